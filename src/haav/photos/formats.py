"""Tells what a file is by its first bytes. Its name may say anything."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

HEAD = 4096
"""bytes at the beginning of a file that are enough to tell what it is"""


@dataclass(frozen=True)
class FileFormat:
    name: str
    """with its article, as in a sentence"""
    decoder: str = ""
    """Pillow's name of the format, if it can be read"""
    picture: bool = False
    """whether it looks like a photo to its owner, even if it cannot be read"""
    advice: str = ""
    """what to do with a file that cannot be read"""


def _readable(decoder: str, name: str = "") -> FileFormat:
    return FileFormat(f"a {name or decoder} picture", decoder, picture=True)


_CONVERT = "Save it as JPEG or PNG first."
_FRAME = "Save one of its frames as a picture first, e.g. ffmpeg -i VIDEO -frames:v 1 frame.jpg."
_UNPACK = "Unpack it first; haav reads folders and plain .tar files."

JPEG = _readable("JPEG")
HEIF = FileFormat("a HEIC or HEIF picture", "HEIF", picture=True)
AVIF = FileFormat("an AVIF picture", "AVIF", picture=True)
WEBP = _readable("WEBP", "WebP")
BMP = _readable("BMP")
PPM = _readable("PPM")
TAR = FileFormat("a tar file", advice=_UNPACK)
RAW = FileFormat("a raw photo of a camera", picture=True, advice="Develop it to JPEG or PNG first.")
SVG = FileFormat("an SVG drawing", advice=_CONVERT)
PDF = FileFormat("a PDF document", advice="Save its page or its photo as JPEG or PNG first.")
HTML = FileFormat("a web page", advice="Save the photo itself, not the page that shows it.")
VIDEO = FileFormat("a video", advice=_FRAME)
SOUND = FileFormat("a sound recording")
ARCHIVE = FileFormat("a compressed archive", advice=_UNPACK)
ZIP = FileFormat("a ZIP archive or an office document", advice=_UNPACK)

_PPM = re.compile(rb"P(?:[1-6]\s+[\d#]|f\s+-?[\d.#])")
_BEGINNINGS: tuple[tuple[bytes, FileFormat], ...] = (
    (b"\xff\xd8\xff", JPEG),
    (b"\x89PNG\r\n\x1a\n", _readable("PNG")),
    (b"GIF87a", _readable("GIF")),
    (b"GIF89a", _readable("GIF")),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", _readable("JPEG2000", "JPEG 2000")),
    (b"\xff\x4f\xff\x51", _readable("JPEG2000", "JPEG 2000")),
    (b"II*\x00\x10\x00\x00\x00CR", RAW),
    *((beginning, _readable("TIFF")) for beginning in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"MM*\0", b"II\0*")),
    (b"FUJIFILMCCD-RAW", RAW),
    (b"IIRO", RAW),
    (b"IIRS", RAW),
    (b"IIU\0", RAW),
    (b"8BPS", FileFormat("a Photoshop picture", picture=True, advice=_CONVERT)),
    (b"gimp xcf", FileFormat("a GIMP picture", picture=True, advice=_CONVERT)),
    (b"\xff\x0a", FileFormat("a JPEG XL picture", picture=True, advice=_CONVERT)),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", FileFormat("a JPEG XL picture", picture=True, advice=_CONVERT)),
    (b"\x1a\x45\xdf\xa3", VIDEO),
    (b"\x00\x00\x01\xba", VIDEO),
    (b"\x00\x00\x01\xb3", VIDEO),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", VIDEO),
    (b"FLV\x01", VIDEO),
    (b"OggS", FileFormat("a video or a sound recording", advice=_FRAME)),
    (b"ID3", SOUND),
    (b"fLaC", SOUND),
    (b"PK\x03\x04", ZIP),
    (b"PK\x05\x06", ZIP),
    (b"\x1f\x8b", ARCHIVE),
    (b"BZh", ARCHIVE),
    (b"\xfd7zXZ\x00", ARCHIVE),
    (b"7z\xbc\xaf\x27\x1c", ARCHIVE),
    (b"Rar!\x1a\x07", ARCHIVE),
    (b"\x28\xb5\x2f\xfd", ARCHIVE),
)
_CHUNKS = {b"WEBP": WEBP, b"AVI ": VIDEO, b"WAVE": SOUND}
_QUICKTIME = (b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_HEIF_BRANDS = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"mif2", b"msf1"])


def format_of(head: bytes) -> FileFormat | None:
    """The format of a file that begins with these bytes, at least `HEAD` if it is that long. None if it is unknown."""
    if head[4:8] == b"ftyp" and head[:1] == b"\0":
        return _box_format(head)
    if head[4:8] in _QUICKTIME and head[:1] == b"\0":
        return VIDEO
    if head[:4] == b"RIFF":
        return _CHUNKS.get(head[8:12])
    # Texts may begin with these letters too, so what follows is looked at.
    if head[:2] == b"BM" and head[15:18] == b"\0\0\0":
        return BMP
    if _PPM.match(head):
        return PPM
    if head[257:262] == b"ustar":
        return TAR
    for beginning, file_format in _BEGINNINGS:
        if head.startswith(beginning):
            return file_format
    if b"%PDF-" in head[:1024]:
        return PDF
    return _markup_format(head)


def _box_format(head: bytes) -> FileFormat:
    """HEIF, AVIF, MP4 and QuickTime share a container, whose first box lists the brands of its content."""
    (size,) = struct.unpack(">I", head[:4])
    box = head[: min(size, len(head))]
    brands = {box[8:12], *(box[start : start + 4] for start in range(16, len(box), 4))}
    if brands & {b"avif", b"avis"}:
        return AVIF
    if b"crx " in brands:
        return RAW
    if brands & _HEIF_BRANDS:
        return HEIF
    return SOUND if box[8:11] == b"M4A" else VIDEO


def _markup_format(head: bytes) -> FileFormat | None:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not text.startswith(b"<"):
        return None
    if b"<svg" in text:
        return HTML if text.startswith((b"<!doctype html", b"<html")) else SVG
    return HTML if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) else None
