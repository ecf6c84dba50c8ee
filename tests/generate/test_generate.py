from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from haav.generate.beam import BeamSearch
from haav.generate.loop import Captions, Generated, _next_words, collapse_repeats, generate
from haav.generate.rules import Ending, Never, NoDoubles, NoRepeats
from haav.generate.sample import Sampling
from haav.model.ensemble import Ensemble
from haav.text import BOS, EOS, PAD, SPECIAL, UNK, Vocabulary
from haav.types import Cache, Decoded
from helpers import every_decoder, every_variant, random_view, random_views, tiny_model

SPEAKABLE = Never([UNK, PAD, BOS])


def beam(model: Any, views: Any, width: int, max_words: int, *rules: Any, **options: Any) -> Generated:
    return generate(model, model.encode(views), BeamSearch(width, **options), rules, max_words, weighed=None)


def words_of(found: Generated, photo: int = 0, rank: int = 0) -> list[int]:
    return found.tokens[photo, rank, : int(found.lengths[photo, rank])].tolist()


def all_captions(model: Any, views: Any, vocabulary: int, max_words: int) -> dict[tuple[int, ...], float]:
    """Every caption of one photo up to `max_words` with its log-probability, scored without a cache."""
    every = torch.tensor(list(itertools.product(range(vocabulary), repeat=max_words)))
    logprobs = model(views, torch.nn.functional.pad(every, (1, 0), value=BOS)[None]).logprobs[0, :, :-1]
    own = logprobs.gather(2, every[..., None])[..., 0]
    scored = {}
    for words, scores in zip(every.tolist(), own.tolist(), strict=True):
        end = words.index(EOS) + 1 if EOS in words else max_words
        scored[tuple(words[:end])] = sum(scores[:end])
    return scored


# Beam search


@every_variant
def test_beam_one_is_greedy_without_a_cache(variant: dict[str, str]) -> None:
    model, views = tiny_model(**variant), random_views()
    tokens = torch.full((3, 1, 1), BOS)
    for _ in range(6):
        logits = model(views, tokens).logits[:, :, -1:]
        logits[..., [PAD, BOS]] = -torch.inf
        best = logits.argmax(dim=-1)
        ended = (tokens == EOS).any(dim=-1, keepdim=True)
        tokens = torch.cat([tokens, best.masked_fill(ended, PAD)], dim=-1)
    found = beam(model, views, 1, 6, Never([PAD, BOS]))
    steps = found.tokens.shape[2]
    assert torch.equal(found.tokens, tokens[:, :, 1 : steps + 1])


@every_decoder
def test_a_beam_as_wide_as_the_tree_finds_the_best_caption_of_all(decoder: str) -> None:
    """Five words, three steps: every caption is scored one by one."""
    model, views = tiny_model(vocabulary_size=5, decoder=decoder), random_views(batch=1)
    found = beam(model, views, 125, 3)
    scored = all_captions(model, views, 5, 3)
    for rank, (words, score) in enumerate(sorted(scored.items(), key=lambda item: -item[1])):
        assert tuple(found.tokens[0, rank, : len(words)].tolist()) == words
        assert found.scores[0, rank].item() == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("penalty", [0.3, 1.0, 2.0])
def test_length_penalty_ranks_by_logprob_over_words_to_its_power(penalty: float) -> None:
    model, views = tiny_model(vocabulary_size=6), random_views(batch=1)
    scored = all_captions(model, views, 6, 3)
    legal = {words: score for words, score in scored.items() if not {UNK, PAD, BOS} & set(words) and words[-1] == EOS}
    best = sorted(legal, key=lambda words: -legal[words] / len(words) ** penalty)[:3]
    rules = (SPEAKABLE, Ending())
    assert [words_of(beam(model, views, 200, 3, *rules, length_penalty=penalty), rank=k) for k in range(3)] == [
        list(words) for words in best
    ]


@every_decoder
def test_beams_are_sorted_and_scores_are_the_models_own(decoder: str) -> None:
    model, views = tiny_model(decoder=decoder), random_views()
    found = beam(model, views, 4, 7, SPEAKABLE)
    assert (found.scores.diff(dim=1) <= 1e-6).all()
    _assert_scored_by_the_model(model, views, found)


