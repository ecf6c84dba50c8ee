"""The base class of extractors. An extractor turns photos into one view, usually with a frozen network.

A third party adds a view with a class like this and one line in its own pyproject.toml:

    [project.entry-points."haav.views"]
    colours = "my_package:ColourExtractor"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract, signature
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from PIL import Image
from torch import Tensor

from haav.errors import ConfigError, HaavError, ViewError, unknown
from haav.photos.images import square_pixels
from haav.registry import Registry
from haav.types import PhotoView, ViewSpec
from haav.views.options import ExtractorOptions

T = TypeVar("T")


class PhotoBatch:
    """A few photos and the values computed from them so far. Extractors share the outputs of their networks."""

    def __init__(self, ids: Sequence[str], images: Sequence[Image.Image] | None, **known: Any) -> None:
        """`known`: stored views by name; with `images` None, the pictures are not available"""
        self.ids = tuple(ids)
        self._images = images
        self._stored, self._known = known, dict(known)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def images(self) -> Sequence[Image.Image]:
        """The pictures, upright RGB."""
        assert self._images is not None, "these photos are known only by what a store holds of them"
        return self._images

    def pixels(self, side: int, resample: Image.Resampling = Image.Resampling.BILINEAR) -> Tensor:
        """(B, 3, side, side) uint8 RGB: the whole photo resized to a square."""
        return torch.from_numpy(square_pixels(self.images, side, resample))

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """The value under `name`, computed on first use."""
        if name not in self._known:
            self._known[name] = compute()
        value: T = self._known[name]
        return value

    def apart(self) -> list[PhotoBatch]:
        """One batch per photo, without computed values."""
        if self._images is None:
            stored = [{view: [views[row]] for view, views in self._stored.items()} for row in range(len(self))]
            return [PhotoBatch([photo], None, **known) for photo, known in zip(self.ids, stored, strict=True)]
        return [PhotoBatch([photo], [image]) for photo, image in zip(self.ids, self._images, strict=True)]

    def view(self, extractor: Extractor) -> list[PhotoView]:
        """The extractor's view of these photos, computed once. Other views may be computed from it."""
        return self.once(extractor.name, lambda: extractor.extract(self))


@dataclass(frozen=True)
class TracedView:
    """A view of one photo whose tensors are values of a graph that `haav export` writes."""

    view: PhotoView
    rows: Tensor | None = None
    """(S,) int64: the sentence of each token, for a view that gives sentences"""
    sentences: Sequence[str] = ()
    """what `rows` refers to"""


class Extractor(ABC):
    """Subclass it, set the fields and implement `extract`. Several threads may call it, each with its own photos."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """what the view is, in plain words, for the readers of an explanation; empty: its name"""
    licence: ClassVar[str]
    """of the weights it runs"""
    needs: ClassVar[tuple[str, ...]] = ()
    """required options: "bridge", "textdb". A packed model includes them. The fingerprint names each as
    `bridge-FINGERPRINT`, `textdb-FINGERPRINT`."""
    gives: ClassVar[tuple[str, ...]] = ()
    """what its labels are: "sentences" (retrieved texts, the nearest first), "boxes" (classes of detected objects)"""
    spec: ViewSpec
    weights: ClassVar[tuple[str, ...]] = ()
    """names of the frozen weights it runs on (haav.weights)"""
    reads: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """stored views that it can read instead of the photo, each with the fingerprints it accepts (an empty tuple accepts
    any). If this is empty, it needs the photo itself."""
    exportable: ClassVar[bool] = False
    """whether `haav export` can write it as an ONNX graph, by tracing `extract` of one photo. It then takes pixels from
    `photos.pixels` and computes with tensor operations alone: no Python branch depends on their values. The views that
    it `reads` must be exportable too."""

    def __init__(self, device: str = "cpu") -> None:
        """`device`: where its networks run; views are returned on the CPU"""
        self.device = check_device(device)

    @classmethod
    def weights_with(cls, options: ExtractorOptions) -> tuple[str, ...]:
        """Names of the frozen weights that an extractor built with these options runs on."""
        return cls.weights

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Differs whenever the same photo would give different tokens."""

    @property
    def origin(self) -> str:
        """The fingerprint that models compare: the one before a packed bridge or text database was rounded."""
        return self.fingerprint

    @abstractmethod
    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        """One view per photo. A view without tokens means that the photo lacks it."""

    @classmethod
    def crop_boxes(cls) -> Tensor | None:
        """For tokens with the index `crop`: the box of each crop, (crops, 4) as fractions of the photo."""
        return None

    def trace(self, photo: PhotoBatch) -> TracedView:
        """The view of one photo, while its operations are recorded. Labels are not part of the graph."""
        (view,) = photo.view(self)
        return TracedView(view)


