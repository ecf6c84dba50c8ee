"""Errors that a user can act on. They state what was given, what is allowed and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class HaavError(Exception):
    """Base of all errors that are caused by inputs, not by bugs of haav."""


class ConfigError(HaavError):
    """A setting, flag or combination of them that cannot work."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigError:
        """One error for all problems, so that a user can fix them at once."""
        if len(problems) == 1:
            return cls(problems[0])
        listed = "\n".join(f"  {index}. {text}" for index, text in enumerate(problems, 1))
        return cls(f"{len(problems)} problems:\n{listed}")


class ViewError(HaavError):
    """Views that do not fit the model they were given to."""


class ImageError(HaavError):
    """A picture that cannot be read."""


class StoreError(HaavError):
    """A view store that is missing, broken, or made by other extractors."""


class DataError(HaavError):
    """A data set or a file of features that cannot be read or contradicts itself."""


class TrainingError(HaavError):
    """A training run that cannot continue."""


class CheckpointError(HaavError):
    """A model directory or weights file that cannot be read or does not fit."""


class WeightsError(HaavError):
    """Frozen weights that are not on this machine and cannot be fetched, or are not what they should be."""


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or an empty string if no allowed name is close."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def unknown(what: str, name: str, allowed: Iterable[str]) -> str:
    """The message for an unknown name, the same everywhere."""
    names = sorted(allowed)
    return f"unknown {what} '{name}'.{did_you_mean(name, names)}\n  Available: {', '.join(names)}."
