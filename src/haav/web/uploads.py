"""Read requests: settings from query, form or JSON, and photos as bytes. Everything is bounded.

The server never reads a path or fetches a URL that a client names.
"""

from __future__ import annotations

import base64
import binascii
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

import python_multipart  # noqa: F401  # Starlette imports it with the first form, which is too late to say so
from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from haav.files import json_of
from haav.web.schemas import LISTS, NoSettings, first_problem, photo_field

LINGER = 10
"""Of an upload that is too large, this many times the limit is read and dropped before it is refused. A client that
still sends when the connection closes does not see the answer."""
AnySettings = TypeVar("AnySettings", bound=NoSettings)


class Refused(Exception):
    """A request that cannot be answered, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass(frozen=True)
class Photo:
    name: str
    data: bytes


async def read_upload(
    request: Request, settings: type[AnySettings], most_bytes: int, most_photos: int = 0
) -> tuple[AnySettings, list[Photo]]:
    """Settings and photos of a request. `most_photos`: 0 means one photo, which is no list."""
    field = photo_field(most_photos)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    in_query = _check(settings, _from_texts(request.query_params.multi_items()), field)
    if content_type == "application/json":
        body = b"".join([part async for part in _bounded(request, most_bytes)])
        fields, photos = _from_json(body, field, as_list=bool(most_photos))
        in_body = _check(settings, fields, field, strict=True)
    elif content_type == "multipart/form-data":
        texts, photos = await _from_form(request, field, most_bytes)
        in_body = _check(settings, _from_texts(texts), field)
    elif content_type.startswith("image/") and not most_photos:
        photos = [Photo("photo", b"".join([part async for part in _bounded(request, most_bytes)]))]
        in_body = _check(settings, {}, field)
    else:
        bodies = f"multipart/form-data with '{field}', or application/json with '{field}' in base64"
        raise Refused(415, f"send {bodies}{'' if most_photos else ', or the photo itself as image/jpeg'}.")
    for name in in_query.model_fields_set & in_body.model_fields_set:
        raise Refused(422, f"{name} was given in the query and in the body; give it once.")
    if not 1 <= len(photos) <= (most_photos or 1):
        allowed = f"1 to {most_photos} photos" if most_photos else "one photo; /v1/captions takes several"
        raise Refused(422, f"'{field}' must be {allowed}, not {len(photos)}.")
    return in_body.model_copy(update=in_query.model_dump(exclude_unset=True)), photos


def _check(settings: type[AnySettings], fields: dict[str, Any], field: str, strict: bool = False) -> AnySettings:
    """`strict`: numbers must be numbers, not texts"""
    try:
        return settings.model_validate(fields, strict=strict)
    except ValidationError as error:
        raise Refused(422, first_problem(error, settings, field)) from None


def _from_texts(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields of a query or form. Empty ones are as good as none."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in pairs:
        if text:
            texts[name].append(text)
    fields: dict[str, Any] = {}
    for name, values in texts.items():
        if name in LISTS:
            fields[name] = [item for text in values for item in text.split(",") if item]
        elif len(values) > 1:
            raise Refused(422, f"{name[:100]} was given {len(values)} times; give it once.")
        else:
            fields[name] = values[0]
    return fields


def _from_json(body: bytes, field: str, as_list: bool) -> tuple[dict[str, Any], list[Photo]]:
    try:
        fields = json_of(body)
        if not isinstance(fields, dict):
            raise ValueError("it must be an object")
        value = fields.pop(field, None)
        texts = value if as_list else [value]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"it must have '{field}', {'a list of texts' if as_list else 'a text'} in base64")
        return fields, [Photo("photo", _decode(text)) for text in texts]
    except (binascii.Error, ValueError) as error:
        raise Refused(422, f"this JSON cannot be used: {error}.") from None


def _decode(text: str) -> bytes:
    """Base64, also of a data URL"""
    return base64.b64decode(text.partition("base64,")[2] or text, validate=True)


async def _from_form(request: Request, field: str, most_bytes: int) -> tuple[list[tuple[str, str]], list[Photo]]:
    try:
        parser = MultiPartParser(request.headers, _bounded(request, most_bytes), max_files=100, max_fields=200)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise Refused(422, f"this form cannot be read: {str(error).rstrip('.')}.") from None
    try:
        texts: list[tuple[str, str]] = []
        photos: list[Photo] = []
        for name, value in form.multi_items():
            if isinstance(value, UploadFile) and name == field:
                photos.append(Photo(PurePath(value.filename or "").name[:200] or "photo", await value.read()))
            elif isinstance(value, UploadFile):
                texts.append((name, "a file"))  # its name is checked with the other fields
            elif name == field:
                raise Refused(422, f"'{field}' must be a file, not a text.")
            else:
                texts.append((name, value))
    finally:
        await form.close()
    return texts, photos


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > LINGER * most:
            break
        if size <= most:
            yield part
    if size > most:
        raise Refused(413, f"a request has at most {most:,} bytes.", {"Connection": "close"})
