"""Files are told apart by their first bytes."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from haav.photos.formats import format_of
from haav.photos.images import load_image


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_pictures_that_pillow_writes_are_told(file_format: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, file_format)
    told = format_of(buffer.getvalue())
    assert told is not None
    assert (told.decoder, told.picture) == (file_format, True)


def box(*brands: bytes) -> bytes:
    content = brands[0] + bytes(4) + b"".join(brands[1:])
    return (8 + len(content)).to_bytes(4, "big") + b"ftyp" + content


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (box(b"heic", b"mif1", b"heic"), "a HEIC or HEIF picture"),
        (box(b"mif1", b"mif1", b"heic"), "a HEIC or HEIF picture"),
        (box(b"mif1", b"mif1", b"avif"), "an AVIF picture"),
        (box(b"isom", b"isom", b"mp41"), "a video"),
        (box(b"qt  "), "a video"),
        (box(b"crx ", b"isom"), "a raw photo of a camera"),
        (box(b"M4A "), "a sound recording"),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "a video"),
        (b"RIFF\0\0\0\0AVI LIST", "a video"),
        (b"\x1a\x45\xdf\xa3\x93\x42\x82", "a video"),
        (b"II*\0\x10\0\0\0CR\x02\0", "a raw photo of a camera"),
        (b"8BPS\0\x01", "a Photoshop picture"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        (b"\xef\xbb\xbf  <svg/>", "an SVG drawing"),
        (b"<!DOCTYPE html><html><svg/>", "a web page"),
        (b"\n<HTML>", "a web page"),
        (gzip.compress(b"x", mtime=0), "a compressed archive"),
    ],
)
def test_other_files_are_told(head: bytes, name: str) -> None:
    told = format_of(head)
    assert told is not None
    assert told.name == name


def test_archives_are_told() -> None:
    plain, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.jpg"))
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.jpg", b"")
    assert [format_of(file.getvalue()).name for file in (plain, packed)] == [
        "a tar file",
        "a ZIP archive or an office document",
    ]


@pytest.mark.parametrize(
    "text", [b"", b"BMW drivers", b"P2P", b"P1 priorities", b"Pf off", b"The free lunch", b"a.jpg\nb.jpg\n", b"<note/>"]
)
def test_texts_are_no_pictures(text: bytes) -> None:
    assert format_of(text) is None


def test_what_is_told_does_not_depend_on_more_than_the_head() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    assert format_of(buffer.getvalue()) == format_of(buffer.getvalue()[:64])
    assert load_image(buffer.getvalue()).size == (64, 64)
