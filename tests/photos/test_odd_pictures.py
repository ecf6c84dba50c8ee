"""Pictures that people really try: what is said about each, and how long it takes."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from PIL import Image

import haav
import haav.studies.explain  # the command imports it, which a user without rights may not do
from haav.cli import captions
from haav.cli.main import main
from haav.inference.captioner import Captioner
from helpers import save_model

CAPTION = r"% sure"
FOREVER = 120
"""seconds after which something hangs, also on a busy machine"""
REFUSED_BYTES = 20_000_000
"""memory that a refusal may take"""


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    loaded = haav.load(save_model(tmp_path_factory.mktemp("models") / "model", ["grid", "cells"]))
    loaded.caption(picture())  # loads the networks, which is no part of what is timed
    return loaded


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(name: str, image: Image.Image | None = None, file_format: str = "JPEG", **options: object) -> Callable:
    def make(folder: Path) -> None:
        buffer = io.BytesIO()
        (image or picture()).save(buffer, file_format, **options)
        (folder / name).write_bytes(buffer.getvalue())

    return make


def written(name: str, data: bytes, size: int = 0) -> Callable:
    """`size`: of the file, whose rest is a hole"""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(data)
        if size:
            os.truncate(folder / name, size)

    return make


def heic(folder: Path) -> None:
    pytest.importorskip("pillow_heif", reason="needs the heif extra").register_heif_opener()
    saved("phone.heic", file_format="HEIF")(folder)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def bomb() -> bytes:
    """A PNG that claims 20,000 × 20,000 pixels"""
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    parts = (header, b"IDAT" + zlib.compress(bytes(1000)), b"IEND")
    chunks = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("a.jpg", b"x")
    return buffer.getvalue()


def listening(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # the path of a socket is short
        try:
            server.bind("door")
        finally:
            os.chdir(here)


def loop(folder: Path) -> None:
    (folder / "photos").mkdir()
    saved("photos/a.jpg")(folder)
    (folder / "photos" / "again").symlink_to(folder / "photos")


def broken_links(folder: Path) -> None:
    (folder / "photos").mkdir()
    for number in range(4):
        (folder / "photos" / f"{number}.jpg").symlink_to("gone")


def pipes(folder: Path) -> None:
    (folder / "photos").mkdir()
    saved("photos/a.jpg")(folder)
    os.mkfifo(folder / "photos" / "b.jpg")
    os.mkfifo(folder / "photos" / "c")


def mixed(folder: Path) -> None:
    (folder / "photos").mkdir()
    saved("photos/a.jpg")(folder)
    for name, data in {"b.jpg": b"", "c.jpg": MP4, "d.mp4": MP4, "e.md": b"notes"}.items():
        (folder / "photos" / name).write_bytes(data)


def locked_file(folder: Path) -> None:
    saved("a.jpg")(folder)
    (folder / "a.jpg").chmod(0)


def locked_folder(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "photos").chmod(0)


def locked_inside(folder: Path) -> None:
    (folder / "photos" / "private").mkdir(parents=True)
    (folder / "photos" / "private").chmod(0)


def nothing(folder: Path) -> None:
    pass


MP4 = b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41"
SVG = b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg">\n<path d="M0 0"/>\n</svg>\n'
NEWLINE = "a\n\x1b[2Jb.jpg"

CASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    # what it is: how it is made, what is named, what is said
    "panorama": (saved("a.jpg", picture(3000, 60)), "a.jpg", CAPTION),
    "tall": (saved("a.png", picture(2, 2000), "PNG"), "a.png", CAPTION),
    "one pixel": (saved("a.png", picture(1, 1), "PNG"), "a.png", CAPTION),
    "transparent": (saved("a.png", picture(mode="RGBA"), "PNG"), "a.png", CAPTION),
    "palette": (saved("a.gif", picture(mode="P"), "GIF"), "a.gif", CAPTION),
    "animated": (
        saved("a.webp", file_format="WEBP", save_all=True, append_images=[picture(mode="L").convert("RGB")]),
        "a.webp",
        CAPTION,
    ),
    "16 bits": (
        saved("a.png", Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 54), "PNG"),
        "a.png",
        CAPTION,
    ),
    "cmyk": (saved("a.jpg", picture(mode="CMYK")), "a.jpg", CAPTION),
    "exif": (saved("a.jpg", exif=turned()), "a.jpg", CAPTION),
    "tiff": (saved("scan.tif", file_format="TIFF"), "scan.tif", CAPTION),
    "jpeg 2000": (saved("a.jp2", file_format="JPEG2000"), "a.jp2", CAPTION),
    "avif": (saved("a.avif", file_format="AVIF"), "a.avif", CAPTION),
    "heic": (heic, "phone.heic", CAPTION),
    "without an ending": (saved("IMG_0001"), "IMG_0001", CAPTION),
    "with another's ending": (saved("a.png"), "a.png", CAPTION),
    "unicode name": (saved("été 写真 👩‍👧.jpg"), "été 写真 👩‍👧.jpg", "été 写真 👩‍👧.jpg\n.*% sure"),
    "name with a newline": (saved(NEWLINE), NEWLINE, r"a\\x0a\\x1b\[2Jb.jpg\n.*% sure"),
    "huge": (written("a.png", bomb()), "a.png", "would unpack to more than 100,000,000 pixels"),
    "huge file": (
        written("a.jpg", b"\xff\xd8\xff\xe0", 300_000_000),
        "a.jpg",
        "300,000,000 bytes; at most 200,000,000",
    ),
    "zero bytes": (written("a.jpg", b""), "a.jpg", "a.jpg is empty"),
    "noise": (written("a.jpg", b"\x01\x02" * 500), "a.jpg", "not a picture that can be read. JPEG, PNG,"),
    "text": (written("a", b"hello\n"), "a", "a is text, not a photo. For a list of paths, write @"),
    "svg": (written("a.svg", SVG), "a.svg", "not a photo: it is an SVG drawing. Save it as JPEG or PNG first"),
    "pdf": (written("a.pdf", b"%PDF-1.7\n"), "a.pdf", "not a photo: it is a PDF document. Save its page"),
    "movie": (written("a.mp4", MP4, 1_500_000_000), "a.mp4", "not a photo: it is a video. Save one of its frames"),
    "web page": (
        written("a.jpg", b"<!DOCTYPE html>\n<html>"),
        "a.jpg",
        "not a photo: it is a web page. Save the photo",
    ),
    "zip": (written("a.zip", archive()), "a.zip", "not a photo: it is a ZIP archive or an office document. Unpack it"),
    "empty directory": (lambda folder: (folder / "photos").mkdir(), "photos", "photos: no photo is there"),
    "link loop": (loop, "photos", "1 linked folder, the first .*again(.|\n)*% sure"),
    "link to itself": (lambda folder: (folder / "a").symlink_to("a"), "a", "Too many levels of symbolic links"),
    "broken links": (broken_links, "photos", r"\ncannot read photos/3.jpg: it is a link to gone, which does not exist"),
    "not there": (nothing, "a.jpg", "a.jpg does not exist. Give a picture, a folder"),
    "address": (nothing, "https://example.org/a.jpg", "is an address.* Download the photo first"),
    "no rights": (locked_file, "a.jpg", "cannot read a.jpg: Permission denied"),
    "folder without rights": (locked_folder, "photos", "cannot read photos: Permission denied"),
    "folder without rights inside": (locked_inside, "photos", "cannot read photos/private: Permission denied"),
    "pipe": (lambda folder: os.mkfifo(folder / "a.jpg"), "a.jpg", "a.jpg is a pipe, not a file"),
    "pipes in a folder": (pipes, "photos", r"% sure(.|\n)*2 of 3 failed: photos/b.jpg, photos/c\."),
    "socket": (listening, "door", "door is a socket, not a file"),
    "device": (nothing, "/dev/zero", "/dev/zero is a device, not a file.* use a pipe: … | haav caption -"),
    "mixed folder": (
        mixed,
        "photos",
        r"not read: 2 other files \(1 .mp4, 1 .md\)(.|\n)*% sure(.|\n)*2 of 3 failed: photos/b.jpg, photos/c.jpg\.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_odd_pictures_are_captioned_or_explained(
    case: str,
    captioner: Captioner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    make, named, says = CASES[case]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(captions, "load_captioner", lambda *given, **named: captioner)  # loaded once for all cases
    monkeypatch.setattr(captions, "fetch_weights_of", lambda *given, **named: None)
    tracemalloc.start()
    started = time.perf_counter()
    with not_forever(), without_rights(tmp_path) if "rights" in case else nullcontext():
        code = main(["caption", named])
    seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shown = capsys.readouterr()
    record_property("seconds", round(seconds, 3))
    record_property("peak_bytes", peak)
    print(f"{case}: {seconds:.3f} s, {peak / 1e6:.1f} MB")
    assert (code == 0) == (says.endswith(CAPTION))
    # Notes come before captions, failures after them.
    notes, failures = [], []
    for line in shown.err.splitlines():
        (notes if "not read:" in line else failures).append(line)
    said = "\n".join([*notes, shown.out, *failures])
    assert re.search(says, said), said
    assert not set(said) & set("\x1b\r\u202e")
    if CAPTION not in said:
        assert peak < REFUSED_BYTES


@contextmanager
def not_forever() -> Iterator[None]:
    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {FOREVER} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(FOREVER)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Rights do not bind root, so act as another user."""
    if os.geteuid() != 0:
        yield
        return
    folder.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
