"""Photos to the views of a model, live: no store between."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image

from haav.errors import CheckpointError, DataError, ViewError
from haav.files import json_of
from haav.provenance import MadeBy, accepted_by_all, check_made_by
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor, PhotoBatch, build_extractor, check_options, extractor_kind, weights_of
from haav.views.retrieval.textdb import MANIFEST

BRIDGE, TEXTDB = "bridge", "textdb"
"""folders of a model directory that can look at photos: what its text views are retrieved with"""


def own_texts(home: str | Path) -> dict[str, Any]:
    """The bridge and text database that lie in a model directory, if they do"""
    return {name: str(Path(home) / name) for name in (BRIDGE, TEXTDB) if (Path(home) / name).is_dir()}


class ViewExtractors:
    """The extractors that views need, made when first used. Any number of threads may look at once."""

    def __init__(
        self,
        specs: Mapping[str, ViewSpec],
        home: str | Path | None = None,
        made_by: MadeBy | None = None,
        **options: Any,
    ) -> None:
        """`home`: the model's directory; `made_by`: which extractors it accepts; `options`: of extractors, e.g.
        `clip_model`"""
        if options:
            check_options(options)
        self.specs = dict(specs)
        self.options = (own_texts(home) if home else {}) | options
        self.made_by = dict(made_by or {})
        self._owners: dict[str, ViewExtractors] = {}
        """of several models together: whose extractor serves a view"""
        self._lock = threading.Lock()
        self._made: dict[str, Extractor] = {}

    @classmethod
    def together(cls, parts: Sequence[ViewExtractors]) -> ViewExtractors:
        """For views of several models. One that several read is extracted once, by the first model's extractor: it must
        be the same for all."""
        together = cls({}, made_by=accepted_by_all([one.made_by for one in parts]))
        for one in parts:
            for name, spec in one.specs.items():
                first = together._owners.setdefault(name, one._owners.get(name, one))
                together.specs.setdefault(name, spec)
                _check_same_texts(name, first, one._owners.get(name, one))
        return together

    def extract(self, images: Sequence[Image.Image], views: Sequence[str]) -> dict[str, list[PhotoView]]:
        """Upright RGB pictures → for each of `views` one view a picture"""
        photos = PhotoBatch([f"photo {number}" for number in range(len(images))], images)
        return {name: photos.view(self.extractor(name)) for name in views}

    def weights(self, views: Sequence[str]) -> tuple[str, ...]:
        """Names of the frozen weights that looking by these views takes"""
        each = (weights_of([name], **self._owners.get(name, self).options) for name in views)
        return tuple(dict.fromkeys(chain.from_iterable(each)))

    def extractor(self, name: str) -> Extractor:
        """Of a view; an error where it is not the one that the model was trained with"""
        with self._lock:
            if name not in self._made:
                owner = self._owners.get(name)
                extractor = owner.extractor(name) if owner else build_extractor(name, **self.options)
                if extractor.spec != self.specs[name]:
                    raise CheckpointError(
                        f"this model was trained on another '{name}' than the one installed: {self.specs[name]} "
                        f"instead of {extractor.spec}."
                    )
                check_made_by(self.made_by, {name: extractor.origin}, "the one that looks at photos")
                self._made[name] = extractor
            return self._made[name]


def _check_same_texts(view: str, first: ViewExtractors, other: ViewExtractors) -> None:
    """Models that do not say what they were trained with may still bring their own bridges and texts."""
    kind = extractor_kind(view)
    for need in kind.needs if kind else ():
        path, other_path = first.options.get(need), other.options.get(need)
        if path is None or other_path is None or path == other_path:
            continue
        origin, other_origin = read_origin(path), read_origin(other_path)
        if origin != other_origin:
            raise ViewError(
                f"these models bring a different {need} for '{view}':\n"
                f"  {path}  {origin}\n  {other_path}  {other_origin}\n"
                "  An ensemble looks at a photo once. Train its members on one store."
            )


def read_origin(folder: str | Path) -> str:
    """What a bridge or text database was, or was made from, without loading it"""
    path = Path(folder) / MANIFEST
    try:
        manifest = json_of(path.read_text(encoding="utf-8"))
        return str(manifest.get("origin") or manifest["fingerprint"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
