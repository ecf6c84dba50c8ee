"""What the benchmarks share: timing, and random data of the release's sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from haav.generate.loop import Generated
from haav.text import EOS


def random_captions(photos: int, each: int, seed: int = 0) -> list[list[str]]:
    """Sentences of 8 to 14 words, common words far more often than rare ones, as in captions"""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(8000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    return [[" ".join(rng.choices(words, weights, k=rng.randint(8, 14))) for _ in range(each)] for _ in range(photos)]


def end_after(model: Any, write: Callable[[], Generated], words: int) -> None:
    """Fit the end token's weights so that captions end after `words` or so, as a trained model's do."""
    seen: list[torch.Tensor] = []
    hook = model.decoder.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    write()
    hook.remove()
    states = torch.cat(seen)
    wanted = torch.cat(
        [torch.full((len(part),), 15.0 if position >= words else -15.0) for position, part in enumerate(seen)]
    )
    gram = states.T @ states + 1e-2 * torch.eye(states.shape[1])
    with torch.no_grad():
        model.decoder.output.weight[EOS] = torch.linalg.solve(gram, states.T @ wanted)


def peak_gigabytes() -> float:
    """The most memory that this process had. `getrusage` would count what its parent had when it was started, too."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**20
