"""Encoding strategies, one file each; importing the folder registers them all."""

from haav.model.encodings import concat_views, model_per_view, shared, unshared
from haav.model.encodings.base import Encoding, encodings

__all__ = ["Encoding", "concat_views", "encodings", "model_per_view", "shared", "unshared"]
