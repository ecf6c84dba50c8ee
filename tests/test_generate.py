from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from haav.captioner import Captioner
from haav.errors import ConfigError
from haav.generate import beam_search
from haav.text import BOS, EOS, PAD, SPECIAL, Vocabulary
from tiny import combinations, random_views, tiny_config, tiny_model


@pytest.mark.parametrize(("encoding", "aggregator", "outputs"), combinations())
def test_beam_one_is_greedy_without_a_cache(encoding: str, aggregator: str, outputs: str) -> None:
    model, views = tiny_model(encoding=encoding, aggregator=aggregator, encoder_outputs=outputs), random_views()
    tokens = torch.full((3, 1, 1), BOS)
    for _ in range(6):
        logits = model(views, tokens).logits[:, :, -1:]
        logits[..., [PAD, BOS]] = -torch.inf
        best = logits.argmax(dim=-1)
        ended = (tokens == EOS).any(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, best.masked_fill(ended, PAD)], dim=-1)
    found = beam_search(model, model.encode(views), beam=1, max_words=6)
    steps = found.tokens.shape[2]
    assert torch.equal(found.tokens, tokens[:, :, 1 : steps + 1])


def test_a_beam_as_wide_as_the_tree_finds_the_best_caption_of_all() -> None:
    """Five words, three steps: every caption is scored one by one."""
    model, views = tiny_model(vocabulary_size=5), random_views(batch=1)
    found = beam_search(model, model.encode(views), beam=125, max_words=3, banned=())
    scored = {}
    for words in itertools.product(range(5), repeat=3):
        cut = words[: words.index(EOS) + 1] if EOS in words else words
        tokens = torch.tensor([[[BOS, *cut]]])
        logprobs = model(views, tokens).logprobs[0, 0, :-1]
        scored[cut] = logprobs.gather(1, torch.tensor(cut)[:, None]).sum().item()
    for rank, (words, score) in enumerate(sorted(scored.items(), key=lambda item: -item[1])):
        assert tuple(found.tokens[0, rank, : len(words)].tolist()) == words
        assert found.scores[0, rank].item() == pytest.approx(score, abs=1e-4)


def test_beams_are_sorted_and_scores_are_the_models_own() -> None:
    model, views = tiny_model(), random_views()
    found = beam_search(model, model.encode(views), beam=4, max_words=7)
    assert (found.scores.diff(dim=1) <= 1e-6).all()
    inputs = torch.cat([torch.full((3, 4, 1), BOS), found.tokens[:, :, :-1]], dim=-1)
    decoded = model(views, inputs)
    real = found.tokens != PAD
    expected = decoded.logprobs.gather(3, found.tokens[..., None])[..., 0]
    assert_close(found.logprobs[real], expected[real])
    assert (found.logprobs[~real] == 0).all()
    assert_close(found.weights[real], decoded.weights[real])


def test_search_ends_when_every_beam_has() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.decoder.output.weight.zero_()
        model.decoder.output.weight[EOS] = 5 * model.decoder.layers[-1].feed_forward.norm.weight
        model.decoder.layers[-1].feed_forward.norm.bias.fill_(1.0)
    found = beam_search(model, model.encode(random_views()), beam=1, max_words=7)
    assert found.tokens.tolist() == [[[EOS]]] * 3


def test_banned_words_are_never_said() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.decoder.output.weight[[PAD, BOS, 7]] *= 50
    tokens = beam_search(model, model.encode(random_views()), 4, 8, banned=(PAD, BOS, 7)).tokens
    before_end = (tokens == EOS).cumsum(dim=-1) == 0
    assert not torch.isin(tokens[before_end], torch.tensor([PAD, BOS, 7])).any()


def captioner() -> Captioner:
    config = tiny_config()
    words = Vocabulary((*SPECIAL, *(f"w{number}" for number in range(4, 23))))
    return Captioner(tiny_model(), config, words)


def test_captions_carry_words_weights_and_other_beams() -> None:
    tool, views = captioner(), random_views()
    captions = tool.caption_views(views, beam=3)
    assert len(captions) == 3
    for caption in captions:
        assert len(caption.n_best) == 2
        assert caption.logprob >= caption.n_best[0].logprob
        assert caption.text == " ".join(word.text for word in caption.words)
        for word in caption.words:
            assert word.views is not None
            assert set(word.views) == {"objects", "grid", "text"}
            assert sum(word.views.values()) == pytest.approx(1, abs=1e-5)


def test_word_weights_are_the_last_layers_mean_over_heads() -> None:
    tool, views = captioner(), random_views()
    found = beam_search(tool.model, tool.model.encode(views), 5, 8)
    word = tool.caption_views(views)[1].words[2]
    expected = found.weights[1, 0, 2, -1].mean(dim=0)
    assert list(word.views.values()) == pytest.approx(expected.tolist())


def test_an_ensemble_captions_without_weights() -> None:
    config = tiny_config(encoding="model_per_view")
    words = Vocabulary((*SPECIAL, *(f"w{number}" for number in range(4, 23))))
    caption = Captioner(tiny_model(encoding="model_per_view"), config, words).caption_views(random_views())[0]
    assert caption.words[0].views is None


def test_a_word_carries_its_own_log_probability() -> None:
    tool, views = captioner(), random_views()
    found = beam_search(tool.model, tool.model.encode(views), 5, 8)
    for photo, caption in enumerate(tool.caption_views(views)):
        assert [word.logprob for word in caption.words] == found.logprobs[photo, 0, : len(caption.words)].tolist()


def test_a_beam_wider_than_the_captions_there_are_gives_those_there_are() -> None:
    config = tiny_config(vocabulary_size=6)
    tool = Captioner(tiny_model(vocabulary_size=6), config, Vocabulary((*SPECIAL, "a", "b")))
    caption = tool.caption_views(random_views(batch=1), beam=50, max_words=1)[0]
    texts = [caption.text, *(other.text for other in caption.n_best)]
    assert sorted(texts) == ["", "<unk>", "a", "b"]


def test_captioner_refuses_what_cannot_work() -> None:
    tool, views = captioner(), random_views()
    with pytest.raises(ConfigError, match="beam must be at least 1, not 0"):
        tool.caption_views(views, beam=0)
    with pytest.raises(ConfigError, match="max_words is between 1 and 12 for this model, not 40"):
        tool.caption_views(views, max_words=40)
    with pytest.raises(ConfigError, match="the vocabulary has 5 words, the model 23"):
        Captioner(tool.model, tool.config, Vocabulary((*SPECIAL, "a")))
