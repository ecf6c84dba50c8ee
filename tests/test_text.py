from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haav.errors import CheckpointError
from haav.text import BOS, EOS, PAD, SPECIAL, UNK, Vocabulary, tokenize


def test_captions_become_lower_case_words() -> None:
    assert tokenize("A man's T-shirt, 3 dogs… & one “cat”.") == ["a", "man's", "t-shirt", "3", "dogs", "one", "cat"]


def test_vocabulary_keeps_frequent_words_in_a_fixed_order() -> None:
    words = Vocabulary.build(["a dog", "a cat", "a cat", "zebra"], min_count=2)
    assert words.words == (*SPECIAL, "a", "cat")
    assert words.encode("A cat, zebra") == [BOS, 4, 5, UNK, EOS]
    assert words.decode([BOS, 4, 5, EOS, 4, PAD]) == ["a", "cat"]


def test_new_words_stand_behind_the_known_ones_if_they_occur_often_enough() -> None:
    known = Vocabulary((*SPECIAL, "a", "dog"))
    captions = ["a dog bello", "a mimi", "bello and mimi", "bello is rare"]
    assert known.extended(captions, min_count=2).words == (*SPECIAL, "a", "dog", "bello", "mimi")
    assert known.unknown(captions) == {"bello": 3, "mimi": 2, "and": 1, "is": 1, "rare": 1}


@given(st.lists(st.sampled_from(["a", "dog", "on", "the", "beach"]), max_size=9))
def test_known_words_survive_the_way_there_and_back(words: list[str]) -> None:
    vocabulary = Vocabulary((*SPECIAL, "a", "dog", "on", "the", "beach"))
    assert vocabulary.decode(vocabulary.encode(" ".join(words))) == words


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "must be"),
        ({"words": "abc"}, "must be"),
        ({"words": ["a", "b"]}, "must begin with <unk>"),
        ({"words": [*SPECIAL, "a", "a"]}, "'a' more than once"),
    ],
)
def test_broken_vocabularies_are_refused(data: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Vocabulary.from_json(data)
