"""Errors a user can act on: what was given, what is allowed, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HaavError(Exception):
    """Base of every error that haav raises for a mistake that is not its own."""


class ConfigError(HaavError):
    """A setting, flag or combination of them that cannot work."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigError:
        """One error for all problems, so that a user fixes them in one go."""
        if len(problems) == 1:
            return cls(problems[0])
        listed = "\n".join(f"  {number}. {text}" for number, text in enumerate(problems, 1))
        return cls(f"{len(problems)} problems:\n{listed}")


class ViewError(HaavError):
    """Views that do not fit the model they were given to."""


class ImageError(HaavError):
    """A picture that cannot be read."""


class StoreError(HaavError):
    """A view store that is missing, broken, or of other extractors."""


class DataError(HaavError):
    """A data set or a file of features that cannot be read or contradicts itself."""


class TrainingError(HaavError):
    """A run that cannot go on by itself."""


class CheckpointError(HaavError):
    """A model directory or weights file that cannot be read or does not fit."""


class WeightsError(HaavError):
    """Frozen weights that are not on this machine and cannot be fetched, or are not what they should be."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or nothing when no allowed name is close."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> str:
    """The one sentence in which every unknown name is reported."""
    names = sorted(allowed)
    return f"unknown {kind} '{given}'.{did_you_mean(given, names)}\n  Available: {', '.join(names)}."
