"""Decodes pictures of any format to upright RGB of bounded size. Unreadable input raises ImageError."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, Union

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from haav.errors import ImageError

if TYPE_CHECKING:
    from torch import Tensor

MAX_PIXELS = 100_000_000
MAX_BYTES = 200_000_000

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
    to 8. `most` is the largest number of pixels allowed.
    """
    if _is_tensor(picture):
        return _from_array(_channels_last(picture.detach().cpu().numpy()), "the tensor")
    if isinstance(picture, np.ndarray):
        return _from_array(picture, "the array")
    if isinstance(picture, Image.Image):
        return _to_rgb(picture, "the image")
    name, data = _bytes_of(picture)  # type: ignore[arg-type]  # tensors are handled above
    if not data:
        raise ImageError(f"{name} is empty.")
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            width, height = image.size
            if width * height > most:
                raise ImageError(f"{name} has {width} × {height} pixels; at most {most:,} are read.")
            image.draft("RGB", (1024, 1024))  # a large JPEG is decoded at a fraction of its size
            return _to_rgb(image, name)
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"{name} would unpack to more than {MAX_PIXELS:,} pixels.") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not a picture that can be read.") from None
    except MemoryError:
        raise ImageError(f"{name} does not fit into memory.") from None
    except Exception as error:  # decoders raise whatever they like on damaged files
        raise ImageError(f"{name} is damaged: {error}.") from None


def square_pixels(images: Sequence[Image.Image], side: int, resample: Image.Resampling) -> np.ndarray:
    """(B, 3, side, side) uint8 RGB: whole pictures resized to squares."""
    arrays = [np.asarray(image.resize((side, side), resample)) for image in images]
    return np.stack(arrays).transpose(0, 3, 1, 2)


def _bytes_of(picture: str | Path | bytes | BinaryIO) -> tuple[str, bytes]:
    """The name of the picture for error messages, and its bytes."""
    if isinstance(picture, (bytes, bytearray)):
        return "picture", bytes(picture)
    if isinstance(picture, (str, Path)):
        return str(picture), _read(Path(picture))
    if not hasattr(picture, "read"):
        raise ImageError(
            f"an object of type {type(picture).__name__} is not a photo.\n"
            "  Give a path, bytes, an open file, a PIL image, an array or a tensor."
        )
    name = str(getattr(picture, "name", "picture"))
    data = picture.read(MAX_BYTES + 1)
    if not isinstance(data, bytes):
        raise ImageError(f"{name} is open as text; open it with 'rb'.")
    if len(data) > MAX_BYTES:
        raise ImageError(f"{name} has more than {MAX_BYTES:,} bytes.")
    return name, data


def _channels_last(array: np.ndarray) -> np.ndarray:
    """(C, H, W), the usual layout of tensors, to (H, W, C)."""
    return array.transpose(1, 2, 0) if array.ndim == 3 and array.shape[0] in (1, 3, 4) else array


@cache
def _formats() -> tuple[str, ...]:
    """Formats that may be opened. Formats whose reader runs another program, such as EPS, are left out."""
    Image.init()
    allowed = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
    return tuple(name for name in allowed if name in Image.OPEN)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read.")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}.") from None


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        return _from_array(np.asarray(image), name)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    """From an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4).

    Integers are in 0..255. If their type is uint16 or one of them is above 255, they are 16 bits in 0..65535 and are
    scaled to 8. Floats are in 0..1. If their maximum is above 1, they are divided by it.
    """
    shape = array.shape
    if array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in (1, 3, 4)) or 0 in shape:
        raise ImageError(f"an array of shape {shape} is not a picture; use (height, width, 3).")
    pixels: Any = array
    if np.issubdtype(array.dtype, np.integer):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > 65535:
            raise ImageError(
                f"{name} has values from {low} to {high}. Pixels are 0 to 255, or 0 to 65535 with 16 bits."
            )
        if array.dtype == np.uint16 or high > 255:
            pixels = array // 257
    elif np.issubdtype(array.dtype, np.floating):
        finite = np.nan_to_num(array)
        pixels = finite * (255 / max(1.0, float(finite.max())))
    pixels = np.clip(pixels, 0, 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    return _to_rgb(Image.fromarray(pixels), name)
