"""Build strategies and rules from the decode settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from haav.config import DecodeConfig
from haav.errors import ConfigError, did_you_mean
from haav.generate.beam import BeamSearch
from haav.generate.loop import Strategy
from haav.generate.rules import Ending, Never, NoDoubles, NoRepeats, Prefix, Rule
from haav.generate.sample import Sampling
from haav.text import BOS, EOS, PAD, UNK, Vocabulary, tokenize

MOST_DEMANDS = 4
"""the number of banks of a constrained search doubles with each"""


def build_strategy(
    settings: DecodeConfig,
    vocabulary: Vocabulary,
    must: Sequence[str] = (),
    n_best: int | None = None,
    generator: torch.Generator | None = None,
) -> Strategy:
    """`must`: words that captions must contain; "dog|puppy" stands for either of them"""
    demands = demanded(must, vocabulary)
    if settings.method == "sample":
        if demands:
            raise ConfigError("words that must be said need decode.method beam: a sample cannot look ahead.")
        return Sampling(settings.samples, settings.temperature, settings.top_k, settings.top_p, generator)
    if len(demands) > MOST_DEMANDS:
        raise ConfigError(f"at most {MOST_DEMANDS} words can be demanded, not {len(demands)}.")
    return BeamSearch(
        settings.beam,
        settings.length_penalty,
        demands,
        settings.groups,
        settings.diversity,
        n_best,
        settings.keep_greedy,
    )


def demanded(must: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    wanted = {tuple(_known(word, vocabulary) for word in choices.split("|")) for choices in _listed("must", must)}
    return sorted(map(list, wanted))


def forbidden(never: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    """Ids of forbidden words. Words outside the vocabulary are ignored, as the model cannot say them."""
    ids = (vocabulary.ids.get(_plain(word)) for word in _listed("never", never))
    return sorted({token for token in ids if token is not None and token not in (PAD, BOS, EOS)})


def first_words(prefix: str, vocabulary: Vocabulary) -> list[int]:
    """Ids of the words that captions begin with"""
    return [_known(word, vocabulary) for word in tokenize(prefix)]


def build_rules(
    settings: DecodeConfig, vocabulary: Vocabulary, never: Sequence[str] = (), prefix: str = ""
) -> list[Rule]:
    """`never`: words that captions must not contain; `prefix`: words that they begin with"""
    rules: list[Rule] = [Never([PAD, BOS, *([] if settings.allow_unk else [UNK])])]
    unsaid = forbidden(never, vocabulary)
    if unsaid:
        rules.append(Never(unsaid))
    if settings.no_repeat:
        rules.append(NoRepeats(settings.no_repeat))
    if settings.no_doubles:
        rules.append(NoDoubles(vocabulary.forms))
    if settings.min_words or not settings.allow_cut:
        dangling = [] if settings.allow_cut else vocabulary.dangling
        rules.append(Ending(settings.min_words, dangling, in_time=not settings.allow_cut))
    begun = first_words(prefix, vocabulary)
    if len(begun) >= settings.max_words:
        raise ConfigError(
            f"a caption has fewer than {settings.max_words} words, and the prefix has {len(begun)}.\n"
            "  Shorten the prefix, or raise decode.max_words."
        )
    for token in set(begun) & set(unsaid):
        raise ConfigError(f"'{vocabulary.words[token]}' is in the prefix, so it cannot be forbidden.")
    return [Prefix(begun, rules)] if begun else rules


def _known(word: str, vocabulary: Vocabulary) -> int:
    token = vocabulary.ids.get(_plain(word))
    if token is None or token in (UNK, PAD, BOS, EOS):
        raise ConfigError(f"the model does not know the word '{word}'.{did_you_mean(_plain(word), vocabulary.words)}")
    return token


def _plain(word: str) -> str:
    return word.strip().lower()


def _listed(name: str, words: Sequence[str]) -> Sequence[str]:
    if isinstance(words, str):
        raise ConfigError(f"{name} takes a list of words: {name}=['{words}'].")
    return words
