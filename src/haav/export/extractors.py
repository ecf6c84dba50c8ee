"""Export the extractors of a model as one graph: the pixels of a photo → its views.

PyTorch records what the extractors do with one photo. A network that several of them run is in the graph once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image
from torch import Tensor, nn

from haav.export.graph import write_graph, write_json
from haav.export.portable.views import EXTRACTORS, ROWS
from haav.views import Extractor, PhotoBatch
from haav.views.base import TracedView

Size = tuple[int, Image.Resampling]
"""side of a square picture in pixels, and how the photo is resized to it"""


class TracedPhoto(PhotoBatch):
    """A photo whose pixels, in each size that extractors ask for, are the inputs of a graph."""

    def __init__(self, inputs: dict[Size, Tensor]) -> None:
        super().__init__(["photo 0"], [Image.new("RGB", (64, 64))])
        self.inputs = inputs

    def pixels(self, side: int, resample: Image.Resampling = Image.Resampling.BILINEAR) -> Tensor:
        if (side, resample) not in self.inputs:
            self.inputs[side, resample] = super().pixels(side, resample)
        return self.inputs[side, resample]


class TracedExtractors(nn.Module):
    def __init__(self, extractors: Mapping[str, Extractor]) -> None:
        super().__init__()
        self.extractors = dict(extractors)
        self.inputs: dict[Size, Tensor] = {}
        """what the extractors ask for, with the example that the graph is traced with"""
        self.views = self._trace(self.inputs)

    def forward(self, *pixels: Tensor) -> tuple[Tensor, ...]:
        views = self._trace(dict(zip(self.inputs, pixels, strict=True)))
        return tuple(value for view in views.values() for value in _parts(view).values())

    def _trace(self, inputs: dict[Size, Tensor]) -> dict[str, TracedView]:
        photo = TracedPhoto(inputs)
        return {name: extractor.trace(photo) for name, extractor in self.extractors.items()}

    def outputs(self) -> list[str]:
        return [f"{name}.{part}" for name, view in self.views.items() for part in _parts(view)]


def _parts(traced: TracedView) -> dict[str, Tensor]:
    view = traced.view
    parts = {"tokens": view.tokens.float(), **view.indices, "boxes": view.boxes, ROWS: traced.rows}
    return {name: part for name, part in parts.items() if part is not None}


def export_extractors(extractors: Mapping[str, Extractor], folder: Path) -> dict[str, dict[str, str]]:
    """Write the graph and the sentences of text views. Returns what `PortableExtractors` must know of them."""
    traced = TracedExtractors(extractors).eval()
    inputs = {f"pixels.{side}.{resample.name.lower()}": resample.name for side, resample in traced.inputs}
    write_graph(traced, tuple(traced.inputs.values()), list(inputs), traced.outputs(), {}, folder / EXTRACTORS)
    sentences = {name: view.sentences for name, view in traced.views.items() if view.rows is not None}
    # Views of one text database share a file, which is named after the first of them.
    files = {
        name: next(f"sentences.{first}.json" for first in sentences if sentences[first] == sentences[name])
        for name in sentences
    }
    for file, texts in {files[name]: texts for name, texts in sentences.items()}.items():
        write_json(folder / file, list(texts))
    return {"inputs": inputs, "sentences": files}
