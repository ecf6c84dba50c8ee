"""What an extractor is: a frozen network, or anything else, that turns photos into one view.

A third party adds a view with a class like this and one line in its own pyproject.toml:

    [project.entry-points."haav.views"]
    colours = "my_package:ColourExtractor"
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract, signature
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from haav.errors import ConfigError, HaavError, ViewError, unknown
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
        self._stored, self._known = known, dict(known)

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

    def apart(self) -> list[PhotoBatch]:
        """Each photo by itself, with nothing computed of it yet"""
        if self._images is None:
            stored = [{view: [views[row]] for view, views in self._stored.items()} for row in range(len(self))]
            return [PhotoBatch([photo], None, **known) for photo, known in zip(self.ids, stored, strict=True)]
        return [PhotoBatch([photo], [image]) for photo, image in zip(self.ids, self._images, strict=True)]

    def view(self, extractor: Extractor) -> list[PhotoView]:
        """Its view of these photos, computed once: other views may be made of it"""
        return self.once(extractor.name, lambda: extractor.extract(self))


class Extractor(ABC):
    """Subclass, set the fields, write `extract`. Several threads may call it at once, each with photos of its own."""

    name: ClassVar[str]
    licence: ClassVar[str]
    """of the weights it runs"""
    needs: ClassVar[tuple[str, ...]] = ()
    """options it cannot be built without: "bridge", "textdb". A packed model takes them along, and the fingerprint
    names each as `bridge-FINGERPRINT`, `textdb-FINGERPRINT`."""
    gives: ClassVar[tuple[str, ...]] = ()
    """what its tokens are to a reader: "sentences" (labels are retrieved texts, the nearest first), "boxes" (labels are
    classes of detected things)"""
    spec: ViewSpec
    weights: ClassVar[tuple[str, ...]] = ()
    """names of the frozen weights it runs on (weights.py)"""
    reads: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """stored views that can stand for the photo, each with the fingerprints it accepts; none named: any. Empty: it
    needs the photo itself."""

    def __init__(self, device: str = "cpu") -> None:
        """`device`: where its networks run; views come back to the CPU"""
        self.device = check_device(device)

    @classmethod
    def weights_with(cls, **options: Any) -> tuple[str, ...]:
        """Names of the frozen weights it would run on if it were built with these options"""
        return cls.weights

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes whenever the same photo would give other numbers."""

    @property
    def origin(self) -> str:
        """What a model compares: the fingerprint before a packed bridge or text database was rounded."""
        return self.fingerprint

    @abstractmethod
    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        """One view a photo; a view without tokens says that the photo lacks it."""


def check_device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"device '{name}' cannot be used: {reason}.\n  Without a GPU: device cpu.") from None
    return name


extractors: Registry[Extractor] = Registry("view")


@dataclass(frozen=True)
class BrokenPlugin:
    """An entry point that gives no view, and why"""

    view: str
    source: str
    """package and entry point"""
    error: str

    def __str__(self) -> str:
        return f"view '{self.view}' of the plug-in {self.source}: {self.error}"


_plugins: dict[str, str] = {}
"""view → package and entry point, of the plug-ins that work"""


@cache
def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """Load all plug-ins → those that cannot be used. One that fails costs its own view and no other."""
    broken = []
    for point in sorted(entry_points(group="haav.views"), key=lambda point: (point.name, point.value)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
        source = f"{package} ({point.value})"
        if point.name in extractors and _plugins.get(point.name) == source:
            continue  # loaded before
        error = _load_plugin(point)
        if error:
            broken.append(BrokenPlugin(point.name, source, error))
        else:
            _plugins[point.name] = source
    return tuple(broken)


def _load_plugin(point: EntryPoint) -> str:
    """Register its view → what is wrong with it, or nothing"""
    if point.name in extractors:
        other = _plugins.get(point.name)
        return f"the name is taken by {f'the plug-in {other}' if other else 'a view of haav'}; choose another"
    try:
        kind = point.load()
    except (Exception, SystemExit) as error:  # whatever a stranger's module does while it is imported
        return f"{type(error).__name__}: {error}"
    if not (isinstance(kind, type) and issubclass(kind, Extractor)):
        return f"{point.value} is not a subclass of haav.views.Extractor"
    if getattr(kind, "name", None) != point.name:
        return f"{point.value} has the name {getattr(kind, 'name', None)!r}, its entry point {point.name!r}"
    if isabstract(kind):
        return f"{point.value} lacks {', '.join(sorted(kind.__abstractmethods__))}"
    extractors.register(point.name)(kind)
    return ""


def view_names() -> list[str]:
    broken_plugins()
    return list(extractors)


def weights_of(views: Iterable[str], **options: Any) -> tuple[str, ...]:
    """Names of the frozen weights that views run on; a view that is not installed says so when it is built"""
    kinds = [kind for kind in map(extractor_kind, views) if kind is not None]
    return tuple(dict.fromkeys(name for kind in kinds for name in kind.weights_with(**options)))


def extractor_kind(name: str) -> type[Extractor] | None:
    """The class that makes a view; None for one that no extractor makes, such as imported features"""
    broken_plugins()
    return extractors.get(name) if name in extractors else None


def views_that_give(what: str, names: Iterable[str]) -> list[str]:
    """Those of the named views whose extractors declare it"""
    kinds = ((name, extractor_kind(name)) for name in names)
    return [name for name, kind in kinds if kind is not None and what in kind.gives]


def check_options(names: Iterable[str]) -> None:
    """An option that no extractor takes is a misspelling."""
    known = {option for view in view_names() for option in _options(extractors.get(view))}
    for name in names:
        if name not in known:
            raise ConfigError(unknown("option of views", name, known))


def build_extractor(name: str, **options: Any) -> Extractor:
    """The extractor of a view; options of other extractors (a bridge for `grid`) are left out."""
    check_options(options)
    kind = extractor_kind(name)
    if kind is None:
        for plugin in broken_plugins():
            if plugin.view == name:
                raise ViewError(f"{plugin}.\n  Mend or uninstall the package; other views work without it.")
        raise ConfigError(
            unknown("view", name, extractors) + "".join(f"\n  Broken: {one}." for one in broken_plugins())
        )
    own = {key: value for key, value in options.items() if key in _options(kind) and value is not None}
    try:
        return kind(**own)
    except Exception as error:
        if name in _plugins and not isinstance(error, HaavError):
            broken = BrokenPlugin(name, _plugins[name], f"{type(error).__name__}: {error}")
            raise ViewError(f"{broken}.\n  Ask its authors; other views work without it.") from error
        raise


def _options(kind: type[Extractor]) -> set[str]:
    parameters = list(signature(kind.__init__).parameters.values())[1:]
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
