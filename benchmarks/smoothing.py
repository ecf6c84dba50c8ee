"""Makes `views/clip_smoothing.safetensors`: what each input channel of CLIP's layers is divided by before rounding.

$ python -m benchmarks.smoothing PHOTOS     # a folder or a tar with at least 48 photos
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
from PIL import Image
from safetensors.torch import save_file

from haav.photos.images import load_image
from haav.photos.sources import find_photos
from haav.views import PhotoBatch
from haav.views.embedded import clip
from haav.views.embedded.vit import VisionTransformer, smoothing

PHOTOS = 48


def main(source: str) -> None:
    refs = list(islice(find_photos([source]), PHOTOS))
    photos = PhotoBatch([ref.id for ref in refs], [load_image(ref.read()) for ref in refs])
    tower = VisionTransformer(clip.CONFIG, clip.read_clip(), "float32")
    divisors = smoothing(tower, photos.pixels(clip.SIDE, Image.Resampling.BICUBIC))
    save_file({name: value.half() for name, value in divisors.items()}, clip.SMOOTHING)
    largest = max(float(value.max() / value.median()) for value in divisors.values())
    print(f"{clip.SMOOTHING}: {len(divisors)} layers, channels divided by up to {largest:.0f} × the median")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(sys.argv[1])
