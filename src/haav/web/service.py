"""From bytes to captions: queue photos, decode them meanwhile, caption those with equal settings together."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Any, cast

from PIL import Image

from haav.errors import ConfigError, HaavError, ImageError, unknown
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import PhotoItem
from haav.photos.images import load_image, to_jpeg
from haav.studies.explain import explain
from haav.web.batcher import Batcher, Busy
from haav.web.schemas import Settings
from haav.web.uploads import Photo, Refused

SAMPLES = resources.files("haav").joinpath("samples")
PREVIEW = 1024
"""longest side of a preview"""
SAMPLING = ("samples", "temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class Limits:
    upload: int = 20_000_000
    """bytes of a request"""
    pixels: int = 50_000_000
    """of a photo"""
    photos: int = 16
    """of a request"""
    seconds: float = 60.0
    """time limit of a request, and of its upload"""
    waiting: int = 32
    """photos whose batch has not begun, decoded or not"""
    batch: int = 8


@dataclass(frozen=True)
class Job:
    """Settings of a photo. Photos with equal settings share a batch."""

    options: CaptionOptions
    explain: bool
    together: bool
    """False if other photos of the batch could change the answer"""


@dataclass(frozen=True)
class Result:
    image: Image.Image
    caption: dict[str, Any]
    """what `haav caption --json` prints, or the explanation"""


@dataclass(frozen=True)
class _Waiting:
    """A photo in the queue."""

    picture: Future[Image.Image]
    captioned: Future[dict[str, Any]] = field(default_factory=Future)
    """the caption, as soon as it is decoded; never set for a photo that fails"""


class CaptionService:
    def __init__(self, captioner: Captioner, limits: Limits) -> None:
        self.captioner, self.limits = captioner, limits
        self.batcher = Batcher(self._work, limits.batch, limits.waiting)
        self.decoders = ThreadPoolExecutor(2, "decoder")  # a picture may be large before it is downscaled
        self.previews = 0
        """previews that are being made"""
        self.sample_lock, self.sample_captions = threading.Lock(), cast("list[dict[str, Any]] | None", None)

    def close(self) -> None:
        """Answer the queued photos, then stop the threads."""
        self.batcher.close()
        self.decoders.shutdown()

    def job(self, settings: Settings, explained: bool) -> Job:
        """The job of checked settings. Raises Refused if this model cannot do it."""
        for view in settings.views:
            if view not in self.captioner.views:
                raise Refused(422, unknown("view", view, self.captioner.views))
        default = self.captioner.config.decode
        method = settings.method or default.method
        sampling = method == "sample"
        for name in ("beam",) if sampling else SAMPLING:
            if getattr(settings, name) is not None:
                raise Refused(422, f"{name} has no effect with method {method}; leave one of them out.")
        options = CaptionOptions(
            settings.n_best,
            tuple(view for view in self.captioner.views if view in (settings.views or self.captioner.views)),
            tuple(settings.must),
            tuple(settings.never),
            settings.seed,
            settings.prefix,
            method=method,
            beam=None if sampling else max(settings.beam or default.beam, settings.n_best),
            samples=max(settings.samples or default.samples, settings.n_best) if sampling else None,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        # Samples of a batch share their random numbers, and a photo that cannot say what it must fails its batch.
        seeded = sampling and settings.seed is not None
        return Job(options, explained, together=not (seeded or settings.must))

    async def caption(self, photos: Sequence[Photo], job: Job) -> list[Result | ImageError]:
        """Decode and caption the photos of a request, within its time limit.

        They take their places in the queue first, so that pictures that wait for a decoder are counted too.
        """
        with self._queued(photos, job) as (_, answers), _refusals(self.limits):
            return await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, answers)), self.limits.seconds)

    async def caption_then_explain(self, photo: Photo, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        """The caption of a photo as soon as it is decoded, then its explanation, both within the time limit.

        What is raised before the caption is a Refused or an ImageError; after it, a Refused.
        """
        ends = asyncio.get_running_loop().time() + self.limits.seconds
        with self._queued([photo], job) as ([waiting], [answer]), _refusals(self.limits):
            explained = asyncio.ensure_future(asyncio.wrap_future(answer))
            captioned = asyncio.ensure_future(asyncio.wrap_future(waiting.captioned))
            try:
                await asyncio.wait({explained, captioned}, timeout=self.limits.seconds, return_when=FIRST_COMPLETED)
                if captioned.done():
                    yield captioned.result()
                result = await asyncio.wait_for(explained, ends - asyncio.get_running_loop().time())
                if isinstance(result, ImageError):
                    raise result
                yield result.caption
            finally:
                captioned.cancel()
                explained.cancel()

    async def preview(self, photo: Photo) -> bytes:
        """A JPEG of a photo, for browsers that cannot show its format."""
        if self.previews >= self.limits.waiting:
            raise Refused(429, "too many previews are waiting; try again in 1 s.", {"Retry-After": "1"})
        self.previews += 1
        try:
            decoded = self.decoders.submit(lambda: to_jpeg(self._decode(photo.data), PREVIEW))
            with _refusals(self.limits):
                return await asyncio.wait_for(asyncio.wrap_future(decoded), self.limits.seconds)
        except ImageError as error:
            raise Refused(422, str(error)) from None
        finally:
            self.previews -= 1

    def samples(self) -> list[dict[str, Any]]:
        """The sample photos with their captions, computed once. The first call takes a second or two."""
        with self.sample_lock:
            if self.sample_captions is None:
                items = [PhotoItem(name, partial(_sample, name)) for name in sample_names()]
                self.sample_captions = [photo.to_json() for photo in self.captioner.stream(items)]
            return self.sample_captions

    @contextmanager
    def _queued(self, photos: Sequence[Photo], job: Job) -> Iterator[tuple[list[_Waiting], list[Future[Any]]]]:
        """Photos in the queue, and their answers. Those whose batch has not begun leave it at the end."""
        try:
            self.batcher.check(len(photos))
        except Busy as error:
            raise Refused(429, str(error), {"Retry-After": str(error.seconds)}) from None
        waiting = [_Waiting(self.decoders.submit(self._decode, photo.data)) for photo in photos]
        answers = self.batcher.submit(waiting, job, job.together)
        try:
            yield waiting, answers
        finally:
            for photo, answer in zip(waiting, answers, strict=True):
                if answer.cancel():  # nobody waits for the picture
                    photo.picture.cancel()

    def _decode(self, data: bytes) -> Image.Image:
        image = load_image(data, self.limits.pixels)
        image.thumbnail((1024, 1024))  # larger than any view needs; the queue holds many pictures
        return image

    def _work(self, waiting: Sequence[_Waiting], job: Job) -> list[Result | ImageError]:
        items = [PhotoItem("", photo.picture.result) for photo in waiting]
        photos = list(self.captioner.stream(items, job.options, len(items)))
        for early, photo in zip(waiting, photos, strict=True):
            # A request that is over has cancelled it.
            if photo.caption is not None and early.captioned.set_running_or_notify_cancel():
                early.captioned.set_result(photo.caption.to_json())
        if job.explain:
            captioned = [photo for photo in photos if photo.error is None]
            captions = [explanation.to_json() for explanation in explain(self.captioner, captioned, job.options)]
        else:
            captions = [photo.caption.to_json() for photo in photos if photo.caption is not None]
        remaining = iter(captions)
        return [
            photo.error or Result(early.picture.result(), next(remaining))
            for photo, early in zip(photos, waiting, strict=True)
        ]


@contextmanager
def _refusals(limits: Limits) -> Iterator[None]:
    """Errors of captioning become refusals with a status."""
    try:
        yield
    except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
        raise Refused(504, f"no caption within {limits.seconds:g} s; the server is busy.") from None
    except ConfigError as error:
        raise Refused(422, str(error)) from None
    except ImageError:
        raise
    except HaavError as error:
        logging.getLogger("uvicorn.error").error("%s: %s", type(error).__name__, error)
        raise Refused(500, "the model of this server does not work; the server's log says why.") from None


def sample_names() -> list[str]:
    return sorted(file.name for file in SAMPLES.iterdir() if file.name.endswith(".jpg"))


def _sample(name: str) -> bytes:
    return SAMPLES.joinpath(name).read_bytes()
