"""Decodes pictures of any format to upright RGB of bounded size. Unreadable input raises ImageError."""

from __future__ import annotations

import base64
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeGuard, Union
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from haav.errors import ImageError, printable
from haav.photos.formats import HEAD, HEIF, format_of

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 100_000_000
MAX_BYTES = 200_000_000
ENOUGH = 1024
"""pixels of the shorter side that are kept at least; no network sees as many"""
FORMATS = "JPEG, PNG, WebP, HEIC, AVIF, TIFF, JPEG 2000, GIF, BMP and PPM"

# Pillow warns about conditions that are checked or repaired here. The filter is global because
# warnings.catch_warnings is not thread-safe.
warnings.filterwarnings("ignore", module=r"PIL\.")

Picture = Union[str, Path, bytes, BinaryIO, Image.Image, np.ndarray, "Tensor"]


def is_picture(value: object) -> bool:
    """Whether `value` is a single picture, not a list or a batch of pictures."""
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.ndim != 4
    return isinstance(value, (str, Path, bytes, bytearray, Image.Image)) or hasattr(value, "read")


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """Does not import torch, because haav.export.portable runs without it."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def load_image(picture: Picture, most: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB image.

    EXIF rotation is applied. Of an animation the first frame is read. Transparency is put on white. 16 bits are scaled
    to 8. The picture of a large file is reduced by a whole number. `most` is the largest number of pixels allowed.
    """
    if _is_tensor(picture):
        return _from_array(_channels_last(picture.detach().cpu().numpy()), "the tensor")
    if isinstance(picture, np.ndarray):
        return _from_array(picture, "the array")
    if isinstance(picture, Image.Image):
        with _decoding("the image", most):
            return _to_rgb(picture, "the image")
    name, data = _bytes_of(picture)  # type: ignore[arg-type]  # tensors are handled above
    decoder = _decoder(data, name)
    if len(data) > MAX_BYTES:
        raise ImageError(f"{name} has more than {MAX_BYTES:,} bytes.")
    with _decoding(name, most), Image.open(io.BytesIO(data), formats=(decoder,)) as image:
        width, height = image.size
        if width * height > most:
            raise ImageError(f"{name} has {width} × {height} pixels; at most {most:,} are read.")
        image.draft("RGB", (ENOUGH, ENOUGH))  # a large JPEG is decoded at a fraction of its size
        upright = _to_rgb(image, name)
    return upright.reduce(min(upright.size) // ENOUGH) if min(upright.size) >= 2 * ENOUGH else upright


@contextmanager
def _decoding(name: str, most: int) -> Iterator[None]:
    """Turns the faults of decoders into ImageError."""
    try:
        yield
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"{name} would unpack to more than {most:,} pixels.") from None
    except MemoryError:
        raise ImageError(f"{name} does not fit into memory.") from None
    except Exception as error:  # decoders raise whatever they like on damaged files
        reason = "its beginning is broken" if isinstance(error, UnidentifiedImageError) else error
        raise ImageError(f"{name} is damaged: {reason}.") from None


def read_photo(path: str | Path, offset: int = 0, size: int | None = None, name: str = "") -> bytes:
    """The bytes of a photo: a file, or a part of one. What is no photo is refused before it is read as a whole.

    `name` is what errors call it (default: the path).
    """
    name = printable(name or str(path))
    try:
        length = regular_file(path).st_size - offset if size is None else size
        with open(path, "rb") as file:
            file.seek(offset)
            head = file.read(min(HEAD, length))
            _decoder(head, name)
            if length > MAX_BYTES:
                raise ImageError(f"{name} has {length:,} bytes; at most {MAX_BYTES:,} are read.")
            return head + file.read(length - len(head))
    except (OSError, ValueError) as error:
        raise ImageError(unreadable(path, error)) from None


def unreadable(path: str | Path, error: OSError | ValueError) -> str:
    """The message about a path that the system cannot open."""
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        reason = f"it is a link to {printable(os.readlink(path))}, which does not exist"
    return f"cannot read {printable(str(path))}: {reason}."


def regular_file(path: str | Path) -> os.stat_result:
    """The status of a file. Pipes, devices and sockets are refused, because reading them may never end."""
    refuse_address(str(path))
    status = os.stat(path)
    for is_type, name in _NOT_FILES.items():
        if is_type(status.st_mode):
            raise ImageError(
                f"{printable(str(path))} is a {name}, not a file. For a photo from another program, use a pipe: "
                "… | haav caption -"
            )
    return status


_NOT_FILES = {
    stat.S_ISFIFO: "pipe",
    stat.S_ISSOCK: "socket",
    stat.S_ISCHR: "device",
    stat.S_ISBLK: "device",
}


def refuse_address(text: str) -> None:
    """Refuse the address of a web page or photo. Nothing is downloaded."""
    if re.match(r"[a-z][a-z0-9+.-]+:/|www\.|data:", text, re.IGNORECASE) and not os.path.exists(text):
        if text.lower().startswith("file:"):
            raise ImageError(f"{printable(text)} is an address. Give the path alone: {printable(_path_of(text))}")
        raise ImageError(
            f"{printable(text)} is an address, and haav reads only files. Download the photo first, or pipe it: "
            "curl -L ADDRESS | haav caption -"
        )


def _path_of(address: str) -> str:
    """The path of a file: address"""
    parts = urlsplit(address)
    return unquote(parts.path) or parts.netloc


