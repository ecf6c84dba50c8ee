"""Text views for fewer labels: nothing of the captions that a run does not keep is left in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from haav.data.annotations import load_dataset
from haav.errors import ConfigError
from haav.store import Store, ViewManifest, open_store
from haav.studies.texts import cut_textdb, cut_texts
from haav.types import PhotoView, Progress, ViewSpec, quiet
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.build import build_bridge, build_textdb
from haav.views.retrieval.textdb import Entry, TextDatabase

PHOTOS = 60


class ToyEncoder:
    fingerprint = "toy"

    def encode(self, sentences: Sequence[str], progress: Progress = quiet) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.nn.functional.normalize(torch.randn(len(sentences), 8, generator=generator), dim=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of 60 photos with two captions each, a store of their regions, a text database and a bridge"""
    images = [
        {
            "filename": f"p{index}.jpg",
            "split": "val" if index % 10 == 0 else "train",
            "sentences": [{"raw": f"caption {index}"}, {"raw": f"photo  {index}"}],
        }
        for index in range(PHOTOS)
    ]
    (tmp_path / "data.json").write_text(json.dumps({"images": images}))
    (tmp_path / "more.txt").write_text("".join(f"stranger {index}\n" for index in range(20)))
    texts = build_textdb([tmp_path / "data.json"], [tmp_path / "more.txt"], encoder=ToyEncoder())
    texts.save(tmp_path / "texts")
    with Store(tmp_path / "store", write=True) as store:
        for view, spec in (("patch_regions", ViewSpec(12, 15)), ("patches", ViewSpec(4, 2))):
            store.add_view(view, ViewManifest(spec, "toy"))
            records = {f"p{n}.jpg": PhotoView(torch.randn(spec.max_tokens, spec.dim)) for n in range(PHOTOS)}
            store.put(view, records)
        settings = {"epochs": 1, "folds": 2, "hidden": 16, "batch": 8}
        dataset = load_dataset(tmp_path / "data.json")
        build_bridge(store, dataset, texts, encoder=ToyEncoder(), **settings)[0].save(tmp_path / "bridge")
    return tmp_path


def test_a_cut_database_has_the_kept_captions_and_as_large_a_share_of_others(folder: Path) -> None:
    texts = TextDatabase.load(folder / "texts")
    dataset = load_dataset(folder / "data.json").label_fraction(0.5, "photo", seed=1)
    kept = {" ".join(text.split()): photo.id for photo in dataset.split("train") for text in photo.captions}
    cut = cut_textdb(texts, dataset, 0.5)
    owned = {entry.sentence: entry.owners for entry in cut.entries if entry.owners}
    assert owned == {sentence: (photo,) for sentence, photo in kept.items()}
    assert sum(entry.sentence.startswith("stranger") for entry in cut.entries) == 10
    assert len(cut) == 54 + 10
    rows = {entry.sentence: vector for entry, vector in zip(texts.entries, texts.vectors, strict=True)}
    assert all(
        torch.equal(rows[entry.sentence], vector) for entry, vector in zip(cut.entries, cut.vectors, strict=True)
    )
    assert len(cut_textdb(texts, load_dataset(folder / "data.json"), 1.0)) == len(texts)


def test_a_sentence_of_two_photos_stays_with_the_one_that_keeps_it(folder: Path) -> None:
    texts = TextDatabase.load(folder / "texts")
    dataset = load_dataset(folder / "data.json").label_fraction(0.5, "photo", seed=1)
    kept, lost = (next(p for p in dataset.split("train") if bool(p.captions) is there) for there in (True, False))
    entry = Entry(kept.captions[0], (lost.id, kept.id))
    database = TextDatabase([entry], texts.vectors[:1], texts.manifest)
    assert cut_textdb(database, dataset, 0.5).entries == (Entry(kept.captions[0], (kept.id,)),)


def half_of(folder: Path) -> dict[str, str]:
    """Settings of a row that keeps half of the labels"""
    return {
        "data.dataset": str(folder / "data.json"),
        "data.store": str(folder / "store"),
        "data.views": "patches,text_whole",
        "data.label_fraction": "0.5",
        "train.seed": "1",
    }


def test_text_views_of_fewer_labels_are_made_once_and_hold_nothing_else(folder: Path) -> None:
    settings = half_of(folder)
    told: list[str] = []
    words = (folder / "cut", str(folder / "bridge"), str(folder / "texts"), told.append, ToyEncoder())
    ready = cut_texts(settings, *words)
    dataset = load_dataset(folder / "data.json").label_fraction(0.5, "photo", seed=1)
    kept = {" ".join(text.split()) for photo in dataset.split("train") for text in photo.captions}
    store = open_store(ready["data.store"])
    assert {"patches", "text_whole", "patch_regions"} == set(store.views)
    said = {label for photo in store.ids("text_whole") for label in store.get("text_whole", photo).labels or ()}
    assert len(store.ids("text_whole")) == PHOTOS
    assert {text for text in said if not text.startswith("stranger")} <= kept
    bridge = CrossFitted.load(folder / "cut" / "photo-0.5-seed-1" / "bridge")
    assert set(bridge.folds) == {photo.id for photo in dataset.split("train") if photo.captions}
    assert (bridge.config.epochs, bridge.config.folds) == (1, 2), "trained as the whole bridge was"
    store.close()
    assert cut_texts(settings, *words) == ready
    assert len(told) == 1, "what is done is not repeated"


def test_rows_in_parallel_wait_for_one_cut(folder: Path) -> None:
    """Rows that differ in their encoding only read the same texts."""
    settings = half_of(folder)
    told: list[str] = []
    words = (folder / "cut", str(folder / "bridge"), str(folder / "texts"), told.append, ToyEncoder())
    with ThreadPoolExecutor(3) as executor:
        stores = {ready["data.store"] for ready in executor.map(lambda _: cut_texts(settings, *words), range(3))}
    assert (len(stores), len(told)) == (1, 1)


def test_all_labels_and_views_without_texts_need_no_cut(folder: Path) -> None:
    whole = {"data.views": "patches,text_whole", "data.label_fraction": "1.0"}
    assert cut_texts(whole, folder, None, None) == whole
    no_text = {"data.views": "patches", "data.label_fraction": "0.1"}
    assert cut_texts(no_text, folder, None, None) == no_text
    with pytest.raises(ConfigError, match="--bridge DIR --textdb DIR"):
        cut_texts({"data.views": "text_whole", "data.label_fraction": "0.1"}, folder, None, None)
