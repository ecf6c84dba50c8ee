"""CLIP ViT-B/16's image tower (OpenAI), and what its views share.

The weights come from the package index as an 8-bit ONNX file, whose matrices are dequantised. Unquantised weights can
be read from a model of the hub or a folder. Texts are not encoded: no package carries CLIP's text tower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from haav import weights
from haav.errors import ViewError
from haav.views.base import PhotoBatch
from haav.views.embedded.onnx_weights import OnnxWeights
from haav.views.embedded.prepared import load_tower
from haav.views.embedded.vit import VitConfig
from haav.weights import hub
from haav.weights.load_once import load_once

WEIGHTS = "clip-vit-b16"
LICENCE = "MIT"
SIDE, GRID = 224, 14
CONFIG = VitConfig(
    width=768,
    heads=12,
    layers=12,
    patch=16,
    eps=1e-5,
    quick_gelu=True,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    # CLIP was trained on the class token alone. Patches before the last layer say more about the photo than those after
    # it: captions score 11 CIDEr more (docs/experiments/2026-11-18-layers.md).
    patch_layer=11,
)
SOURCES = "Give openai/clip-vit-base-patch16, a folder with it, or its model.safetensors."
SMOOTHING = Path(__file__).with_name("clip_smoothing.safetensors")


def read_smoothing() -> dict[str, Tensor]:
    """Smoothing divisors for int8, made by benchmarks/smoothing.py."""
    return {name: value.float() for name, value in load_file(SMOOTHING).items()}


class ClipTower:
    """Photos → hidden states. The projection that compares photos with texts is not needed."""

    def __init__(self, source: str | Path | None = None, precision: str = "auto", device: str = "cpu") -> None:
        """`source`: None for the package index, or a hub name, folder or safetensors file with unquantised weights"""
        self.fingerprint, self.device = fingerprint_of(source), device
        key = f"{self.fingerprint}-{hub.file_digest(SMOOTHING)[:8]}"
        self.vit = load_tower(CONFIG, key, precision, lambda: read_clip(source), read_smoothing()).to(device)

    def hidden(self, photos: PhotoBatch) -> Tensor:
        """(B, 197, 768): the class token, then 14 × 14 patches row by row; computed once per batch"""

        def compute() -> Tensor:
            states: Tensor = self.vit(photos.pixels(SIDE, Image.Resampling.BICUBIC).to(self.device))
            return states.cpu()

        return photos.once(f"clip {self.fingerprint} {self.vit.precision}", compute)


@load_once
def load_clip(source: str | Path | None = None, precision: str = "auto", device: str = "cpu") -> ClipTower:
    return ClipTower(source, precision, device)


def patch_map(hidden: Tensor) -> Tensor:
    """Hidden states (B, 197, D) → (B, D, 14, 14), without the class token"""
    patches: Tensor = hidden[:, 1:].transpose(1, 2).unflatten(2, (GRID, GRID))
    return patches


def fingerprint_of(source: str | Path | None) -> str:
    """The fingerprint of the weight file of a source. It does not depend on the precision of the computation."""
    if source is None:
        return f"{WEIGHTS}-{weights.find(WEIGHTS).fingerprint}"
    digest = hub.file_digest(Path(source)) if Path(source).is_file() else _find(source).fingerprint
    return f"{WEIGHTS}-{digest[:16]}"


def read_clip(source: str | Path | None = None) -> dict[str, Tensor]:
    """The tower's weights under the names of vit.py"""
    if source is None:
        return read_onnx(weights.locate(WEIGHTS) / weights.find(WEIGHTS).members[0].name)
    return read_safetensors([Path(source)] if Path(source).is_file() else hub.weight_files(_find(source).folder))


def _find(source: str | Path) -> hub.HubModel:
    return hub.find_hub_model(source, "clip_source")


def read_safetensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """Weights as saved by transformers, in one file or several."""
    tensors: dict[str, Tensor] = {}
    try:
        for path in files:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith("vision_model.")]  # noqa: SIM118
                tensors |= {name: file.get_tensor(name).float() for name in names}
        state = _renamed(lambda name: tensors[f"{name}.weight"], lambda name: tensors[name])
    except (OSError, SafetensorError, KeyError) as error:
        raise ViewError(f"clip_source: {files[0]} holds no CLIP image tower: {error}.\n  {SOURCES}") from None
    if state["positions"].shape != (1 + GRID**2, CONFIG.width):
        raise ViewError(f"clip_source: {files[0]} holds another CLIP than ViT-B/16.\n  {SOURCES}")
    return state


def read_onnx(path: Path) -> dict[str, Tensor]:
    """Weights of an ONNX file exported by transformers. 8-bit matrices are dequantised."""
    file = OnnxWeights(path)

    def matrix(name: str) -> Tensor:
        # `layers.3.mlp.fc1` is the node `layers.3/mlp/fc1` there: the layer index keeps its dot.
        node = "/" + name.replace(".", "/").replace("layers/", "layers.") + "/MatMul"
        return torch.from_numpy(file.linear(node))

    return _renamed(matrix, lambda name: torch.from_numpy(file[name].copy()))


def _renamed(matrix: Callable[[str], Tensor], vector: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Weights under the names of vit.py, read by the names of transformers.

    `matrix(name)` reads the weight (out, in) of a linear layer, `vector(name)` any other tensor.
    """
    root = "vision_model"
    state = {
        "patch.weight": vector(f"{root}.embeddings.patch_embedding.weight"),
        "patch.bias": torch.zeros(CONFIG.width),
        "cls": vector(f"{root}.embeddings.class_embedding"),
        "positions": vector(f"{root}.embeddings.position_embedding.weight"),
    }
    norms = {"pre_norm": f"{root}.pre_layrnorm"}
    for index in range(CONFIG.layers):
        ours, theirs = f"layers.{index}", f"{root}.encoder.layers.{index}"
        norms |= {f"{ours}.norm1": f"{theirs}.layer_norm1", f"{ours}.norm2": f"{theirs}.layer_norm2"}
        parts = {"qkv": [f"self_attn.{part}_proj" for part in "qkv"], "out": ["self_attn.out_proj"]}
        for layer, names in (parts | {"fc1": ["mlp.fc1"], "fc2": ["mlp.fc2"]}).items():
            state[f"{ours}.{layer}.weight"] = torch.cat([matrix(f"{theirs}.{name}") for name in names])
            state[f"{ours}.{layer}.bias"] = torch.cat([vector(f"{theirs}.{name}.bias") for name in names])
    for ours, theirs in norms.items():
        state |= {f"{ours}.{part}": vector(f"{theirs}.{part}") for part in ("weight", "bias")}
    return state
