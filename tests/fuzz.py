"""Damaged and hostile input of every kind, 1,000,000 cases: python tests/fuzz.py; or [cases of each kind] [kinds …]

Each kind runs in a process of its own with a limit on memory, so that a crash of a native library, a hang or an
explosion is seen and can be repeated: a case is its kind and its number. A case is fine when the input is taken, or
refused with a HaavError (or an HTTP status), within `SECONDS`.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

SECONDS = 10.0
MEMORY = 6 * 2**30
"""bytes that a process may ask for; what it maps of files does not count"""
MEMORY_DISK = Path("/dev/shm")
"""where files cost least, if there is one"""
TOKENS = [
    b"null", b"-1", b"1e999", b"NaN", b"true", b'""', b"[]", b"{}", b"\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff",
    b"9" * 400, b"[" * 200, b"!!python/object/apply:os.system ['x']", b"../../etc/passwd", b"\xed\xa0\x80", b"&a [*a]",
    b"\r\n\r\n", b"[" * 100_000,
]  # fmt: skip
"""what parsers trip over"""

Check = Callable[[random.Random], None]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few changes: bytes, cuts, copies, insertions"""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        position = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        what = rng.randrange(6)
        if what == 0 and position < len(changed):
            changed[position] = rng.randrange(256)
        elif what == 1 and position < len(changed):
            changed[position] ^= 1 << rng.randrange(8)
        elif what == 2:
            del changed[position : position + size]
        elif what == 3:
            changed[position:position] = rng.choice(TOKENS)
        elif what == 4:
            source = rng.randrange(len(changed) + 1)
            changed[position : position + size] = changed[source : source + size]
        elif rng.random() < 0.3:
            del changed[position:]
    return bytes(changed)


def pictures(folder: Path) -> Check:
    import pillow_heif
    from PIL import Image

    from haav.photos.images import load_image

    pillow_heif.register_heif_opener()
    image = Image.effect_mandelbrot((60, 40), (-2, -1.5, 1, 1.5), 40).convert("RGB")
    corpus = []
    for file_format, options in {
        "JPEG": {},
        "PNG": {},
        "WEBP": {},
        "GIF": {},
        "TIFF": {},
        "BMP": {},
        "PPM": {},
        "AVIF": {},
        "JPEG2000": {},
        "HEIF": {},
    }.items():
        buffer = io.BytesIO()
        image.save(buffer, file_format, **options)
        corpus.append(buffer.getvalue())
    return lambda rng: load_image(mutate(rng.choice(corpus), rng), 10_000_000) and None


def annotations(folder: Path) -> Check:
    from haav.data.annotations import Photo, check_dataset, load_dataset
    from haav.data.mapped import write_photos
    from haav.errors import ConfigError

    captions = ["a dog runs", "a cat sleeps on a mat"]
    photo = {"filename": "a.jpg", "split": "train", "sentences": [{"raw": text} for text in captions]}
    coco = {
        "images": [{"id": 1, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 1, "caption": text} for text in captions],
    }
    corpus = {
        "k.json": json.dumps({"images": [photo]}).encode(),
        "c.json": json.dumps(coco).encode(),
        "t.csv": b"image,caption,split\na.jpg,a dog runs,train\nb.jpg,a cat sleeps,val\n",
        "t.jsonl": b'{"image": "a.jpg", "caption": "a dog"}\n{"image": "b.jpg", "captions": ["a cat", "two"]}\n',
    }

    with suppress(ConfigError):  # without pyarrow
        write_photos(folder / "p.arrow", [Photo(f"{index}.jpg", "val", tuple(captions)) for index in range(3)])
        corpus["p.arrow"] = (folder / "p.arrow").read_bytes()

    def check(rng: random.Random) -> None:
        name, data = rng.choice(list(corpus.items()))
        data = mutate(data, rng)
        if name.endswith(".json") and rng.random() < 0.2:
            name, data = (
                name + ".gz",
                mutate(gzip.compress(data, mtime=0), rng) if rng.random() < 0.5 else gzip.compress(data),
            )
        (folder / name).unlink(missing_ok=True)  # a file that is mapped must not be cut
        (folder / name).write_bytes(data)
        dataset = load_dataset(folder / name)
        check_dataset(dataset)
        list(dataset.photos)

    return check


