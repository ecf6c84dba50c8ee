"""Encoding strategies: every file of this folder registers one, or a few that are alike."""

from haav.model.encodings.base import Encoding, encodings
from haav.registry import import_siblings

import_siblings(__name__, __path__)

__all__ = ["Encoding", "encodings"]