def _assert_scored_by_the_model(model: Any, views: Any, found: Generated) -> None:
    photos, captions, _ = found.tokens.shape
    inputs = torch.cat([torch.full((photos, captions, 1), BOS), found.tokens[:, :, :-1]], dim=-1)
    decoded = model(views, inputs)
    real = found.tokens != PAD
    expected = decoded.logprobs.gather(3, found.tokens[..., None])[..., 0]
    assert_close(found.logprobs[real], expected[real], atol=1e-5, rtol=1e-4)
    assert (found.logprobs[~real] == 0).all()
    if found.weights is not None:
        assert_close(found.weights[real], decoded.weights[real], atol=1e-5, rtol=1e-4)


def test_search_ends_when_every_beam_has() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.decoder.output.weight.zero_()
        model.decoder.output.weight[EOS] = 5 * model.decoder.layers[-1].feed_forward.norm.weight
        model.decoder.layers[-1].feed_forward.norm.bias.fill_(1.0)
    found = beam(model, random_views(), 1, 7)
    assert found.tokens.tolist() == [[[EOS]]] * 3


def _sharpen(model: Any, strength: float = 3.0) -> None:
    """A random model that is sure of itself: its captions end at different lengths."""
    with torch.no_grad():
        model.decoder.output.weight *= strength
        model.decoder.words.weight *= 3


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(1.0, 8.0), st.sampled_from([0.0, 0.7]))
def test_wanting_fewer_captions_and_other_photos_beside_change_no_result(
    seed: int, width: int, strength: float, penalty: float
) -> None:
    """Photos that settle early leave the batch; what is left must not notice, nor must they."""
    torch.manual_seed(seed)
    model, views = tiny_model(), random_views(batch=5)
    _sharpen(model, strength)
    rules = (SPEAKABLE, Ending())
    full = beam(model, views, width, 8, *rules, length_penalty=penalty)
    few = beam(model, views, width, 8, *rules, length_penalty=penalty, n_best=1)
    for photo in range(5):
        alone = {name: _row(view, photo) for name, view in views.items()}
        own = beam(model, alone, width, 8, *rules, length_penalty=penalty)
        for rank in range(width):
            assert words_of(own, 0, rank) == words_of(full, photo, rank)
        assert words_of(few, photo) == words_of(full, photo)
        assert few.scores[photo, 0].item() == pytest.approx(full.scores[photo, 0].item(), abs=1e-5)


def _row(view: Any, photo: int) -> Any:
    rows = slice(photo, photo + 1)
    return type(view)(
        view.tokens[rows],
        view.mask[rows],
        {name: index[rows] for name, index in view.indices.items()},
        None if view.boxes is None else view.boxes[rows],
    )


def test_settled_photos_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    model, views = tiny_model(), random_views(batch=8)
    _sharpen(model)
    sizes, memories = [], []
    decode = model.decode

    def watched(tokens: torch.Tensor, cache: Any, weighed: int | None) -> Any:
        sizes.append(len(tokens))
        memories.append(len(cache.memory[0].sources[0].memory.keys))
        return decode(tokens, cache, weighed)

    monkeypatch.setattr(model, "decode", watched)
    lengths = beam(model, views, 2, 10, SPEAKABLE, Ending(), n_best=1).lengths[:, 0]
    assert len(set(lengths.tolist())) > 1, "the photos must end at different steps for this test to tell"
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 8
    assert all(before == after or after <= before / 2 for before, after in itertools.pairwise(sizes)), sizes
    assert memories == sizes, "memory holds the photos that are left, never a copy per beam"


def test_memory_is_not_copied_for_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    model, views = tiny_model(), random_views()
    pointers = set()
    decode = model.decode

    def watched(tokens: torch.Tensor, cache: Cache, weighed: int | None) -> Any:
        pointers.add(cache.memory[0].sources[0].memory.keys.data_ptr())
        return decode(tokens, cache, weighed)

    monkeypatch.setattr(model, "decode", watched)
    beam(model, views, 5, 6, Never([EOS]))
    assert len(pointers) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([1.0, 3.0]))
