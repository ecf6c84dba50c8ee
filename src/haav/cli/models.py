"""Commands on model directories: convert, pack, export."""

from __future__ import annotations

import sys
from typing import Annotated


def convert(
    source: Annotated[str, "a checkpoint of the authors' released code: .safetensors or .pth"],
    out: Annotated[str, "model directory to write"],
    *,
    vocabulary: Annotated[str | None, "its words by id: a JSON list, or one a line"] = None,
    heads: Annotated[int, "attention heads: the file does not say"] = 8,
) -> int:
    """Turn a checkpoint of the authors' released code into a model directory of haav."""
    from haav.inference.convert import convert, save

    converted = convert(source, vocabulary, heads)
    save(converted, out)
    model = converted.captioner.config.model
    print(f"{out}: {len(model.views)} views, width {model.d_model}, {model.vocabulary_size} words.")
    if not converted.named:
        print("No --vocabulary was given, so its words are numbers (word4, word5, …).", file=sys.stderr)
    return 0


def pack(
    model: Annotated[str, "model directory, e.g. RUN/best"],
    *,
    out: Annotated[str, "model directory to write"],
    bridge: Annotated[str | None, "for text views: the bridge that its photos were extracted with"] = None,
    textdb: Annotated[str | None, "for text views: the text database that its photos were extracted with"] = None,
    like: Annotated[str | None, "take both from this model, e.g. best"] = None,
) -> int:
    """Make a model small and complete: then it captions photos on any machine."""
    from haav.inference.pack import pack

    parts = pack(model, out, bridge, textdb, like)
    sizes = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in parts.items())
    print(f"{out}: {sum(parts.values()) / 1e6:.1f} MB ({sizes}).")
    return 0


def export(
    model: Annotated[str, "a model that is shipped, or a model directory"],
    *,
    out: Annotated[str, "folder to write"],
) -> int:
    """Write a model as ONNX graphs; `python -m haav.export.portable` captions with them where there is no torch."""
    from haav.export.onnx import export_onnx

    parts = export_onnx(model, out)
    print(f"{out}: {len(parts)} files, {sum(parts.values()) / 1e6:.1f} MB.")
    print(f"  Try it: python -m haav.export.portable {out} photo.jpg")
    return 0
