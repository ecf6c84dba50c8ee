"""`haav serve`: a web page and a small API.

Pictures arrive as bytes. The server never reads a path or fetches a URL that a client names.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from haav import __version__
from haav.errors import ConfigError, HaavError, ImageError
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import PhotoItem
from haav.photos.images import load_image
from haav.studies import html
from haav.studies.explain import explain
from haav.web.api_page import api_page
from haav.web.batcher import Batcher, Busy
from haav.web.schemas import CaptionRequest, CaptionResponse, ErrorResponse, first_problem, request_body

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
SAMPLES = resources.files("haav").joinpath("samples")


@dataclass(frozen=True)
class Limits:
    upload: int = 20_000_000
    """bytes of a request"""
    pixels: int = 50_000_000
    seconds: float = 60.0
    """time limit of a request, and of its upload"""
    waiting: int = 32
    """requests in the queue"""
    batch: int = 8


class Refused(Exception):
    """A request that cannot be answered, with its HTTP status and the reason."""

    def __init__(self, status: int, reason: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers or {}


@dataclass(frozen=True)
class Asked:
    """Settings of a request. Requests with equal settings share a batch."""

    options: CaptionOptions
    explain: bool
    format: str


def build_app(captioner: Captioner, limits: Limits | None = None, name: str = "best") -> FastAPI:
    limits = limits or Limits()

    def work(images: Sequence[Image.Image], settings: Asked) -> list[dict[str, Any]]:
        items = [PhotoItem("", partial(Image.Image.copy, image)) for image in images]
        photos = list(captioner.stream(items, settings.options, len(images)))
        if settings.explain:
            return [explanation.to_json() for explanation in explain(captioner, photos, settings.options)]
        return [photo.caption.to_json() for photo in photos if photo.caption is not None]

    batcher = Batcher(work, limits.batch, limits.waiting)
    decoding = asyncio.Semaphore(2)  # pictures decoded at once; each may be large before it is downscaled

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(title="haav", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)

    @app.middleware("http")
    async def secure(request: Request, following: Any) -> Response:
        response: Response = await following(request)
        for header, value in SECURITY.items():
            response.headers.setdefault(header, value)
        return response

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": error.reason}, error.status, error.headers)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def index() -> str:
        return _file("templates/index.html")

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    def docs(request: Request) -> str:
        return api_page(app.openapi(), str(request.base_url))

    @app.get("/static/{file}", include_in_schema=False)
    def static(file: str) -> Response:
        media_types = {"app.js": "text/javascript", "explain.js": "text/javascript", "style.css": "text/css"}
        if file not in media_types:
            raise Refused(404, f"there is no {file}.")
        return Response(_file("static/app.js") if file == "app.js" else html.part(file), media_type=media_types[file])

    @app.get("/samples/{file}", include_in_schema=False)
    def sample(file: str) -> Response:
        if file not in _samples():
            raise Refused(404, f"there is no sample {file}.")
        return Response(SAMPLES.joinpath(file).read_bytes(), media_type="image/jpeg")

    @app.get("/v1/health")
    def health() -> dict[str, Any]:
        """Whether the server works, and how many requests wait"""
        return {"status": "ok" if batcher.thread.is_alive() else "broken", "waiting": batcher.line.qsize()}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        """The model, its views, and the limits"""
        return {
            "models": [{"name": name, "views": list(captioner.views), "beam": captioner.config.decode.beam}],
            "samples": _samples(),
            "limits": {"upload": limits.upload, "pixels": limits.pixels, "seconds": limits.seconds},
        }

    @app.post("/v1/caption", openapi_extra=request_body(), responses=_answers(limits))
    async def caption(request: Request) -> Response:
        """Caption a photo: multipart with `image`, or JSON with `image` in base64"""
        try:
            fields = await asyncio.wait_for(_fields(request, limits.upload), limits.seconds)
        except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
            raise Refused(408, f"the upload took longer than {limits.seconds:g} s.") from None
        settings = _asked(fields, captioner)
        try:
            batcher.check()
            async with decoding:
                image = await asyncio.to_thread(_picture, fields["image"], limits.pixels)
            answer = batcher.submit(image, settings)
        except Busy as error:
            raise Refused(429, str(error), {"Retry-After": str(error.seconds)}) from None
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(answer), limits.seconds)
        except asyncio.TimeoutError:
            raise Refused(504, f"no caption within {limits.seconds:g} s; the server is busy.") from None
        except HaavError as error:
            raise Refused(422, str(error)) from None
        title = fields["name"]
        if settings.format == "html":
            text = await asyncio.to_thread(html.render_explanation, title, image, result)
            headers = {"Content-Disposition": 'attachment; filename="explanation.html"'}
            return HTMLResponse(text, headers=headers)
        return JSONResponse({"image": title, **result})

    return app


async def _fields(request: Request, most: int) -> dict[str, Any]:
    """The settings of the request, `image` as bytes and its `name`"""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        body = b"".join([part async for part in _bounded(request, most)])
        try:
            fields = json.loads(body)
            if not isinstance(fields, dict) or not isinstance(fields.get("image"), str):
                raise ValueError("it must be an object with a text 'image'")
            fields["image"] = base64.b64decode(
                fields["image"].partition("base64,")[2] or fields["image"], validate=True
            )
        except (binascii.Error, ValueError, RecursionError) as error:
            raise Refused(422, f"this JSON cannot be used: {error}.") from None
        return fields | {"name": "photo"}
    if content_type != "multipart/form-data":
        raise Refused(415, "send multipart/form-data with a file 'image', or JSON with 'image' in base64.")
    try:
        parser = MultiPartParser(request.headers, _bounded(request, most), max_files=1, max_fields=10)
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise Refused(422, f"this form cannot be read: {error}.") from None
    async with _closing(form):
        upload = form.get("image")
        if not isinstance(upload, UploadFile):
            raise Refused(422, "the form has no file 'image'.")
        fields = {key: value for key, value in form.items() if isinstance(value, str)}
        return fields | {"image": await upload.read(), "name": PurePath(upload.filename or "photo").name[:200]}


@asynccontextmanager
async def _closing(form: Any) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await form.close()


async def _bounded(request: Request, most: int) -> AsyncGenerator[bytes, None]:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise Refused(413, f"a request has at most {most:,} bytes.", {"Connection": "close"})
        yield part


def _asked(fields: dict[str, Any], captioner: Captioner) -> Asked:
    """Validated settings of a request. Raises Refused if a value is out of range."""
    try:
        settings = CaptionRequest.model_validate(
            {key: fields[key] for key in CaptionRequest.model_fields if key in fields}
        )
    except ValidationError as error:
        raise Refused(422, first_problem(error)) from None
    for view in settings.views:
        if view not in captioner.views:
            raise Refused(422, f"there is no view '{view[:50]}'; this model reads {', '.join(captioner.views)}.")
    beam = max(settings.beam or captioner.config.decode.beam, settings.n_best)
    views = tuple(view for view in captioner.views if view in (settings.views or captioner.views))
    return Asked(
        CaptionOptions(settings.n_best, views, beam=beam),
        settings.explain or settings.format == "html",
        settings.format,
    )


def _picture(data: bytes, pixels: int) -> Image.Image:
    try:
        image = load_image(data, pixels)
    except ImageError as error:
        raise Refused(422, str(error)) from None
    image.thumbnail((1024, 1024))  # larger than any view needs; the queue holds many pictures
    return image


def _samples() -> list[str]:
    return sorted(file.name for file in SAMPLES.iterdir() if file.name.endswith(".jpg"))


def _file(name: str) -> str:
    return resources.files("haav.web").joinpath(name).read_text(encoding="utf-8")


def _answers(limits: Limits) -> dict[int | str, dict[str, Any]]:
    texts = {
        408: f"the upload took longer than {limits.seconds:g} s",
        413: f"more than {limits.upload:,} bytes",
        415: "neither a form nor JSON",
        422: "not a picture, too large a picture, or a field that cannot be used; error says what",
        429: f"{limits.waiting} requests wait already; come back after Retry-After seconds",
        504: f"no caption within {limits.seconds:g} s",
    }
    answers: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "model": ErrorResponse} for status, text in texts.items()
    }
    answers[200] = {
        "description": "the caption, its words with the weight of each view; n_best and explanation if asked for",
        "model": CaptionResponse,
    }
    return answers


def bind(host: str, port: int) -> socket.socket:
    """The server's address, taken before anything slow. Clients are refused until `run` listens."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"a port is a number from 0 to 65535, not {port}.")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}.\n  Give another with --host or --port."
        ) from None
    return bound


def run(captioner: Captioner, bound: socket.socket, limits: Limits | None = None, name: str = "best") -> None:
    """`bound`: as `bind` gives it"""
    import uvicorn

    blank = PhotoItem("blank", lambda: Image.new("RGB", (64, 64)))
    explain(captioner, list(captioner.stream([blank])))  # reports what is missing at start-up, not to a client
    settings = uvicorn.Config(build_app(captioner, limits, name), log_level="warning", timeout_keep_alive=15)
    host, port, *_ = bound.getsockname()
    print(f"http://{f'[{host}]' if ':' in host else host}:{port} – Ctrl-C ends it.", flush=True)
    uvicorn.Server(settings).run(sockets=[bound])
