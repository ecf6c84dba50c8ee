from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from haav.errors import DataError
from haav.evaluate import spice
from haav.evaluate.bleu import bleu, bleu_stats
from haav.evaluate.chair import chair
from haav.evaluate.cider import Cider
from haav.evaluate.ngrams import NgramTable
from haav.evaluate.reward import END, CiderReward, similar_photos
from haav.evaluate.rouge import rouge_l
from haav.evaluate.scores import METRICS, SLOW, Metric, compare, evaluate, finds_own_photo
from haav.evaluate.statistics import bootstrap_counts
from haav.evaluate.wording import wording

WORD = st.sampled_from(["a", "the", "dog", "cat", "runs", "sits", "on", "in", "red", "park", "2\xa01/2"])
CAPTION = st.lists(WORD, max_size=9)
CORPUS = st.lists(st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=5)), min_size=1, max_size=6)


def sentences(count: int, seed: int = 0) -> list[list[str]]:
    """Caption-like random sentences with a long tail of words"""
    rng = random.Random(seed)
    return [[f"w{int(rng.paretovariate(0.7)) % 500}" for _ in range(rng.randint(4, 14))] for _ in range(count)]


def corpus(photos: int, seed: int = 0) -> tuple[list[list[str]], list[list[list[str]]]]:
    """Captions that share much with their references, which are four or five"""
    rng = random.Random(seed)
    captions, references = [], []
    for words in sentences(photos, seed):
        captions.append([word for word in words if rng.random() > 0.2])
        references.append(
            [
                rng.sample(words, len(words))
                if rng.random() < 0.3
                else [word if rng.random() > 0.3 else "w1" for word in words]
                for _ in range(rng.randint(4, 5))
            ]
        )
    captions[0], captions[1] = [], captions[1][:1]
    return captions, references


# n-grams


@given(st.lists(CAPTION, max_size=6), st.lists(CAPTION, max_size=6))
def test_counted_ngrams_are_those_of_a_counter(known: list[list[str]], others: list[list[str]]) -> None:
    table = NgramTable(known)
    numbers: dict[tuple[str, ...], int] = {}
    for captions, counts in ((known, table.counts), (others, table.count(others))):
        for index, words in enumerate(captions):
            expected = Counter(
                tuple(words[position : position + n]) for n in range(1, 5) for position in range(len(words) - n + 1)
            )
            rows = counts.caption == index
            assert sorted(counts.count[rows].tolist()) == sorted(expected.values())
            assert np.bincount(counts.order[rows], minlength=4).tolist() == [
                sum(len(gram) == n for gram in expected) for n in range(1, 5)
            ]
        if captions is known:
            for index, words in enumerate(captions):
                if len(words) == 1:
                    numbers[tuple(words)] = int(counts.gram[counts.caption == index][0])
    for index, words in enumerate(others):
        if len(words) == 1 and tuple(words) in numbers:
            assert table.count(others).gram[table.count(others).caption == index].tolist() == [numbers[tuple(words)]]


# Against pycocoevalcap


