"""What changes in captions when CLIP is computed otherwise: precisions, other roundings of its weights, fewer tokens.

$ python docs/experiments/precision.py MODEL DATASET PHOTOS [COUNT [ROW …]] > precision.json

MODEL: a model directory that reads `patches` alone; DATASET, PHOTOS: val photos with captions, and where they are.
The model is not trained again: each row says how it takes views that it was not trained on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from haav import Captioner
from haav.data.annotations import load_dataset
from haav.evaluate.scores import SLOW, evaluate
from haav.photos.images import load_image
from haav.photos.sources import find_photos
from haav.types import PhotoView
from haav.views import PhotoBatch
from haav.views.embedded import clip, vit
from haav.views.embedded.pooling import squares
from haav.views.embedded.vit import VisionTransformer

Look = Callable[[PhotoBatch], list[PhotoView]]


def views_of(hidden: Tensor, side: int) -> list[PhotoView]:
    """The `patches` view of towers with other numbers of patches: 7 × 7 cells of whatever there is"""
    maps = hidden[:, 1:].transpose(1, 2).unflatten(2, (side, side))
    cells = F.adaptive_avg_pool2d(maps, 7).flatten(2).transpose(1, 2)
    boxes = torch.cat([torch.tensor([[0.0, 0.0, 1.0, 1.0]]), squares(7)])
    return [PhotoView(tokens, boxes=boxes) for tokens in torch.cat([hidden[:, :1], cells], dim=1)]


def in_precision(precision: str, state: dict[str, Tensor]) -> Look:
    tower = VisionTransformer(clip.CONFIG, state, precision, clip.read_smoothing())
    return lambda photos: views_of(tower(photos.pixels(clip.SIDE, Image.Resampling.BICUBIC)), clip.GRID)


def without_vnni(state: dict[str, Tensor]) -> Look:
    """int8 as on CPUs without VNNI, whichever CPU this is"""
    with mock.patch.object(vit, "has_vnni", return_value=False):
        return in_precision("int8", state)


def rounded_otherwise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices rounded to 8 bits once more, with one scale per input channel: about as far as from unquantised ones"""
    changed = dict(state)
    for name, weight in state.items():
        if name.endswith(("qkv.weight", "out.weight", "fc1.weight", "fc2.weight")):
            scale = weight.abs().amax(dim=0, keepdim=True) / 127
            changed[name] = (weight / scale).round() * scale
    return changed


def smaller(side: int, state: dict[str, Tensor]) -> Look:
    """A smaller picture, with the positions of its patches interpolated"""
    grid = side // clip.CONFIG.patch
    cells = state["positions"][1:].T.view(1, -1, clip.GRID, clip.GRID)
    stretched = F.interpolate(cells, (grid, grid), mode="bicubic", antialias=True, align_corners=False)
    positions = torch.cat([state["positions"][:1], stretched[0].flatten(1).T])
    tower = VisionTransformer(clip.CONFIG, state | {"positions": positions}, "auto", clip.read_smoothing())
    return lambda photos: views_of(tower(photos.pixels(side, Image.Resampling.BICUBIC)), grid)


def merged(per_layer: int, state: dict[str, Tensor]) -> Look:
    """Token merging (ToMe): after each attention the `per_layer` most similar pairs of patches become one"""
    tower = VisionTransformer(clip.CONFIG, state, "auto", clip.read_smoothing())

    @torch.no_grad()
    def look(photos: PhotoBatch) -> list[PhotoView]:
        pixels = photos.pixels(clip.SIDE, Image.Resampling.BICUBIC)
        x = F.conv2d(pixels.to(tower.kernel), tower.kernel, tower.bias, clip.CONFIG.patch).flatten(2).transpose(1, 2)
        x = torch.cat([tower.cls.expand(len(x), 1, -1), x], dim=1) + tower.positions
        x = tower.pre_norm(x)
        # (B, tokens, patches): which share of each patch a token stands for
        source = torch.eye(x.shape[1]).expand(len(x), -1, -1).clone()
        patches = x[:, 1:]
        for layer, block in enumerate(tower.blocks, start=1):
            x, source = _block(block, x, source, per_layer)
            if layer == tower.patch_layer:  # each patch gets the token that it went into
                patches = (source.transpose(1, 2) @ x)[:, 1:]
        return views_of(torch.cat([x[:, :1], patches], dim=1), clip.GRID)

    return look


