"""Reading training batches from a store as it grows, beside the step that uses them: python -m benchmarks loading"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from benchmarks.scale import BATCH, VIEWS, step_seconds

from haav.data.annotations import Photo
from haav.data.loader import ShuffledBatches, StoredPhotos
from haav.store import Store, ViewManifest
from haav.studies.bench import seconds
from haav.types import PhotoView

COUNTS = (250, 2000)
BATCHES = 5


def loading() -> dict[str, Any]:
    """Shuffled batches of random views of the real sizes, nothing read ahead"""
    took = {}
    for count in COUNTS:
        with tempfile.TemporaryDirectory() as folder, Store(folder, write=True) as store:
            _fill(store, count)
            photos = [Photo(str(index), "train") for index in range(count)]
            stored = StoredPhotos(store, list(VIEWS), photos, vocabulary=None)
            rows = list(ShuffledBatches(count, BATCH))[:BATCHES]
            took[count] = seconds(lambda stored=stored, rows=rows: [stored[own] for own in rows], 3) / BATCHES
    step, _ = step_seconds()
    few, many = COUNTS
    return {
        "what": f"reading shuffled batches of {BATCH} photos, {len(VIEWS)} views, nothing read ahead",
        **{f"{count:,} photos in the store, ms a batch": 1000 * took[count] for count in COUNTS},
        "power of the number of photos": math.log(took[many] / took[few]) / math.log(many / few),
        "of an XE step of as many photos, %": 100 * took[many] / step,
    }


def _fill(store: Store, count: int) -> None:
    for name, (spec, tokens) in VIEWS.items():
        store.add_view(name, ViewManifest(spec, "random"))
        for start in range(0, count, BATCH):
            store.put(name, {str(index): _random_view(spec, tokens) for index in range(start, start + BATCH)})


def _random_view(spec: Any, tokens: int) -> PhotoView:
    indices = {index: torch.randint(0, size, (tokens,)) for index, size in spec.indices.items()}
    return PhotoView(torch.randn(tokens, spec.dim), indices, torch.rand(tokens, 4) if spec.boxes else None)