def coco_scores(captions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> dict[str, object]:
    pytest.importorskip("pycocoevalcap", reason="needs the coco extra")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider as CocoCider
    from pycocoevalcap.rouge.rouge import Rouge

    wanted = {index: [" ".join(words) for words in texts] for index, texts in enumerate(references)}
    said = {index: [" ".join(words)] for index, words in enumerate(captions)}
    corpus_bleu, each_bleu = Bleu(4).compute_score(wanted, said, verbose=0)
    return {
        "bleu": corpus_bleu,
        "each bleu": np.array(each_bleu).T,
        "rouge": Rouge().compute_score(wanted, said)[1],
        "cider": CocoCider().compute_score(wanted, said)[1],
    }


def _assert_equals_coco(captions: list[list[str]], references: list[list[list[str]]]) -> None:
    expected = coco_scores(captions, references)
    cider = Cider([[" ".join(words).split() for words in texts] for texts in references])
    split = [" ".join(words).split() for words in captions]
    stats = bleu_stats(cider.table.count(split), cider.table.counts, np.repeat(np.arange(len(split)), cider.references))
    close = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(bleu(stats.sum(axis=0)), expected["bleu"], **close)
    np.testing.assert_allclose(bleu(stats), expected["each bleu"], **close)
    np.testing.assert_allclose(cider.score(range(len(split)), split), expected["cider"], **close)
    rouge = [rouge_l(words, texts) for words, texts in zip(captions, references, strict=True)]
    np.testing.assert_allclose(rouge, expected["rouge"], **close)


def test_bleu_rouge_and_cider_equal_cocos_tools() -> None:
    _assert_equals_coco(*corpus(400))


@settings(max_examples=60, deadline=None)
@given(CORPUS)
def test_they_agree_on_empty_tiny_and_odd_captions_too(pairs: list[tuple[list[str], list[list[str]]]]) -> None:
    assume(any(words for _, texts in pairs for words in texts))  # COCO's CIDEr fails without any word
    _assert_equals_coco([caption for caption, _ in pairs], [texts for _, texts in pairs])


# CIDEr


def slow_cider(
    captions: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    documents: Sequence[Sequence[Sequence[str]]],
    plain: bool = False,
) -> list[float]:
    """CIDEr-D from its definition; `documents` are groups of captions, a word's frequency how many have it."""

    def grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
        return Counter(tuple(words[position : position + n]) for position in range(len(words) - n + 1))

    def vector(words: Sequence[str], n: int) -> dict[tuple[str, ...], float]:
        return {
            gram: tf * (math.log(len(documents)) - math.log(max(1, seen[gram]))) for gram, tf in grams(words, n).items()
        }

    seen = Counter(
        gram for group in documents for gram in {g for words in group for n in range(1, 5) for g in grams(words, n)}
    )
    scores = []
    for caption, texts in zip(captions, references, strict=True):
        total = 0.0
        for text, n in itertools.product(texts, range(1, 5)):
            own, other = vector(caption, n), vector(text, n)
            dot = sum((w if plain else min(w, other.get(g, 0.0))) * other.get(g, 0.0) for g, w in own.items())
            norm = math.hypot(*own.values()) * math.hypot(*other.values())
            gap = max(len(caption) - 1, 0) - max(len(text) - 1, 0)
            total += (dot / norm if norm else 0.0) * (1.0 if plain else math.exp(-(gap**2) / 72))
        scores.append(10 * total / 4 / len(texts))
    return scores


def test_cider_by_hand() -> None:
    """Two photos; "dog" is in the references of one, so its idf is log 2; "a" is in both, so it counts nothing.

    Caption "a dog" against "a dog": cosine 1 for single words and for pairs, there are no longer n-grams: 10 · 2/4 = 5.
    Caption "a cat" against "a dog": no n-gram that counts is shared: 0.
    """
    references = [[["a", "dog"]], [["a", "bus"]]]
    assert Cider(references).score([0, 0], [["a", "dog"], ["a", "cat"]]).tolist() == pytest.approx([5, 0])


@pytest.mark.parametrize("plain", [False, True])
def test_every_way_to_count_documents_equals_the_slow_definition(plain: bool) -> None:
    captions, references = corpus(30, seed=1)
    each = [[words] for texts in references for words in texts]
    for documents, per_caption in ((references, False), (each, True)):
        found = Cider(references, per_caption).score(range(30), captions, plain=plain)
        assert found.tolist() == pytest.approx(slow_cider(captions, references, documents, plain), abs=1e-9)


# The reward


@pytest.mark.parametrize("end_token", [True, False])
@pytest.mark.parametrize("per_caption", [True, False])
def test_the_reward_is_ciderd_with_the_frequencies_of_all_photos(end_token: bool, per_caption: bool) -> None:
    captions, references = corpus(40, seed=2)
    texts = {f"p{n}": [" ".join(words) for words in own] for n, own in enumerate(references)}
    reward = CiderReward(texts, end_token, per_caption)
    photos = [7, 3, 20]
    beams = [[captions[n], captions[n + 1], captions[n][:3]] for n in photos]
    ended = [[True, True, False]] * 3
    found = reward([f"p{n}" for n in photos], [[" ".join(words) for words in own] for own in beams], ended)
    assert found.shape == (3, 3)

    def close(words: Sequence[str], end: bool = True) -> list[str]:
        return [*words, END] if end_token and end else list(words)

    wanted = [[close(words) for words in own] for own in references]
    documents = [[words] for own in wanted for words in own] if per_caption else wanted
    for row, photo in enumerate(photos):
        for column, words in enumerate(beams[row]):
            own = close(words, ended[row][column])
            [expected] = slow_cider([own], [wanted[photo]], documents)
            assert found[row, column] == pytest.approx(expected, abs=1e-9)
    assert ("not counted" in reward.signature) != end_token


def test_similarities_are_the_original_cider_of_all_pairs() -> None:
    captions, references = corpus(15, seed=3)
    cider = Cider(references)
    captions = [*captions, ["never", "seen", "before"], []]
    table = cider.similarities(captions)
    for photo in range(len(references)):
        slow = cider.score([photo] * len(captions), captions, plain=True)
        np.testing.assert_allclose(table[:, photo], slow, atol=1e-9)


def test_a_caption_finds_its_photo_among_the_photos_of_its_group() -> None:
    references = [[["a", "red", "bus"]], [["a", "brown", "dog"]], [["two", "grey", "cats"]], [["a", "red", "bus"]]]
    captions = [["a", "red", "bus"], ["a", "red", "bus"], ["grey", "cats"], ["bus"]]
    cider = Cider(references)
    assert finds_own_photo(captions, cider, candidates=4).tolist() == [0.5, 0, 1, 0.5]
    assert finds_own_photo(captions, cider, candidates=2).tolist() == [1, 0, 1, 1]


def test_similar_photos_are_those_whose_references_share_rare_words() -> None:
    references = [
        [["a", "red", "bus"], ["the", "bus"]],
        [["a", "dog"], ["a", "brown", "dog"]],
        [["a", "blue", "bus"]],
        [["a", "dog", "and", "a", "bus"]],
    ]
    nearest = similar_photos(references, 2, chunk=3)
    assert nearest[0].tolist() == [2, 3]
    assert nearest[1, 0] == 3
    for row, others in enumerate(nearest.tolist()):
        assert row not in others
    assert similar_photos(references, 9).shape == (4, 3)
    assert similar_photos(references[:1], 5).shape == (1, 0)


def test_a_distinct_reward_takes_off_what_the_caption_earns_for_similar_photos() -> None:
    captions, references = corpus(12, seed=5)
    texts = {f"p{n}": [" ".join(words) for words in own] for n, own in enumerate(references)}
    plain, distinct = CiderReward(texts), CiderReward(texts, distinct=0.5)
    assert distinct.similar is not None
    names = ["p4", "p9"]
    beams = [[" ".join(captions[4]), " ".join(captions[5])], [" ".join(captions[9]), " ".join(captions[1])]]
    rewards = distinct(names, beams)
    for row, photo in enumerate((4, 9)):
        for column in range(2):
            own = plain([names[row]], [[beams[row][column]]])[0, 0]
            others = [plain([f"p{other}"], [[beams[row][column]]])[0, 0] for other in distinct.similar[photo]]
            assert rewards[row, column] == pytest.approx(own - 0.5 * sum(others) / len(others), abs=1e-9)
    assert "similar photos" in distinct.signature


def test_with_the_end_token_a_caption_that_stops_short_earns_less() -> None:
    texts = {"a": ["a dog runs in the park"], "b": ["two cats on a bed"], "c": ["a red bus"]}
    whole, cut = CiderReward(texts), CiderReward(texts, end_token=False)
    short = [["a dog runs in the"]]
    assert whole(["a"], short, [[True]]) < whole(["a"], [["a dog runs in the park"]])
    assert cut(["a"], short, [[True]]) == cut(["a"], short, [[False]])
    assert whole(["a"], short, [[True]]) != whole(["a"], short, [[False]])


# ROUGE-L


@given(CAPTION, CAPTION)
def test_longest_common_subsequence_in_bits_is_that_of_the_table(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, j in itertools.product(range(len(first)), range(len(second))):
        table[i + 1][j + 1] = table[i][j] + 1 if first[i] == second[j] else max(table[i][j + 1], table[i + 1][j])
    length = table[-1][-1]
    if not first or not second or not length:
        return
    precision, recall = length / len(first), length / len(second)
    assert rouge_l(first, [second]) == pytest.approx(2.44 * precision * recall / (recall + 1.44 * precision))


# The report


def photos(count: int, seed: int = 0) -> tuple[dict[str, str], dict[str, list[str]]]:
    captions, references = corpus(count, seed)
    return (
        {f"p{n}": " ".join(words) for n, words in enumerate(captions)},
        {f"p{n}": [" ".join(words) for words in texts] for n, texts in enumerate(references)},
    )


def test_report_has_every_key_an_interval_and_a_reason_for_what_is_missing() -> None:
    report = evaluate(*photos(60), resamples=50)
    data = report.to_json()
    assert set(METRICS) <= set(data)
    for name, score in report.scores.items():
        assert score.low <= score.value <= score.high, name
    for name in SLOW:
        assert (data[name] is None) == (name in data["reasons"])
    assert "60 photos" in report.signature
    assert "4–5 a photo" in report.signature


def test_metrics_can_be_left_out() -> None:
    report = evaluate(*photos(10), skip=SLOW, resamples=5)
    assert report.reasons == {"METEOR": "left out", "SPICE": "left out"}
    assert report.to_json()["METEOR"] is None


def test_missing_data_for_meteor_and_spice_is_a_reason_and_never_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haav.evaluate.meteor.find_spec", lambda name: None)
    monkeypatch.setattr(spice, "find_spec", lambda name: None)
    data = evaluate(*photos(5), resamples=5).to_json()
    assert data["METEOR"] is data["SPICE"] is None
    assert "haav[coco]" in data["reasons"]["METEOR"]
    assert "haav[coco]" in data["reasons"]["SPICE"]
    with pytest.raises(DataError, match="SPICE cannot run"):
        spice.spice(["a"], [["a"]])


def test_bootstrap_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=2000)
    metric = Metric.mean("m", values)
    draws = metric.score(bootstrap_counts(2000, 2000, seed=0) @ metric.stats)[:, 0]
    assert draws.mean() == pytest.approx(values.mean(), abs=0.005)
    assert draws.std() == pytest.approx(values.std() / math.sqrt(2000), rel=0.06)
    assert np.array_equal(bootstrap_counts(9, 5, seed=0), bootstrap_counts(9, 5, seed=0))


def test_a_bootstrap_draw_is_the_metric_of_the_drawn_photos() -> None:
    """The first draw, with photos as often as they were drawn, scored anew the plain way"""
    captions, references = photos(12)
    report = evaluate(captions, references, skip=SLOW, resamples=5)
    drawn = bootstrap_counts(12, 1, seed=3)
    names = [f"p{n}" for n in range(12) for _ in range(int(drawn[0, n]))]
    again = evaluate(
        {f"{k}": captions[name] for k, name in enumerate(names)},
        {f"{k}": references[name] for k, name in enumerate(names)},
        skip=SLOW,
        resamples=5,
    )
    for metric in report.metrics[:2]:  # BLEU and ROUGE-L; CIDEr keeps the whole set's document frequencies
        for index, name in enumerate(metric.names):
            found = metric.score(drawn @ metric.stats)[0, index]
            assert found == pytest.approx(again.scores[name].value)


def test_comparison_finds_what_is_better_and_calls_a_tie_a_tie() -> None:
    captions, references = photos(80)
    worse = {photo: " ".join(text.split()[:3]) for photo, text in captions.items()}
    good, bad = (evaluate(given, references, skip=SLOW, resamples=200) for given in (captions, worse))
    found = compare(bad, good, resamples=200)["CIDEr"]
    assert found.value == pytest.approx(good.scores["CIDEr"].value - bad.scores["CIDEr"].value)
    assert found.low > 0
    assert found.p == pytest.approx(2 / 201), "no draw is on the other side, yet p is not 0"
    tie = compare(good, good, resamples=50)["BLEU-4"]
    assert (tie.value, tie.low, tie.high, tie.p) == (0, 0, 0, 1)
    few, wanted = photos(9)
    with pytest.raises(DataError, match="the same photos"):
        compare(good, evaluate(few, wanted, skip=SLOW, resamples=5))


def test_evaluate_refuses_what_it_cannot_score() -> None:
    with pytest.raises(DataError, match="not of the same photos"):
        evaluate({"a": "x"}, {"b": ["x"]})
    with pytest.raises(DataError, match=r"1 of 1 photos have no reference to score by \(first: a\)"):
        evaluate({"a": "x"}, {"a": []})


# Wording and hallucination


def test_wording_by_hand() -> None:
    found = wording(
        [s.split() for s in ("a dog runs", "a dog runs", "a man with a", "a cat cat", "a b c a b c")] + [[]]
    )
    assert found["distinct captions"] == pytest.approx(5 / 6)
    assert found["truncated"] == pytest.approx(1 / 6)
    assert found["repetitive"] == pytest.approx(2 / 6)
    assert found["empty"] == pytest.approx(1 / 6)
    assert found["words a caption"] == pytest.approx(19 / 6)
    assert found["vocabulary used"] == 8
    assert found["distinct-1"] == pytest.approx(8 / 19)
    assert wording([])["distinct captions"] == 0


def test_chair_by_hand() -> None:
    captions = [s.split() for s in ("a man and two dogs", "a hot dog on toilet paper", "a puppy near a bus stop sign")]
    labels = [["person"], ["hot dog"], ["dog"]]
    references = [[["a", "woman", "alone"]], [["food"]], [["a", "stop", "sign"]]]
    # Named: person, dog | hot dog | dog ("bus stop" is no bus, and "sign" alone none). The first's dog is not there.
    found = chair(captions, labels, references)
    assert found == {"CHAIRi": pytest.approx(1 / 4), "CHAIRs": pytest.approx(1 / 3)}
    assert chair([["a", "drone"]], [["drone"]], [[]]) == {"CHAIRi": 0, "CHAIRs": 0}, "labels of one's own"
    assert chair([["a", "dog"]], [["Dogs"]], [[]])["CHAIRi"] == 0, "whatever the case and number"
    assert chair([["wine", "glasses"]], [["wine glass"]], [[]])["CHAIRi"] == 0
    assert chair(captions[:1], [[]], [[["two", "dogs", "and", "a", "lady"]]])["CHAIRi"] == 0, "people named them"
