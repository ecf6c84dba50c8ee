"""Write the files of an export: modules as ONNX graphs, settings and texts as JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from haav.errors import HaavError
from haav.files import write_atomically

OPSET = 17


def write_graph(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: dict[str, dict[int, str]],
    path: Path,
) -> None:
    def save(place: Path) -> None:
        from haav.export.compress import compress  # needs onnx, an extra

        with warnings.catch_warnings(), torch.no_grad():
            # Tracing warns of every Python branch on a tensor. The examples are chosen to take the right branches.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                example,
                str(place),
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_axes=axes,
                opset_version=OPSET,
                do_constant_folding=False,
                dynamo=False,
            )
        compress(place)

    try:
        write_atomically(path, save)
    except ModuleNotFoundError as error:
        raise HaavError(f"an export needs {error.name}.\n  pip install 'haav[onnx]'") from None


def write_json(path: Path, data: object) -> None:
    text = json.dumps(data, ensure_ascii=False, indent=1)
    write_atomically(path, lambda place: place.write_text(text, encoding="utf-8"))
