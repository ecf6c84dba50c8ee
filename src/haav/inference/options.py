"""Options of captioning: typed, frozen, and validated where a user passes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from haav.config import MAX_CAPTIONS, Config, DecodeConfig, override
from haav.errors import ConfigError, did_you_mean

OptionValue = str | int | float | bool | Sequence[str] | None


@dataclass(frozen=True)
class CaptionOptions:
    """Options for captions. A decode setting that is None takes its value from the model.

    >>> CaptionOptions(beam=3, n_best=2, never=("man",)).beam
    3
    """

    n_best: int = 1
    """captions per photo, the best first"""
    views: tuple[str, ...] | None = None
    """use only these views of the model"""
    must: tuple[str, ...] = ()
    """words that captions must contain; "dog|puppy": one of them"""
    never: tuple[str, ...] = ()
    """words that captions must not contain"""
    seed: int | None = None
    """random seed of samples"""
    prefix: str = ""
    """words that captions begin with"""

    method: str | None = None
    beam: int | None = None
    keep_greedy: bool | None = None
    length_penalty: float | None = None
    groups: int | None = None
    diversity: float | None = None
    samples: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_words: int | None = None
    min_words: int | None = None
    no_repeat: int | None = None
    no_doubles: bool | None = None
    allow_unk: bool | None = None
    allow_cut: bool | None = None
    collapse_repeats: bool | None = None
    consensus: float | None = None
    consensus_of: int | None = None

    def __post_init__(self) -> None:
        for name in ("must", "never"):
            words = getattr(self, name)
            if isinstance(words, str):
                raise ConfigError(f"{name} takes a list of words: {name}=['{words}'].")
            object.__setattr__(self, name, tuple(words))
        if not isinstance(self.prefix, str):
            raise ConfigError(f"prefix is a text, not {self.prefix!r}.")
        if self.views is not None:
            object.__setattr__(self, "views", (self.views,) if isinstance(self.views, str) else tuple(self.views))
        if not isinstance(self.n_best, int) or not 1 <= self.n_best <= MAX_CAPTIONS:
            raise ConfigError(f"n_best must be a whole number from 1 to {MAX_CAPTIONS}, not {self.n_best!r}.")

    @classmethod
    def of(cls, base: CaptionOptions | None, settings: Mapping[str, OptionValue]) -> CaptionOptions:
        """`base`, or the defaults, with some settings replaced by name"""
        known = [field.name for field in fields(cls)]
        wrong = [name for name in settings if name not in known]
        if wrong:
            raise ConfigError.of(
                [
                    f"unknown setting '{name}'.{did_you_mean(name, known)}\n  Available: {', '.join(sorted(known))}."
                    for name in wrong
                ]
            )
        return replace(base or cls(), **settings)  # type: ignore[arg-type]  # __post_init__ and `decode` check them

    def decode(self, config: Config) -> DecodeConfig:
        """The decode settings of the model, with the given ones replaced"""
        settings = {name: getattr(self, name) for name in _DECODE if getattr(self, name) is not None}
        decode = override(config, "decode", settings).decode if settings else config.decode
        source = "samples" if decode.method == "sample" else "beam"
        if self.n_best > getattr(decode, source):
            raise ConfigError(
                f"{self.n_best} captions per photo need decode.{source} of at least {self.n_best}, "
                f"not {getattr(decode, source)}."
            )
        return decode


_DECODE = tuple(field.name for field in fields(DecodeConfig))
