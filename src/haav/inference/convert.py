"""Convert checkpoints of the authors' released code into a model directory.

Names and layout are translated. Sizes are taken from the shapes of the tensors. Both safetensors files and `.pth` files
of plain tensors are supported. Pickled code is never executed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haav.config import Config
from haav.errors import CheckpointError, ConfigError
from haav.files import json_of
from haav.inference.captioner import Captioner
from haav.model.build import build_contrast, build_model, load_config
from haav.model.contrast import MomentumContrast
from haav.model.haav import Haav
from haav.pretrained import fit_weights, load_weights, save_weights
from haav.text import SPECIAL, Vocabulary
from haav.types import ViewSpec

CONTRAST = "contrast.safetensors"
ANCHOR = "decoder.pos_emb.weight"
"""a frozen tensor that every released checkpoint has; identifies the format and the prefix of names"""

VIEWS = {"obj_mlp": "objects", "vis_mlp": "grid", "txt_mlp_whole": "text_whole", "txt_mlp_five": "text_five"}
DEFAULT_TOKENS = 50
"""maximum number of tokens of objects and grid, which the file does not contain"""

_RENAMES = (
    (r"^(view_gen|encoder)_ema\.", r"momentum_\1."),
    (r"^(cls_mlp|cls_agg)_ema\.", r"momentum_\1."),
    (r"(?<![a-z])view_gen\.", "encoding.embed.by_name."),
    (r"^(momentum_)?encoder\.", r"\1encoding.encoder."),
    (r"^momentum_view_gen\.", "momentum_encoding.embed.by_name."),
    (r"cls_mlp\.", "projector.mlp."),
    (r"cls_agg\.", "projector.pool."),
    (r"txt_pos_(\w+)\.weight$", r"text_\1.crop_positions"),
    (r"txt_rank_(\w+)\.weight$", r"text_\1.rank_positions"),
    (r"by_name\.(\w+_mlp\w*)\.0\.", lambda match: f"by_name.{VIEWS.get(match[1], match[1])}.norm."),
    (r"by_name\.(\w+_mlp\w*)\.1\.", lambda match: f"by_name.{VIEWS.get(match[1], match[1])}.project."),
    (r"\.(mhatt|self_att)\.", ".attention."),
    (r"\.cross_att\.", ".aggregator.within."),
    (r"\.agg_layers\.", ".aggregator.across_layers."),
    (r"\.agg_views\.", ".aggregator.across_views."),
    (r"\.attention\.fc_q\.", ".query."),
    (r"\.attention\.fc_o\.", ".output."),
    (r"\.attention\.m_k$", ".slot_keys"),
    (r"\.attention\.m_v$", ".slot_values"),
    (r"\.layer_norm\.", ".norm."),
    (r"\.pwff\.fc1\.", ".feed_forward.inner."),
    (r"\.pwff\.fc2\.", ".feed_forward.outer."),
    (r"\.pwff\.", ".feed_forward."),
    (r"^decoder\.word_emb\.", "decoder.words."),
    (r"^decoder\.pos_emb\.weight$", "decoder.positions"),
    (r"^decoder\.fc\.", "decoder.output."),
    (r"^queue_ptr$", "position"),
)


@dataclass(frozen=True)
class Converted:
    captioner: Captioner
    contrast: MomentumContrast | None
    named: bool
    """whether a vocabulary was given; otherwise the words are numbered placeholders"""


def convert(source: str | Path, vocabulary: str | Path | None = None, heads: int = 8) -> Converted:
    """Convert a released checkpoint, with its contrastive training state if the file has one."""
    source = Path(source)
    if heads < 1:
        raise ConfigError(f"--heads must be at least 1, not {heads}.")
    released = _released_tensors(source)
    try:
        config = _config_of(released, heads, source)
        tensors = rename(released)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{source} is not a whole released checkpoint: {error} is missing or misshapen."
        ) from None
    words = _vocabulary(vocabulary, config.model.vocabulary_size)
    with torch.random.fork_rng(devices=[]):
        model = build_model(config.model)
        assert isinstance(model, Haav)
        contrast = build_contrast(model.encoding, config.model, config.contrast) if config.contrast.enabled else None
    model_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(("encoding.", "decoder."))}
    fit_weights(model, model_tensors, source)
    if contrast is not None:
        state = {name: tensor for name, tensor in tensors.items() if name not in model_tensors}
        state["filled"] = torch.tensor(config.contrast.queue_size)
        fit_weights(contrast, state, source)
    return Converted(Captioner(model, config, words), contrast, named=vocabulary is not None)


def save(converted: Converted, directory: str | Path) -> None:
    converted.captioner.save_pretrained(directory)
    if converted.contrast is not None:
        save_weights(Path(directory) / CONTRAST, converted.contrast.state_dict(), {})


def rename(released: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map released names to ours. The separate key and value tensors of the release are concatenated."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in released.items():
        if ".running_keys" in name or ".running_values" in name or name.startswith("decoder.running_"):
            continue  # decoding state that the release keeps inside its modules
        if ".fc_v." in name:
            continue  # concatenated with its fc_k below
        if ".fc_k." in name:
            tensor = torch.cat([tensor, released[name.replace(".fc_k.", ".fc_v.")]])
            name = name.replace(".attention.fc_k.", ".key_value.")
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        if name.endswith((".slot_keys", ".slot_values")):
            tensor = tensor.squeeze(0)
        tensors[name] = tensor.squeeze() if name == "position" else tensor
    return tensors


def _released_tensors(source: Path) -> dict[str, Tensor]:
    if source.suffix == ".safetensors":
        tensors, _ = load_weights(source)
    else:
        tensors = _load_pth(source)
    anchor = next((name for name in tensors if name.endswith(ANCHOR)), None)
    if anchor is None:
        raise CheckpointError(
            f"{source} does not look like a checkpoint of the released code: it has no tensor '{ANCHOR}'."
        )
    prefix = anchor.removesuffix(ANCHOR)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _load_pth(source: Path) -> dict[str, Tensor]:
    try:
        data: Any = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{source} is missing.") from None
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{source} holds more than tensors, and loading it could run code.\n"
            "  Where you trust it: torch.save(torch.load(path, weights_only=False)['state_dict'], new_path)."
        ) from None
    except Exception as error:  # damaged files of the old format fail in many ways
        raise CheckpointError(f"{source} is not a whole PyTorch file: {error}.") from None
    for inner in ("state_dict", "model", "model_state_dict"):
        if isinstance(data, dict) and isinstance(data.get(inner), dict):
            data = data[inner]
            break
    if not isinstance(data, dict):
        raise CheckpointError(f"{source} holds a {type(data).__name__}, not named tensors.")
    return {str(name): tensor for name, tensor in data.items() if isinstance(tensor, Tensor)}


def _config_of(released: Mapping[str, Tensor], heads: int, source: Path) -> Config:
    """The `release` preset with the sizes of the tensors."""
    views = _views_of(released)
    slots = released["encoder.layers.0.mhatt.attention.m_k"].shape[1]
    d_ff, d_model = released["encoder.layers.0.pwff.fc1.weight"].shape
    vocabulary_size = len(released["decoder.word_emb.weight"])
    max_words = len(released[ANCHOR]) - 1
    if d_model % heads:
        raise ConfigError(f"--heads {heads} does not divide the width {d_model} of {source}.")
    config = load_config("release")
    model = replace(
        config.model,
        views=views,
        vocabulary_size=vocabulary_size,
        d_model=d_model,
        d_ff=d_ff,
        heads=heads,
        encoder_layers=_count(released, "encoder"),
        decoder_layers=_count(released, "decoder"),
        memory_slots=slots,
        max_words=max_words,
    )
    contrast = replace(config.contrast, enabled="cls_mlp.0.weight" in released)
    if contrast.enabled:
        contrast = replace(contrast, hidden=len(released["cls_mlp.0.weight"]), queue_size=len(released["queue"]))
    decode = replace(config.decode, max_words=min(config.decode.max_words, max_words))
    return replace(config, model=model, contrast=contrast, decode=decode)


def _views_of(released: Mapping[str, Tensor]) -> dict[str, ViewSpec]:
    views = {}
    for mlp, view in VIEWS.items():
        dim = len(released[f"view_gen.{mlp}.0.weight"])
        if not view.startswith("text_"):
            views[view] = ViewSpec(dim, DEFAULT_TOKENS)
            continue
        crops = view.removeprefix("text_")
        crop = len(released[f"view_gen.txt_pos_{crops}.weight"])
        rank = len(released[f"view_gen.txt_rank_{crops}.weight"])
        views[view] = ViewSpec(dim, crop * rank, {"crop": crop, "rank": rank})
    return views


def _count(released: Mapping[str, Tensor], part: str) -> int:
    layers = {name.split(".")[2] for name in released if name.startswith(f"{part}.layers.")}
    return len(layers)


def _vocabulary(path: str | Path | None, size: int) -> Vocabulary:
    """Words by id from a JSON list or a text file with one word per line. Without a file, numbered placeholders."""
    if path is None:
        return Vocabulary((*SPECIAL, *(f"word{index}" for index in range(len(SPECIAL), size))))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read vocabulary {path}: {error}.") from None
    try:
        words = json_of(text)
    except ValueError:
        words = text.splitlines()
    try:
        vocabulary = Vocabulary.from_json(words if isinstance(words, dict) else {"words": words})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if len(vocabulary) != size:
        raise CheckpointError(f"vocabulary {path} has {len(vocabulary)} words, the checkpoint {size}.")
    return vocabulary
