"""Extracts the views that a model reads directly from photos, without a store."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from PIL import Image

from haav.errors import CheckpointError, DataError, ViewError
from haav.files import json_of
from haav.provenance import MadeBy, accepted_by_all, check_made_by
from haav.types import PhotoView, ViewSpec
from haav.views import (
    Extractor,
    ExtractorOptions,
    PhotoBatch,
    build_extractor,
    check_options,
    find_extractor_class,
    weights_of,
)
from haav.views.retrieval.textdb import MANIFEST

BRIDGE, TEXTDB = "bridge", "textdb"
"""folders of a packed model directory: what its text views are retrieved with"""


def own_texts(home: str | Path) -> dict[str, str]:
    """Paths of the bridge and the text database in a model directory, if they exist."""
    return {name: str(Path(home) / name) for name in (BRIDGE, TEXTDB) if (Path(home) / name).is_dir()}


def with_own_texts(options: ExtractorOptions, home: str | Path) -> ExtractorOptions:
    """`options` with the bridge and the text database of a model directory, where they name none."""
    own = own_texts(home)
    bridge = own.get(BRIDGE) if options.bridge is None else options.bridge
    textdb = own.get(TEXTDB) if options.textdb is None else options.textdb
    return replace(options, bridge=bridge, textdb=textdb)


class ViewExtractors:
    """The extractors of a model's views, built on first use. Any number of threads may use them at once."""

    def __init__(
        self,
        specs: Mapping[str, ViewSpec],
        home: str | Path | None = None,
        made_by: MadeBy | None = None,
        options: ExtractorOptions | None = None,
    ) -> None:
        """`home`: the model's directory; `made_by`: the extractors that it accepts"""
        resolved = options or ExtractorOptions()
        check_options(resolved)
        self.specs = dict(specs)
        self.options = with_own_texts(resolved, home) if home else resolved
        self.made_by = dict(made_by or {})
        self._owners: dict[str, ViewExtractors] = {}
        """for several models together: view → the extractors that serve it"""
        self._lock = threading.Lock()
        self._made: dict[str, Extractor] = {}

    @classmethod
    def together(cls, parts: Sequence[ViewExtractors]) -> ViewExtractors:
        """The extractors of several models. A view that several models read is extracted once, by the first model's
        extractor, which must be the same for all of them."""
        together = cls({}, made_by=accepted_by_all([part.made_by for part in parts]))
        for part in parts:
            for name, spec in part.specs.items():
                first = together._owners.setdefault(name, part._owners.get(name, part))
                together.specs.setdefault(name, spec)
                _check_same_texts(name, first, part._owners.get(name, part))
        return together

    def extract(self, images: Sequence[Image.Image], views: Sequence[str]) -> dict[str, list[PhotoView]]:
        """Upright RGB pictures → for each of `views`, one view per picture."""
        photos = PhotoBatch([f"photo {index}" for index in range(len(images))], images)
        return {name: photos.view(self.extractor(name)) for name in views}

    def weights(self, views: Sequence[str]) -> tuple[str, ...]:
        """Names of the frozen weights that these views run on."""
        names = (weights_of([name], self._owners.get(name, self).options) for name in views)
        return tuple(dict.fromkeys(chain.from_iterable(names)))

    def extractor(self, name: str) -> Extractor:
        """The extractor of a view. Raises if it is not the one that the model was trained with."""
        with self._lock:
            if name not in self._made:
                owner = self._owners.get(name)
                extractor = owner.extractor(name) if owner else build_extractor(name, self.options)
                if extractor.spec != self.specs[name]:
                    raise CheckpointError(
                        f"this model was trained on another '{name}' than the one installed: {self.specs[name]} "
                        f"instead of {extractor.spec}."
                    )
                check_made_by(self.made_by, {name: extractor.origin}, "the one installed")
                self._made[name] = extractor
            return self._made[name]


def _check_same_texts(view: str, first: ViewExtractors, other: ViewExtractors) -> None:
    """Compares bridges and text databases, which models may bring even if they record no fingerprints."""
    extractor_class = find_extractor_class(view)
    for need in extractor_class.needs if extractor_class else ():
        path, other_path = (part.options.given().get(need) for part in (first, other))
        if path == other_path or not (isinstance(path, (str, Path)) and isinstance(other_path, (str, Path))):
            continue
        origin, other_origin = read_origin(path), read_origin(other_path)
        if origin != other_origin:
            raise ViewError(
                f"these models have a different {need} for '{view}':\n"
                f"  {path}  {origin}\n  {other_path}  {other_origin}\n"
                "  An ensemble extracts each view once. Train its members on one store."
            )


def read_origin(folder: str | Path) -> str:
    """The origin of a bridge or text database, or else its fingerprint, read without loading it."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json_of(path.read_text(encoding="utf-8"))
        return str(manifest.get("origin") or manifest["fingerprint"])
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