def configs(folder: Path) -> Check:
    from haav.model.build import load_config
    from helpers import ROOT

    corpus = [file.read_bytes() for file in sorted((ROOT / "src" / "haav" / "config" / "recipes").glob("*.yaml"))]
    assert corpus
    corpus.append(b"model: {views: {grid: {dim: 8, max_tokens: 4, indices: {row: 2}, boxes: true}}, d_model: 32}\n")

    def check(rng: random.Random) -> None:
        (folder / "c.yaml").write_bytes(mutate(rng.choice(corpus), rng))
        load_config(None, folder / "c.yaml")

    return check


def models(folder: Path) -> Check:
    """Model directories, and what lies in them for text views"""
    from haav.inference.captioner import Captioner

    _quiet_torch()
    from haav.model.build import build_model
    from helpers import WORDS, random_views, tiny_config

    config = tiny_config(vocabulary_size=len(WORDS))
    Captioner(build_model(config.model), config, WORDS).save_pretrained(folder / "model")
    views = random_views()

    def load(place: Path) -> None:
        Captioner.from_pretrained(place).caption_views(views)

    return _damaged(folder / "model", folder / "copy", load)


def texts(folder: Path) -> Check:
    import torch

    from haav.views.retrieval.bridge import Bridge, BridgeConfig, CrossFitted
    from haav.views.retrieval.textdb import Entry, Manifest, TextDatabase

    _quiet_torch()
    vectors = torch.nn.functional.normalize(torch.randn(12, 6), dim=1)
    TextDatabase([Entry(f"s {n}", (f"p{n}",)) for n in range(12)], vectors, Manifest("toy")).save(folder / "textdb")
    config = BridgeConfig(features=4, vectors=6, hidden=3, folds=1)
    CrossFitted(config, [Bridge(config), Bridge(config)], {"p1": 0}, "toy").save(folder / "bridge")

    def load(place: Path) -> None:
        TextDatabase.load(place).search(vectors[:1], 2)

    checks = (
        _damaged(folder / "textdb", folder / "copy1", load),
        _damaged(folder / "bridge", folder / "copy2", lambda place: CrossFitted.load(place) and None),
    )
    return lambda rng: rng.choice(checks)(rng)


def stores(folder: Path) -> Check:
    """The records of a store and its shards; for the file beneath a store, see `store_files`"""
    import torch

    from haav.store import Store, ViewManifest
    from haav.store.records import pack, unpack
    from haav.store.shards import read_shard, write_shards
    from haav.types import PhotoView, ViewSpec

    _quiet_torch()
    view = PhotoView(torch.randn(5, 7), {"row": torch.arange(5)}, torch.rand(5, 4), ("a", "b", "c", "d", "e"))
    record = pack(view)
    spec = ViewSpec(7, 5, {"row": 5}, True)
    with Store(folder / "store", write=True) as store:
        store.add_view("toy", ViewManifest(spec, "fingerprint", "CC0"))
        store.put("toy", {f"photo {index}": view for index in range(6)})
        write_shards(store, ["toy"], folder / "shards", 3)
    shard = sorted((folder / "shards").glob("*.tar"))[0].read_bytes()

    def check(rng: random.Random) -> None:
        if rng.random() < 0.5:
            unpack(mutate(record, rng), "a record")
        else:
            (folder / "damaged.tar").write_bytes(mutate(shard, rng))
            list(read_shard(folder / "damaged.tar"))

    return check


