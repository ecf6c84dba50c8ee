"""Captions that agree with the retrieved sentences are preferred, by as much as is asked for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import haav
from haav.config import ConfidenceConfig, DecodeConfig, override
from haav.data.collate import collate
from haav.generate.consensus import Consensus
from haav.inference.caption import choose_captions
from haav.inference.captioner import Captioner
from haav.inference.pack import pack
from haav.photos.images import load_image
from haav.text import SPECIAL, Vocabulary, tokenize
from haav.types import Caption, PhotoView, Word
from helpers import SAMPLES, save_text_model

WORDS = Vocabulary((*SPECIAL, *["a", "on", "the", "dog", "cat", "sits", "runs", "mat", "grass", "red"]))
sentences = st.lists(st.sampled_from(WORDS.words[4:]), min_size=0, max_size=9).map(" ".join)


def slow(caption: str, others: list[str]) -> float:
    """CIDEr-D's formula written down as it is defined, one pair of n-gram lists at a time"""

    def grams(text: str, n: int) -> list[tuple[str, ...]]:
        words = [*text.split(), "<eos>"]
        return [tuple(words[position : position + n]) for position in range(len(words) - n + 1)]

    def weight(gram: tuple[str, ...], count: int) -> float:
        return count * sum(math.log(1 + WORDS.ids.get(word, len(WORDS))) for word in gram)

    total = 0.0
    for other in others:
        for n in (1, 2, 3, 4):
            mine, theirs = Counter(grams(caption, n)), Counter(grams(other, n))
            norms = [math.sqrt(sum(weight(gram, own[gram]) ** 2 for gram in own)) for own in (mine, theirs)]
            if not all(norms):
                continue
            shared = sum(
                min(weight(gram, mine[gram]) / norms[0], weight(gram, theirs[gram]) / norms[1])
                * weight(gram, theirs[gram])
                / norms[1]
                for gram in set(mine) & set(theirs)
            )
            apart = len(caption.split()) - len(other.split())
            total += shared * math.exp(-(apart**2) / 72) / 4
    return total / max(1, len(others))


@given(sentences, st.lists(sentences, max_size=4))
def test_agreement_is_the_slow_formula(caption: str, others: list[str]) -> None:
    (found,) = Consensus(WORDS)([caption.split()], others)
    assert found == pytest.approx(slow(caption, others), abs=1e-12)
    assert 0 <= found <= 1 + 1e-12


def test_agreement_by_hand() -> None:
    agree = Consensus(WORDS)
    same, other = agree([["a", "dog", "sits"], ["red", "grass", "runs"]], ["A dog sits."])
    assert same == pytest.approx(1)
    # <eos> is all that is shared; its share of a unit vector, squared, is counted for one of four lengths of sequence
    rare = {
        word: math.log(1 + WORDS.ids.get(word, len(WORDS))) for word in ("red", "grass", "runs", "a", "dog", "sits")
    }
    end = math.log(1 + WORDS.ids["<eos>"])
    mine = end / math.sqrt(end**2 + sum(rare[word] ** 2 for word in ("red", "grass", "runs")))
    theirs = end / math.sqrt(end**2 + sum(rare[word] ** 2 for word in ("a", "dog", "sits")))
    assert other == pytest.approx(min(mine, theirs) * theirs / 4)
    assert agree([["dog"]], []) == [0.0]


def caption_of(text: str, logprob: float) -> Caption:
    return Caption(text, tuple(Word(word, 0, 0.0, 0.5, None) for word in text.split()), logprob, 0.5)


def test_the_weight_decides_between_probability_and_agreement() -> None:
    probable, agreeing = caption_of("a cat sits", -1.0), caption_of("a dog runs", -2.0)
    told = ["a dog runs on the grass", "a dog runs"]
    gain = Consensus(WORDS)([["a", "dog", "runs"], ["a", "cat", "sits"]], told)
    turning = 1.0 / (gain[0] - gain[1])

    def best(sentences: list[str], decode: DecodeConfig) -> str:
        return choose_captions([probable, agreeing], sentences, None, 1, WORDS, decode, ConfidenceConfig()).text

    for weight, first in ((0.0, probable), (0.99 * turning, probable), (1.01 * turning, agreeing)):
        assert best(told, DecodeConfig(consensus=weight)) == first.text
    assert best([], DecodeConfig(consensus=100.0)) == probable.text
    assert best(["a cat sits", *told], DecodeConfig(consensus=100.0, consensus_of=1)) == probable.text


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    folder = tmp_path_factory.mktemp("models")
    pack(save_text_model(folder), folder / "packed", folder / "bridge", folder / "textdb")
    return haav.load(folder / "packed")


