"""Text views for runs with fewer labels: retrieved only from the captions that such a run keeps.

A text database holds the captions of all training photos. A run that keeps a tenth of the labels must not read the
others through its text views. So its text database is cut to the captions that it keeps, its bridge is trained on
these captions only, and its text views are extracted into a store of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock

from haav.data.annotations import Dataset, load_dataset
from haav.data.mixture import parse_sources
from haav.errors import ConfigError
from haav.store import Store, ViewManifest
from haav.views import Extractor, ExtractorOptions, PhotoBatch, build_extractor, find_extractor_class
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.build import build_bridge
from haav.views.retrieval.sentences import SentenceEncoder
from haav.views.retrieval.textdb import Entry, TextDatabase, sample_entries

BATCH = 256
DONE = "done"
LOCK = Lock()
"""Rows in parallel may need the same texts. One makes them, and the others wait."""
NAMED = ("epochs", "folds", "hidden", "batch", "lr", "weight_decay", "dropout", "temperature", "seed")
"""settings of a bridge that a cut one takes over"""


def cut_textdb(textdb: TextDatabase, dataset: Dataset, share: float) -> TextDatabase:
    """The text database of a data set that keeps the captions of `share` of its photos.

    A sentence stays if it is a caption that a photo keeps. Of sentences that belong to no training photo of the data
    set, such as those of text files, the same share stays.
    """
    training = {photo.id for photo in dataset.split("train")}
    kept = {(photo.id, " ".join(text.split())) for photo in dataset.split("train") for text in photo.captions}
    rows: dict[str, int] = {}
    entries: list[Entry] = []
    strangers: list[Entry] = []
    for row, entry in enumerate(textdb.entries):
        rows[entry.sentence] = row
        owners = tuple(owner for owner in entry.owners if (owner, entry.sentence) in kept)
        others = tuple(owner for owner in entry.owners if owner not in training)
        if owners:
            entries.append(replace(entry, owners=owners + others))
        elif not entry.owners or others:
            strangers.append(replace(entry, owners=others))
    limit = round(share * len(strangers))
    entries += sample_entries(strangers, limit) if limit else []
    sources = [*textdb.manifest.sources, {"kind": "cut", "share": share, "sentences": len(entries)}]
    vectors = textdb.vectors[[rows[entry.sentence] for entry in entries]]
    return TextDatabase(entries, vectors, replace(textdb.manifest, sources=sources))


def text_views(settings: Mapping[str, str]) -> list[str]:
    """The views of a run that retrieve from a text database"""
    classes = {name: find_extractor_class(name) for name in settings.get("data.views", "").split(",") if name}
    return [name for name, extractor in classes.items() if extractor is not None and "textdb" in extractor.needs]


def cut_texts(
    settings: Mapping[str, str],
    folder: Path,
    bridge: str | None,
    textdb: str | None,
    report: Callable[[str], None] = lambda line: None,
    encoder: SentenceEncoder | None = None,
) -> dict[str, str]:
    """The settings of a run, with the store that holds its text views. It is made if it is not there yet.

    The same labels are kept as in training: they depend on the share and on the seed.
    """
    share, views = float(settings.get("data.label_fraction", 1)), text_views(settings)
    if share >= 1 or not views:
        return dict(settings)
    if bridge is None or textdb is None:
        raise ConfigError(
            f"a run with {share:.0%} of the labels needs text views from those labels only.\n"
            "  Give what the text views of the store were made with: --bridge DIR --textdb DIR."
        )
    sources = [source for source in parse_sources(settings["data.dataset"]) if source.role == "human"]
    if len(sources) != 1:
        raise ConfigError("runs with fewer labels take one data set with captions by people (--data.dataset).")
    by, seed = settings.get("data.label_by", "photo"), int(settings["train.seed"])
    place = folder / f"{by}-{share:g}-seed-{seed}"
    over = place / "views"
    with LOCK:
        if not (place / DONE).exists():
            report(f"text views from {share:.0%} of the labels, seed {seed}: begins")
            dataset = load_dataset(sources[0].path).label_fraction(share, by, seed)
            whole = CrossFitted.load(bridge)
            database = cut_textdb(TextDatabase.load(textdb), dataset, share)
            like = {name: getattr(whole.config, name) for name in NAMED}
            with Store(settings["data.store"]) as store:
                fitted, measured = build_bridge(store, dataset, database, encoder=encoder, view=whole.view, **like)
                database.save(place / "texts")
                fitted.save(place / "bridge", measured)
                for name in views:
                    extractor = build_extractor(name, ExtractorOptions(bridge=fitted, textdb=database))
                    _extract(extractor, store, over, whole.view)
            (place / DONE).touch()
    return {**settings, "data.store": f"{settings['data.store']},{over}"}


def _extract(extractor: Extractor, store: Store, over: Path, features: str) -> None:
    """Extract a text view of all photos of a store into another, from the stored features of the bridge."""
    photos = store.ids(features)
    with Store(over, write=True) as target:
        if extractor.name in target.views and target.views[extractor.name].fingerprint != extractor.fingerprint:
            target.drop(extractor.name)  # of a bridge that was trained before an interruption
        target.add_view(extractor.name, ViewManifest(extractor.spec, extractor.fingerprint, extractor.licence))
        missing = target.missing(extractor.name, photos)
        for start in range(0, len(missing), BATCH):
            ids = missing[start : start + BATCH]
            batch = PhotoBatch(ids, None, **{features: store.get_many(features, ids)})
            target.put(extractor.name, dict(zip(ids, batch.view(extractor), strict=True)))
