"""Measure how fast this machine captions photos, and where the time goes."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch import nn

from haav.files import json_of
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.parallel import side_by_side
from haav.photos.images import load_image
from haav.studies.describe import cost
from haav.views import PhotoBatch
from haav.views.embedded import clip, dinov2, efficientnet, yolo
from haav.views.embedded.folded_conv import FoldedConv
from haav.views.embedded.grid import grid_map
from haav.views.embedded.objects import detections
from haav.views.embedded.vit import resolve_precision


def bench(captioner: Captioner, model: str) -> dict[str, Any]:
    """Times, rates and shares by name. Run it on an otherwise idle machine."""
    captioner.prepare()
    samples = resources.files("haav").joinpath("samples")
    paths = sorted(str(file) for file in samples.iterdir() if file.name.endswith(".jpg"))
    images = [load_image(path) for path in paths]
    eight = [images[index % len(images)] for index in range(8)]
    fifty = [images[index % len(images)] for index in range(50)]
    peak, int8_peak = matmul_rate(), int8_rate()
    results: dict[str, Any] = {
        "machine": machine(),
        "a large matrix product, GFLOP/s": peak,
        "a large matrix product in int8, GFLOP/s": int8_peak,
        "cold: a process that captions one photo, s": cold(model, paths[0]),
    }
    for beam in (3, 5):
        results[f"warm: a photo to its caption, beam {beam}, ms"] = 1000 * median(
            seconds(partial(captioner.caption, path, beam=beam), 3) for path in paths
        )
    many = eight * 8
    results["photos in batches of 8, photos/s"] = len(many) / seconds(lambda: captioner.caption(many), 2)
    results["of that, looking at them, photos/s"] = len(many) / seconds(
        lambda: list(side_by_side(captioner.extract, [eight] * 8)), 2
    )
    eight_views = captioner.extract(eight)
    results["one batch of 8, photos/s"] = 8 / seconds(lambda: captioner.caption(eight), 3)
    for name, value in looking(captioner, eight, peak, int8_peak).items():
        results[f"  {name}"] = value
    fifty_views = captioner.extract(fifty)
    for batch, views in ((1, captioner.extract(images[:1])), (8, eight_views), (50, fifty_views)):
        for beam in (1, 5):
            took = seconds(partial(captioner.caption_extracted, views, CaptionOptions(beam=beam)), 3)
            results[f"views to captions, beam {beam}, batch {batch}, captions/s"] = batch / took
    beside = seconds(
        lambda: list(
            side_by_side(lambda views: captioner.caption_extracted(views, CaptionOptions(beam=5)), [fifty_views] * 4)
        ),
        2,
    )
    results["views to captions, beam 5, batches of 50 side by side, captions/s"] = 200 / beside
    flops = cost(captioner.config.model)
    results["GFLOP to read a photo's views, at their longest"] = (flops.encoding + flops.memory) / 1e9
    results["GFLOP a word and caption"] = flops.step / 1e9
    results["peak memory, GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return results


def looking(captioner: Captioner, images: Sequence[Image.Image], peak: float, int8_peak: float) -> dict[str, Any]:
    """Rates of the networks behind the views, and of each view without its networks. Peaks are in GFLOP/s."""
    assert captioner.extractors is not None, "it was loaded from a model directory"

    def photos() -> PhotoBatch:
        return PhotoBatch([str(index) for index in range(len(images))], images)

    def run_anew(network: Network) -> None:
        network.run(photos())  # a new batch each time, because a batch caches what was computed from it

    results: dict[str, Any] = {}
    for name in captioner.extractors.weights(captioner.views):
        network = NETWORKS[name]()
        rate = len(images) / seconds(partial(run_anew, network), 3)
        results[f"{name}, precision"] = network.precision
        results[f"{name}, photos/s"] = rate
        results[f"{name}, GFLOP per photo"] = network.gigaflops
        results[f"{name}, of the large product's rate, %"] = 100 * network.gigaflops * rate / peak
        if network.precision == "int8":
            results[f"{name}, of the large int8 product's rate, %"] = 100 * network.gigaflops * rate / int8_peak
    batch = photos()
    for name in captioner.views:
        extractor = captioner.extractors.extractor(name)
        took = seconds(partial(extractor.extract, batch), 3)
        results[f"{name}, its networks not counted, photos/s"] = len(images) / took
    return results


@dataclass(frozen=True)
class Network:
    run: Callable[[PhotoBatch], Any]
    gigaflops: float
    """per photo"""
    precision: str = "float32"


def _convolutions(network: nn.Module, side: int, run: Callable[[PhotoBatch], Any]) -> Network:
    return Network(run, convolution_gigaflops(network, side))


def _transformer(tower: clip.ClipTower | dinov2.Dinov2Tower) -> Network:
    return Network(tower.hidden, tower.vit.gigaflops, tower.vit.precision)


NETWORKS: dict[str, Callable[[], Network]] = {
    efficientnet.WEIGHTS: lambda: _convolutions(efficientnet.load_efficientnet(), efficientnet.SIZE, grid_map),
    yolo.WEIGHTS: lambda: _convolutions(yolo.load_yolo(), yolo.SIZE, detections),
    clip.WEIGHTS: lambda: _transformer(clip.load_clip(None, resolve_precision("auto"), "cpu")),
    dinov2.WEIGHTS: lambda: _transformer(dinov2.load_dinov2(resolve_precision("auto"), "cpu")),
}
"""name of the weights → network"""


def convolution_gigaflops(network: nn.Module, side: int) -> float:
    """GFLOP of the convolutions for one square picture, counting two FLOPs per multiply-add"""
    total = 0

    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal total
        assert isinstance(module, FoldedConv)
        total += 2 * output.numel() * module.weight[0].numel()

    hooks = [part.register_forward_hook(count) for part in network.modules() if isinstance(part, FoldedConv)]
    with torch.no_grad():
        network(torch.zeros(1, 3, side, side, dtype=torch.uint8))
    for hook in hooks:
        hook.remove()
    return total / 1e9


def cold(model: str, path: str) -> float:
    words = [sys.executable, "-m", "haav", "caption", path, "--model", model, "--json"]

    def once() -> None:
        done = subprocess.run(words, capture_output=True, check=True)
        assert "caption" in json_of(done.stdout)

    return seconds(once, 2)


def matmul_rate(size: int = 2048, dtype: torch.dtype = torch.float32) -> float:
    """GFLOP/s of a product of two square matrices, the peak rate of the machine"""
    left, right = torch.randn(2, size, size).to(dtype)
    return 2 * size**3 / seconds(lambda: left @ right, 5) / 1e9


def int8_rate(size: int = 2048) -> float:
    """GFLOP/s of a product of two square matrices of 8-bit integers"""
    left, right = torch.randint(-127, 128, (2, size, size), dtype=torch.int8)
    return 2 * size**3 / seconds(lambda: torch._int_mm(left, right), 5) / 1e9


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The shortest of several runs after a warm-up run. The minimum is least affected by other processes."""
    work()
    durations = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return min(durations)


def machine() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8", errors="replace").splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    processor = named[0] if named else platform.machine()
    return f"{processor}, {threads} threads, torch {torch.__version__}, Python {platform.python_version()}"
