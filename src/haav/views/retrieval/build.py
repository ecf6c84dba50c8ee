"""Builds the text database from training sentences, and the bridge from stored views."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haav.data.annotations import Dataset, Photo, load_dataset
from haav.errors import DataError, unknown
from haav.store import Store
from haav.types import Progress, quiet
from haav.views.embedded.regions import crops
from haav.views.retrieval.bridge import FEATURES, Bridge, BridgeConfig, CrossFitted, Pairs, recall, train_bridge
from haav.views.retrieval.sentences import MiniLM, SentenceEncoder
from haav.views.retrieval.textdb import (
    Entry,
    Manifest,
    TextDatabase,
    merge_entries,
    read_text_file,
    read_visual_genome,
    sample_entries,
)


def build_textdb(
    datasets: Sequence[str | Path] = (),
    texts: Sequence[str | Path] = (),
    visual_genome: Sequence[str | Path] = (),
    exclude: frozenset[str] = frozenset(),
    progress: Progress = quiet,
    encoder: SentenceEncoder | None = None,
    limit: int | None = None,
) -> TextDatabase:
    """Collects captions of training splits, lines of text files and phrases of Visual Genome.

    The manifest lists the sources. `limit` is the largest number of sentences; more are sampled evenly.
    """
    entries: list[Entry] = []
    sources: list[dict[str, Any]] = []
    for path in datasets:
        training = load_dataset(path).split("train")
        sentences = [Entry(text, (photo.id,)) for photo in training for text in photo.captions]
        sources.append({"file": Path(path).name, "kind": "captions", "split": "train", "sentences": len(sentences)})
        entries += sentences
    for source_type, paths in (("text", texts), ("visual genome", visual_genome)):
        for path in map(Path, paths):
            try:
                sentences = list(read_text_file(path) if source_type == "text" else read_visual_genome(path, exclude))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"cannot read {path} as {source_type}: {error}.") from None
            sources.append(
                {"file": path.name, "kind": source_type, "sentences": len(sentences), "excluded": len(exclude)}
            )
            entries += sentences
    merged = merge_entries(entries)
    if not merged:
        raise DataError("no sentence was given: name a data set, a text file or a Visual Genome file.")
    if limit is not None:
        merged = sample_entries(merged, limit)
        sources.append({"kind": "sample", "sentences": len(merged)})
    encoder = encoder or MiniLM()
    vectors = encoder.encode([entry.sentence for entry in merged], progress)
    return TextDatabase(merged, vectors, Manifest(encoder.fingerprint, sources))


def build_bridge(
    store: Store,
    dataset: Dataset,
    textdb: TextDatabase,
    progress: Progress = quiet,
    encoder: SentenceEncoder | None = None,
    view: str = FEATURES,
    **settings: Any,
) -> tuple[CrossFitted, dict[str, Any]]:
    """Trains the cross-fitted bridge and evaluates it on photos that it was not trained on.

    `view`: the view to train on; its tokens must be those of the whole photo and of its crops, as in `regions`.
    """
    encoder = encoder or MiniLM()
    if textdb.encoder != encoder.fingerprint:
        raise DataError(
            f"the bridge leads to vectors of {encoder.fingerprint}; the text database has those of {textdb.encoder}.\n"
            "  Build one without --clip-text-model: haav textdb"
        )
    manifest = store.views.get(view)
    if manifest is None:
        raise DataError(unknown("view", view, store.views) + f"\n  Add it with: haav extract --store {store.path}")
    tokens = len(crops())
    if manifest.spec.max_tokens != tokens:
        raise DataError(
            f"view '{view}' has up to {manifest.spec.max_tokens} tokens; a bridge needs {tokens}: the whole photo, "
            f"five crops, nine crops.\n  Take a view of that layout, such as '{FEATURES}'."
        )
    pairs = training_pairs(store, dataset.split("train"), textdb, view)
    config = BridgeConfig(features=pairs.features.shape[2], vectors=textdb.vectors.shape[1], **settings)
    bridge = train_bridge(pairs, textdb.encoder, config, progress, view, (manifest.made_by,))
    return bridge, evaluate_bridge(bridge, store, dataset, textdb, pairs, encoder)


def training_pairs(store: Store, photos: Sequence[Photo], textdb: TextDatabase, view: str = FEATURES) -> Pairs:
    """Training photos whose captions are in the text database, with their regions from the store."""
    owned = [(photo.id, tuple(textdb.rows_of(photo.id))) for photo in photos]
    known = [(photo, rows) for photo, rows in owned if rows]
    if not known:
        raise DataError("no training photo of the data set has a caption in the text database.")
    ids = tuple(photo for photo, _ in known)
    return Pairs(ids, region_features(store, view, ids), textdb.vectors, tuple(rows for _, rows in known))


def region_features(store: Store, view: str, ids: Sequence[str]) -> Tensor:
    """(N, regions, D) float16, which saves half the memory and is precise enough for the bridge"""
    return torch.stack([view.tokens for view in store.get_many(view, ids)])


def evaluate_bridge(
    bridge: CrossFitted,
    store: Store,
    dataset: Dataset,
    textdb: TextDatabase,
    pairs: Pairs,
    encoder: SentenceEncoder,
    photos: int = 1000,
) -> dict[str, Any]:
    """Recall on val next to that of an untrained bridge, and the cosine of retrieved sentences to a photo's captions.

    With cross-fitting, the cosine should be the same on training photos as on val. Without it, it is not.
    """
    val = [photo for photo in dataset.split("val") if photo.captions][:photos]
    if not val:
        return {}
    texts = [text for photo in val for text in photo.captions]
    vectors = encoder.encode(texts)
    ends = torch.tensor([len(photo.captions) for photo in val]).cumsum(dim=0).tolist()
    rows = [tuple(range(end - len(photo.captions), end)) for photo, end in zip(val, ends, strict=True)]
    features = region_features(store, bridge.view, [photo.id for photo in val])[:, :1]
    ids = [photo.id for photo in val]
    queries = bridge(features, ids)[:, 0]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        whole = pairs.features[:, 0].float()
        untrained = Bridge(bridge.config, whole.mean(dim=0), whole.std(dim=0) + 1e-3).eval()(features[:, 0])
    indices = sorted(random.Random(0).sample(range(len(pairs.photos)), min(photos, len(pairs.photos))))
    train_ids = [pairs.photos[index] for index in indices]
    train_features, train_rows = pairs.features[indices][:, :1], [pairs.rows[index] for index in indices]
    with torch.no_grad():
        without_folds = bridge.bridges[0](train_features[:, 0])
    held_out = bridge(train_features, train_ids)[:, 0]
    return {
        "photos": len(val),
        "candidates": len(texts),
        "val": recall(queries, vectors, rows),
        "untrained": recall(untrained, vectors, rows),
        "cosine_to_own_captions": {
            "val": _nearness(textdb, queries, ids, vectors, rows),
            "train, cross-fitted": _nearness(textdb, held_out, train_ids, textdb.vectors, train_rows),
            "train, without cross-fitting": _nearness(textdb, without_folds, train_ids, textdb.vectors, train_rows),
        },
    }


def _nearness(
    textdb: TextDatabase,
    queries: Tensor,
    ids: Sequence[str],
    vectors: Tensor,
    rows: Sequence[Sequence[int]],
    top: int = 5,
) -> float:
    """Mean cosine between the `top` sentences retrieved for a photo and its own captions."""
    _, retrieved = textdb.search(queries, top, exclude_owner=ids)
    cosines = [
        (textdb.vectors[nearest].float() @ vectors[list(captions)].float().T).mean()
        for nearest, captions in zip(retrieved, rows, strict=True)
    ]
    return round(torch.stack(cosines).mean().item(), 4)