def check_device(name: str) -> str:
    """The name, if torch can use that device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # an assertion of torch: it was built without this kind of device
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        available = ", ".join(device for device, usable in there.items() if usable)
        raise ConfigError(f"device '{name}' cannot be used on this machine. Available: {available}.") from None
    return name


extractors: Registry[Extractor] = Registry("view")


@dataclass(frozen=True)
class BrokenPlugin:
    """An entry point that provides no view, and the reason."""

    view: str
    source: str
    """package and entry point"""
    error: str

    def __str__(self) -> str:
        return f"view '{self.view}' of the plug-in {self.source}: {self.error}"


_plugins: dict[str, str] = {}
"""view → package and entry point, of working plug-ins"""


@cache
def broken_plugins() -> tuple[BrokenPlugin, ...]:
    """Loads all plug-ins and returns those that cannot be used. A broken plug-in does not affect other views."""
    broken = []
    for point in sorted(entry_points(group="haav.views"), key=lambda point: (point.name, point.value)):
        package = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown package"
        source = f"{package} ({point.value})"
        if point.name in extractors and _plugins.get(point.name) == source:
            continue  # already loaded
        error = _load_plugin(point)
        if error:
            broken.append(BrokenPlugin(point.name, source, error))
        else:
            _plugins[point.name] = source
    return tuple(broken)


def _load_plugin(point: EntryPoint) -> str:
    """Registers the view of a plug-in. Returns an error message, empty on success."""
    if point.name in extractors:
        other = _plugins.get(point.name)
        return f"the name is taken by {f'the plug-in {other}' if other else 'a view of haav'}; choose another"
    try:
        extractor_class = point.load()
    except (Exception, SystemExit) as error:  # importing third-party code may raise anything
        return f"{type(error).__name__}: {error}"
    if not (isinstance(extractor_class, type) and issubclass(extractor_class, Extractor)):
        return f"{point.value} is not a subclass of haav.views.Extractor"
    if getattr(extractor_class, "name", None) != point.name:
        return f"{point.value} has the name {getattr(extractor_class, 'name', None)!r}, its entry point {point.name!r}"
    if isabstract(extractor_class):
        return f"{point.value} lacks {', '.join(sorted(extractor_class.__abstractmethods__))}"
    extractors.register(point.name)(extractor_class)
    return ""


def view_names() -> list[str]:
    broken_plugins()
    return list(extractors)


def weights_of(views: Iterable[str], options: ExtractorOptions | None = None) -> tuple[str, ...]:
    """Names of the frozen weights that views run on. Unknown views are skipped; building them raises."""
    resolved = options or ExtractorOptions()
    classes = [extractor_class for extractor_class in map(find_extractor_class, views) if extractor_class is not None]
    return tuple(dict.fromkeys(name for extractor_class in classes for name in extractor_class.weights_with(resolved)))


def find_extractor_class(name: str) -> type[Extractor] | None:
    """The extractor class of a view. None for a view without an extractor, such as imported features."""
    broken_plugins()
    return extractors.get(name) if name in extractors else None


def views_that_give(what: str, names: Iterable[str]) -> list[str]:
    """The views among `names` whose extractors declare `what` in `gives`."""
    classes = ((name, find_extractor_class(name)) for name in names)
    return [name for name, extractor_class in classes if extractor_class is not None and what in extractor_class.gives]


def view_titles(names: Iterable[str]) -> dict[str, str]:
    """View → what it is, in plain words. Views that share a title are told apart by their names."""
    classes = ((name, find_extractor_class(name)) for name in names)
    titles = {name: (extractor_class.title if extractor_class else "") or name for name, extractor_class in classes}
    shared = {title for title, count in Counter(titles.values()).items() if count > 1}
    return {name: f"{title} ({name})" if title in shared else title for name, title in titles.items()}


def check_options(options: ExtractorOptions) -> None:
    """Raises for an option that no extractor takes, and for a device that is not there."""
    check_device(options.device)
    known = {option for view in view_names() for option in _parameters(extractors.get(view))}
    for name in options.given():
        if name not in known:
            raise ConfigError(unknown("option of views", name, known))


def build_extractor(name: str, options: ExtractorOptions | None = None) -> Extractor:
    """The extractor of a view. Options that only other extractors take (a bridge for `grid`) are ignored."""
    resolved = options or ExtractorOptions()
    check_options(resolved)
    extractor_class = find_extractor_class(name)
    if extractor_class is None:
        for plugin in broken_plugins():
            if plugin.view == name:
                raise ViewError(f"{plugin}.\n  Fix or uninstall the package; other views work without it.")
        raise ConfigError(
            unknown("view", name, extractors) + "".join(f"\n  Broken: {plugin}." for plugin in broken_plugins())
        )
    parameters = _parameters(extractor_class)
    accepted: dict[str, Any] = {key: value for key, value in resolved.given().items() if key in parameters}
    try:
        return extractor_class(**accepted)
    except Exception as error:
        if name in _plugins and not isinstance(error, HaavError):
            broken = BrokenPlugin(name, _plugins[name], f"{type(error).__name__}: {error}")
            raise ViewError(f"{broken}.\n  Ask its authors; other views work without it.") from error
        raise


def _parameters(extractor_class: type[Extractor]) -> set[str]:
    """Names of the options that an extractor takes"""
    parameters = list(signature(extractor_class.__init__).parameters.values())[1:]
    return {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