def test_a_captioner_weighs_its_beams_against_what_it_retrieved(captioner: Captioner) -> None:
    images = [load_image(SAMPLES / name) for name in ("cat.jpg", "coffee.jpg")]
    seen = captioner.extract(images)
    plain = captioner.caption_extracted(seen, haav.CaptionOptions(beam=6, n_best=6))
    wanted = [own.n_best[3].text for own in plain]
    told = [replace(view, labels=(text,) * 16) for view, text in zip(seen["text_whole"], wanted, strict=True)]
    found = captioner.caption_extracted({**seen, "text_whole": told}, haav.CaptionOptions(beam=6, consensus=1000.0))
    assert [caption.text for caption in found] == wanted
    assert {caption.text for caption in found} != {caption.text for caption in plain}
    several = captioner.caption_extracted(
        {**seen, "text_whole": told}, haav.CaptionOptions(beam=6, n_best=6, consensus=1000.0)
    )
    for mine, theirs in zip(several, plain, strict=True):
        both = [[one.text for one in (own, *own.n_best)] for own in (mine, theirs)]
        assert sorted(both[0]) == sorted(both[1]), "the same captions in another order"
    assert [
        own.text for own in captioner.caption_extracted({**seen, "text_whole": told}, haav.CaptionOptions(beam=6))
    ] == [own.text for own in plain], "off unless asked for"
    without = {name: views for name, views in seen.items() if name != "text_whole"}
    assert [
        own.text for own in captioner.caption_extracted(without, haav.CaptionOptions(beam=6, consensus=1000.0))
    ] == [own.text for own in captioner.caption_extracted(without, haav.CaptionOptions(beam=6))], (
        "nothing to agree with"
    )


def test_class_names_of_objects_are_no_sentences(captioner: Captioner) -> None:
    boxes = PhotoView(torch.randn(1, 849), boxes=torch.rand(1, 4), labels=("cat",))
    cells = captioner.extract([load_image(SAMPLES / "cat.jpg")], ["cells"])["cells"]
    seen = {"objects": [boxes], "cells": cells}
    loud = captioner.caption_extracted(seen, haav.CaptionOptions(consensus=1000.0))
    assert loud[0].text == captioner.caption_extracted(seen)[0].text


def test_labels_pass_through_a_batch_and_are_left_out_where_there_are_none() -> None:
    told = [PhotoView(torch.randn(2, 3), labels=("a dog", "a cat")), PhotoView(torch.randn(0, 3))]
    assert collate(["1", "2"], {"text": told}).views["text"].to("cpu").labels == (("a dog", "a cat"), ())
    assert collate(["1"], {"text": [PhotoView(torch.randn(1, 3))]}).views["text"].labels is None


@pytest.mark.slow
def test_an_export_weighs_as_its_model_does(captioner: Captioner, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the onnx extra")
    pytest.importorskip("onnx", reason="needs the onnx extra")
    from haav.export.onnx import export_onnx
    from haav.export.portable import PortableCaptioner

    told = captioner.with_config(override(captioner.config, "decode", {"consensus": 40.0, "beam": 6}))
    told.save_pretrained(tmp_path / "model")
    assert captioner.extractors is not None
    own = captioner.extractors.options
    pack(tmp_path / "model", tmp_path / "packed", own.bridge, own.textdb)
    export_onnx(tmp_path / "packed", tmp_path / "out")
    photos = sorted(SAMPLES.glob("*.jpg"))
    ours, portable = haav.load(tmp_path / "packed"), PortableCaptioner(tmp_path / "out")
    for one, other in zip(ours.caption(photos, n_best=4), portable.caption(photos, n_best=4), strict=True):
        assert [one.text, *(more.text for more in one.n_best)] == [other.text, *(more.text for more in other.n_best)]


def test_sentences_are_read_as_captions_are() -> None:
    assert tokenize("A dog, on the MAT.") == ["a", "dog", "on", "the", "mat"]