def store_files(folder: Path) -> Check:
    """The database file beneath a store: any bytes of it, or what LMDB follows; read, and now and then written to"""
    import torch

    from haav.store import Store, ViewManifest
    from haav.types import PhotoView, ViewSpec

    _quiet_torch()
    torch.manual_seed(0)
    with Store(folder / "store", write=True) as store:
        # Two levels of pages, values in runs of pages, free pages
        for view, count in (("dropped", 9), ("toy", 20), ("small", 40)):
            store.add_view(view, ViewManifest(ViewSpec(64, 90), "fingerprint", "CC0"))
            for index in range(count):
                tokens = 1 if view == "small" else 90 if index % 5 == 0 else 8
                store.put(view, {f"photo {index}": PhotoView(torch.randn(tokens, 64))})
        store.drop("dropped")
    whole = (folder / "store" / "data.mdb").read_bytes()
    (folder / "copy").mkdir()

    def check(rng: random.Random) -> None:
        damaged = mutate(whole, rng) if rng.random() < 0.3 else mutate_pages(whole, rng)
        (folder / "copy" / "data.mdb").write_bytes(damaged)
        write = rng.random() < 0.2
        with Store(folder / "copy", write=write) as store:
            store.info()
            for view in store.views:
                list(store.verify(view))
                if write:
                    store.put(view, {f"new {index}": PhotoView(torch.zeros(index, 64)) for index in (2, 9, 70)})
                    store.drop(view)

    return check


def mutate_pages(data: bytes, rng: random.Random) -> bytes:
    """Change what LMDB follows: the headers of pages and records, offsets, tables; or replace a page by another"""
    size = 4096
    changed, count = bytearray(data), len(data) // size
    for _ in range(rng.choice((1, 1, 2, 3))):
        page = rng.randrange(count)
        start = page * size
        if rng.random() < 0.05:
            source = rng.randrange(count) * size
            changed[start : start + size] = changed[source : source + size]
            if rng.random() < 0.8:
                struct.pack_into("=Q", changed, start, page)
            continue
        lower, upper = struct.unpack_from("=HH", changed, start + 12)
        slots = range(16, min(lower, size - 1), 2)
        offset = rng.randrange(16 if page > 1 else 152)
        if page > 1 and slots and rng.random() < 0.8:
            offset = rng.choice(slots)
            if rng.random() < 0.7:
                offset = struct.unpack_from("=H", changed, start + offset)[0] + rng.choice((0, 2, 4, 6, *range(8, 64)))
        elif page > 1 and rng.random() < 0.2:
            offset = max(upper, 16) + rng.randrange(200)
        layout = rng.choice(("=B", "=H", "=H", "=I", "=Q"))
        width = struct.calcsize(layout)
        offset = min(offset, size - width)
        (old,) = struct.unpack_from(layout, changed, start + offset)
        new = rng.choice(
            (
                *(0, 1, 2, 3, 4, 6, 8, 12, 16, 18, 48, 511, size - 8, size, 2**15, 2**16 - 1, 2**31, 2**63, 2**64 - 1),
                *(
                    count - 1,
                    count,
                    rng.randrange(count),
                    rng.randrange(count),
                    rng.randrange(size),
                    rng.getrandbits(64),
                ),
                *(old + 1, old - 1, old + 2, old - 2, old + 8, old - 8, old * 2, old ^ 1 << rng.randrange(8 * width)),
            )
        )
        struct.pack_into(layout, changed, start + offset, new % 2 ** (8 * width))
    return bytes(changed)


def exports(folder: Path) -> Check:
    """What `haav export` writes, its graphs excepted: onnxruntime parses those"""
    from haav.export.portable import PortableCaptioner

    _quiet_torch()
    from haav.export.onnx import export_onnx
    from helpers import tiny_captioner

    tiny_captioner(folder / "model", {})
    export_onnx(folder / "model", folder / "out")
    names = ("portable.json", "vocabulary.json")
    return _damaged(folder / "out", folder / "copy", lambda place: PortableCaptioner(place, 1) and None, names)


