"""METEOR 1.5 (Denkowski & Lavie 2014) for English, without Java: the scores of the jar of COCO's evaluation.

`meteor(hypotheses, references)` equals `java -jar meteor-1.5.jar - - -stdio -l en -norm`. The word tables are read
from that jar and the file beside it, both in the wheel of pycocoevalcap. A beam search aligns a caption with each of
its references with four modules, one per kind of match. The best reference counts:

    P, R     weighted matches / weighted length of the hypothesis, of the reference;
             a match of module i weighs w_i, a content word δ, a function word 1 - δ
    F_mean   P·R / (α·P + (1 - α)·R)
    score    F_mean · (1 - γ·(chunks / matches)^β)

P, R, chunks and matches are computed from sums over segments, so a corpus score is the score of summed statistics.

There is one difference from the jar: the jar treats words with equal 32-bit hashes as equal, such as "ap" and "c2".
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, compress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haav.errors import DataError
from haav.evaluate.meteor_words import normalize
from haav.evaluate.porter2 import stem

INSTALL = 'pip install "haav[coco]"'

# English, task "rank": α, β, γ, δ and w_i.
ALPHA, BETA, GAMMA, DELTA = 0.85, 0.20, 0.60, 0.75
EXACT, STEM, SYNONYM, PARAPHRASE = range(4)  # the modules of METEOR, which find the matches
WEIGHTS = (1.0, 0.6, 0.8, 0.6)
BEAM = 40
LONGEST_PHRASE = 7  # words, on either side of a paraphrase

# Columns of the statistics, in pairs (hypothesis, reference): length, function words, content matches of each module,
# function matches of each module. Last the chunks, 0 if all words of both match in one.
LENGTH, FUNCTION_WORDS, CONTENT, FUNCTION, CHUNKS = slice(0, 2), slice(2, 4), slice(4, 12), slice(12, 20), 20
COLUMNS = 21

Words = list[str]
Blocks = Iterable[tuple[Sequence[bytes], Sequence[bytes]]]


def meteor(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], data: MeteorData | None = None
) -> tuple[float, list[float]]:
    """Corpus score and segment scores, in [0, 1]. The best reference of each segment counts."""
    stats = meteor_stats(hypotheses, references, data)
    return float(score(stats.sum(axis=0))), score(stats).tolist()


def meteor_stats(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], data: MeteorData | None = None
) -> np.ndarray:
    """(N, 21) sufficient statistics of each segment and its best reference.

    `score` of a row is the segment's score, `score` of the column sums the corpus score. For a bootstrap, let
    `draws` (B, N) say how often each sample drew each segment: `score(draws @ stats)` are the B corpus scores.
    """
    data = data or load_meteor()
    tested = [normalize(text.replace("|||", ""), data.prefixes) for text in hypotheses]
    # The jar reads all texts of a segment from one line, separated by '|||', so '|||' splits a reference in two.
    wanted = [[normalize(part, data.prefixes) for text in texts for part in text.split("|||")] for texts in references]
    if [] in wanted:
        raise DataError(f"segment {wanted.index([])} has no reference; METEOR needs at least one.")
    aligner = Aligner(data, [*tested, *(words for texts in wanted for words in texts)])
    rows = [aligner.align(words, texts) for words, texts in zip(tested, wanted, strict=True)]
    stats = np.array([row for of_segment in rows for row in of_segment], dtype=np.float64).reshape(-1, COLUMNS)
    scores = score(stats)
    best, end = [], 0
    for of_segment in rows:
        start, end = end, end + len(of_segment)
        best.append(start + int(scores[start:end].argmax()))  # the first of equal scores, as in the jar
    return stats[best]


def score(stats: np.ndarray) -> np.ndarray:
    """(…, 21) statistics → (…) scores; 0 where nothing matches"""
    length, function_words = stats[..., LENGTH], stats[..., FUNCTION_WORDS]
    matches = np.zeros_like(length)
    for columns, importance in ((CONTENT, DELTA), (FUNCTION, 1 - DELTA)):
        per_module = stats[..., columns]
        for module, weight in enumerate(WEIGHTS):  # in the order of the jar, for bit-identical sums
            matches = matches + per_module[..., 2 * module : 2 * module + 2] * weight * importance
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = matches / (DELTA * (length - function_words) + (1 - DELTA) * function_words)
        precision, recall = ratios[..., 0], ratios[..., 1]
        f_mean = 1 / ((1 - ALPHA) / precision + ALPHA / recall)
        fragmentation = stats[..., CHUNKS] / (stats[..., CONTENT.start : FUNCTION.stop].sum(axis=-1) / 2)
        result = f_mean * (1 - GAMMA * fragmentation**BETA)
    return np.asarray(np.nan_to_num(result))


@dataclass(frozen=True)
class MeteorData:
    """The tables of the jar."""

    function_words: frozenset[str] = frozenset()
    prefixes: dict[str, bool] = field(default_factory=dict)  # "Dr", which keeps its dot → whether only before digits
    synsets: dict[str, str] = field(default_factory=dict)  # word → its WordNet synsets, with spaces between
    bases: dict[str, list[str]] = field(default_factory=dict)  # irregular form → its base forms
    paraphrases: Blocks = ()  # phrases and as many paraphrases, sorted


class ParaphraseFile:
    """5.3 million paraphrases, 60 MB on disk and 270 MB unpacked. Each iteration reads the file in small blocks."""

    def __init__(self, path: Path, block: int = 1 << 18) -> None:
        self.path, self.block = path, block

    def __iter__(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        lines = [b""]
        with gzip.open(self.path) as file:
            while block := file.read(self.block):
                first, *more = block.split(b"\n")
                lines = [*lines[:-1], lines[-1] + first, *more]
                whole = (len(lines) - 1) // 3 * 3  # the last line may go on in the next block
                yield lines[1:whole:3], lines[2:whole:3]  # the first line of three is a probability, not used
                lines = lines[whole:]


def load_meteor() -> MeteorData:
    """Load the tables in the folder of pycocoevalcap. The package is located, but not imported."""
    spec = find_spec("pycocoevalcap")
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) / "meteor" if spec else Path()
    jar, paraphrases = folder / "meteor-1.5.jar", folder / "data" / "paraphrase-en.gz"
    if not (jar.is_file() and paraphrases.is_file()):
        raise DataError(f"METEOR needs the word tables of the package pycocoevalcap.\n  {INSTALL}")
    with zipfile.ZipFile(jar) as archive:
        words, prefixes, synsets, exceptions = (
            archive.read(name).decode().splitlines()
            for name in (
                "function/english.words",
                "nonbreaking/english.prefixes",
                "synonym/english.synsets",
                "synonym/english.exceptions",
            )
        )
    bases: dict[str, list[str]] = {}
    for base, forms in zip(exceptions[::2], exceptions[1::2], strict=True):
        for form in forms.split():
            bases.setdefault(form, []).append(base)
    return MeteorData(
        function_words=frozenset(words),
        prefixes={line.split()[0]: "#NUMERIC_ONLY#" in line for line in prefixes if line and line[0] != "#"},
        synsets=dict(zip(synsets[::2], synsets[1::2], strict=True)),
        bases=bases,
        paraphrases=ParaphraseFile(paraphrases),
    )


# --- Words to matches ------------------------------------------------------------------------------------------------

# WordNet's detachment rules in the order of the jar. The first one that yields a known word determines the base form.
_DETACH = (
    ("s", ""), ("ses", "s"), ("xes", "x"), ("zes", "z"), ("ches", "ch"), ("shes", "sh"), ("men", "man"), ("ies", "y"),
    ("es", "e"), ("es", ""), ("ed", "e"), ("ed", ""), ("ing", "e"), ("ing", ""), ("er", ""), ("est", ""), ("er", "e"),
    ("est", "e"),
)  # fmt: skip


class Match(NamedTuple):
    """Words `start:end` of the hypothesis for words `ref_start:ref_end` of the reference."""

    module: int
    start: int
    end: int
    ref_start: int
    ref_end: int
    used: int  # bit i is word i of the hypothesis, the reference's words follow
    gain: int  # what the search key changes by
    distance: int


class Phrases(NamedTuple):
    """Phrases of a sentence that have or are a paraphrase."""

    spans: list[tuple[str, int, int]]  # phrase, start, end; by start and length
    places: dict[str, list[tuple[int, int]]]


class Aligner:
    """Aligns hypotheses with references. It holds the paraphrases that can occur in the given sentences."""

    def __init__(self, data: MeteorData, sentences: Iterable[Words]) -> None:
        self.data = data
        self.paraphrases = _select(data.paraphrases, sentences)
        self.phrases = set(self.paraphrases).union(*self.paraphrases.values())
        self.openings = {opening for phrase in self.phrases for opening in accumulate(phrase.split(), _longer)}
        self._stem, self._synsets, self._modules = cache(stem), cache(self._find_synsets), cache(self._compare)

    def align(self, hypothesis: Words, references: Sequence[Words]) -> list[list[int]]:
        """One row of statistics per reference."""
        places: dict[str, list[int]] = {}
        for place, word in enumerate(hypothesis):
            places.setdefault(word, []).append(place)
        phrases = self._phrases(hypothesis)
        of_word: dict[str, list[tuple[int, int]]] = {}  # kept, as references to one photo share words
        rows = []
        for reference in references:
            for word in reference:
                if word not in of_word:
                    modules = ((module, other) for other in places for module in self._modules(word, other))
                    of_word[word] = sorted((module, place) for module, other in modules for place in places[other])
            size = len(hypothesis)
            matches = [
                [_match(size, module, start, start + 1, position, position + 1) for module, start in of_word[word]]
                for position, word in enumerate(reference)
            ]
            if hypothesis == reference:
                matches = [[match for match in candidates if match.module == EXACT] for candidates in matches]
            else:
                self._add_paraphrases(matches, size, phrases, self._phrases(reference))
            rows.append(self._count(hypothesis, reference, *search(matches)))
        return rows

    def _compare(self, word: str, other: str) -> tuple[int, ...]:
        """The kinds of match between two words."""
        if word == other:
            return (EXACT,)
        by_stem = (STEM,) if self._stem(word) == self._stem(other) else ()
        return by_stem if self._synsets(word).isdisjoint(self._synsets(other)) else (*by_stem, SYNONYM)

    def _find_synsets(self, word: str) -> frozenset[str]:
        """Synsets of the word and of its base forms."""
        known = self.data.synsets
        bases = self.data.bases.get(word)
        if bases is None and len(word) > 2 and not word.endswith("ss"):
            detached = (word.removesuffix(old) + new for old, new in _DETACH if word.endswith(old))
            bases = [next((base for base in detached if base in known), word)]
        return frozenset(synset for form in (word, *(bases or ())) for synset in known.get(form, "").split())

    def _phrases(self, words: Words) -> Phrases:
        phrases = Phrases([], {})
        for start in range(len(words)):
            for end, phrase in enumerate(accumulate(words[start:], _longer), start + 1):
                if phrase not in self.openings:
                    break
                if phrase in self.phrases:
                    phrases.spans.append((phrase, start, end))
                    phrases.places.setdefault(phrase, []).append((start, end))
        return phrases

    def _add_paraphrases(self, matches: list[list[Match]], size: int, hypothesis: Phrases, reference: Phrases) -> None:
        """From phrases of the reference, then of the hypothesis. A pair known in both directions gives two matches."""
        for ref_start, ref_end, start, end in self._pairs(reference, hypothesis):
            matches[ref_start].append(_match(size, PARAPHRASE, start, end, ref_start, ref_end))
        for start, end, ref_start, ref_end in self._pairs(hypothesis, reference):
            matches[ref_start].append(_match(size, PARAPHRASE, start, end, ref_start, ref_end))

    def _pairs(self, phrases: Phrases, others: Phrases) -> Iterator[tuple[int, int, int, int]]:
        """(start, end) of each phrase with (start, end) of each of its paraphrases among the others"""
        for phrase, start, end in phrases.spans:
            common = others.places.keys() & self.paraphrases.get(phrase, ())
            for paraphrase in sorted(common):  # the order of the file
                for place in others.places[paraphrase]:
                    yield start, end, *place

    def _count(self, hypothesis: Words, reference: Words, chosen: list[Match], chunks: int) -> list[int]:
        """Statistics of an alignment; see the columns above."""
        row = [0] * COLUMNS
        for side, words in enumerate((hypothesis, reference)):
            is_function = [word in self.data.function_words for word in words]
            row[LENGTH.start + side] = len(words)
            row[FUNCTION_WORDS.start + side] = sum(is_function)
            for match in chosen:
                span = slice(match.ref_start, match.ref_end) if side else slice(match.start, match.end)
                functions = sum(is_function[span])
                row[FUNCTION.start + 2 * match.module + side] += functions
                row[CONTENT.start + 2 * match.module + side] += span.stop - span.start - functions
        # If all words match in one chunk, the jar counts no chunk, and leaves it out of the corpus sum.
        complete = chunks == 1 and sum(row[CONTENT.start : FUNCTION.stop]) == len(hypothesis) + len(reference)
        row[CHUNKS] = 0 if complete else chunks
        return row


def _longer(phrase: str, word: str) -> str:
    return f"{phrase} {word}"


def _select(blocks: Blocks, sentences: Iterable[Words]) -> dict[str, set[str]]:
    """phrase → its paraphrases, where both occur in the sentences"""
    phrases: set[bytes] = set()
    for sentence in set(map(tuple, sentences)):
        words = [word.encode() for word in sentence]
        for length in range(1, LONGEST_PHRASE + 1):
            phrases.update(b" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
    selected: dict[str, set[str]] = {}
    for block, paraphrases in blocks:
        for phrase, paraphrase in compress(zip(block, paraphrases, strict=True), map(phrases.__contains__, block)):
            if paraphrase in phrases:
                selected.setdefault(phrase.decode(), set()).add(paraphrase.decode())
    return selected


# The search key of a partial alignment sorts like the comparator of the jar: most matched words first, then fewest
# chunks, then least distance. A word of an inexact match counts half, rounded down.
_MATCHED, _CHUNK = 1 << 64, 1 << 32


def _match(size: int, module: int, start: int, end: int, ref_start: int, ref_end: int) -> Match:
    """`size` is the hypothesis' length"""
    used = ((1 << end) - (1 << start)) | (((1 << ref_end) - (1 << ref_start)) << size)
    matched = 2 if module == EXACT else (end - start) // 2 + (ref_end - ref_start) // 2
    return Match(module, start, end, ref_start, ref_end, used, -matched * _MATCHED, abs(start - ref_start))


