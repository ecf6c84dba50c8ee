"""Checkpoints: the complete state of a run in one file that is written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from haav.errors import CheckpointError
from haav.files import json_of
from haav.pretrained import fit_weights, load_weights, save_weights

FORMAT = "haav-run-1"


@dataclass
class Position:
    """Progress of a run."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """batches of the epoch that are done"""
    best: float = float("-inf")
    """highest CIDEr on val"""
    best_step: int = 0
    worse: int = 0
    """evaluations since the best one"""
    skipped: int = 0
    """steps whose loss was not finite"""


def save_checkpoint(
    path: Path,
    modules: Mapping[str, nn.Module],
    optimizer: Optimizer,
    position: Position,
    fingerprint: str,
    draws: Tensor,
) -> None:
    """`draws` holds the state of the random number generator of each process, one row per process."""
    tensors = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors["rng.cpu"] = draws
    for device, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []):
        tensors[f"rng.cuda{device}"] = state
    facts = {"run": FORMAT, "of": fingerprint, "position": json.dumps(asdict(position))}
    save_weights(path, {name: tensor.clone() for name, tensor in tensors.items()}, facts)


def load_checkpoint(
    path: Path, modules: Mapping[str, nn.Module], optimizer: Optimizer, fingerprint: str, rank: int = 0
) -> Position:
    """`rank` is the rank of this process in the run."""
    tensors, facts = load_weights(path)
    if facts.get("run") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of a training run.")
    if facts.get("of") != fingerprint:
        raise CheckpointError(
            f"{path} belongs to a run with other settings or data than config.yaml beside it.\n"
            "  Give the settings back, or begin a new run from its best model: haav train RECIPE --init RUN/best."
        )
    parts = {name: _under(tensors, f"{name}.") for name in (*modules, "optimizer", "rng")}
    for name, module in modules.items():
        fit_weights(module, parts[name], path, assign=False)
    try:
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in parts["optimizer"].items():
            index, _, field = key.partition(".")
            state.setdefault(int(index), {})[field] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        draws = parts["rng"].pop("cpu")
        if rank >= len(draws):
            raise CheckpointError(f"{path} is of a run with {len(draws)} processes; resume it with as many.")
        torch.set_rng_state(draws[rank].clone())  # torch reads it in place, and in a file it may be unaligned
        if parts["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([parts["rng"][f"cuda{device}"] for device in range(len(parts["rng"]))])
        return Position(**json_of(facts["position"]))
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be resumed from: {error}.") from None


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
