"""Aggregators, one file each; importing the folder registers them all."""

from haav.model.aggregators import concat_tokens, gate, hierarchical, pool
from haav.model.aggregators.base import Aggregator, aggregators

__all__ = ["Aggregator", "aggregators", "concat_tokens", "gate", "hierarchical", "pool"]
