"""From encoded views to captions: a loop, a strategy that chooses words, rules that forbid some."""

from haav.generate.beam import BeamSearch
from haav.generate.build import build_rules, build_strategy, demanded, forbidden
from haav.generate.loop import CaptionModel, Choice, Generated, Strategy, collapse_repeats, generate
from haav.generate.rules import Ending, Never, NoRepeats, Rule
from haav.generate.sample import Sampling

__all__ = [
    "BeamSearch",
    "CaptionModel",
    "Choice",
    "Ending",
    "Generated",
    "Never",
    "NoRepeats",
    "Rule",
    "Sampling",
    "Strategy",
    "build_rules",
    "build_strategy",
    "collapse_repeats",
    "demanded",
    "forbidden",
    "generate",
]
