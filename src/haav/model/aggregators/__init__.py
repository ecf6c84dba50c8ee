"""Aggregators: every file of this folder registers one, or a few that are alike."""

from haav.model.aggregators.base import Aggregator, aggregators
from haav.registry import import_siblings

import_siblings(__name__, __path__)

__all__ = ["Aggregator", "aggregators"]
