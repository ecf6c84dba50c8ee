"""Building what retrieval needs: the text database from training sentences, the bridge from stored photos."""

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
    """Captions of training splits only, lines of text files, phrases of Visual Genome; the manifest says which.

    `limit`: no more sentences than that, an even sample of them.
    """
    entries: list[Entry] = []
    sources: list[dict[str, Any]] = []
    for path in datasets:
        training = load_dataset(path).split("train")
        own = [Entry(text, (photo.id,)) for photo in training for text in photo.captions]
        sources.append({"file": Path(path).name, "kind": "captions", "split": "train", "sentences": len(own)})
        entries += own
    for kind, paths in (("text", texts), ("visual genome", visual_genome)):
        for path in map(Path, paths):
            try:
                own = list(read_text_file(path) if kind == "text" else read_visual_genome(path, exclude))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"cannot read {path} as {kind}: {error}.") from None
            sources.append({"file": path.name, "kind": kind, "sentences": len(own), "excluded": len(exclude)})
            entries += own
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
    """The cross-fitted bridge, and how well it finds captions of photos it has not seen.

    `view`: what it is trained on; its tokens are those of the whole photo and of its crops, as `regions` has them.
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
    """Training photos whose captions are in the text database, with their regions out of the store."""
    owned = [(photo.id, tuple(textdb.rows_of(photo.id))) for photo in photos]
    known = [(photo, rows) for photo, rows in owned if rows]
    if not known:
        raise DataError("no training photo of the data set has a caption in the text database.")
    ids = tuple(photo for photo, _ in known)
    return Pairs(ids, region_features(store, view, ids), textdb.vectors, tuple(rows for _, rows in known))


def region_features(store: Store, view: str, ids: Sequence[str]) -> Tensor:
    """(N, regions, D) float16: half the memory, and the bridge does not mind"""
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
    """Recall on val beside an untrained bridge, and how near retrieved sentences come to a photo's own captions.

    The last is what cross-fitting is for: on training photos it should be as on val, and is not without it.
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
        chance = Bridge(bridge.config, whole.mean(dim=0), whole.std(dim=0) + 1e-3).eval()(features[:, 0])
    some = sorted(random.Random(0).sample(range(len(pairs.photos)), min(photos, len(pairs.photos))))
    train_ids = [pairs.photos[number] for number in some]
    train_features, train_rows = pairs.features[some][:, :1], [pairs.rows[number] for number in some]
    with torch.no_grad():
        seen = bridge.bridges[0](train_features[:, 0])
    held_out = bridge(train_features, train_ids)[:, 0]
    return {
        "photos": len(val),
        "candidates": len(texts),
        "val": recall(queries, vectors, rows),
        "untrained": recall(chance, vectors, rows),
        "cosine_to_own_captions": {
            "val": _nearness(textdb, queries, ids, vectors, rows),
            "train, cross-fitted": _nearness(textdb, held_out, train_ids, textdb.vectors, train_rows),
            "train, without cross-fitting": _nearness(textdb, seen, train_ids, textdb.vectors, train_rows),
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
    _, found = textdb.search(queries, top, exclude_owner=ids)
    near = [
        (textdb.vectors[own].float() @ vectors[list(true)].float().T).mean()
        for own, true in zip(found, rows, strict=True)
    ]
    return round(torch.stack(near).mean().item(), 4)
