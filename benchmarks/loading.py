"""What reading a shuffled training batch costs beside the training step that uses it, in one run.

python benchmarks/loading.py --store STORE --dataset DATASET.json.gz [--views grid,objects]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from haav.data.annotations import load_dataset
from haav.data.loader import ShuffledBatches, StoredPhotos
from haav.losses import caption_xe
from haav.model.build import build_model, resolve
from haav.presets import load_config
from haav.store import Store
from haav.text import PAD, Vocabulary

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--store", required=True)
parser.add_argument("--dataset", required=True)
parser.add_argument("--views", default="grid,objects")
parser.add_argument("--batch", type=int, default=50)
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

photos = load_dataset(options.dataset).split("train")
words = Vocabulary.build(text for photo in photos for text in photo.captions)
with Store(options.store) as store:
    names = options.views.split(",")
    data = StoredPhotos(store, names, photos, words)
    config = load_config("paper")
    specs = {name: store.views[name].spec for name in names}
    config, _ = resolve(replace(config, model=replace(config.model, views=specs, vocabulary_size=len(words))))
    model = build_model(config.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    reading, training = [], []
    for rows, _ in zip(ShuffledBatches(len(data), options.batch), range(options.steps), strict=False):
        started = time.perf_counter()
        batch = data[rows]
        read = time.perf_counter()
        logits = model(batch.views, batch.captions[:, :, :-1]).logits
        loss = caption_xe(logits, batch.captions[:, :, 1:], PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done = time.perf_counter()
        reading.append(read - started)
        training.append(done - read)
    read_ms, step_ms = (1000 * sorted(times)[len(times) // 2] for times in (reading, training))
    captions = batch.captions.shape[1]
    print(f"batch of {options.batch} photos × {captions} captions, views {options.views}, median of {options.steps}")
    print(f"reading {read_ms:.0f} ms, XE step {step_ms:.0f} ms: {100 * read_ms / step_ms:.1f} %, nothing read ahead")
