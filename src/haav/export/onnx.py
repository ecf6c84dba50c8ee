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
from haav.export.graph import write_graph, write_json
from haav.export.portable import ABOUT, FORMAT, READER, STEP, WORDS
from haav.files import make_folder
from haav.generate.beam import BeamSearch
from haav.generate.build import build_strategy
from haav.inference.captioner import Captioner
from haav.inference.novelty import save_novelty
from haav.model.decoders.transformer import TransformerDecoder
from haav.model.haav import Haav
from haav.types import Aggregated, KeyValues, Memory, Source, View, ViewSpec
from haav.views import Extractor, find_extractor_class

PHOTOS, CAPTIONS, PAST = 2, 3, 4
"""sizes that graphs are traced with; all of them are dynamic in the graph"""


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
    """Computes the memory, with flat tensors as inputs and outputs.

    The outputs are keys and values for each decoder layer and source, then biases, `present`, and `owners` if any.
    """

    def __init__(self, model: Haav, specs: dict[str, ViewSpec]) -> None:
        super().__init__()
        self.model, self.specs = model, specs

    def inputs(self) -> list[str]:
        return [f"{name}.{part}" for name, spec in self.specs.items() for part in _parts(spec)]

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        memory = self.model.init_cache(self.model.encode(self.views(flat))).memory
        pairs = [part.memory for layer in memory for part in layer.sources]
        kept = [tensor for pair in pairs for tensor in (pair.keys, pair.values)]
        owners = () if memory[0].owners is None else (memory[0].owners,)
        return (*kept, *(source.bias for source in memory[0].sources), memory[0].present, *owners)

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


class Step(nn.Module):
    """One step of the decoder. The position is a tensor, so that the graph serves every position."""

    def __init__(self, model: Haav, sources: int, owned: bool) -> None:
        super().__init__()
        self.decoder, self.sources, self.owned = _decoder(model), sources, owned

    def forward(self, words: Tensor, position: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        layers = len(self.decoder.layers)
        rest = iter(flat)
        pairs = [[KeyValues(next(rest), next(rest)) for _ in range(self.sources)] for _ in range(layers)]
        biases = [next(rest) for _ in range(self.sources)]
        present, owners = next(rest), next(rest) if self.owned else None
        past = [next(rest) for _ in range(layers)]
        x = (self.decoder.words(words) + self.decoder.get_buffer("positions")[position + 1])[:, :, None]
        known: list[Tensor] = []
        gathered: Aggregated | None = None
        for layer, layer_pairs, before in zip(self.decoder.layers, pairs, past, strict=True):
            memory = Memory(tuple(Source(*part) for part in zip(layer_pairs, biases, strict=True)), present, owners)
            x, gathered, after = layer(x, before, None, memory, layer is self.decoder.layers[-1])
            known.append(after)
        assert gathered is not None
        trust = gathered.weights.mean(dim=2) if gathered.weights is not None else x.new_zeros(*words.shape, 0)
        return (self.decoder.output(x[:, :, 0]), trust, *known)


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
        outputs = reader(*example)
        encoded = model.encode(reader.views(example))
        first = model.init_cache(encoded).memory[0]
    sources = encoded.names if len(first.sources) == len(encoded.names) else ("all",)
    layers = range(len(_decoder(model).layers))
    fields = ("keys", "values")
    names = [f"memory.{layer}.{name}.{field}" for layer in layers for name in sources for field in fields]
    names += [f"memory.{name}.bias" for name in sources] + ["memory.present"]
    names += ["memory.owners"] if first.owners is not None else []
    axes = {name: {0: "photos", 1: f"{name.rsplit('.', 1)[0]}.tokens"} for name in reader.inputs()}
    axes |= _axes_of_memory(names)
    write_graph(reader, tuple(example), reader.inputs(), names, axes, path)
    return dict(zip(names, outputs, strict=True))


def _export_step(model: Haav, memory: dict[str, Tensor], path: Path) -> None:
    sources = sum(name.endswith(".bias") for name in memory)
    width = 2 * model.decoder.words.embedding_dim
    past = {
        f"past.{index}": torch.zeros(PHOTOS * CAPTIONS, PAST, width) for index in range(len(_decoder(model).layers))
    }
    words = torch.zeros(PHOTOS, CAPTIONS, dtype=torch.int64)
    example = (words, torch.tensor(PAST), *memory.values(), *past.values())
    inputs = ["words", "position", *memory, *past]
    outputs = ["scores", "trust", *(f"known.{index}" for index in range(len(past)))]
    axes: dict[str, dict[int, str]] = {name: {0: "photos", 1: "captions"} for name in ("words", "scores", "trust")}
    axes |= {name: {0: "rows", 1: "past"} for name in past}
    axes |= {name: {0: "rows", 1: "known"} for name in outputs[2:]}
    axes |= _axes_of_memory(memory)
    step = Step(model, sources, owned="memory.owners" in memory).eval()
    write_graph(step, example, inputs, outputs, axes, path)


def _axes_of_memory(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Dynamic axes of the memory: photos, and tokens where they are"""
    tokens = {"keys": 2, "values": 2, "bias": 3, "owners": 1}
    axes: dict[str, dict[int, str]] = {name: {0: "photos"} for name in names}
    for name, own in axes.items():
        field = name.rsplit(".", 1)[1]
        if field in tokens:
            own[tokens[field]] = f"{name}.tokens"
    return axes