def test_no_beam_is_worse_than_greedy(seed: int, width: int, strength: float) -> None:
    torch.manual_seed(seed)
    model, views = tiny_model(encoder_layers=1, decoder_layers=1), random_views(batch=8)
    _sharpen(model, strength)
    greedy = beam(model, views, 1, 8, SPEAKABLE, Ending())
    found = beam(model, views, width, 8, SPEAKABLE, Ending(), keep_greedy=True)
    assert (found.scores[:, 0] >= greedy.scores[:, 0] - 1e-5).all()
    for photo in range(8):
        captions = [words_of(found, photo, rank) for rank in range(width)]
        assert len({tuple(words) for words in captions}) == width, "no caption twice"
        if width == 1:
            assert captions == [words_of(greedy, photo)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_a_beam_as_wide_as_the_vocabulary_is_never_worse_than_greedy_and_beam_one_is_greedy(
    seed: int, width: int
) -> None:
    torch.manual_seed(seed)
    model, views = tiny_model(vocabulary_size=9), random_views(batch=2)
    _sharpen(model)
    greedy = beam(model, views, 1, 3, SPEAKABLE, Ending())
    assert torch.equal(
        greedy.tokens, generate(model, model.encode(views), Sampling(top_k=1), (SPEAKABLE, Ending()), 3).tokens
    )
    # With 5 speakable words and <eos>, 36 beams hold every prefix of two words: the search is complete.
    complete = beam(model, views, 36, 3, SPEAKABLE, Ending()).scores[:, 0]
    assert (complete >= greedy.scores[:, 0] - 1e-5).all()
    assert (complete >= beam(model, views, width, 3, SPEAKABLE, Ending()).scores[:, 0] - 1e-5).all()


# Rules


def test_no_rule_hides_an_infinite_score() -> None:
    logits = torch.zeros(1, 1, 1, 23)
    logits[..., UNK] = torch.inf
    start = Captions(np.zeros((1, 1, 0), np.int64), np.zeros((1, 1, 0), np.float32))
    assert _next_words(Decoded(logits, None, None), start, [Never([UNK])], room=8).isnan().all()


def test_never_and_ending_and_repeats_by_hand() -> None:
    def left(rule: Any, said: list[int], room: int = 5, words: int = 8) -> list[int]:
        scores = torch.zeros(1, 1, words)
        rule.forbid(scores, np.array([[said]], np.int64), room)
        return [word for word in range(words) if scores[0, 0, word] == 0]

    everything = list(range(8))
    assert left(Never([0, 5]), [4]) == [1, 2, 3, 4, 6, 7]
    assert left(Ending(min_words=2), [4]) == [0, 1, 2, 4, 5, 6, 7]
    assert left(Ending(min_words=2), [4, 5]) == everything
    assert left(Ending(dangling=[5, 6]), [4, 5]) == [0, 1, 2, 4, 5, 6, 7], "not after 5"
    assert left(Ending(dangling=[5, 6]), [5, 4]) == everything
    assert left(Ending(dangling=[5, 6]), [4], room=2) == [0, 1, 2, 3, 4, 7], "the end must follow, so not 5 or 6 now"
    assert left(Ending(dangling=[5, 6]), [4], room=1) == [EOS]
    assert left(Ending(min_words=2, in_time=False), [4], room=1) == [0, 1, 2, 4, 5, 6, 7], "may be cut"
    # 4 5 4 6 4 …: after a 4, the pairs 4 5 and 4 6 have been said.
    assert left(NoRepeats(2), [4, 5, 4, 6, 4]) == [0, 1, 2, 3, 4, 7]
    assert left(NoRepeats(2), [4]) == everything
    assert left(NoRepeats(3), [4, 5, 6, 7, 4, 5]) == [0, 1, 2, 3, 4, 5, 7]
    assert left(NoRepeats(1), [4, 6]) == [0, 1, 2, 3, 5, 7]
    vocabulary = Vocabulary((*SPECIAL, "a", "dog", "dogs", "cat"))
    assert vocabulary.nouns == [-1, -1, -1, -1, -1, 0, 0, 1]
    forms = vocabulary.forms
    assert forms == [(), (), (), (), (), (5, 6), (5, 6), (7,)]
    assert left(NoDoubles(forms), [5, 4]) == [0, 1, 2, 3, 4, 7], "a dog and a … neither dog nor dogs"
    assert left(NoDoubles(forms), [5, 4, 7]) == everything, "after another word it may be said"
    assert left(NoDoubles(forms), [4]) == everything
    assert left(NoDoubles(forms), []) == everything


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_constraints_hold_on_random_models_and_inputs(data: st.DataObject) -> None:
    _assert_constraints_hold(data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_constraints_hold_on_a_thousand_random_models_and_inputs(data: st.DataObject) -> None:
    _assert_constraints_hold(data)


def _assert_constraints_hold(data: st.DataObject) -> None:
    """Demanded words are said, forbidden ones not, nothing repeats, every caption ends, none dangles."""
    seed = data.draw(st.integers(0, 10**6))
    words = 16
    dangling = [4, 5]
    must = data.draw(st.lists(st.lists(st.integers(6, 15), min_size=1, max_size=2), max_size=3))
    said = {word for choices in must for word in choices}
    never = data.draw(st.lists(st.integers(4, 15).filter(lambda word: word not in said), max_size=4))
    max_words = data.draw(st.integers(len(must) + 2, 9))
    min_words = data.draw(st.integers(0, max_words - 1))
    repeat = data.draw(st.integers(2, 3))
    groups, per_group = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    sampling = not must and data.draw(st.booleans())
    torch.manual_seed(seed)
    model, views = tiny_model(vocabulary_size=words, decoder_layers=1, encoder_layers=1), random_views(batch=2)
    with torch.no_grad():
        model.decoder.output.weight *= data.draw(st.sampled_from([1.0, 20.0]))
        model.decoder.output.weight[[UNK, PAD, BOS, *dangling]] *= 3
    rules = (SPEAKABLE, Never(never), NoRepeats(repeat), Ending(min_words, dangling))
    greedy = data.draw(st.booleans())
    strategy: Any = BeamSearch(groups * per_group, must=must, groups=groups, keep_greedy=greedy)
    if sampling:
        strategy = Sampling(3, temperature=2.0)
    found = generate(model, model.encode(views), strategy, rules, max_words)
    assert found.scores[:, 0].isfinite().all(), "there is always a caption"
    for photo, rank in itertools.product(range(2), range(found.tokens.shape[1])):
        if found.scores[photo, rank].isneginf():
            continue
        caption = words_of(found, photo, rank)
        assert caption[-1] == EOS
        spoken = caption[:-1]
        assert min_words <= len(spoken) < max_words
        assert not {UNK, PAD, BOS, EOS, *never} & set(spoken)
        assert all(set(choices) & set(spoken) for choices in must)
        assert not spoken or spoken[-1] not in dangling
        grams = [tuple(spoken[position : position + repeat]) for position in range(len(spoken) - repeat + 1)]
        assert len(grams) == len(set(grams))
    if not sampling:
        _assert_scored_by_the_model(model, views, _finite(found))


def _finite(found: Generated) -> Generated:
    """Only the first caption: later ones may stand for none"""
    weights = None if found.weights is None else found.weights[:, :1]
    return Generated(found.tokens[:, :1], found.logprobs[:, :1], weights)


# Constrained and diverse search


def slow_search(
    model: Any, views: Any, width: int, max_words: int, groups: int, diversity: float, penalty: float, must: list[int]
) -> list[tuple[float, tuple[int, ...]]]:
    """The same search of one photo the obvious way: lists, no cache, every word of every caption a candidate."""
    banks: list[dict[int, list[tuple[tuple[int, ...], float]]]] = [{0: [((), 0.0)]} for _ in range(groups)]
    full = 2 ** len(must) - 1
    for room in range(max_words, 0, -1):
        chosen: Counter[int] = Counter()
        for group, states in enumerate(banks):
            reached: dict[int, list[tuple[float, tuple[int, ...], float]]] = {}
            for state, captions in states.items():
                going_on = [words for words, _ in captions if not words or words[-1] != EOS]
                if going_on:
                    inputs = torch.tensor([[[BOS, *words] for words in going_on]])
                    scores = dict(zip(going_on, model(views, inputs).logprobs[0, :, -1].tolist(), strict=True))
                for words, score in captions:
                    if words and words[-1] == EOS:
                        reached.setdefault(state, []).append((score / len(words) ** penalty, words, score))
                        continue
                    own = scores[words]
                    for word in range(3, len(own)) if room > 1 else [EOS]:
                        if word == EOS and state != full:
                            continue
                        after = state | sum(1 << index for index, wanted in enumerate(must) if wanted == word)
                        total = score + own[word]
                        rank = (total - diversity * chosen[word]) / (len(words) + 1) ** penalty
                        reached.setdefault(after, []).append((rank, (*words, word), total))
            before = {words for captions in states.values() for words, _ in captions}
            banks[group] = {
                state: [(words, score) for _, words, score in sorted(found, key=lambda item: -item[0])[:width]]
                for state, found in reached.items()
            }
            for captions in banks[group].values():
                chosen.update(words[-1] for words, _ in captions if words not in before)
    final = [(score, words) for states in banks for words, score in states.get(full, ())]
    return sorted(final, key=lambda item: -item[0] / len(item[1]) ** penalty)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 3, 0.0), (1, 2, 0.0), (2, 2, 2.0), (3, 2, 50.0)]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.lists(st.integers(4, 8), max_size=2, unique=True),
    st.booleans(),
)
def test_every_search_equals_the_slow_obvious_one(
    seed: int, shape: tuple[int, int, float], penalty: float, must: list[int], one: bool
) -> None:
    groups, width, diversity = shape
    torch.manual_seed(seed)
    model, views = tiny_model(vocabulary_size=9, encoder_layers=1, decoder_layers=1), random_views(batch=1)
    _sharpen(model, 2.0)
    slow = slow_search(model, views, width, 5, groups, diversity, penalty, must)
    options = {"groups": groups, "diversity": diversity, "length_penalty": penalty, "n_best": 1 if one else None}
    found = beam(model, views, groups * width, 5, SPEAKABLE, Ending(), must=[[word] for word in must], **options)
    fast = [words_of(found, rank=rank) for rank in range(found.tokens.shape[1]) if found.scores[0, rank].isfinite()]
    assert fast == [list(words) for _, words in slow][: 1 if one else None]


