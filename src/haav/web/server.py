"""`haav serve`: a web page and a small API.

Pictures arrive as bytes. The server never reads a path or fetches a URL that a client names.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib import resources
from pathlib import PurePath
from typing import Annotated, Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response, Security
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from PIL import Image
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from haav import __version__
from haav.errors import ConfigError, ImageError
from haav.inference.captioner import Captioner
from haav.inference.stream import PhotoItem
from haav.studies import html
from haav.studies.explain import explain
from haav.views import view_titles
from haav.web.api_page import api_page
from haav.web.connection import Connection
from haav.web.metrics import CONTENT_TYPE, Metrics
from haav.web.middleware import SECURITY, Answers
from haav.web.schemas import (
    CaptionResponse,
    CaptionSettings,
    CaptionsResponse,
    ErrorResponse,
    HealthResponse,
    ModelsResponse,
    NoSettings,
    SamplesResponse,
    Settings,
    query_parameters,
    request_body,
)
from haav.web.service import SAMPLES, CaptionService, Limits, sample_names
from haav.web.uploads import AnySettings, Photo, Refused, read_upload

MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
BEARER = HTTPBearer(auto_error=False)
TEXT = {"schema": {"type": "string"}}


class AsciiJSONResponse(JSONResponse):
    """JSON with escapes for all but ASCII. UTF-8 cannot hold half a surrogate pair, which clients can send."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def build_app(
    captioner: Captioner,
    limits: Limits | None = None,
    name: str = "best",
    api_key: str | None = None,
    cors: Sequence[str] = (),
) -> FastAPI:
    """`api_key`: what clients must send to use the API. `cors`: origins whose pages may use it"""
    limits = limits or Limits()
    service, metrics = CaptionService(captioner, limits), Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="haav",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        default_response_class=AsciiJSONResponse,
    )
    app.add_middleware(Answers, metrics=metrics)
    if cors:
        app.add_middleware(
            _Cors,
            allow_origins=list(cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.state.service = service
    _add_error_bodies(app)
    app.include_router(_pages(app))
    app.include_router(_health(service))
    locked = {"dependencies": [Depends(_key_check(api_key))], "responses": _errors(limits, 401)} if api_key else {}
    app.include_router(_api(service, metrics, name), **locked)  # type: ignore[arg-type]
    return app


class _Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        """As Starlette's, with the error body of the API"""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        reason = f"this server is not open to pages of other sites: {bytes(response.body).decode()}."
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return AsciiJSONResponse({"error": reason}, response.status_code, headers)


def _add_error_bodies(app: FastAPI) -> None:
    """Every error has the same body: {"error": …}"""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return AsciiJSONResponse({"error": error.reason}, error.status, error.headers)

    @app.exception_handler(StarletteHTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        reason = f"{request.method} {request.url.path[:200]}: {error.detail.lower()}. GET /docs describes the API."
        return AsciiJSONResponse({"error": reason}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it; it is counted in /metrics

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        reason = "the server failed at this request; its log says why."
        return AsciiJSONResponse({"error": reason}, 500, SECURITY)


def _pages(app: FastAPI) -> APIRouter:
    pages = APIRouter(include_in_schema=False)

    @pages.get("/", response_class=HTMLResponse)
    def index() -> str:
        return _file("templates/index.html")

    @pages.get("/docs", response_class=HTMLResponse)
    def docs(request: Request) -> str:
        return api_page(app.openapi(), str(request.base_url))

    @pages.get("/static/{file}")
    def static(file: str) -> Response:
        parts = {"explain.js", "explain.html", "style.css"}
        own = {entry.name for entry in resources.files("haav.web").joinpath("static").iterdir()}
        if file not in parts | own:
            raise Refused(404, f"there is no {file}.")
        text = html.part(file) if file in parts else _file(f"static/{file}")
        return Response(text, media_type=MEDIA_TYPES[PurePath(file).suffix])

    @pages.get("/samples/{file}")
    def sample(file: str) -> Response:
        if file not in sample_names():
            raise Refused(404, f"there is no sample {file}.")
        return Response(SAMPLES.joinpath(file).read_bytes(), media_type="image/jpeg")

    return pages


def _health(service: CaptionService) -> APIRouter:
    health = APIRouter()

    @health.get("/v1/health")
    async def alive() -> HealthResponse:
        """Whether the server is alive, and how many photos wait. Restart it if there is no answer"""
        return HealthResponse(status="ok", waiting=service.batcher.queue.qsize())

    @health.get("/v1/ready", responses=_errors(service.limits, 503))
    async def ready() -> HealthResponse:
        """Whether the server can take a photo now. Send none while the status is 503"""
        fault = service.batcher.fault(service.limits.seconds)
        if fault:
            raise Refused(503, fault)
        return await alive()

    return health


def _api(service: CaptionService, metrics: Metrics, name: str) -> APIRouter:
    api, limits, captioner = APIRouter(), service.limits, service.captioner
    refusals = _errors(limits, 408, 413, 415, 422, 429, 500, 504)

    async def read(request: Request, settings: type[AnySettings], photos: int) -> tuple[AnySettings, list[Photo]]:
        try:
            return await asyncio.wait_for(read_upload(request, settings, limits.upload, photos), limits.seconds)
        except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
            raise Refused(408, f"the upload took longer than {limits.seconds:g} s.", {"Connection": "close"}) from None

    @api.get("/v1/models")
    def models() -> ModelsResponse:
        """The model, its views, and the limits"""
        views = list(captioner.views)
        model = {"name": name, "views": views, "titles": view_titles(views), "beam": captioner.config.decode.beam}
        bounds = {field: getattr(limits, field) for field in ("upload", "pixels", "photos", "seconds")}
        return ModelsResponse.model_validate({"models": [model], "samples": sample_names(), "limits": bounds})

    @api.get("/v1/samples")
    def samples() -> SamplesResponse:
        """The sample photos and their captions"""
        return SamplesResponse.model_validate({"photos": service.samples()})

    @api.post(
        "/v1/preview",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}}, **_errors(limits, 408, 413, 415, 422, 429, 504)},
        openapi_extra={"requestBody": request_body(NoSettings)},
    )
    async def preview(request: Request) -> Response:
        """A photo as a JPEG of at most 1,024 pixels: TIFF and HEIC, for example, which browsers cannot show"""
        _, [photo] = await read(request, NoSettings, 0)
        return Response(await service.preview(photo), media_type="image/jpeg")

    @api.post(
        "/v1/caption",
        response_model=CaptionResponse,
        responses={200: {"content": {"text/html": TEXT, "text/event-stream": TEXT}}, **refusals},
        openapi_extra={"parameters": query_parameters(CaptionSettings), "requestBody": request_body(CaptionSettings)},
    )
    async def caption(request: Request) -> Response:
        """Caption a photo: a form with a file, JSON with base64, or its bytes with settings in the query"""
        settings, [photo] = await read(request, CaptionSettings, 0)
        job = service.job(settings, settings.explain or settings.format != "json")
        if settings.format == "events":
            answers = service.caption_then_explain(photo, job)
            try:
                first = await anext(answers)
            except ImageError as error:
                raise Refused(422, str(error)) from None
            return StreamingResponse(_events(photo.name, first, answers), media_type="text/event-stream")
        [result] = await service.caption([photo], job)
        if isinstance(result, ImageError):
            raise Refused(422, str(result))
        if settings.format == "html":
            text = await asyncio.to_thread(html.render_explanation, photo.name, result.image, result.caption)
            headers = {"Content-Disposition": 'attachment; filename="explanation.html"'}
            # Half a surrogate pair in the photo's name becomes the escape that the page's script reads.
            return HTMLResponse(text.encode("utf-8", "backslashreplace"), headers=headers)
        return AsciiJSONResponse({"image": photo.name, **result.caption})

    @api.post(
        "/v1/captions",
        response_model=CaptionsResponse,
        responses=refusals,
        openapi_extra={"parameters": query_parameters(Settings), "requestBody": request_body(Settings, limits.photos)},
    )
    async def captions(request: Request) -> Response:
        """Caption several photos: a form with files, or JSON with base64. A photo that fails has an error"""
        settings, photos = await read(request, Settings, limits.photos)
        job = service.job(settings, settings.explain)
        results = await service.caption(photos, job)
        rows = [{"error": str(result)} if isinstance(result, ImageError) else result.caption for result in results]
        named = [{"image": photo.name, **row} for photo, row in zip(photos, rows, strict=True)]
        return AsciiJSONResponse({"photos": named})

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def counts() -> Response:
        """Counts of requests and photos, in the text format of Prometheus"""
        return Response(metrics.text(service.batcher), media_type=CONTENT_TYPE)

    return api


def _key_check(api_key: str) -> Any:
    async def check(bearer: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        if bearer is None or not hmac.compare_digest(bearer.credentials.encode(), api_key.encode()):
            raise Refused(401, "send the header 'Authorization: Bearer KEY'.", {"WWW-Authenticate": "Bearer"})

    return check


async def _events(
    name: str, caption: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]
) -> AsyncIterator[bytes]:
    """The answers as server-sent events: `caption`, then `explanation`, or `problem` if that fails"""

    def event(kind: str, data: dict[str, Any]) -> bytes:
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode("ascii")

    async with aclosing(rest):
        yield event("caption", {"image": name, **caption})
        try:
            async for explanation in rest:
                yield event("explanation", {"image": name, **explanation})
        except Refused as error:
            yield event("problem", {"error": error.reason})


def _file(name: str) -> str:
    return resources.files("haav.web").joinpath(name).read_text(encoding="utf-8")


def _errors(limits: Limits, *statuses: int) -> dict[int | str, dict[str, Any]]:
    texts = {
        401: "the API key is missing or wrong",
        408: f"the upload took longer than {limits.seconds:g} s",
        413: f"more than {limits.upload:,} bytes",
        415: "not a kind of body that is read",
        422: "not a picture, too large a picture, or a field that cannot be used; error says what",
        429: f"more than {limits.waiting} photos would wait; come back after Retry-After seconds",
        500: "a fault of the server; its log says more",
        503: "not ready; error says why",
        504: f"no caption within {limits.seconds:g} s",
    }
    return {status: {"description": texts[status], "model": ErrorResponse} for status in statuses}


def check_origins(origins: Sequence[str]) -> Sequence[str]:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s?#]+", origin):
            raise ConfigError(
                f"'{origin}' is not an origin. Give one like https://example.org, without a path, or '*'."
            )
    return origins


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


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        host, port, *_ = sockets[0].getsockname()
        print(f"http://{f'[{host}]' if ':' in host else host}:{port} – Ctrl-C ends it.", flush=True)


def run(
    captioner: Captioner,
    bound: socket.socket,
    limits: Limits | None = None,
    name: str = "best",
    api_key: str | None = None,
    cors: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM. The address is printed when clients can connect. `bound`: as `bind` gives it"""
    blank = PhotoItem("blank", lambda: Image.new("RGB", (64, 64)))
    captioner.prepare()
    explain(captioner, list(captioner.stream([blank])))  # reports what is missing at start-up, not to a client
    app = build_app(captioner, limits, name, api_key, cors)
    threading.Thread(target=app.state.service.samples, daemon=True).start()  # before somebody opens the page
    _Server(server_settings(app)).run(sockets=[bound])


def server_settings(app: FastAPI) -> uvicorn.Config:
    """Errors of the server are logged. Those of clients are counted in /metrics, so that they cannot fill a disk."""
    return uvicorn.Config(app, http=Connection, ws="none", log_level="error", timeout_keep_alive=15)
