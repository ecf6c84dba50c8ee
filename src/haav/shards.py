"""A store as WebDataset shards: plain tar files that a cluster streams, and back.

Each photo is one sample: `KEY.VIEW.haav` members hold the store's own records (checksums included),
`KEY.json` the photo's name. Nothing in them can run.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from haav.errors import StoreError
from haav.store import Store, pack, unpack
from haav.types import PhotoView

SUFFIX = "haav"


def export(store: Store, views: Sequence[str], out: Path, shard_size: int = 1000) -> int:
    """Photos that have all of the views, in order of name; returns the number of shards."""
    ids = store.ids(views[0]) if views else []
    for view in views[1:]:
        known = set(store.ids(view))
        ids = [photo for photo in ids if photo in known]
    if not ids:
        raise StoreError(f"no photo of {store.path} has all of the views {', '.join(views) or '(none)'}.")
    out.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(ids), shard_size)
    for number, at in enumerate(starts):
        final = out / f"shard-{number:06d}.tar"
        partial = final.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            for row, photo in enumerate(ids[at : at + shard_size], at):
                _add(tar, f"{row:09d}.json", json.dumps({"id": photo}).encode())
                for view in views:
                    _add(tar, f"{row:09d}.{view}.{SUFFIX}", pack(store.get(view, photo)))
        os.replace(partial, final)
    return len(starts)


def read_shard(path: Path) -> Iterator[tuple[str, dict[str, PhotoView]]]:
    """Photos of a shard with their views."""
    current, photo, views = "", "", {}
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            key, _, kind = member.name.partition(".")
            file = tar.extractfile(member)
            data = file.read() if file else b""
            if key != current:
                if current:
                    yield photo, views
                current, photo, views = key, "", {}
            if kind == "json":
                photo = json.loads(data)["id"]
            else:
                views[kind.removesuffix(f".{SUFFIX}")] = unpack(data, f"{member.name} in {path}")
    if current:
        yield photo, views


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