def test_a_wide_constrained_search_finds_the_best_of_all_captions_that_say_the_words() -> None:
    model, views = tiny_model(vocabulary_size=7), random_views(batch=1)
    scored = all_captions(model, views, 7, 4)
    for must in ([[4]], [[4], [5, 6]], [[4], [5], [6]]):
        legal = {
            words: score
            for words, score in scored.items()
            if words[-1] == EOS
            and not {UNK, PAD, BOS} & set(words)
            and all(set(choice) & set(words) for choice in must)
        }
        best = max(legal, key=lambda words: legal[words])
        found = beam(model, views, 300, 4, SPEAKABLE, Ending(), must=must)
        assert tuple(words_of(found)) == best, must
        assert found.scores[0, 0].item() == pytest.approx(legal[best], abs=1e-4)


def test_demanding_nothing_is_the_plain_search_and_demanding_what_is_said_anyway_changes_nothing() -> None:
    model, views = tiny_model(), random_views(batch=1)
    plain = beam(model, views, 3, 7, SPEAKABLE, Ending(), n_best=1)
    said = words_of(plain)[0]
    assert words_of(beam(model, views, 3, 7, SPEAKABLE, Ending(), n_best=1, must=[[said]])) == words_of(plain)


def test_what_does_not_fit_gives_no_caption() -> None:
    found = beam(tiny_model(), random_views(), 3, 3, SPEAKABLE, Ending(), must=[[4], [5], [6]])
    assert found.scores.isneginf().all()


