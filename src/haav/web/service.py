"""From bytes to captions: queue photos, decode them meanwhile, caption those with equal settings together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from haav.errors import ConfigError, HaavError, ImageError, unknown
from haav.inference.captioner import Captioner
from haav.inference.options import CaptionOptions
from haav.inference.stream import PhotoItem
from haav.photos.images import load_image
from haav.studies.explain import explain
from haav.web.batcher import Batcher, Busy
from haav.web.schemas import Settings
from haav.web.uploads import Photo, Refused

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


class CaptionService:
    def __init__(self, captioner: Captioner, limits: Limits) -> None:
        self.captioner, self.limits = captioner, limits
        self.batcher = Batcher(self._work, limits.batch, limits.waiting)
        self.decoders = ThreadPoolExecutor(2, "decoder")  # a picture may be large before it is downscaled

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
        try:
            self.batcher.check(len(photos))
        except Busy as error:
            raise Refused(429, str(error), {"Retry-After": str(error.seconds)}) from None
        pictures = [self.decoders.submit(self._decode, photo.data) for photo in photos]
        answers = self.batcher.submit(pictures, job, job.together)
        try:
            return await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, answers)), self.limits.seconds)
        except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
            raise Refused(504, f"no caption within {self.limits.seconds:g} s; the server is busy.") from None
        except ConfigError as error:
            raise Refused(422, str(error)) from None
        except HaavError as error:
            logging.getLogger("uvicorn.error").error("%s: %s", type(error).__name__, error)
            raise Refused(500, "the model of this server does not work; the server's log says why.") from None
        finally:
            for picture, answer in zip(pictures, answers, strict=True):
                if answer.cancel():  # its batch has not begun, so nobody waits for the picture
                    picture.cancel()

    def _decode(self, data: bytes) -> Image.Image:
        image = load_image(data, self.limits.pixels)
        image.thumbnail((1024, 1024))  # larger than any view needs; the queue holds many pictures
        return image

    def _work(self, pictures: Sequence[Future[Image.Image]], job: Job) -> list[Result | ImageError]:
        items = [PhotoItem("", picture.result) for picture in pictures]
        photos = list(self.captioner.stream(items, job.options, len(items)))
        if job.explain:
            captioned = [photo for photo in photos if photo.error is None]
            captions = [explanation.to_json() for explanation in explain(self.captioner, captioned, job.options)]
        else:
            captions = [photo.caption.to_json() for photo in photos if photo.caption is not None]
        remaining = iter(captions)
        return [
            photo.error or Result(picture.result(), next(remaining))
            for photo, picture in zip(photos, pictures, strict=True)
        ]
