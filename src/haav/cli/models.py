"""Commands on model directories: convert, pack, export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haav.cli.common import check_unused


def convert(
    source: Annotated[str, "checkpoint of the authors' code: .safetensors or .pth"],
    out: Annotated[str, "model directory to write"],
    *,
    vocabulary: Annotated[str | None, "its words by id: a JSON list, or a text file with one word per line"] = None,
    heads: Annotated[int, "attention heads, which the file does not record"] = 8,
    overwrite: Annotated[bool, "replace the model in the directory"] = False,
) -> int:
    """Convert a checkpoint of the authors' code to a model directory."""
    from haav.inference.convert import convert, save
    from haav.pretrained import CONFIG

    check_unused(Path(out) / CONFIG, overwrite)
    converted = convert(source, vocabulary, heads)
    save(converted, out)
    model = converted.captioner.config.model
    print(f"{out}: {len(model.views)} views, width {model.d_model}, {model.vocabulary_size} words.")
    if not converted.named:
        print("Without --vocabulary, words are named by id (word4, word5, …).", file=sys.stderr)
    return 0


def pack(
    model: Annotated[str, "model directory, e.g. RUN/best"],
    *,
    out: Annotated[str, "model directory to write"],
    bridge: Annotated[str | None, "text views: bridge that the training photos were extracted with"] = None,
    textdb: Annotated[str | None, "text views: text database that the training photos were extracted with"] = None,
    like: Annotated[str | None, "packed model with the same bridge and text database, e.g. best"] = None,
) -> int:
    """Pack a model with its bridge and text database, in half precision, for use on any machine."""
    from haav.inference.pack import pack

    parts = pack(model, out, bridge, textdb, like)
    sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items())
    print(f"{out}: {sum(parts.values()) / 1e6:.1f} MB ({sizes}).")
    return 0


def export(
    model: Annotated[str, "name of a shipped model, or a model directory"],
    *,
    out: Annotated[str, "folder to write"],
) -> int:
    """Export a model as ONNX graphs. `python -m haav.export.portable` runs them without torch."""
    from haav.export.onnx import export_onnx

    parts = export_onnx(model, out)
    print(f"{out}: {len(parts)} files, {sum(parts.values()) / 1e6:.1f} MB.")
    print(f"  Try it: python -m haav.export.portable {out} photo.jpg")
    return 0
