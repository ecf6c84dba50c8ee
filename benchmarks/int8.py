"""The frozen networks' convolutions in eight bits, beside float32: python -m benchmarks int8, on the sample photos; or
what it does to captions: python -m benchmarks.int8 dataset_coco.json.gz IMAGES [PHOTOS], on val photos

Weights have a scale a channel; what a convolution reads is rounded to 255 steps of the range that was seen in sample
photos, and what it writes is float32 again, so that nothing else in a network changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import haav
from haav.data.annotations import load_dataset
from haav.evaluate.scores import SLOW, compare, evaluate
from haav.photos.images import load_image
from haav.photos.sources import find_photos
from haav.studies.bench import seconds
from haav.views import PhotoBatch
from haav.views.embedded.efficientnet import load_efficientnet
from haav.views.embedded.folded_conv import FoldedConv
from haav.views.embedded.grid import grid_map
from haav.views.embedded.objects import detections
from haav.views.embedded.yolo import load_yolo

Ranges = dict[nn.Module, tuple[float, float]]


def int8() -> dict[str, Any]:
    found: dict[str, Any] = {"what": "frozen networks with int8 convolutions, eight photos; float32 is 1"}
    images = _samples()
    ways: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "EfficientNet-Lite2": (load_efficientnet(), lambda: grid_map(_photos(images))),
        "YOLOv4-tiny": (load_yolo(), lambda: detections(_photos(images)).deep),
    }
    for name, (network, look) in ways.items():
        exact, slow = look(), seconds(look)
        with in_int8(network, ranges(network, look)):
            rounded, fast = look(), seconds(look)
        found[f"{name}, times faster"] = slow / fast
        found[f"{name}, its features are off by, %"] = 100 * ((rounded - exact).norm() / exact.norm()).item()
    return found


def ranges(network: nn.Module, look: Callable[[], Any]) -> Ranges:
    """The smallest and the largest number that each convolution reads"""
    found: Ranges = {}

    def watch(conv: nn.Module, inputs: Any) -> None:
        low, high = found.get(conv, (0.0, 0.0))
        found[conv] = min(low, inputs[0].min().item()), max(high, inputs[0].max().item())

    hooks = [part.register_forward_pre_hook(watch) for part in network.modules() if isinstance(part, FoldedConv)]
    look()
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def in_int8(network: nn.Module, known: Ranges) -> Iterator[None]:
    convs = [part for part in network.modules() if isinstance(part, FoldedConv)]
    for conv in convs:
        conv.forward = _rounded(conv, *known[conv])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for conv in convs:
            del conv.forward


def _rounded(conv: FoldedConv, low: float, high: float) -> Callable[[Tensor], Tensor]:
    step = (high - low) / 255
    zero = round(-low / step)
    packed: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def forward(x: Tensor) -> Tensor:
        weight, padding = conv.kernel(x.shape[2])
        place = ([conv.stride] * 2, [padding] * 2, [1, 1], conv.groups)
        if x.shape not in packed:
            scales = weight.abs().amax(dim=(1, 2, 3)).clamp(min=1e-8) / 127
            whole = (weight / scales[:, None, None, None]).round().to(torch.int8)
            inner = torch.ops.onednn.qconv_prepack(whole, scales, step, zero, *place, list(x.shape))
            packed[x.shape] = inner, scales, torch.zeros(len(scales), dtype=torch.int32)
        read = torch.add(torch.tensor(zero + 0.5), x, alpha=1 / step).clamp_(0, 255).to(torch.uint8)
        fused = ("hardtanh", [0.0, 6.0]) if conv.activation == "relu6" else ("none", [])
        result: Tensor = torch.ops.onednn.qconv2d_pointwise(
            read, step, zero, *packed[x.shape], conv.bias, *place, 1.0, 0, torch.float32, *fused, ""
        )
        return F.leaky_relu_(result, 0.1) if conv.activation == "leaky" else result

    return forward


def captions(dataset: str, images: str, count: int) -> dict[str, Any]:
    """CIDEr of the first val photos with YOLOv4-tiny in int8 minus that in float32, and how many captions differ"""
    wanted = {photo.id: photo.captions for photo in load_dataset(dataset).split("val")[:count]}
    photos = {photo.id: photo for photo in find_photos([images]) if photo.id in wanted}
    captioner = haav.load()

    def write() -> dict[str, str]:
        found = captioner.caption([photo.read() for photo in photos.values()])
        return {name: caption.text for name, caption in zip(photos, found, strict=True)}

    network = load_yolo()
    exact = write()
    samples = _samples()
    with in_int8(network, ranges(network, lambda: detections(_photos(samples)))):
        rounded = write()
    reports = [evaluate(texts, {name: wanted[name] for name in photos}, skip=SLOW) for texts in (exact, rounded)]
    difference = compare(*reports)["CIDEr"]
    return {
        "photos": len(photos),
        "CIDEr in float32": 100 * reports[0].scores["CIDEr"].value,
        "CIDEr in int8": 100 * reports[1].scores["CIDEr"].value,
        "difference": [100 * difference.value, 100 * difference.low, 100 * difference.high],
        "captions that differ, %": 100 * sum(exact[name] != rounded[name] for name in photos) / len(photos),
    }


def _samples() -> list[Any]:
    files = sorted(str(file) for file in resources.files("haav").joinpath("samples").iterdir() if ".jpg" in file.name)
    images = [load_image(file) for file in files]
    return [images[index % len(images)] for index in range(8)]


def _photos(images: list[Any]) -> PhotoBatch:
    return PhotoBatch([str(index) for index in range(len(images))], images)


if __name__ == "__main__":
    print(captions(sys.argv[1], sys.argv[2], int(sys.argv[3]) if sys.argv[3:] else 1000))
