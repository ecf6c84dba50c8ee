"""How unlike the training photos a picture is, by the part of its features that their main directions miss.

Principal components of the training photos reconstruct a new photo well and a blank page, noise or a chart badly. The
error is standardised on val: 0 is typical, 1 is one standard deviation more. It needs no torch: `haav.export.portable`
uses it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from haav.errors import CheckpointError
from haav.files import write_atomically
from haav.types import Views

FILE = "novelty.safetensors"
COMPONENTS = 256

Floats = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]


def summarise(tokens: Floats, boxes: Floats | None) -> Floats:
    """One vector (D,) of a view: the tokens whose box is the whole photo, such as CLIP's class token, else the mean."""
    if boxes is not None and len(boxes):
        whole = (boxes == np.array([0, 0, 1, 1], boxes.dtype)).all(axis=1)
        if whole.any():
            tokens = tokens[whole]
    mean: Floats = tokens.astype(np.float32).mean(axis=0)
    return mean


@dataclass(frozen=True)
class Novelty:
    view: str
    """name of the view that is compared"""
    mean: Floats
    scale: Floats
    components: Floats
    """(K, D) orthonormal directions of the standardised training photos"""
    typical: float
    spread: float
    """mean and standard deviation of the error on val"""

    @classmethod
    def fit(cls, view: str, train: Floats, val: Floats, components: int = COMPONENTS) -> Novelty:
        """`train`, `val`: summaries (N, D) of photos"""
        mean, scale = train.mean(axis=0), train.std(axis=0) + 1e-6
        _, _, directions = np.linalg.svd((train - mean) / scale, full_matrices=False)
        # Half of the directions at most: something must be left over to be missed.
        kept = directions[: min(components, train.shape[1] // 2, len(train) // 2)]
        raw = cls(view, mean, scale, kept, 0.0, 1.0)
        errors = np.array([raw(summary) for summary in val])
        return cls(view, mean, scale, kept, float(errors.mean()), float(errors.std()) + 1e-6)

    def __call__(self, summary: Floats) -> float:
        """The novelty of a photo from its summary (D,)."""
        x = (summary - self.mean) / self.scale
        missed = x - self.components.T @ (self.components @ x)
        return (float(np.sqrt((missed**2).mean())) - self.typical) / self.spread

    @classmethod
    def load(cls, directory: Path, widths: Mapping[str, int]) -> Novelty | None:
        """The one of a model directory, if it has one. `widths`: of the tokens of each view of the model"""
        path = directory / FILE
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata()
                arrays = {name: file.get_tensor(name) for name in ("mean", "scale", "components")}
            if _checksum(arrays, metadata) != metadata["sha256"]:
                raise ValueError("its checksum does not match")
            mean, scale, components = (array.astype(np.float32) for array in arrays.values())
            width = widths.get(metadata["view"])
            if not mean.shape == scale.shape == components.shape[1:] == (width,):
                raise ValueError(f"it is of {metadata['view']} of {len(mean)} channels, which the model does not read")
            typical, spread = float(metadata["typical"]), float(metadata["spread"])
            return cls(metadata["view"], mean, scale, components, typical, spread)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{path} is damaged: {error}.\n  Make it again with: haav calibrate") from None


def novelties(novelty: Novelty | None, views: Views, photos: int) -> list[float | None]:
    """The novelty of each photo of a batch of views. None if it is not known, or the photo lacks the view"""
    view = views.get(novelty.view) if novelty is not None else None
    if novelty is None or view is None:
        return [None] * photos
    mask, tokens = view.mask.cpu().numpy(), view.tokens.float().cpu().numpy()
    boxes = None if view.boxes is None else view.boxes.float().cpu().numpy()
    rows = [(tokens[row][real], None if boxes is None else boxes[row][real]) for row, real in enumerate(mask)]
    return [novelty(summarise(*row)) if len(row[0]) else None for row in rows]


def save_novelty(directory: Path, novelty: Novelty | None) -> None:
    """Save it in a model directory. None removes that of an earlier model."""
    if novelty is None:
        (directory / FILE).unlink(missing_ok=True)
        return
    arrays: Arrays = {
        "mean": novelty.mean,
        "scale": novelty.scale,
        "components": novelty.components.astype(np.float16),
    }
    metadata = {"view": novelty.view, "typical": repr(novelty.typical), "spread": repr(novelty.spread)}
    metadata["sha256"] = _checksum(arrays, metadata)
    write_atomically(directory / FILE, lambda path: save_file(arrays, path, metadata))


def _checksum(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    """SHA-256 over the numbers and the arrays"""
    digest = hashlib.sha256("\0".join(metadata[name] for name in ("view", "typical", "spread")).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
