"""Export a model as ONNX graphs that run without torch. `haav.export.portable` reads them.

`reader.onnx`: views → cross-attention memory, once per photo.
`step.onnx`: one word of each caption and the past → scores of the next word, view weights, the past with that word.
`extractors.onnx`: pixels of a photo → its views, if all of them can be exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from haav.data.collate import blank_view
from haav.errors import ConfigError
from haav.export.extractors import export_extractors
from haav.export.graph import write_graph, write_json, write_onnx
from haav.export.portable import ABOUT, FORMAT, READER, STEP, WORDS
from haav.files import make_folder
from haav.generate.beam import BeamSearch
from haav.generate.build import build_strategy
from haav.generate.graph import PHOTOS, Step, axes_of_memory, flat_memory, step_to_onnx
from haav.inference.captioner import Captioner
from haav.inference.novelty import save_novelty
from haav.model.decoders.transformer import TransformerDecoder
from haav.model.haav import Haav
from haav.types import Memory, View, ViewSpec
from haav.views import Extractor, find_extractor_class


def export_onnx(model: str | Path, out: str | Path) -> dict[str, int]:
    """Write the exported model. Returns bytes by file."""
    captioner = Captioner.from_pretrained(model, precision="float32")
    _check(captioner)
    network = captioner.model
    assert isinstance(network, Haav)
    folder = make_folder(out)
    memory = _export_reader(network, captioner.config.model.views, folder / READER)
    _export_step(network, memory, folder / STEP)
    extractors = _extractors(captioner)
    about = {
        "format": FORMAT,
        "views": {name: asdict(spec) for name, spec in captioner.config.model.views.items()},
        "layers": len(_decoder(network).layers),
        "past": 2 * captioner.config.model.d_model,
        "decode": asdict(captioner.config.decode),
        "confidence": asdict(captioner.config.confidence),
        "extractors": export_extractors(extractors, folder) if extractors else None,
    }
    write_json(folder / WORDS, captioner.vocabulary.to_json())
    write_json(folder / ABOUT, about)
    save_novelty(folder, captioner.novelty)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


def _check(captioner: Captioner) -> None:
    strategy = build_strategy(captioner.config.decode, captioner.vocabulary)
    if not isinstance(strategy, BeamSearch) or strategy.groups > 1 or captioner.config.decode.collapse_repeats:
        raise ConfigError(
            "an exported model decodes by plain beam search; set decode.method beam, decode.groups 1 and "
            "decode.collapse_repeats false."
        )
    if not isinstance(captioner.model, Haav):
        raise ConfigError("an ensemble cannot be exported as one; export a single model.")
    if not captioner.model.decoder.exportable:
        raise ConfigError(f"a model with decoder '{captioner.config.model.decoder}' cannot be exported.")


def _decoder(model: Haav) -> TransformerDecoder:
    assert isinstance(model.decoder, TransformerDecoder)
    return model.decoder


def _extractors(captioner: Captioner) -> dict[str, Extractor]:
    """The extractors of the views if all of them can be exported, otherwise none"""
    if captioner.extractors is None or not _exportable(captioner.views):
        return {}
    extractors = {name: captioner.extractors.extractor(name) for name in captioner.views}
    return extractors if all(_exportable(extractor.reads) for extractor in extractors.values()) else {}


def _exportable(views: Iterable[str]) -> bool:
    classes = [find_extractor_class(name) for name in views]
    return all(extractor_class is not None and extractor_class.exportable for extractor_class in classes)


class Reader(nn.Module):
    """Computes the memory, with flat tensors as inputs and outputs (see `flat_memory`)."""

    def __init__(self, model: Haav, specs: dict[str, ViewSpec]) -> None:
        super().__init__()
        self.model, self.specs = model, specs

    def inputs(self) -> list[str]:
        return [f"{name}.{part}" for name, spec in self.specs.items() for part in _parts(spec)]

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat_memory(self.memory(flat)).values())

    def memory(self, flat: Sequence[Tensor]) -> tuple[Memory, ...]:
        return self.model.init_cache(self.model.encode(self.views(flat))).memory

    def views(self, flat: Sequence[Tensor]) -> dict[str, View]:
        tensors = dict(zip(self.inputs(), flat, strict=True))
        return {
            name: View(
                tensors[f"{name}.tokens"],
                tensors[f"{name}.mask"],
                {index: tensors[f"{name}.{index}"] for index in spec.indices},
                tensors.get(f"{name}.boxes"),
            )
            for name, spec in self.specs.items()
        }


def _parts(spec: ViewSpec) -> list[str]:
    return ["tokens", "mask", *spec.indices, *(["boxes"] if spec.boxes else [])]


class PortableStep(Step):
    """The step with the weights that are shown: their mean over heads"""

    outputs = ("scores", "trust")

    def forward(self, words: Tensor, position: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        scores, weights, *known = super().forward(words, position, *flat)
        return (scores, weights.mean(dim=2), *known)


def _export_reader(model: Haav, specs: dict[str, ViewSpec], path: Path) -> dict[str, Tensor]:
    """Export the reader. Returns an example of its outputs by name."""
    reader = Reader(model, specs).eval()
    example: list[Tensor] = []
    for spec in specs.values():
        blank = blank_view(spec)
        # One photo lacks its last token, so that the traced path is the one that applies masks.
        mask = torch.ones(PHOTOS, spec.max_tokens, dtype=torch.bool)
        mask[0, -1] = False
        parts = {"tokens": blank.tokens, "mask": mask, **blank.indices}
        if blank.boxes is not None:
            parts["boxes"] = blank.boxes
        example += [part.expand(PHOTOS, *part.shape[1:]).contiguous() for part in parts.values()]
    with torch.no_grad():
        memory = flat_memory(reader.memory(example))
    axes = {name: {0: "photos", 1: f"{name.rsplit('.', 1)[0]}.tokens"} for name in reader.inputs()}
    axes |= axes_of_memory(memory)
    write_graph(reader, tuple(example), reader.inputs(), list(memory), axes, path)
    return memory


def _export_step(model: Haav, memory: dict[str, Tensor], path: Path) -> None:
    sources = sum(name.endswith(".bias") for name in memory)
    step = PortableStep(_decoder(model), sources, owned="memory.owners" in memory).eval()
    write_onnx(path, step_to_onnx(step, memory))