def test_groups_without_diversity_repeat_the_search_and_with_it_they_part() -> None:
    model, views = tiny_model(), random_views()
    single = beam(model, views, 2, 6, SPEAKABLE, Ending())
    same = beam(model, views, 4, 6, SPEAKABLE, Ending(), groups=2, diversity=0.0)
    for photo in range(3):
        assert [words_of(same, photo, rank) for rank in range(0, 4, 2)] == [
            words_of(single, photo, rank) for rank in range(2)
        ]
    apart = beam(model, views, 4, 6, SPEAKABLE, Ending(), groups=4, diversity=1e4)
    for photo in range(3):
        firsts = [words_of(apart, photo, rank)[0] for rank in range(4)]
        assert len(set(firsts)) == 4
        greedy = words_of(beam(model, views, 1, 6, SPEAKABLE, Ending()), photo)
        assert greedy in [words_of(apart, photo, rank) for rank in range(4)], "the first group is a search of its own"
    assert (apart.scores.diff(dim=1) <= 1e-6).all(), "sorted by the model's own probability"


# Sampling


def test_samples_follow_the_models_probabilities() -> None:
    model, views = tiny_model(vocabulary_size=8), random_views(batch=1)
    generator = torch.Generator().manual_seed(0)
    found = generate(model, model.encode(views), Sampling(20000, generator=generator), (Never([PAD]),), 1)
    expected = model(views, torch.tensor([[[BOS]]])).logprobs[0, 0, 0].exp()
    expected[PAD] = 0
    expected /= expected.sum()
    seen = torch.bincount(found.tokens.flatten(), minlength=8) / 20000
    assert_close(seen, expected, atol=0.015, rtol=0)
    _assert_scored_by_the_model(model, views, found)


