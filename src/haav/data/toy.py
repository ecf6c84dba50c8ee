"""A synthetic data set that a small model learns in seconds: coloured things in places.

Each view holds a part of the content, as real views do. `objects` holds the thing and its count, `grid` the colour and
the place, `text` noisy hints at the thing and the colour. A model needs all views to write a complete caption.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haav.files import write_atomically
from haav.store import Store, ViewManifest
from haav.types import PhotoView, ViewSpec

THINGS = ("dog", "cat", "bus", "boat", "horse", "kite")
COLOURS = ("red", "blue", "green", "white", "black")
PLACES = ("beach", "street", "field", "lake")
COUNTS = ("a", "two", "three")
FORMS = (
    "{count} {colour} {thing} on the {place}",
    "{count} {colour} {thing} near a {place}",
    "there is {count} {colour} {thing} by the {place}",
    "{count} {thing} that is {colour} at the {place}",
    "the {place} with {count} {colour} {thing} in it",
)
WIDTH = 12
VIEWS = {"objects": ViewSpec(WIDTH, 4, boxes=True), "grid": ViewSpec(WIDTH, 6), "text": ViewSpec(WIDTH, 3, {"rank": 3})}
SPLITS = (("train", 160), ("val", 30), ("test", 30))


def make_toy(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Paths of the data set and the view store under `folder`. The data set file is written last; if it
    exists, nothing is made."""
    dataset, store = folder / "dataset.json", folder / "store"
    if dataset.exists():
        return dataset, store
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    embeddings = {word: torch.randn(WIDTH, generator=generator) for word in (*THINGS, *COLOURS, *PLACES, *COUNTS)}
    images: list[dict[str, Any]] = []
    records: dict[str, dict[str, PhotoView]] = {name: {} for name in VIEWS}
    for split, photos in SPLITS:
        for index in range(photos):
            truth = {
                "count": rng.choice(COUNTS),
                "colour": rng.choice(COLOURS),
                "thing": rng.choice(THINGS),
                "place": rng.choice(PLACES),
            }
            name = f"{split}{index}.png"
            sentences = [{"raw": form.format(**truth)} for form in rng.sample(FORMS, 5)]
            images.append({"filename": name, "split": split, "sentences": sentences})

            def noisy(word: str) -> Tensor:
                return embeddings[word] + 0.3 * torch.randn(WIDTH, generator=generator)

            count = 1 + COUNTS.index(truth["count"])
            boxes = torch.rand(count, 4, generator=generator)
            records["objects"][name] = PhotoView(torch.stack([noisy(truth["thing"])] * count), boxes=boxes)
            cells = [noisy(truth["place"]), noisy(truth["colour"])] * 3
            records["grid"][name] = PhotoView(torch.stack(cells))
            hints = [noisy(truth["thing"]), noisy(truth["colour"]), noisy(rng.choice(PLACES))]
            records["text"][name] = PhotoView(torch.stack(hints), {"rank": torch.arange(3)})
    with Store(store, write=True) as opened:
        for view, spec in VIEWS.items():
            if view not in opened.views:
                opened.add_view(view, ViewManifest(spec, "toy-1"))
            opened.put(view, records[view])
    write_atomically(dataset, lambda path: path.write_text(json.dumps({"images": images})))
    return dataset, store