def search(matches: Sequence[Sequence[Match]]) -> tuple[list[Match], int]:
    """The beam search of the jar. Takes the possible matches at each reference word; returns chosen matches and chunks.

    Ties are broken as in the jar. Paths are sorted stably at each word. The distance of a match is not added to the
    path that takes it, but to the paths that its parent tries afterwards.
    """
    once = twice = 0
    for candidates in matches:
        for match in candidates:
            twice |= once & match.used
            once |= match.used

    # A path: key, reference words done, end of the open chunk or -1, words used, (path so far, match).
    paths: list[tuple[Any, ...]] = [(0, 0, -1, 0, None)]
    for position, candidates in enumerate(matches):
        certain = len(candidates) == 1 and not candidates[0].used & twice
        following = []
        for path in paths:
            key, done, end, used, chosen = path
            if position < done:
                following.append(path)
                continue
            for match in candidates:
                if not used & match.used:
                    taken = key + match.gain if end in (-1, match.start) else key + match.gain + _CHUNK
                    following.append((taken, match.ref_end, match.end, used | match.used, (chosen, match)))
                    key += match.distance
            if not certain:
                following.append((key if end == -1 else key + _CHUNK, position + 1, -1, used, chosen))
        paths = following
        if len(paths) > 1:
            paths.sort(key=itemgetter(0))
            del paths[BEAM:]
    closed = [(key if end == -1 else key + _CHUNK, chosen) for key, _, end, _, chosen in paths]
    key, chain = min(closed, key=itemgetter(0))
    chosen = []
    while chain:
        chain, match = chain
        chosen.append(match)
    return chosen, key % _MATCHED // _CHUNK
