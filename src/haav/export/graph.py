"""Write the files of an export: modules as ONNX graphs, settings and texts as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from haav.errors import HaavError
from haav.files import write_atomically
from haav.generate.graph import Axes, to_onnx


def write_graph(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: Axes,
    path: Path,
) -> None:
    write_onnx(path, to_onnx(module, example, inputs, outputs, axes))


def write_onnx(path: Path, graph: bytes) -> None:
    """Write a graph, made small"""

    def save(place: Path) -> None:
        from haav.export.compress import compress  # needs onnx, an extra

        place.write_bytes(graph)
        compress(place)

    try:
        write_atomically(path, save)
    except ModuleNotFoundError as error:
        raise HaavError(f"an export needs {error.name}.\n  pip install 'haav[onnx]'") from None


def write_json(path: Path, data: object) -> None:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    write_atomically(path, lambda place: place.write_text(text, encoding="utf-8"))
