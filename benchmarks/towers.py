"""The vision transformers in each precision: latency, rate, and how far features are from float32's.

Each precision runs in a process of its own: an instruction that the machine lacks would end it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from typing import Any

from torch.nn import functional as F

from haav.photos.images import load_image
from haav.studies.bench import seconds
from haav.views import PhotoBatch
from haav.views.embedded import clip, dinov2

PRECISIONS = ("float32", "bfloat16", "int8")
TOWERS = {"CLIP ViT-B/16": clip.load_clip, "DINOv2 ViT-S/14": dinov2.load_dinov2}


def towers() -> dict[str, Any]:
    found: dict[str, Any] = {"what": "the sample photos; one photo at a time, and eight in a batch"}
    for name in TOWERS:
        for precision in PRECISIONS:
            words = [sys.executable, "-m", "benchmarks.towers", name, precision]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                found[f"{name}, {precision}"] = "– (does not run on this machine)"
                continue
            for key, value in json.loads(done.stdout).items():
                found[f"{name}, {precision}, {key}"] = value
    return found


def measure(name: str, precision: str) -> dict[str, float]:
    samples = resources.files("haav").joinpath("samples")
    images = [load_image(str(file)) for file in sorted(samples.iterdir(), key=str) if file.name.endswith(".jpg")]
    eight = [images[index % len(images)] for index in range(8)]
    tower, exact = (TOWERS[name](precision=each) for each in (precision, "float32"))

    def photos(pictures: list[Any]) -> PhotoBatch:
        return PhotoBatch([str(index) for index in range(len(pictures))], pictures)

    near = F.cosine_similarity(tower.hidden(photos(images)), exact.hidden(photos(images)), dim=-1)
    rate = 8 / seconds(lambda: tower.hidden(photos(eight)))
    return {
        "one photo, ms": 1000 * seconds(lambda: tower.hidden(photos(images[:1]))),
        "batches of 8, photos/s": rate,
        "GFLOP/s": rate * tower.vit.gigaflops,
        "cosine to float32, mean of tokens": near.mean().item(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
