"""Memory of a training process per photo of its data set: python -m benchmarks annotations

A million photos with a caption, their views in shards of 1,000. Only the index of the shards is written: what is
measured is what a process holds before it reads the first view. It is memory of its own (Private_Dirty). Pages of
mapped files are shared by all processes of a machine, and the system may take them back.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from haav.data.convert import convert
from haav.data.loader import StoredPhotos
from haav.data.mixture import Source, load_mixture
from haav.store import ViewManifest, open_store
from haav.store.shards import FORMAT_WITH_IDS, write_index
from haav.text import Vocabulary
from haav.types import ViewSpec

COUNT, SHARD = 1_000_000, 1000
FORMS = (("JSONL and names in index.json", "photos.jsonl", "listed"), (".arrow and .npy", "photos.arrow", "mapped"))
VIEWS = {"things": ViewManifest(ViewSpec(2, 1), "none")}
WORDS = tuple(f"word{number}" for number in range(1000))


def annotations(count: int = COUNT) -> dict[str, Any]:
    """Private memory per photo of a training process, and of a worker that reads its batches"""
    few = count // 10
    with tempfile.TemporaryDirectory() as name:
        folders = {size: Path(name, str(size)) for size in (few, count)}
        for size, folder in folders.items():
            folder.mkdir()
            _write(folder, size)
        sizes = f"{few:,} to {count:,} photos with a caption of 10 words, shards of {SHARD:,}"
        found: dict[str, Any] = {"what": f"bytes per further photo: {sizes}"}
        for form, dataset, store in FORMS:
            held = {size: _measured(folder / dataset, folder / store) for size, folder in folders.items()}
            for process in held[few]:
                found[f"{form}, {process}"] = (held[count][process] - held[few][process]) / (count - few)
        for _, dataset, _ in FORMS:
            found[f"{dataset} on disk"] = (folders[count] / dataset).stat().st_size / count
    return found


def _measured(dataset: Path, store: Path) -> dict[str, int]:
    words = [sys.executable, "-m", __spec__.name, str(dataset), str(store)]
    held: dict[str, int] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return held


def _write(folder: Path, count: int) -> None:
    rng = random.Random(0)
    with open(folder / "photos.jsonl", "w") as file:
        for row in range(count):
            file.write(json.dumps({"image": _name(row), "caption": " ".join(rng.choices(WORDS, k=10))}) + "\n")
    convert(folder / "photos.jsonl", folder / "photos.arrow")
    shards = {f"{start:09d}.tar": min(SHARD, count - start) for start in range(0, count, SHARD)}
    for index in ("listed", "mapped"):
        (folder / index).mkdir()
    write_index(
        lambda name, file: (folder / "mapped" / name).write_bytes(file.read_bytes()) and None,
        VIEWS,
        shards,
        lambda: map(_name, range(count)),
    )
    listed = {
        "format": FORMAT_WITH_IDS,
        "views": {name: asdict(manifest) for name, manifest in VIEWS.items()},
        "shards": [
            {"file": file, "ids": [_name(row) for row in range(start, start + size)]}
            for start, (file, size) in zip(range(0, count, SHARD), shards.items(), strict=True)
        ],
    }
    (folder / "listed" / "index.json").write_text(json.dumps(listed))


def _name(row: int) -> str:
    return f"{row:012d}.jpg"


def measure(dataset: str, store: str) -> dict[str, int]:
    """Private bytes of this process, and of one that it spawns"""
    mixture = load_mixture([Source(dataset)])
    vocabulary = Vocabulary.build(mixture.sentences)
    photos = StoredPhotos(open_store(store), ["things"], mixture.train, vocabulary)
    epoch = iter(photos.shuffled(50, seed=0))
    next(epoch)
    gc.collect()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return {"training process": _private(), "worker process": pool.apply(_held, (photos,))}


def _held(photos: StoredPhotos) -> int:
    assert len(photos._encode(photos.photos[len(photos) - 1], photos.vocabulary)) == 1
    gc.collect()
    return _private()


def _private() -> int:
    """Bytes that this process alone holds"""
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * int(lines["Private_Dirty"].split()[0])


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
