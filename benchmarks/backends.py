"""What computes a decoding step: PyTorch or onnxruntime. Both take turns in one process.

`python -m benchmarks.backends compile` adds torch.compile, which takes minutes and needs a C++ compiler.

The shipped model on the views of the sample photos, read once. Captions are compared word by word.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from statistics import median
from typing import Any

import torch
import torch._dynamo

import haav
from haav.generate.backends import Backend, OnnxModel
from haav.generate.graph import Step
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.parallel import side_by_side
from haav.model.decoders.transformer import TransformerDecoder
from haav.model.haav import Haav
from haav.photos.images import load_image
from haav.types import Caption, PhotoView

ROUNDS = 5
ALONE = {"beam 3, photos one by one": 3, "beam 5, photos one by one": 5}
"""beam"""
BATCHES = {"beam 5, one batch of 16": (16, 1), "beam 5, 4 batches of 50 in parallel": (50, 4)}
"""photos per batch, batches"""
RECOMPILATIONS = 64
"""allowed for torch.compile, which makes a kernel anew for sizes of 0 and 1"""


class AllNames(frozenset[str]):
    """onnxruntime drops inputs that its graph does not use. Here all are passed on."""

    def __contains__(self, name: object) -> bool:
        return True


class CompiledStep:
    """torch.compile in the place of an onnxruntime session"""

    def __init__(self, model: Haav) -> None:
        assert isinstance(model.decoder, TransformerDecoder)
        # Weights that are not frozen are not packed by haav, so that the compiler can lay them out.
        torch._dynamo.config.recompile_limit = RECOMPILATIONS
        decoder = copy.deepcopy(model.decoder).requires_grad_()
        self.step = torch.compile(Step(decoder, 1, True).eval(), dynamic=True)

    def run(self, _: None, feed: dict[str, Any]) -> list[Any]:
        words, position = feed.pop("words"), feed.pop("position")
        rest = [torch.from_numpy(value) for value in feed.values()]
        with torch.no_grad():
            results = self.step(torch.from_numpy(words), torch.from_numpy(position), *rest)
        return [result.numpy() for result in results]


def backends(compiled: bool = False) -> dict[str, Any]:
    """Views to captions by backend"""
    captioners = {name: haav.load(backend=name) for name in ("torch", "onnxruntime")}
    if compiled:
        captioners["torch.compile"] = _compiled(captioners["onnxruntime"])
    samples = resources.files("haav").joinpath("samples")
    images = [load_image(str(file)) for file in sorted(samples.iterdir(), key=str) if file.name.endswith(".jpg")]
    read = captioners["torch"].extract(images)
    results: dict[str, Any] = {"what": "views to captions, the shipped model", "threads": torch.get_num_threads()}
    for label, beam in ALONE.items():
        alone = [{name: [part[index]] for name, part in read.items()} for index in range(len(images))]
        _compare(results, label, captioners, alone, CaptionOptions(beam=beam), parallel=False)
    for label, (photos, batches) in BATCHES.items():
        views = {name: [part[index % len(part)] for index in range(photos)] for name, part in read.items()}
        _compare(results, label, captioners, [views] * batches, CaptionOptions(beam=5), parallel=batches > 1)
    return results


def _compare(
    results: dict[str, Any],
    label: str,
    captioners: Mapping[str, Captioner],
    batches: Sequence[Mapping[str, list[PhotoView]]],
    options: CaptionOptions,
    parallel: bool,
) -> None:
    turns = {name: partial(_caption, one, batches, options, parallel) for name, one in captioners.items()}
    photos = sum(len(next(iter(batch.values()))) for batch in batches)
    texts, times = _take_turns(turns)
    for name in turns:
        results[f"{label}, {name}, ms per photo"] = 1000 * times[name] / photos
        results[f"{label}, {name}, captions/s"] = photos / times[name]
        results[f"{label}, {name}, captions unlike those of torch"] = sum(
            one != other for one, other in zip(texts[name], texts["torch"], strict=True)
        )


def _caption(
    captioner: Captioner, batches: Sequence[Mapping[str, list[PhotoView]]], options: CaptionOptions, parallel: bool
) -> list[Caption]:
    run = side_by_side if parallel else map
    return [one for part in run(lambda batch: captioner.caption_extracted(batch, options), batches) for one in part]


def _compiled(captioner: Captioner) -> Captioner:
    assert isinstance(captioner.model, Haav)
    one = OnnxModel(captioner.model)
    one.session, one.inputs = CompiledStep(captioner.model), AllNames()
    captioner = captioner.with_config(captioner.config)
    captioner.backend = Backend("torch", captioner.model)
    captioner.backend.next_search = lambda: one  # type: ignore[method-assign]
    return captioner


def _take_turns(turns: Mapping[str, Callable[[], list[Caption]]]) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Captions, and the median seconds of a turn"""
    texts = {name: [caption.text for caption in work()] for name, work in turns.items()}  # warms up
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(ROUNDS):
        for name, work in turns.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return texts, {name: median(each) for name, each in times.items()}


if __name__ == "__main__":
    for name, value in backends("compile" in sys.argv).items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
