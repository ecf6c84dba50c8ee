"""A model directory: `config.json`, `model.safetensors`, `vocabulary.json`. No pickle, no code.

All files are written to temporary names and moved into place when all are complete, so a full disk leaves the old
model intact. The weights file contains a fingerprint of the other two, so mixed files of different saves are detected,
and a checksum of its tensors, so damage is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from haav.config import Config, ModelConfig, flatten, parse, to_dict
from haav.errors import CheckpointError, did_you_mean
from haav.files import Writer, json_of, read_text, write_together
from haav.model.build import build_model, decoder_sizes, resolve
from haav.model.decoders import decoders
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.text import Vocabulary

FORMAT = "haav-1"
CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocabulary.json"
CHECKSUM = "tensors_sha256"
"""key in the metadata of a weights file"""
MAX_JSON_BYTES = 64_000_000


SHIPPED = Path(__file__).parent / "models"
"""model directories inside the package"""


def find_model(name: str | Path) -> Path:
    """Path of a model directory, or of a shipped model by name"""
    if (Path(name) / CONFIG).is_file():
        return Path(name)
    shipped = sorted(folder.name for folder in SHIPPED.glob("*/")) if SHIPPED.is_dir() else []
    if str(name) in shipped:
        return SHIPPED / str(name)
    if Path(name).is_dir():
        return Path(name)  # reading it reports which files are missing
    raise CheckpointError(
        f"no model directory {name}, and no model of that name is shipped.{did_you_mean(str(name), shipped)}\n"
        f"  Shipped: {', '.join(shipped) or 'none'}. A directory holds {CONFIG}, {WEIGHTS} and {VOCABULARY}."
    )


def save_pretrained(
    directory: str | Path,
    model: nn.Module,
    config: Config,
    vocabulary: Vocabulary,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a model directory. `dtype` is that of the weights on disk; float16 halves the file."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = _to_json({"format": FORMAT, **to_dict(config)})
    words = _to_json(vocabulary.to_json())
    write_together(
        {
            directory / VOCABULARY: lambda path: path.write_text(words, encoding="utf-8"),
            directory / CONFIG: lambda path: path.write_text(settings, encoding="utf-8"),
            directory / WEIGHTS: _weights_writer(_as(dtype, model.state_dict()), {"of": _fingerprint(settings, words)}),
        }
    )


def saved_dtype(directory: str | Path) -> torch.dtype:
    """The dtype of the weights of a model directory"""
    weights, _ = load_weights(find_model(directory) / WEIGHTS)
    return next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())


def read_config(directory: str | Path) -> Config:
    """The config of a model directory"""
    path = find_model(directory) / CONFIG
    return _config_from(_parse_json(read_text(path, MAX_JSON_BYTES, CheckpointError), path), path)


def load_pretrained(
    directory: str | Path, device: torch.device | str = "cpu"
) -> tuple[Haav | Ensemble, Config, Vocabulary]:
    """The model in evaluation mode, its config and vocabulary. Faults raise a CheckpointError that names the file."""
    directory = find_model(directory)
    settings, words = (read_text(directory / name, MAX_JSON_BYTES, CheckpointError) for name in (CONFIG, VOCABULARY))
    config = _config_from(_parse_json(settings, directory / CONFIG), directory / CONFIG)
    vocabulary = Vocabulary.from_json(_parse_json(words, directory / VOCABULARY))
    if len(vocabulary) != config.model.vocabulary_size:
        raise CheckpointError(
            f"{directory / VOCABULARY} has {len(vocabulary)} words, {CONFIG} says {config.model.vocabulary_size}."
        )
    weights, metadata = load_weights(directory / WEIGHTS)
    if metadata.get("of", "") != _fingerprint(settings, words):
        raise CheckpointError(
            f"{directory / WEIGHTS} was saved with another {CONFIG} or {VOCABULARY} than the ones beside it.\n"
            "  Copy all three files from one save."
        )
    if _least_elements(config.model) > sum(tensor.numel() for tensor in weights.values()):
        raise CheckpointError(f"{directory / CONFIG} describes a larger model than {WEIGHTS} holds.")
    with torch.random.fork_rng(devices=[]):  # loading must not change the random state of the caller
        model = build_model(config.model)
    fit_weights(model, weights, directory / WEIGHTS)
    return model.to(device).eval(), config, vocabulary


def _least_elements(model: ModelConfig) -> int:
    """Lower bound of the elements of a model. It stops an untrusted config from allocating more than its file holds."""
    per_view = sum(spec.dim + sum(spec.indices.values()) for spec in model.views.values())
    inside = decoders.get(model.decoder).least_rows(model.encoder_layers, model.memory_slots, decoder_sizes(model))
    return model.d_model * (2 * model.vocabulary_size + per_view + inside)


def save_weights(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    write_together({path: _weights_writer(tensors, metadata)})


def _as(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def _weights_writer(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Writer:
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    stamped = {"format": FORMAT, **metadata, CHECKSUM: _checksum(flat)}
    return lambda temporary: save_file(flat, temporary, stamped)


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Files of other programs and of haav up to 0.2 have no checksum."""
    try:
        # safe_open opens a file twice: for its header and for its tensors. Training may replace it in between.
        replaced = True
        while replaced:
            before = path.stat()
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                metadata = dict(file.metadata() or {})
            replaced = not os.path.samestat(before, path.stat())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}.") from None
    if CHECKSUM in metadata and metadata[CHECKSUM] != _checksum(tensors):
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match.\n  Copy or download it again, or save the model again."
        )
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values"""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fit_weights(module: nn.Module, weights: Mapping[str, Tensor], path: Path, assign: bool = True) -> None:
    """Load weights into a module. Names and shapes must match exactly.

    `assign=False` copies into the existing parameters, which an optimizer may refer to.
    """
    expected = module.state_dict()
    faults = [f"'{name}' is missing" for name in expected.keys() - weights.keys()]
    faults += [f"'{name}' is not of this model" for name in weights.keys() - expected.keys()]
    faults += [
        f"'{name}' has shape {tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    faults += [
        f"'{name}' is of type {weights[name].dtype}"
        for name, tensor in expected.items()
        if name in weights and weights[name].is_floating_point() != tensor.is_floating_point()
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:3])
        raise CheckpointError(f"{path} does not fit the config beside it ({len(faults)} tensors): {shown}.")
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    module.load_state_dict(floats, assign=assign)


def _config_from(data: Any, path: Path) -> Config:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        actual = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(f"{path} is not a haav config of format '{FORMAT}': found {actual!r}.")
    settings = {key: value for key, value in data.items() if key != "format"}
    config, problems = parse([flatten(settings)])
    config, more = resolve(config)
    if problems or more:
        raise CheckpointError(f"{path}: " + "; ".join([*problems, *more]))
    return config


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json_of(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not whole JSON: {error}.") from None


def _to_json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _fingerprint(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
