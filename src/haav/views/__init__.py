"""Views of photos: every file of this folder that holds an extractor registers it."""

from haav.registry import import_siblings
from haav.views.base import Extractor, PhotoBatch, build_extractor, extractors, view_names, weights_of

import_siblings(__name__, __path__)

__all__ = ["Extractor", "PhotoBatch", "build_extractor", "extractors", "view_names", "weights_of"]
