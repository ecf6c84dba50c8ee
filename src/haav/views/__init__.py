"""Views of photos: every file of this folder that holds an extractor registers it."""

from haav.registry import import_siblings
from haav.views.base import (
    BrokenPlugin,
    Extractor,
    PhotoBatch,
    broken_plugins,
    build_extractor,
    check_options,
    extractor_kind,
    extractors,
    view_names,
    views_that_give,
    weights_of,
)

import_siblings(__name__, __path__)

DEFAULT_VIEWS = ("grid", "cells", "objects", "regions")
"""what `haav extract` makes where no views are named: those that need photos alone"""

__all__ = [
    "DEFAULT_VIEWS",
    "BrokenPlugin",
    "Extractor",
    "PhotoBatch",
    "broken_plugins",
    "build_extractor",
    "check_options",
    "extractor_kind",
    "extractors",
    "view_names",
    "views_that_give",
    "weights_of",
]