def captions(folder: Path) -> Check:
    """Files of captions: to go on with, and to be scored"""
    from haav.data.predictions import read_predictions
    from haav.inference.caption_file import CaptionFile, MadeWith

    made_with = MadeWith("model", "0123456789ab", {"beam": 3})
    row = {"image": "a.jpg", "caption": "a dog", "confidence": 0.5, "words": [], "made_with": asdict(made_with)}
    line = json.dumps(row).encode() + b"\n"
    broken = json.dumps({"image": "b.jpg", "error": "no"}).encode() + b"\n"
    results = json.dumps([{"image_id": 1, "caption": "a dog"}, {"image_id": 2, "caption": "a cat"}]).encode()

    def check(rng: random.Random) -> None:
        if rng.random() < 0.5:
            (folder / "c.jsonl").write_bytes(mutate(line + broken + line, rng))
            with CaptionFile(folder / "c.jsonl", made_with):
                pass
        else:
            (folder / "c.json").write_bytes(mutate(results, rng))
            read_predictions(folder / "c.json")

    return check


def runs(folder: Path) -> Check:
    """A run's own files, resumed"""
    from haav.train.run import RunFiles

    _quiet_torch()
    from helpers import WORDS, tiny_config

    (folder / "run").mkdir()
    files = RunFiles(folder / "run")
    files.begin(tiny_config(vocabulary_size=len(WORDS)), WORDS)
    files.log({"step": 1, "loss": 2.0})
    files.close()

    def load(place: Path) -> None:
        copy = RunFiles(place)
        copy.read()
        copy.metrics()

    return _damaged(folder / "run", folder / "copy", load, ("config.yaml", "vocabulary.json", "metrics.jsonl"))


def requests(folder: Path) -> Check:
    from fastapi.testclient import TestClient

    import haav
    from haav.web.server import Limits, build_app

    _quiet_torch()
    from helpers import SAMPLES, save_model

    small = io.BytesIO()
    from PIL import Image

    with Image.open(SAMPLES / "cat.jpg") as image:
        image.resize((48, 32)).save(small, "JPEG")
    client = TestClient(build_app(haav.load(save_model(folder / "model")), Limits(upload=50_000, seconds=20)))
    client.__enter__()
    form = (
        b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
        + small.getvalue()
        + b'\r\n--x\r\nContent-Disposition: form-data; name="beam"\r\n\r\n1\r\n--x--\r\n'
    )
    body = json.dumps({"image": base64.b64encode(small.getvalue()).decode(), "beam": 1, "views": ["cells"]}).encode()
    content_types = [b"multipart/form-data; boundary=x", b"application/json"]
    paths = [
        "/v1/caption",
        "/v1/caption",
        "/v1/caption",
        "/v1/health",
        "/v1/models",
        "/samples/cat.jpg",
        "/static/app.js",
    ]

    def check(rng: random.Random) -> None:
        which = rng.randrange(2)
        # Most cases damage what stands around the picture, so that few of them cost a caption.
        whole = (form, body)[which]
        head = whole[:160]
        data = mutate(head, rng) + whole[160:] if rng.random() < 0.7 else mutate(whole, rng)
        content_type = (
            content_types[which]
            if rng.random() < 0.9
            else mutate(content_types[which], rng).replace(b"\r", b"").replace(b"\n", b"")
        )
        path = rng.choice(paths)
        if rng.random() < 0.2:
            path = "/" + quote(mutate(path.encode(), rng).lstrip(b"/"), safe="/%?&.")[:2000]
        answer = client.request(
            rng.choice(("POST", "POST", "POST", "GET", "PUT")),
            path,
            content=data,
            headers={b"content-type": content_type},
        )
        assert answer.status_code < 500 or answer.status_code == 504, (answer.status_code, answer.text[:300])

    return check


def _damaged(whole: Path, copy: Path, load: Callable[[Path], None], names: tuple[str, ...] = ()) -> Check:
    """Load a copy of a folder of which one file is damaged or missing"""
    files = {file.name: file.read_bytes() for file in sorted(whole.iterdir()) if file.is_file()}
    names = names or tuple(files)
    shutil.copytree(whole, copy)

    def check(rng: random.Random) -> None:
        name = rng.choice(names)
        if rng.random() < 0.02:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(mutate(files[name], rng))
        try:
            load(copy)
        finally:
            (copy / name).write_bytes(files[name])

    return check


def _quiet_torch() -> None:
    import torch

    torch.set_num_threads(1)


