"""Export a model as ONNX graphs that run without torch. `haav.export.portable` reads them.

`reader.onnx`: views → cross-attention memory, once per photo.
`step.onnx`: one word of each caption and the past → scores of the next word, view weights, the past with that word.
`eyes.onnx`: pixels → inputs of the views, for models that read embedded views only.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from haav.data.collate import blank_view
from haav.errors import ConfigError
from haav.export.portable import ABOUT, EYES, FORMAT, READER, STEP, TEXTS, WORDS
from haav.export.portable.views import DETECTIONS, LARGE, QUERY, SMALL, SUPPRESS
from haav.files import make_folder, write_atomically
from haav.generate.beam import BeamSearch
from haav.generate.build import build_strategy
from haav.inference.captioner import Captioner
from haav.model.haav import Haav
from haav.pretrained import find_model
from haav.types import Aggregated, KeyValues, Memory, Source, View, ViewSpec
from haav.views import Extractor, extractor_kind
from haav.views.embedded import cells, efficientnet, objects, yolo
from haav.views.embedded.grid import GridExtractor
from haav.views.embedded.objects import ObjectsExtractor
from haav.views.embedded.pooling import coverage, squares
from haav.views.embedded.regions import CROPS, RegionsExtractor, crops
from haav.views.live import TEXTDB, own_texts
from haav.views.retrieval.text import TextExtractor

OPSET = 17
EXPORTABLE = (cells.CellsExtractor, GridExtractor, ObjectsExtractor, TextExtractor)
"""extractors that the graph of the embedded networks can replace"""
PHOTOS, CAPTIONS, PAST = 2, 3, 4
"""sizes that graphs are traced with; all of them are dynamic in the graph"""


def export_onnx(model: str | Path, out: str | Path) -> dict[str, int]:
    """Write the exported model. Returns bytes by file."""
    home = find_model(model)
    captioner = Captioner.from_pretrained(home)
    _check(captioner)
    network = captioner.model
    assert isinstance(network, Haav)
    folder = make_folder(out)
    memory = _export_reader(network, captioner.config.model.views, folder / READER)
    _export_step(network, memory, folder / STEP)
    eyes = _embedded(captioner)
    if eyes:
        _export_eyes(eyes, folder / EYES)
        texts = own_texts(home)
        if any(isinstance(extractor, TextExtractor) for extractor in eyes.values()):
            make_folder(folder / TEXTS)
            for file in sorted(Path(texts[TEXTDB]).iterdir()):
                write_atomically(folder / TEXTS / file.name, partial(shutil.copyfile, file))
    heads, width = captioner.config.model.heads, captioner.config.model.d_model // captioner.config.model.heads
    about = {
        "format": FORMAT,
        "views": {name: _about(spec, eyes.get(name)) for name, spec in captioner.config.model.views.items()},
        "layers": len(network.decoder.layers),
        "past": [heads, width],
        "decode": asdict(captioner.config.decode),
        "confidence": asdict(captioner.config.confidence),
        "eyes": bool(eyes),
    }
    for name, data in ((WORDS, captioner.vocabulary.to_json()), (ABOUT, about)):
        text = json.dumps(data, ensure_ascii=False, indent=1)
        write_atomically(folder / name, partial(Path.write_text, data=text, encoding="utf-8"))
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


def _embedded(captioner: Captioner) -> dict[str, Extractor]:
    """The extractors of the views if the graph of the embedded networks can replace all of them, otherwise none"""
    classes = [extractor_kind(name) for name in captioner.views]
    if not all(cls is not None and issubclass(cls, EXPORTABLE) for cls in classes) or captioner.extractors is None:
        return {}
    extractors = {name: captioner.extractors.extractor(name) for name in captioner.views}
    bridges = [extractor.bridge for extractor in extractors.values() if isinstance(extractor, TextExtractor)]
    starts = [extractor_kind(bridge.view) for bridge in bridges]
    return extractors if all(cls is not None and issubclass(cls, RegionsExtractor) for cls in starts) else {}


def _about(spec: ViewSpec, extractor: Extractor | None) -> dict[str, object]:
    about: dict[str, object] = asdict(spec)
    if isinstance(extractor, ObjectsExtractor):
        limits = (objects.MIN_SCORE, objects.MAX_OVERLAP, objects.MAX_BOXES)
        about[SUPPRESS] = dict(zip(("min_score", "max_overlap", "max_boxes"), limits, strict=True))
    return about


class Reader(nn.Module):
    """Computes the memory, with flat tensors as inputs and outputs.

    The outputs are keys and values for each decoder layer and source, then masks, `present`, and `owners` if any.
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
        return (*kept, *(source.mask for source in memory[0].sources), memory[0].present, *owners)

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
        self.decoder, self.sources, self.owned = model.decoder, sources, owned

    def forward(self, words: Tensor, position: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        layers = len(self.decoder.layers)
        rest = iter(flat)
        pairs = [[KeyValues(next(rest), next(rest)) for _ in range(self.sources)] for _ in range(layers)]
        masks = [next(rest) for _ in range(self.sources)]
        present, owners = next(rest), next(rest) if self.owned else None
        past = [KeyValues(next(rest), next(rest)) for _ in range(layers)]
        x = (self.decoder.words(words) + self.decoder.get_buffer("positions")[position + 1])[:, :, None]
        known: list[Tensor] = []
        gathered: Aggregated | None = None
        for layer, layer_pairs, before in zip(self.decoder.layers, pairs, past, strict=True):
            memory = Memory(tuple(Source(*part) for part in zip(layer_pairs, masks, strict=True)), present, owners)
            x, gathered, after = layer(x, before, None, memory)
            known += [after.keys, after.values]
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
    layers = range(len(model.decoder.layers))
    fields = ("keys", "values")
    names = [f"memory.{layer}.{name}.{field}" for layer in layers for name in sources for field in fields]
    names += [f"memory.{name}.mask" for name in sources] + ["memory.present"]
    names += ["memory.owners"] if first.owners is not None else []
    axes = {name: {0: "photos", 1: f"{name.rsplit('.', 1)[0]}.tokens"} for name in reader.inputs()}
    axes |= {name: {0: "photos", 3: f"{name.rsplit('.', 1)[0]}.tokens"} for name in names if name[-4:] != "mask"}
    axes |= {name: {0: "photos", 1: f"{name}.tokens"} for name in names if name.endswith(".mask")}
    axes |= _axes_of_views(names)
    _write(reader, tuple(example), reader.inputs(), names, axes, path)
    return dict(zip(names, outputs, strict=True))


def _export_step(model: Haav, memory: dict[str, Tensor], path: Path) -> None:
    sources = sum(name.endswith(".mask") for name in memory)
    layers = len(model.decoder.layers)
    first = next(iter(memory.values()))
    past = {
        f"past.{index}": torch.zeros(PHOTOS, CAPTIONS, first.shape[2], PAST, first.shape[4])
        for index in range(2 * layers)
    }
    words = torch.zeros(PHOTOS, CAPTIONS, dtype=torch.int64)
    example = (words, torch.tensor(PAST), *memory.values(), *past.values())
    inputs = ["words", "at", *memory, *past]
    outputs = ["scores", "trust", *(f"known.{index}" for index in range(2 * layers))]
    axes: dict[str, dict[int, str]] = {name: {0: "photos", 1: "captions"} for name in ("words", "scores", "trust")}
    axes |= {name: {0: "photos", 1: "captions", 3: "past"} for name in past}
    axes |= {name: {0: "photos", 1: "captions", 3: "known"} for name in outputs[2:]}
    for name in memory:
        axes[name] = {0: "photos", 3: f"{name}.tokens"}
        if name.endswith(".mask"):
            axes[name] = {0: "photos", 1: f"{name}.tokens"}
    axes |= _axes_of_views(memory)
    step = Step(model, sources, owned="memory.owners" in memory).eval()
    _write(step, example, inputs, outputs, axes, path)


def _axes_of_views(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Dynamic axes of tensors that do not belong to one layer"""
    known = {"memory.present": {0: "photos"}, "memory.owners": {0: "photos", 1: "memory.owners.tokens"}}
    return {name: known[name] for name in names if name in known}


class EmbeddedEyes(nn.Module):
    """Both networks, pooling under boxes that are the same for every photo, and the bridge."""

    def __init__(self, views: Mapping[str, Extractor]) -> None:
        super().__init__()
        self.views = dict(views)
        self.grid, self.detector = efficientnet.load_efficientnet(), yolo.load_yolo()
        bridges = [extractor.bridge for extractor in views.values() if isinstance(extractor, TextExtractor)]
        self.bridge = bridges[0].bridges[0] if bridges else None
        sides = (efficientnet.GRID, yolo.DEEP[1], yolo.FINE[1])
        for name, boxes in (("squares", squares(cells.SIDE)), ("crops", crops())):
            for level, side in enumerate(sides):
                self.register_buffer(f"{name}_{level}", coverage(boxes, side, side))

    def outputs(self) -> list[str]:
        parts: dict[type[Extractor], tuple[str, ...]] = {ObjectsExtractor: DETECTIONS, TextExtractor: (QUERY,)}
        return [
            name + part
            for name, extractor in self.views.items()
            for part in next((suffixes for cls, suffixes in parts.items() if isinstance(extractor, cls)), ("",))
        ]

    def forward(self, small: Tensor, large: Tensor) -> tuple[Tensor, ...]:
        grid, detected = self.grid(small), self.detector(large)
        maps = (grid, detected.deep, detected.fine)
        queries = None if self.bridge is None else self.bridge(self._pool("crops", maps))
        answers: list[Tensor] = []
        for extractor in self.views.values():
            if isinstance(extractor, ObjectsExtractor):
                answers += [detected.boxes, detected.scores, detected.deep, detected.fine]
            elif isinstance(extractor, cells.CellsExtractor):
                answers.append(self._pool("squares", maps))
            elif isinstance(extractor, TextExtractor):
                assert queries is not None
                answers.append(queries[:, CROPS[extractor.crops]])
            else:
                answers.append(grid.flatten(2).transpose(1, 2))
        return tuple(answers)

    def _pool(self, name: str, maps: Sequence[Tensor]) -> Tensor:
        """(B, boxes, 2048)"""
        parts = [
            self.get_buffer(f"{name}_{level}") @ part.flatten(2).transpose(1, 2) for level, part in enumerate(maps)
        ]
        return torch.cat(parts, dim=2)


def _export_eyes(views: Mapping[str, Extractor], path: Path) -> None:
    eyes = EmbeddedEyes(views).eval()
    pixels = [torch.zeros(PHOTOS, 3, side, side, dtype=torch.uint8) for side in (efficientnet.SIZE, yolo.SIZE)]
    axes = {name: {0: "photos"} for name in (SMALL, LARGE, *eyes.outputs())}
    _write(eyes, tuple(pixels), [SMALL, LARGE], eyes.outputs(), axes, path)


def _write(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    axes: dict[str, dict[int, str]],
    path: Path,
) -> None:
    def save(place: Path) -> None:
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
                dynamo=False,
            )

    try:
        write_atomically(path, save)
    except ModuleNotFoundError as error:
        raise ConfigError(f"an export needs {error.name}.\n  pip install 'haav[onnx]'") from None