def _block(block: torch.nn.Module, x: Tensor, source: Tensor, count: int) -> tuple[Tensor, Tensor]:
    batch, tokens, _ = x.shape
    heads = block.qkv(block.norm1(x)).view(batch, tokens, 3, block.heads, -1)
    queries, keys, values = heads.permute(2, 0, 3, 1, 4)
    sizes = source.sum(dim=2)
    context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=sizes.log()[:, None, None])
    x = x + block.out(context.transpose(1, 2).flatten(2)).view_as(x)
    x, source = _merge(x, source, keys.mean(dim=1), sizes, count)
    hidden = F.silu(block.fc1(block.norm2(x)))
    if block.divide_hidden is not None:
        hidden = hidden * block.divide_hidden
    return x + block.fc2(hidden).view_as(x), source


def _merge(x: Tensor, source: Tensor, keys: Tensor, sizes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Even tokens look for the most similar odd one; the class token stays as it is"""
    keys = F.normalize(keys, dim=-1)
    even, odd = torch.arange(2, x.shape[1], 2), torch.arange(1, x.shape[1], 2)
    best, partner = (keys[:, even] @ keys[:, odd].transpose(1, 2)).max(dim=2)
    order = best.argsort(dim=1, descending=True)
    gone, kept = even[order[:, :count]], even[order[:, count:]].sort(dim=1).values
    into = odd[partner.gather(1, order[:, :count])]
    weighted, total, origin = x * sizes[..., None], sizes.clone(), source.clone()
    width, patches = x.shape[2], source.shape[2]
    weighted.scatter_add_(1, into[..., None].expand(-1, -1, width), _rows(weighted, gone))
    origin.scatter_add_(1, into[..., None].expand(-1, -1, patches), _rows(origin, gone))
    total.scatter_add_(1, into, total.gather(1, gone))
    first = torch.zeros(len(x), 1, dtype=torch.long)
    rest = torch.cat([first, kept, odd.expand(len(x), -1)], dim=1)
    return _rows(weighted, rest) / total.gather(1, rest)[..., None], _rows(origin, rest)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))


def main(model: str, dataset: str, source: str, count: str = "500", *rows: str) -> None:
    captioner = Captioner.from_pretrained(model)
    val = {photo.id: photo.captions for photo in load_dataset(dataset).split("val") if photo.captions}
    refs = [ref for ref in find_photos([source]) if ref.id in val][: int(count)]
    batches = [refs[start : start + 8] for start in range(0, len(refs), 8)]
    state = clip.read_clip()
    variants: dict[str, Callable[[], Look]] = {
        "float32": lambda: in_precision("float32", state),
        "int8": lambda: in_precision("int8", state),
        "int8 without VNNI": lambda: without_vnni(state),
        "bfloat16": lambda: in_precision("bfloat16", state),
        "float32, weights rounded otherwise": lambda: in_precision("float32", rounded_otherwise(state)),
        "192 px": lambda: smaller(192, state),
        "160 px": lambda: smaller(160, state),
        "8 tokens merged per layer": lambda: merged(8, state),
        "12 tokens merged per layer": lambda: merged(12, state),
    }
    exact: dict[str, str] = {}
    for name, build in variants.items():
        if exact and rows and name not in rows:
            continue  # float32 is what the others are compared with
        look, captions, spent = build(), {}, 0.0
        for batch in batches:
            photos = PhotoBatch([ref.id for ref in batch], [load_image(ref.read()) for ref in batch])
            started = time.process_time()
            views = look(photos)
            spent += time.process_time() - started
            for ref, caption in zip(batch, captioner.caption_extracted({"patches": views}), strict=True):
                captions[ref.id] = caption.text
        exact = exact or captions
        score = evaluate(captions, {photo: val[photo] for photo in captions}, skip=SLOW, resamples=1).scores["CIDEr"]
        changed = sum(captions[photo] != exact[photo] for photo in captions) / len(captions)
        row = {
            "photos": len(captions),
            "CIDEr": round(100 * score.value, 1),
            "captions changed, %": round(100 * changed, 1),
        }
        print(json.dumps({name: row | {"CPU ms per photo": round(1000 * spent / len(captions))}}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