def test_temperature_top_k_and_top_p_by_hand() -> None:
    logprobs = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).log()
    close = {"atol": 1e-6, "rtol": 1e-5}
    squared = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert_close(Sampling(temperature=0.5).chances(logprobs)[0, 0], squared / squared.sum(), **close)
    assert_close(Sampling(top_k=2).chances(logprobs)[0, 0], torch.tensor([0.625, 0.375, 0, 0]), **close)
    # 0.5 + 0.3 reaches 0.7; the third is not needed.
    assert_close(Sampling(top_p=0.7).chances(logprobs)[0, 0], torch.tensor([0.5, 0.3, 0, 0]), **close)
    assert_close(Sampling(top_p=0.0).chances(logprobs)[0, 0], torch.tensor([0.5, 0, 0, 0]), **close)  # at least one


def test_the_same_seed_draws_the_same_captions() -> None:
    model, views = tiny_model(), random_views()

    def draw(seed: int) -> torch.Tensor:
        strategy = Sampling(3, generator=torch.Generator().manual_seed(seed))
        return generate(model, model.encode(views), strategy, (SPEAKABLE, Ending()), 8).tokens

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


# The release's way, and ensembles


def test_words_that_follow_themselves_are_collapsed() -> None:
    tokens = torch.tensor([[[4, 4, 5, 5, 5, 4, EOS, PAD]]])
    logprobs = torch.tensor([[[-1.0, -2, -3, -4, -5, -6, -7, 0]]])
    weights = torch.arange(8.0)[None, None, :, None, None, None]
    found = collapse_repeats(Generated(tokens, logprobs, weights))
    assert found.tokens.tolist() == [[[4, 5, 4, EOS, PAD, PAD, PAD, PAD]]]
    assert found.logprobs.tolist() == [[[-1, -3, -6, -7, 0, 0, 0, 0]]]
    assert found.weights.flatten().tolist()[:4] == [0, 2, 5, 6]


def test_an_ensemble_of_models_with_other_views_averages_probabilities_and_loses_photos_like_one() -> None:
    from helpers import VIEWS

    torch.manual_seed(3)
    first, second = tiny_model(), tiny_model(views={name: VIEWS[name] for name in ("grid", "text")})
    ensemble = Ensemble([first, second])
    views = {name: random_view(spec, 6) for name, spec in VIEWS.items()}
    for model in (first, second):
        _sharpen(model)
    found = generate(ensemble, ensemble.encode(views), BeamSearch(3, n_best=1), (SPEAKABLE, Ending()), 8)
    inputs = torch.cat([torch.full((6, 1, 1), BOS), found.tokens[:, :, :-1]], dim=-1)
    own = {name: views[name] for name in ("grid", "text")}
    mean = (first(views, inputs).logprobs.exp() + second(own, inputs).logprobs.exp()) / 2
    real = found.tokens != PAD
    assert_close(
        found.logprobs[real], mean.log().gather(3, found.tokens[..., None])[..., 0][real], atol=1e-5, rtol=1e-4
    )
