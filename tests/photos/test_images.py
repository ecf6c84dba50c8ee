"""Pictures that people really have."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from haav.errors import ImageError
from haav.photos import images
from haav.photos.images import load_image


def encode(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Left half red, right half blue, wider than high."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    return image.convert(mode)


@pytest.mark.parametrize(
    "file_format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000", "HEIF"]
)
def test_common_formats_are_read(file_format: str) -> None:
    if file_format == "HEIF":
        pytest.importorskip("pillow_heif", reason="needs the heif extra").register_heif_opener()
    image = load_image(encode(halves(), file_format))
    assert (image.mode, image.size) == ("RGB", (40, 20))
    assert image.getpixel((5, 10))[0] > 180 > 80 > image.getpixel((35, 10))[0]


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "LAB", "HSV"])
def test_colour_modes_become_rgb(mode: str) -> None:
    file_format = "JPEG" if mode in ("CMYK", "YCbCr") else "TIFF"
    image = load_image(halves(mode) if mode == "HSV" else encode(halves(mode), file_format))
    assert image.mode == "RGB"


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    image = np.asarray(load_image(encode(Image.fromarray(ramp), "PNG")))[..., 0]
    assert np.array_equal(image, np.arange(256).reshape(16, 16))


def test_transparency_lies_over_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert load_image(encode(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    image = load_image(encode(halves(), "JPEG", exif=exif, quality=95))
    assert image.size == (20, 40)
    assert image.getpixel((10, 5))[0] > 200


def test_an_animation_gives_its_first_frame() -> None:
    frames = [halves(), Image.new("RGB", (40, 20), "green")]
    for file_format in ("GIF", "WEBP"):
        data = encode(frames[0], file_format, save_all=True, append_images=frames[1:])
        assert load_image(data).getpixel((5, 10))[0] > 200


def test_arrays_and_pictures_are_fine() -> None:
    array = np.asarray(halves())
    for given_ in (
        array,
        array / 255.0,
        array.astype(np.float32) / 255,
        halves(),
        halves("RGBA"),
        array.astype(np.int64),
    ):
        assert np.abs(np.asarray(load_image(given_)).astype(int) - array).max() <= 1
    assert load_image(array[..., 0]).mode == "RGB"
    for bad in (np.zeros((3, 4, 5)), np.zeros(3), np.zeros((0, 4, 3))):
        with pytest.raises(ImageError, match="is not a picture"):
            load_image(bad)


def test_heic_photos_are_turned_upright_once() -> None:
    pytest.importorskip("pillow_heif", reason="needs the heif extra").register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = 6
    image = load_image(encode(halves(), "HEIF", exif=exif.tobytes(), quality=95))
    assert image.size == (20, 40)
    assert image.getpixel((10, 5))[0] > 200


def test_without_pillow_heif_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    images._can_decode.cache_clear()
    try:
        with pytest.raises(ImageError, match=r'a HEIC or HEIF picture. .* pip install "haav\[heif\]"'):
            load_image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100))
    finally:
        images._can_decode.cache_clear()


def test_truth_values_are_black_and_white() -> None:
    mask = np.array([[True, False]])
    assert np.asarray(load_image(mask))[..., 0].tolist() == [[255, 0]]


@pytest.mark.parametrize("order", ["<", ">"])
def test_sixteen_bit_arrays_are_scaled(order: str) -> None:
    ramp = (np.arange(128) * 257).astype(f"{order}u2").reshape(8, 16)
    assert np.array_equal(np.asarray(load_image(ramp))[..., 0], np.arange(128).reshape(8, 16))
    assert np.asarray(load_image(np.full((2, 2), 200, np.uint16))).max() == 0, "dark, not bright"


def test_floats_are_read_on_one_of_two_scales() -> None:
    bytes_ = np.arange(256, dtype=np.float32).reshape(16, 16)
    assert np.array_equal(np.asarray(load_image(bytes_))[..., 0], np.arange(256).reshape(16, 16))
    dim = np.full((2, 2), 100.0)
    assert np.asarray(load_image(dim)).max() == 100, "not stretched to its own maximum"
    assert np.asarray(load_image(np.full((2, 2), 1.0000001))).min() == 255, "rounding"


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.full((4, 4, 3), 65536), "65536 to 65536"),
        (np.array([[0, 256]], dtype=np.int64), "0 to 256. Pixels are 0 to 255. For 16 bits, use uint16"),
        (np.array([[0, 1000]], dtype=np.int16), "0 to 1000. Pixels are 0 to 255"),
        (np.array([[-1, 300]], dtype=np.int16), "-1 to 300"),
        (np.array([[-1, 3]], dtype=np.int8), "-1 to 3"),
        (np.array([[-1.0, 1.0]]), "-1 to 1. Floats are 0 to 1, or 0 to 255"),
        (np.array([[0.0, 1.3]]), "0 to 1.3. Floats are 0 to 1, or 0 to 255"),
        (np.array([[0.0, 256.0]]), "0 to 256. Floats"),
        (np.array([[0.0, np.nan]]), "nan to nan. Floats"),
        (np.array([[0.0, np.inf]]), "0 to inf. Floats"),
        (np.array([[1j, 0]]), "of type complex128"),
    ],
)
def test_values_that_are_no_pixels_are_refused(array: np.ndarray, says: str) -> None:
    with pytest.raises(ImageError, match=says):
        load_image(array)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be huge."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (chunk, body, b"IEND")
    )


def test_bombs_are_refused_before_they_unpack() -> None:
    for side in (20_000, 100_000):
        with pytest.raises(ImageError, match="pixels"):
            load_image(png_header(side, side))


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "empty"), (b"hello", "not a picture"), (encode(halves(), "JPEG")[:200], "damaged|not a picture")],
)
def test_broken_pictures_are_named(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=says) as caught:
        load_image(path)
    assert "x.jpg" in str(caught.value)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(ImageError, match="cannot read"):
            load_image(path)


def test_pictures_and_files_that_cannot_be_read_any_more_are_refused() -> None:
    truncated = Image.open(io.BytesIO(encode(halves(), "PNG")[:60]))
    closed = io.BytesIO(encode(halves(), "PNG"))
    closed.close()
    for picture in (truncated, closed):
        with pytest.raises(ImageError, match="is damaged|cannot read"):
            load_image(picture)


GOOD = {file_format: encode(halves(), file_format) for file_format in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")}


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_pictures_are_read_or_refused(data) -> None:
    good = bytearray(data.draw(st.sampled_from(list(GOOD.values()))))
    for _ in range(data.draw(st.integers(1, 6))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = load_image(bytes(good[: data.draw(st.integers(1, len(good)))]))
    except ImageError:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    ("size", "kept"), [((2047, 4000), (2047, 4000)), ((2048, 4000), (1024, 2000)), ((5000, 3300), (1667, 1100))]
)
def test_the_picture_of_a_large_file_is_reduced_by_a_whole_number(size: tuple[int, int], kept: tuple[int, int]) -> None:
    """So that a batch of scans needs as little memory as one of photos. The mean colour stays."""
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, "PNG", compress_level=1)
    picture = load_image(buffer.getvalue())
    assert picture.size == kept
    assert np.asarray(picture).mean() == pytest.approx(127.5, abs=0.5)