KINDS: dict[str, Callable[[Path], Check]] = {
    kind.__name__: kind
    for kind in (pictures, annotations, configs, models, texts, stores, store_files, exports, captions, runs, requests)
}


MANY = {
    "pictures": 400_000,
    "annotations": 200_000,
    "stores": 150_000,
    "captions": 100_000,
    "texts": 60_000,
    "store_files": 60_000,
    "requests": 10_000,
    "configs": 8_000,
    "models": 6_000,
    "runs": 4_000,
    "exports": 2_000,
}
"""cases of a long run, more of what is quick: 1,000,000"""


def raises(folder: Path) -> Check:
    def check(rng: random.Random) -> None:
        raise ZeroDivisionError

    return check


def crashes(folder: Path) -> Check:
    return lambda rng: os.kill(os.getpid(), signal.SIGSEGV)


FAULTS = {"raises": raises, "crashes": crashes}
"""not input: they show that what goes wrong is seen"""


def work(kind: str, folder: Path, first: int, cases: int, said: Any) -> None:
    """In a process of its own: run cases, say what went wrong and where it stands"""
    from haav.errors import HaavError

    check = (KINDS | FAULTS)[kind](folder)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for case in range(first, first + cases):
        said.send(("at", case, ""))
        started, outcome = time.monotonic(), "taken"
        try:
            check(random.Random(f"{kind} {case}"))
        except HaavError:
            outcome = "refused"
        except BaseException:
            outcome = "FAILED"
            said.send(("failed", case, traceback.format_exc(limit=-4)))
        if time.monotonic() - started > SECONDS:
            said.send(("failed", case, f"took {time.monotonic() - started:.1f} s"))
        said.send((outcome, case, ""))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    said.send(("peak", 0, f"{peak:.2f}"))


def fuzz(kind: str, cases: int, first: int = 0) -> dict[str, Any]:
    """Cases by outcome, and what failed"""
    context = multiprocessing.get_context("spawn")
    outcome: dict[str, Any] = {"kind": kind, "taken": 0, "refused": 0, "failures": [], "peak GB": "–"}
    end, begin = first + cases, first
    while begin < end:
        # A process that dies leaves its files behind.
        with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as folder:
            listen, said = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(kind, Path(folder), begin, end - begin, said))
            process.start()
            said.close()
            last, begun = begin, False
            while True:
                try:
                    if not listen.poll(6 * SECONDS if begun else 120):
                        process.kill()
                        outcome["failures"].append((last, "hangs"))
                        break
                    what, case, text = listen.recv()
                except EOFError:
                    break
                if what == "at":
                    last, begun = case, True
                elif what == "failed":
                    outcome["failures"].append((case, text))
                elif what == "peak":
                    outcome["peak GB"] = text
                elif what in outcome:
                    outcome[what] += 1
            process.join()
        if process.exitcode and process.exitcode > 0 and not begun:
            raise RuntimeError(f"{kind} does not begin: exit code {process.exitcode}")
        if (
            process.exitcode
            and process.exitcode < 0
            and (not outcome["failures"] or outcome["failures"][-1][0] != last)
        ):
            outcome["failures"].append((last, f"died of signal {-process.exitcode}"))
        begin = end if process.exitcode == 0 else last + 1
    return outcome


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    chosen = {name: int(sys.argv[1]) for name in sys.argv[2:] or KINDS} if len(sys.argv) > 1 else MANY
    failed = total = 0
    for name, count in chosen.items():
        started = time.monotonic()
        result = fuzz(name, count)
        done = result["taken"] + result["refused"] + len(result["failures"])
        total, failed = total + done, failed + len(result["failures"])
        print(
            f"{name:12} {done:>7,} cases in {time.monotonic() - started:5.0f} s: {result['taken']:,} taken, "
            f"{result['refused']:,} refused, {len(result['failures'])} failed, peak {result['peak GB']} GB",
            flush=True,
        )
        for index, text in result["failures"][:5]:
            print(f"  case {index}: {text}")
    print(f"{total:,} cases, {failed} failed")
    raise SystemExit(1 if failed else 0)