def to_jpeg(image: Image.Image, side: int, quality: int = 85) -> bytes:
    """An RGB picture as a JPEG file, its longest side at most `side` pixels."""
    scale = min(1.0, side / max(image.size))
    width, height = (max(1, round(length * scale)) for length in image.size)
    small = image if scale == 1.0 else image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def data_uri(image: Image.Image, side: int) -> str:
    """An RGB picture as a data URI, its longest side at most `side` pixels."""
    return "data:image/jpeg;base64," + base64.b64encode(to_jpeg(image, side)).decode()


def square_pixels(images: Sequence[Image.Image], side: int, resample: Image.Resampling) -> np.ndarray:
    """(B, 3, side, side) uint8 RGB: whole pictures resized to squares."""
    arrays = [np.asarray(image.resize((side, side), resample)) for image in images]
    return np.stack(arrays).transpose(0, 3, 1, 2)


def _bytes_of(picture: str | Path | bytes | BinaryIO) -> tuple[str, bytes]:
    """The name of the picture for error messages, and its bytes, a little more than `MAX_BYTES` at most."""
    if isinstance(picture, (bytes, bytearray)):
        return "the file", bytes(picture)
    if isinstance(picture, (str, Path)):
        return printable(str(picture)), read_photo(picture)
    if not hasattr(picture, "read"):
        raise ImageError(
            f"an object of type {type(picture).__name__} is not a photo.\n"
            "  Give a path, bytes, an open file, a PIL image, an array or a tensor."
        )
    name = printable(str(getattr(picture, "name", "the file")))
    try:
        data = picture.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # e.g. a closed file
        raise ImageError(unreadable(name, error)) from None
    if not isinstance(data, bytes):
        raise ImageError(f"{name} is open as text; open it with 'rb'.")
    return name, data


def _channels_last(array: np.ndarray) -> np.ndarray:
    """(C, H, W), the usual layout of tensors, to (H, W, C)."""
    return array.transpose(1, 2, 0) if array.ndim == 3 and array.shape[0] in (1, 3, 4) else array


def _decoder(data: bytes, name: str) -> str:
    """Pillow's name of the format of data that begins so. What is not a photo, or cannot be read here, is refused.

    Only this format is decoded: formats whose reader runs another program, such as EPS, are never opened.
    """
    if not data:
        raise ImageError(f"{name} is empty.")
    file_format = format_of(data[:HEAD])
    if file_format is None:
        raise ImageError(f"{name} is not a picture that can be read. {FORMATS} are.")
    if not file_format.picture:
        raise ImageError(f"{name} is not a photo: it is {file_format.name}. {file_format.advice}".rstrip())
    if not file_format.decoder:
        raise ImageError(f"{name} is {file_format.name}, which cannot be read. {file_format.advice}")
    if not _can_decode(file_format.decoder):
        install = '"haav[heif]"' if file_format is HEIF else "--upgrade pillow"
        raise ImageError(f"{name} is {file_format.name}. To read such pictures: pip install {install}")
    return file_format.decoder


@cache
def _can_decode(decoder: str) -> bool:
    Image.preinit()  # JPEG, PNG and a few more
    if decoder not in Image.OPEN:
        Image.init()  # imports 47 plug-ins
    if decoder == HEIF.decoder:
        try:
            import pillow_heif
        except ImportError:
            return False
        # The picture itself is read, not what comes with it: a thumbnail may show something else.
        pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
    return decoder in Image.OPEN


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode == "I":  # Pillow reads 16 bits of some formats into 32
        wide = np.asarray(image)
        _check_range(wide, 65535, name, "Pixels of 16 bits are 0 to 65535.")
        return _from_array(wide.astype(np.uint16), name)
    if image.mode.startswith("I") or image.mode == "F":
        return _from_array(np.asarray(image), name)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    """From an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

    Truth values are black and white. uint16 is 0..65535, other integers are 0..255. Floats are 0..1, or 0..255 if one
    of them is 2 or more. Other values are an error: a guess would darken or bleach the photo.
    """
    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)) or 0 in shape:
        raise ImageError(f"an array of shape {shape} is not a picture; use (height, width, 3).")
    if array.dtype == np.bool_:
        pixels = array * np.uint8(255)
    elif array.dtype.kind == "u" and array.dtype.itemsize == 2:  # of any byte order
        pixels = array // 257
    elif np.issubdtype(array.dtype, np.integer):
        _check_range(array, 255, name, "Pixels are 0 to 255. For 16 bits, use uint16.")
        pixels = array
    elif np.issubdtype(array.dtype, np.floating):
        pixels = _from_floats(array, name)
    else:
        raise ImageError(f"{name} has values of type {array.dtype}. Pixels are numbers, e.g. uint8.")
    pixels = pixels.astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    return _to_rgb(Image.fromarray(pixels), name)


def _from_floats(array: np.ndarray, name: str) -> np.ndarray:
    rounding = 1e-3  # resizing and colour conversion leave values like 1.0000001
    allowed = "Floats are 0 to 1, or 0 to 255. Clip or scale them first."
    high = float(array.max())
    _check_range(array, 1 + rounding if high < 2 else 255 + rounding, name, allowed, -rounding)
    scaled: np.ndarray = np.clip(array * (255 if high < 2 else 1), 0, 255)
    return scaled


def _check_range(array: np.ndarray, highest: float, name: str, allowed: str, lowest: float = 0) -> None:
    low, high = array.min(), array.max()
    if not (lowest <= low and high <= highest):  # also NaN
        raise ImageError(f"{name} has values from {low:g} to {high:g}. {allowed}")
