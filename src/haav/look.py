"""Photos to the views of a model, live: no store between."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from haav.errors import CheckpointError
from haav.types import PhotoView, ViewSpec
from haav.views import Extractor, PhotoBatch, build_extractor

BRIDGE, TEXTDB = "bridge", "textdb"
"""folders of a model directory that can look at photos: what its text views are retrieved with"""


def own_texts(home: str | Path) -> dict[str, Any]:
    """The bridge and text database that lie in a model directory, if they do"""
    return {name: str(Path(home) / name) for name in (BRIDGE, TEXTDB) if (Path(home) / name).is_dir()}


class Eyes:
    """The extractors that views need, made when first used. Any number of threads may look at once."""

    def __init__(self, specs: Mapping[str, ViewSpec], home: str | Path | None = None, **options: Any) -> None:
        """`home`: the model's directory; `options`: of extractors, e.g. `clip_model`"""
        self.specs = dict(specs)
        self.options = (own_texts(home) if home else {}) | options
        self._lock = threading.Lock()
        self._made: dict[str, Extractor] = {}

    @classmethod
    def together(cls, eyes: Sequence[Eyes]) -> Eyes:
        """For views of several models; where two have the same, the first one's is used"""
        specs = {name: spec for one in reversed(eyes) for name, spec in one.specs.items()}
        options = {key: value for one in reversed(eyes) for key, value in one.options.items()}
        return cls(specs, **options)

    def __call__(self, images: Sequence[Image.Image], views: Sequence[str]) -> dict[str, list[PhotoView]]:
        """Upright RGB pictures → for each of `views` one view a picture"""
        photos = PhotoBatch([f"photo {number}" for number in range(len(images))], images)
        return {name: self._extractor(name).extract(photos) for name in views}

    def _extractor(self, name: str) -> Extractor:
        with self._lock:
            if name not in self._made:
                extractor = build_extractor(name, **self.options)
                if extractor.spec != self.specs[name]:
                    raise CheckpointError(
                        f"this model was trained on another '{name}' than the one installed: {self.specs[name]} "
                        f"instead of {extractor.spec}."
                    )
                self._made[name] = extractor
            return self._made[name]
