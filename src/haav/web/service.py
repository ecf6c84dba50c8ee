"""From bytes to captions: decode pictures, queue them, caption those with equal settings together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
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

SAMPLING = ("samples", "temperature", "top_k", "top_p")


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
    """photos in the queue"""
    batch: int = 8


@dataclass(frozen=True)
class Job:
    """Settings of a photo. Photos with equal settings share a batch."""

    options: CaptionOptions
    explain: bool
    together: bool
    """False if other photos of the batch could change the answer"""


class CaptionService:
    def __init__(self, captioner: Captioner, limits: Limits) -> None:
        self.captioner, self.limits = captioner, limits
        self.batcher = Batcher(self._work, limits.batch, limits.waiting)
        self.decoding = asyncio.Semaphore(2)  # pictures decoded at once; each may be large before it is downscaled

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

    async def pictures(self, photos: Sequence[Photo]) -> list[Image.Image | ImageError]:
        self._room(len(photos))
        pictures = []
        for photo in photos:
            async with self.decoding:
                pictures.append(await asyncio.to_thread(self._picture, photo.data))
        return pictures

    async def caption(self, images: Sequence[Image.Image], job: Job) -> list[dict[str, Any]]:
        """What `haav caption --json` prints for each, or their explanations"""
        self._room(len(images))
        answers = self.batcher.submit(images, job, job.together)
        together = asyncio.gather(*map(asyncio.wrap_future, answers))
        try:
            return await asyncio.wait_for(together, self.limits.seconds)
        except asyncio.TimeoutError:  # on Python 3.10 not the built-in one
            raise Refused(504, f"no caption within {self.limits.seconds:g} s; the server is busy.") from None
        except ConfigError as error:
            raise Refused(422, str(error)) from None
        except HaavError as error:
            logging.getLogger("uvicorn.error").error("%s: %s", type(error).__name__, error)
            raise Refused(500, "the model of this server does not work; the server's log says why.") from None

    def _room(self, photos: int) -> None:
        try:
            self.batcher.check(photos)
        except Busy as error:
            raise Refused(429, str(error), {"Retry-After": str(error.seconds)}) from None

    def _picture(self, data: bytes) -> Image.Image | ImageError:
        try:
            image = load_image(data, self.limits.pixels)
        except ImageError as error:
            return error
        image.thumbnail((1024, 1024))  # larger than any view needs; the queue holds many pictures
        return image

    def _work(self, images: Sequence[Image.Image], job: Job) -> list[dict[str, Any]]:
        items = [PhotoItem("", partial(Image.Image.copy, image)) for image in images]
        photos = list(self.captioner.stream(items, job.options, len(images)))
        if job.explain:
            return [explanation.to_json() for explanation in explain(self.captioner, photos, job.options)]
        return [photo.caption.to_json() for photo in photos if photo.caption is not None]
