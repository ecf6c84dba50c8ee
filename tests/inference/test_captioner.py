from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haav.config import ConfidenceConfig, DecodeConfig
from haav.errors import CheckpointError, ConfigError
from haav.generate.beam import BeamSearch
from haav.generate.build import build_rules
from haav.generate.loop import generate
from haav.inference.captioner import Captioner
from haav.text import BOS, DANGLING, SPECIAL, UNK, Vocabulary
from haav.types import Caption, Word
from helpers import random_views, tiny_config, tiny_model

WORDS = Vocabulary((*SPECIAL, "a", "with", *(f"w{index}" for index in range(6, 23))))


def captioner() -> Captioner:
    return Captioner(tiny_model(), tiny_config(), WORDS)


def test_captions_carry_words_weights_and_other_beams() -> None:
    tool, views = captioner(), random_views()
    captions = tool.caption_views(views, beam=3, n_best=3)
    assert len(captions) == 3
    for caption in captions:
        assert len(caption.n_best) == 2
        assert caption.logprob >= caption.n_best[0].logprob
        assert caption.text == " ".join(word.text for word in caption.words)
        for word in caption.words:
            assert word.views is not None
            assert set(word.views) == {"objects", "grid", "text"}
            assert sum(word.views.values()) == pytest.approx(1, abs=1e-5)


def test_words_carry_the_last_layers_weights_and_their_own_log_probability() -> None:
    tool, views = captioner(), random_views()
    rules = build_rules(tool.config.decode, WORDS)
    found = generate(tool.model, tool.model.encode(views), BeamSearch(5, keep_greedy=True), rules, 8)
    for photo, caption in enumerate(tool.caption_views(views)):
        assert [word.logprob for word in caption.words] == pytest.approx(
            found.logprobs[photo, 0, : len(caption.words)].tolist()
        )
        for position, word in enumerate(caption.words):
            expected = found.weights[photo, 0, position, -1].mean(dim=0)
            assert list(word.views.values()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_an_ensemble_captions_without_weights() -> None:
    config = tiny_config(encoding="model_per_view")
    caption = Captioner(tiny_model(encoding="model_per_view"), config, WORDS).caption_views(random_views())[0]
    assert caption.words[0].views is None


def test_confidence_is_the_calibrated_probability_and_a_caption_has_the_mean() -> None:
    tool, views = captioner(), random_views(batch=1)
    [plain] = tool.caption_views(views)
    for word in plain.words:
        assert word.confidence == pytest.approx(math.exp(word.logprob), abs=1e-6)
    assert plain.confidence == pytest.approx(sum(word.confidence for word in plain.words) / len(plain.words))
    config = tiny_config()
    object.__setattr__(config, "confidence", ConfidenceConfig(offset=1.0, slope=0.5))
    [fitted] = Captioner(tool.model, config, WORDS).caption_views(views)
    p = math.exp(plain.words[0].logprob)
    assert fitted.words[0].confidence == pytest.approx(1 / (1 + math.exp(-1 - 0.5 * math.log(p / (1 - p)))), abs=1e-6)
    assert fitted.text == plain.text


def test_words_that_must_or_must_not_be_said() -> None:
    tool, views = captioner(), random_views()
    plain = [caption.text.split() for caption in tool.caption_views(views)]
    for caption, before in zip(
        tool.caption_views(views, must=["w9|w10", "W20"], never=before_all(plain)), plain, strict=True
    ):
        said = caption.text.split()
        assert {"w9", "w10"} & set(said)
        assert "w20" in said
        assert not set(before) & set(said) - {"w9", "w10", "w20"}


def before_all(captions: list[list[str]]) -> list[str]:
    return sorted({word for words in captions for word in words} - {"w9", "w10", "w20"})


def test_a_caption_goes_on_from_its_prefix() -> None:
    tool, views = captioner(), random_views(batch=3)
    greedy = tool.caption_views(views, beam=1)
    for words in (1, 2, 4):
        for row, whole in enumerate(greedy):
            begun = " ".join(whole.text.split()[:words]).upper()
            assert tool.caption_views(views, beam=1, prefix=begun)[row].text == whole.text, "what it would say anyway"
    prefix = "w7 w7 w7 w8"  # also what a rule would forbid
    for settings in ({}, {"groups": 2, "beam": 6}, {"must": ["w9"]}, {"method": "sample", "samples": 3, "seed": 1}):
        for row, caption in enumerate(tool.caption_views(views, prefix=prefix, n_best=3, **settings)):
            assert all(each.text.startswith(prefix) for each in (caption, *caption.n_best)), settings
            tokens = torch.tensor([BOS, *(word.token for word in caption.words)])
            logprobs = tool.model(views, tokens.expand(3, 1, -1)).logprobs[row, 0, :-1]
            said = torch.tensor([word.logprob for word in caption.words])
            torch.testing.assert_close(said, logprobs.gather(1, tokens[1:, None])[:, 0], atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="the model does not know the word 'w7x'"):
        tool.caption_views(views, prefix="w7x")
    with pytest.raises(ConfigError, match="'w7' is in the prefix, so it cannot be forbidden"):
        tool.caption_views(views, prefix="w7", never=["w7"])
    with pytest.raises(ConfigError, match="fewer than 3 words, and the prefix has 3"):
        tool.caption_views(views, prefix="w7 w8 w9", max_words=3)


def test_forbidden_words_may_be_written_in_any_case() -> None:
    tool, views = captioner(), random_views()
    said = tool.caption_views(views)[0].words[0].text
    assert said not in tool.caption_views(views, never=[f" {said.upper()}"])[0].text.split()


def test_no_photos_have_no_captions() -> None:
    assert captioner().caption_views(random_views(batch=0)) == []


def test_an_ensemble_takes_the_shortest_limit_and_is_not_saved(tmp_path: Path) -> None:
    short = replace(tiny_config(max_words=6), decode=DecodeConfig(max_words=5))
    both = Captioner.ensemble([captioner(), Captioner(tiny_model(max_words=6), short, WORDS)])
    assert both.config.decode.max_words == 6
    assert both.caption_views(random_views())
    with pytest.raises(ConfigError, match="cannot be saved as one"):
        both.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="at least one model"):
        Captioner.ensemble([])


