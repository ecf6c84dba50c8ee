"""Tokenizer and vocabulary: convert captions to word ids and back."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from haav.errors import CheckpointError

UNK, PAD, BOS, EOS = 0, 1, 2, 3
SPECIAL = ("<unk>", "<pad>", "<bos>", "<eos>")

_DANGLING = """
    a an the this that these those his its their my your our
    of with at in to from for into onto under between beside near
    and or but as while is are was were has have
"""
DANGLING = frozenset(_DANGLING.split())
"""words that a complete caption rarely ends with"""
_MORE = "on by next top front side other another one two some her it be being up down out"
FUNCTION = DANGLING | frozenset(_MORE.split())
"""words that captions need more than once"""

_WORD = re.compile(r"\w+(?:[-']\w+)*")


def tokenize(caption: str) -> list[str]:
    """Words in lower case without punctuation. Hyphens and apostrophes inside a word are kept."""
    plain = unicodedata.normalize("NFKC", caption).replace("’", "'").lower()
    return _WORD.findall(plain)


@dataclass(frozen=True)
class Vocabulary:
    words: tuple[str, ...]
    """words by id; the first four are `SPECIAL`"""

    @classmethod
    def build(cls, captions: Iterable[str], min_count: int = 5) -> Vocabulary:
        """Words that occur at least `min_count` times, most frequent first, ties in alphabetical order."""
        return cls(SPECIAL).extended(captions, min_count)

    def extended(self, captions: Iterable[str], min_count: int) -> Vocabulary:
        """With the new words that occur at least `min_count` times behind the known ones, whose ids stay."""
        counts = self.unknown(captions)
        new = [word for word, count in counts.items() if count >= min_count]
        return Vocabulary((*self.words, *sorted(new, key=lambda word: (-counts[word], word))))

    def unknown(self, captions: Iterable[str]) -> Counter[str]:
        """Words of the captions that are not in the vocabulary, with their counts"""
        return Counter(word for caption in captions for word in tokenize(caption) if word not in self.ids)

    @classmethod
    def from_json(cls, data: object) -> Vocabulary:
        """Read `{"words": [...]}`. Anything else raises a CheckpointError."""
        words = data.get("words") if isinstance(data, dict) else None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CheckpointError('vocabulary.json must be {"words": [a string for each id]}.')
        if tuple(words[: len(SPECIAL)]) != SPECIAL:
            raise CheckpointError(f"vocabulary.json must begin with {', '.join(SPECIAL)}; it begins with {words[:4]}.")
        if len(set(words)) != len(words):
            twice = next(word for word, count in Counter(words).items() if count > 1)
            raise CheckpointError(f"vocabulary.json has '{twice}' more than once.")
        return cls(tuple(words))

    def to_json(self) -> dict[str, list[str]]:
        return {"words": list(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @cached_property
    def dangling(self) -> list[int]:
        """Ids of the words that a complete caption does not end with"""
        return sorted(self.ids[word] for word in DANGLING & self.ids.keys())

    @cached_property
    def nouns(self) -> list[int]:
        """For each word a number that its singular or plural shares, or -1 if it is a function word"""
        numbers: dict[str, int] = {}
        plain = (word[:-1] if len(word) > 3 and word[-1] == "s" != word[-2] else word for word in self.words)
        return [
            -1 if index < len(SPECIAL) or word in FUNCTION else numbers.setdefault(singular, len(numbers))
            for index, (word, singular) in enumerate(zip(self.words, plain, strict=True))
        ]

    @cached_property
    def forms(self) -> list[tuple[int, ...]]:
        """For each word its singular and plural, as far as they are known; none if it is a function word"""
        alike: dict[int, tuple[int, ...]] = {}
        for word, noun in enumerate(self.nouns):
            alike[noun] = (*alike.get(noun, ()), word)
        alike[-1] = ()
        return [alike[noun] for noun in self.nouns]

    def encode(self, caption: str) -> list[int]:
        """Word ids between <bos> and <eos>. Unknown words become <unk>."""
        known = (self.ids.get(word, UNK) for word in tokenize(caption))
        return [BOS, *known, EOS]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Words up to the first <eos>, without <bos> and <pad>."""
        words = []
        for token in ids:
            if token == EOS:
                break
            if token not in (BOS, PAD):
                words.append(self.words[token])
        return words
