"""Score captions against references with confidence intervals, and compare two sets of captions.

Each metric is a table of statistics per photo, and a function that scores their sums. The bootstrap draws photos with
replacement, so the sums of all draws are one matrix product. CIDEr uses the document frequencies of all references in
every draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from haav import __version__
from haav.errors import DataError
from haav.evaluate import meteor, spice
from haav.evaluate.bleu import bleu, bleu_stats
from haav.evaluate.chair import chair
from haav.evaluate.cider import Cider
from haav.evaluate.ptb import tokenize
from haav.evaluate.rouge import rouge_l
from haav.evaluate.statistics import Floats, bootstrap_counts, percentile_interval, sign_p_value
from haav.evaluate.wording import wording

METRICS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
SLOW = ("METEOR", "SPICE")
"""metrics that can be skipped; the others take a second for thousands of photos"""
RESAMPLES = 1000
CANDIDATES = 1000
RECALL = f"recall@1 of {CANDIDATES}"
"""share of captions that are more like the references of their own photo than like those of any other of 1,000"""


@dataclass(frozen=True)
class Metric:
    names: tuple[str, ...]
    stats: Floats
    """(photos, F)"""
    score: Callable[[Floats], Floats]
    """(…, F) sums → (…, names)"""

    @classmethod
    def mean(cls, name: str, values: Sequence[float] | Floats) -> Metric:
        """A metric that is the mean of its values over photos"""
        table = np.stack([np.asarray(values, dtype=np.float64), np.ones(len(values))], axis=1)
        return cls((name,), table, lambda sums: sums[..., :1] / sums[..., 1:])


@dataclass(frozen=True)
class Score:
    value: float
    low: float
    high: float
    """95 % of bootstrap samples lie between `low` and `high`"""


@dataclass(frozen=True)
class Difference:
    value: float
    """score of the second report minus that of the first"""
    low: float
    high: float
    p: float
    """two-sided p-value of the bootstrap over photos"""


@dataclass(frozen=True)
class Report:
    scores: Mapping[str, Score]
    reasons: Mapping[str, str]
    """metric that could not run → reason"""
    wording: Mapping[str, float]
    photos: int
    signature: str
    metrics: tuple[Metric, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        values = {name: self.scores[name].value if name in self.scores else None for name in METRICS}
        others = {name: score.value for name, score in self.scores.items() if name not in values}
        intervals = {name: [score.low, score.high] for name, score in self.scores.items()}
        return {
            **values,
            **others,
            "intervals": intervals,
            "reasons": dict(self.reasons),
            "wording": dict(self.wording),
            "photos": self.photos,
            "signature": self.signature,
        }


def evaluate(
    captions: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    objects: Mapping[str, Sequence[str]] | None = None,
    skip: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Report:
    """Score captions. `captions` and `references` are keyed by photo and must have the same photos.

    `objects` are the names of the objects in each photo, for CHAIR. `skip` may contain any of `SLOW`.
    """
    if captions.keys() != references.keys():
        raise DataError("captions and references are not of the same photos.")
    photos = list(references)
    bare = [photo for photo in photos if not references[photo]]
    if bare or not photos:
        first = f" (first: {', '.join(bare[:3])})" if bare else ""
        raise DataError(f"{len(bare):,} of {len(photos):,} photos have no reference to score by{first}.")
    said = [tokenize(captions[photo]) for photo in photos]
    wanted = [[tokenize(text) for text in references[photo]] for photo in photos]
    metrics, reasons = _measure(said, wanted, skip)
    scores: dict[str, Score] = {}
    draws = bootstrap_counts(len(photos), resamples, seed)
    for metric in metrics:
        whole = metric.score(metric.stats.sum(axis=0))
        low, high = percentile_interval(metric.score(draws @ metric.stats))
        for column, name in enumerate(metric.names):
            scores[name] = Score(float(whole[column]), float(low[column]), float(high[column]))
    notes = wording(said)
    notes["<unk>"] = sum("<unk>" in captions[photo] for photo in photos) / len(photos)
    if objects is not None:
        notes |= chair(said, [objects.get(photo, ()) for photo in photos], wanted)
    return Report(
        scores, reasons, notes, len(photos), _signature(wanted, list(scores), resamples, seed), tuple(metrics)
    )


def compare(first: Report, second: Report, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Difference]:
    """Differences of the scores of two reports, over the same bootstrap draws of the same photos."""
    differences: dict[str, Difference] = {}
    draws = bootstrap_counts(first.photos, resamples, seed)
    for base, other in zip(first.metrics, second.metrics, strict=True):
        if base.stats.shape != other.stats.shape:
            raise DataError("two reports can be compared only over the same photos.")
        whole = other.score(other.stats.sum(axis=0)) - base.score(base.stats.sum(axis=0))
        drawn = other.score(draws @ other.stats) - base.score(draws @ base.stats)
        drawn[np.abs(drawn) < 1e-9] = 0.0  # a tie, up to rounding
        low, high = percentile_interval(drawn)
        p = sign_p_value(drawn)
        for column, name in enumerate(base.names):
            values = (float(array[column]) for array in (whole, low, high, p))
            differences[name] = Difference(*values)
    return differences


def _measure(
    said: list[list[str]], wanted: list[list[list[str]]], skip: Sequence[str]
) -> tuple[list[Metric], dict[str, str]]:
    # COCO's n-gram metrics split words at no-break spaces. Its ROUGE-L does not.
    split = [_split_at_spaces(words) for words in said]
    cider = Cider([[_split_at_spaces(words) for words in texts] for texts in wanted])
    photo = np.repeat(np.arange(len(wanted)), cider.references)
    metrics = [
        Metric(METRICS[:4], bleu_stats(cider.table.count(split), cider.table.counts, photo), bleu),
        Metric.mean("ROUGE-L", [rouge_l(words, texts) for words, texts in zip(said, wanted, strict=True)]),
        Metric.mean("CIDEr", cider.score(range(len(split)), split)),
        Metric.mean("CIDEr-plain", cider.score(range(len(split)), split, plain=True)),
    ]
    reasons = dict.fromkeys(skip, "left out")
    if len(said) >= CANDIDATES:
        metrics.append(Metric.mean(RECALL, finds_own_photo(split, cider)))
    joined = [" ".join(words) for words in said]
    texts_of = [[" ".join(words) for words in texts] for texts in wanted]
    if "METEOR" not in skip:
        try:
            stats = meteor.meteor_stats(joined, texts_of)
            metrics.append(Metric(("METEOR",), stats, lambda sums: meteor.score(sums)[..., None]))
        except DataError as error:
            reasons["METEOR"] = str(error).replace("\n ", "")
    if "SPICE" not in skip:
        reason = spice.missing()
        try:
            if not reason:
                metrics.append(Metric.mean("SPICE", spice.spice(joined, texts_of)))
        except DataError as error:
            reason = str(error)
        if reason:
            reasons["SPICE"] = reason
    return metrics, reasons


def finds_own_photo(captions: Sequence[Sequence[str]], cider: Cider, candidates: int = CANDIDATES) -> Floats:
    """(photos,): 1 where a caption is most similar to its own photo by original CIDEr, 1/n where n photos share the
    first place.

    Candidates are the photos of its group. Groups are consecutive and as even as possible.
    """
    groups = max(1, len(captions) // candidates)
    hits = []
    for group in np.array_split(np.arange(len(captions)), groups):
        alike = cider.similarities([captions[photo] for photo in group])[:, group]
        best = alike >= alike.max(axis=1, keepdims=True) - 1e-9
        hits.append(np.diag(best) / best.sum(axis=1))
    return np.concatenate(hits)


def _split_at_spaces(words: list[str]) -> list[str]:
    return " ".join(words).split()


def _signature(wanted: Sequence[Sequence[Any]], names: Sequence[str], resamples: int, seed: int) -> str:
    """Description of the protocol. Scores are comparable only if their signatures match."""
    counts = sorted({len(texts) for texts in wanted})
    per_photo = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0])
    mean = sum(map(len, wanted)) / len(wanted)
    parts = [
        f"haav {__version__}",
        "tokens PTB (CoreNLP 3.4.1), lower case, no punctuation",
        f"{len(wanted)} photos",
        f"references {per_photo} a photo (mean {mean:.2f})",
        "BLEU closest length",
        "CIDEr = CIDEr-D, document frequency of these references by photo",
        *(["METEOR 1.5 en -norm"] if "METEOR" in names else []),
        *(["SPICE 1.0"] if "SPICE" in names else []),
        f"bootstrap {resamples}, seed {seed}",
    ]
    return " | ".join(parts)