def test_no_unk_and_no_dangling_end_unless_the_release_is_asked_for() -> None:
    tool, views = captioner(), random_views(batch=12)
    with torch.no_grad():
        tool.model.decoder.output.weight[[0, 4, 5]] *= 30  # <unk>, a, with
    loose = [caption.text for caption in tool.caption_views(views, allow_unk=True, allow_cut=True, no_repeat=0)]
    assert any("<unk>" in text or text.split()[-1] in DANGLING for text in loose), "the test must be able to tell"
    for caption in tool.caption_views(views):
        assert "<unk>" not in caption.text
        assert not caption.words or caption.words[-1].text not in DANGLING


def test_the_release_shows_a_repeated_word_once() -> None:
    tool, views = captioner(), random_views(batch=12)
    loose = {"allow_unk": True, "allow_cut": True, "no_repeat": 0, "beam": 1}
    with torch.no_grad():
        tool.model.decoder.output.weight[7:10] *= 30
    repeated = [caption.text.split() for caption in tool.caption_views(views, **loose)]
    assert any(first == second for words in repeated for first, second in itertools.pairwise(words))
    for caption in tool.caption_views(views, **loose, collapse_repeats=True):
        words = caption.text.split()
        assert all(first != second for first, second in itertools.pairwise(words))


