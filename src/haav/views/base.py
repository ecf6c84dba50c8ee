"""What an extractor is: a frozen network, or anything else, that turns photos into one view.

A third party adds a view with a class like this and one line in its own pyproject.toml:

    [project.entry-points."haav.views"]
    colours = "my_package:ColourExtractor"
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from importlib.metadata import entry_points
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from haav.errors import ConfigError, unknown
from haav.registry import Registry
from haav.types import PhotoView, ViewSpec

P = ParamSpec("P")
T = TypeVar("T")


def load_once(load: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for networks: threads that come at once wait for one load."""
    lock, loaded = threading.Lock(), cache(load)

    @wraps(load)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return loaded(*args, **kwargs)  # type: ignore[arg-type]

    return locked


class PhotoBatch:
    """A few photos, and what has been computed of them so far: extractors share their networks' outputs."""

    def __init__(self, ids: Sequence[str], images: Sequence[Image.Image] | None, **known: Any) -> None:
        """`images` None: only what is `known` (from a store) can be asked for"""
        self.ids = tuple(ids)
        self._images = images
        self._known = known

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def images(self) -> Sequence[Image.Image]:
        """The pictures themselves, upright RGB"""
        assert self._images is not None, "these photos are known only by what a store holds of them"
        return self._images

    def pixels(self, side: int, resample: Image.Resampling = Image.Resampling.BILINEAR) -> Tensor:
        """(B, 3, side, side) uint8 RGB, the whole photo squeezed into a square"""
        arrays = [np.asarray(image.resize((side, side), resample)) for image in self.images]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """The value under `name`, computed by whoever asks first."""
        if name not in self._known:
            self._known[name] = compute()
        value: T = self._known[name]
        return value


class Extractor(ABC):
    """Subclass, set the fields, write `extract`. Several threads may call it at once, each with photos of its own."""

    name: ClassVar[str]
    licence: ClassVar[str]
    """of the weights it runs"""
    spec: ViewSpec
    weights: ClassVar[tuple[str, ...]] = ()
    """names of the frozen weights it runs on (weights.py)"""
    needs_images: bool = True
    """False: it can work on what other views left in the store"""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the same photo would give other numbers."""

    @abstractmethod
    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        """One view a photo; a view without tokens says that the photo lacks it."""


extractors: Registry[Extractor] = Registry("view")


@cache
def _load_plugins() -> None:
    for point in entry_points(group="haav.views"):
        if point.name not in extractors:
            extractors.register(point.name)(point.load())


def view_names() -> list[str]:
    _load_plugins()
    return list(extractors)


def weights_of(views: Iterable[str]) -> tuple[str, ...]:
    """Names of the frozen weights that views run on; a view that is not installed says so when it is built"""
    _load_plugins()
    kinds = [extractors.get(name) for name in views if name in extractors]
    return tuple(dict.fromkeys(name for kind in kinds for name in kind.weights))


def build_extractor(name: str, **options: Any) -> Extractor:
    """The extractor of a view; options that it does not take (a bridge for `grid`) are left out."""
    _load_plugins()
    if name not in extractors:
        raise ConfigError(unknown("view", name, extractors))
    kind = extractors.get(name)
    wanted = kind.__init__.__code__.co_varnames if hasattr(kind.__init__, "__code__") else ()
    return kind(**{key: value for key, value in options.items() if key in wanted and value is not None})
