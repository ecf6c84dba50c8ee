"""The manifest of a view, and the format of its records: half-precision tokens behind a checksum."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from haav.errors import StoreError
from haav.files import json_of
from haav.types import PhotoView, ViewSpec

_HEAD = struct.Struct("<4sII")
_MAGIC = b"HAV1"


@dataclass(frozen=True)
class ViewManifest:
    """How a view was made."""

    spec: ViewSpec
    fingerprint: str
    licence: str = "unknown"
    source: str = "extracted"
    notes: str = ""
    origin: str = ""
    """the fingerprint that models know, if it is another one: a packed bridge and text database give slightly different
    views, which still count as those that the model was trained on"""

    @property
    def made_by(self) -> str:
        return self.origin or self.fingerprint


def pack(record: PhotoView) -> bytes:
    """A checksum, then a JSON header and raw arrays, which the checksum covers."""
    arrays: dict[str, np.ndarray] = {"tokens": _to_half(record.tokens)}
    arrays |= {f"index.{name}": index.numpy().astype(np.int32) for name, index in record.indices.items()}
    if record.boxes is not None:
        arrays["boxes"] = record.boxes.float().numpy()
    header: dict[str, Any] = {
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
        "labels": record.labels,
    }
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    body = b"".join([head, *(np.ascontiguousarray(array).tobytes() for array in arrays.values())])
    return _HEAD.pack(_MAGIC, zlib.crc32(body), len(head)) + body


_DTYPES = {"<f2": 2, "<i4": 4, "<f4": 4}


def unpack(value: Any, what: str) -> PhotoView:
    """The inverse of `pack`. `value` may point into mapped memory, which is copied once."""
    data = memoryview(value)
    try:
        magic, checksum, length = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if magic != _MAGIC or zlib.crc32(body) != checksum:
            raise StoreError(f"the record of {what} is damaged: its checksum does not match.")
        header = json_of(bytes(body[:length]))
        arrays, offset = {}, length
        for name, dtype, shape in header["arrays"]:
            size = _DTYPES[dtype] * int(np.prod(shape, dtype=np.int64))
            values = np.frombuffer(bytearray(body[offset : offset + size]), dtype)
            arrays[name] = torch.from_numpy(values.reshape(shape))
            offset += size
        labels = header["labels"]
        return PhotoView(
            arrays.pop("tokens"),
            {name.removeprefix("index."): arrays[name].long() for name in list(arrays) if name.startswith("index.")},
            arrays.get("boxes"),
            None if labels is None else tuple(labels),
        )
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"the record of {what} cannot be read: {error}.") from None


def token_count(value: Any) -> int:
    _, _, length = _HEAD.unpack_from(value)
    header = json_of(bytes(value[_HEAD.size : _HEAD.size + length]))
    return int(header["arrays"][0][2][0])


def _to_half(tokens: torch.Tensor) -> np.ndarray:
    """Half precision. Values that would overflow are clipped."""
    limit = torch.finfo(torch.float16).max
    return tokens.float().clamp(-limit, limit).half().numpy()