def test_samples_come_with_a_seed() -> None:
    tool, views = captioner(), random_views()

    def draw(seed: int) -> list[str]:
        return [caption.text for caption in tool.caption_views(views, method="sample", seed=seed)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    several = tool.caption_views(views, method="sample", samples=4, n_best=4, seed=0)[0]
    assert len(several.n_best) == 3


def test_a_beam_wider_than_the_captions_there_are_gives_those_there_are() -> None:
    config = tiny_config(vocabulary_size=6)
    tool = Captioner(tiny_model(vocabulary_size=6), config, Vocabulary((*SPECIAL, "b", "c")))
    caption = tool.caption_views(random_views(batch=1), beam=50, max_words=2, n_best=50)[0]
    assert sorted([caption.text, *(other.text for other in caption.n_best)]) == ["", "b", "c"]


def test_captioner_refuses_what_cannot_work() -> None:
    tool, views = captioner(), random_views()
    for settings, message in (
        ({"beam": 0}, "'beam' must be at least 1, not 0"),
        ({"beam": 5, "groups": 2}, "decode.beam 5 does not divide into decode.groups 2"),
        ({"max_words": 40}, "decode.max_words 40 is more than model.max_words 12"),
        ({"min_words": 8}, "decode.min_words 8 and an end token do not fit decode.max_words 8"),
        ({"baem": 3}, "unknown setting 'baem'. Did you mean 'beam'?"),
        ({"beam": 100_000}, "'beam' must be at most 50, not 100000"),
        ({"samples": 51}, "'samples' must be at most 50, not 51"),
        ({"n_best": 51}, "n_best must be a whole number from 1 to 50, not 51"),
        ({"n_best": 0}, "n_best must be a whole number from 1 to 50, not 0"),
        ({"must": ["w9"], "method": "sample"}, "need decode.method beam"),
        ({"must": ["w9x"]}, "does not know the word 'w9x'. Did you mean 'w9'?"),
        ({"must": ["<pad>"]}, "does not know the word '<pad>'"),
        ({"must": ["w6", "w7", "w8", "w9", "w10"]}, "at most 4 words can be demanded, not 5"),
        ({"must": ["W9 "], "never": ["w9"]}, "'w9' cannot be demanded and forbidden at once"),
        ({"must": "w9"}, "must takes a list of words: must=['w9']"),
        ({"never": "w9"}, "never takes a list of words"),
        ({"must": ["<eos>"]}, "does not know the word '<eos>'"),
        ({"n_best": 6}, "6 captions per photo need decode.beam of at least 6, not 5"),
        ({"must": ["w6", "w7", "w8"], "max_words": 3}, "no caption says all that must be said"),
    ):
        with pytest.raises(ConfigError) as error:
            tool.caption_views(views, **settings)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="the vocabulary has 5 words, the model 23"):
        Captioner(tool.model, tool.config, Vocabulary((*SPECIAL, "a")))


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_a_model_whose_scores_are_not_finite_is_named_and_the_rules_are_not_blamed(tmp_path: Path, method: str) -> None:
    tool = captioner()
    with torch.no_grad():
        tool.model.members[0].decoder.output.weight[UNK] = math.nan  # a word that the rules forbid
    tool.save_pretrained(tmp_path / "broken")
    with pytest.raises(CheckpointError, match=r"scores of the model .*broken are not finite.*\n.*lower train.lr"):
        Captioner.from_pretrained(tmp_path / "broken").caption_views(random_views(), method=method, samples=2)


def test_a_notebook_shows_words_over_their_weights_and_runs_nothing() -> None:
    word = Word("<b>", 5, -0.1, 0.5, {"grid": 0.25, "text": 0.75})
    shown = Caption("<b>", (word,), -0.1, 0.5)._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert 'title="text 75%"' in shown
    assert "width:25.0%" in shown
    assert "■ grid" in shown
    assert Caption("", (), 0.0, 0.0)._repr_html_()
    assert "<img" not in shown


def test_a_notebook_shows_the_photo_too() -> None:
    caption = replace(Caption("a cat", (), -0.1, 0.5), thumbnail=b"\xff\xd8")
    assert 'src="data:image/jpeg;base64,/9g="' in caption._repr_html_()
    assert caption == replace(caption, thumbnail=None), "equal captions are equal, wherever they come from"
