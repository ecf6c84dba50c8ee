"""Views of photos. Every file of `embedded` and `hub` registers the extractors that it defines."""

from importlib import import_module

from haav.registry import import_siblings
from haav.views.base import (
    BrokenPlugin,
    Extractor,
    PhotoBatch,
    broken_plugins,
    build_extractor,
    check_options,
    extractors,
    find_extractor_class,
    view_names,
    view_titles,
    views_that_give,
    weights_of,
)
from haav.views.options import ExtractorOptions

for _folder in ("embedded", "hub"):
    import_siblings(f"{__name__}.{_folder}", import_module(f"{__name__}.{_folder}").__path__)
import_module(f"{__name__}.retrieval.text")

DEFAULT_VIEWS = ("patches", "patch_regions")
"""the default of `haav extract`: views that need only the photos"""

__all__ = [
    "DEFAULT_VIEWS",
    "BrokenPlugin",
    "Extractor",
    "ExtractorOptions",
    "PhotoBatch",
    "broken_plugins",
    "build_extractor",
    "check_options",
    "extractors",
    "find_extractor_class",
    "view_names",
    "view_titles",
    "views_that_give",
    "weights_of",
]
