"""The text database and the bridge, with their three guards."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F
from torch.testing import assert_close

from haav import weights
from haav.data.annotations import load_dataset
from haav.errors import DataError, ViewError, WeightsError
from haav.photos.sources import PhotoRef
from haav.store import Store, ViewManifest
from haav.types import PhotoView, Progress, ViewSpec, quiet
from haav.views import Extractor, ExtractorOptions, PhotoBatch, extractors
from haav.views.extract import extract
from haav.views.retrieval import build, textdb
from haav.views.retrieval.bridge import BridgeConfig, CrossFitted, Pairs, recall, train_bridge
from haav.views.retrieval.text import TextFiveExtractor, TextWholeExtractor
from haav.views.retrieval.textdb import (
    Entry,
    Manifest,
    TextDatabase,
    merge_entries,
    read_text_file,
    read_visual_genome,
    sample_entries,
)


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def database(sentences: int = 60, owners: int = 20, width: int = 8) -> TextDatabase:
    """Sentence n is a caption of photo n mod owners."""
    entries = [Entry(f"sentence {n}", (f"p{n % owners}",)) for n in range(sentences)]
    return TextDatabase(entries, unit(sentences, width).half(), Manifest("toy"))


@given(seed=st.integers(0, 999), top=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_search_equals_sorting_all_cosines_without_the_askers_own(seed: int, top: int) -> None:
    texts, queries = database(), unit(4, 8, seed=seed)
    askers = ["p3", None, "stranger", "p7"]
    scores, rows = texts.search(queries, top, exclude_owner=askers)
    for index, asker in enumerate(askers):
        allowed = [row for row, entry in enumerate(texts.entries) if asker not in entry.owners]
        cosines = {row: float(queries[index] @ texts.vectors[row].float()) for row in allowed}
        expected = sorted(allowed, key=lambda row: -cosines[row])[:top]
        assert rows[index].tolist() == expected
        assert scores[index].tolist() == pytest.approx([cosines[row] for row in expected], abs=1e-5)


def test_faiss_finds_what_torch_finds() -> None:
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    texts, queries, askers = database(), unit(5, 8, seed=3), ["p1", "p2", None, "p4", "p5"]
    ours, theirs = (texts.search(queries, 7, askers, backend=backend) for backend in ("torch", "faiss"))
    assert torch.equal(ours[1], theirs[1])
    assert_close(ours[0], theirs[0])


def test_asking_for_more_than_there_is_is_explained() -> None:
    with pytest.raises(DataError, match="60, its askers' own included"):
        database().search(unit(1, 8), 59, ["p0"])


def test_a_sentence_of_two_photos_is_kept_once_and_hidden_from_both() -> None:
    merged = merge_entries([Entry("A dog.", ("a",)), Entry(" A  dog. ", ("b",)), Entry("a cat"), Entry("  ")])
    assert merged == [Entry("A dog.", ("a", "b")), Entry("a cat", ())]


def test_a_database_survives_the_way_to_disk_and_damage_is_noticed(tmp_path: Path) -> None:
    texts = database()
    texts.save(tmp_path)
    again = TextDatabase.load(tmp_path)
    assert tuple(again.entries) == texts.entries
    assert tuple(again.entries[1:3]) == texts.entries[1:3]
    assert torch.equal(again.vectors, texts.vectors)
    assert again.fingerprint == texts.fingerprint
    for file in ("entries.jsonl", "vectors.safetensors", "manifest.json"):
        whole = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match="damaged|belong together"):
            TextDatabase.load(tmp_path)
        (tmp_path / file).unlink()
        with pytest.raises(DataError, match=f"{file} is missing"):
            TextDatabase.load(tmp_path)
        (tmp_path / file).write_bytes(whole)
    # Whoever knows the bytes of both files knows the fingerprint. Databases of before say nothing of their bytes.
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    digests = manifest.pop("files")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert TextDatabase.load(tmp_path).fingerprint == texts.fingerprint
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"files": digests}))
    entries = (tmp_path / "entries.jsonl").read_text()
    (tmp_path / "entries.jsonl").write_text(entries.replace(texts.sentences[0], texts.sentences[1]))
    with pytest.raises(DataError, match="its fingerprint does not match"):
        TextDatabase.load(tmp_path)
    lines = (tmp_path / "entries.jsonl").read_text().replace("sentence 5", "sentence X", 1)
    (tmp_path / "entries.jsonl").write_text(lines)
    with pytest.raises(DataError, match="fingerprint"):
        TextDatabase.load(tmp_path)


def test_visual_genome_becomes_phrases_without_excluded_images(tmp_path: Path) -> None:
    attributes = [
        {"image_id": 1, "attributes": [{"names": ["car", "auto"], "attributes": ["Red", "old"]}, {"names": ["tree"]}]},
        {"image_id": 2, "coco_id": 77, "attributes": [{"names": ["dog"], "attributes": ["wet"]}]},
    ]
    relations = [
        {
            "image_id": 1,
            "relationships": [{"subject": {"name": "man"}, "predicate": "riding", "object": {"names": ["horse"]}}],
        }
    ]
    (tmp_path / "a.json").write_text(json.dumps(attributes))
    (tmp_path / "r.json").write_text(json.dumps(relations))
    phrases = [entry.sentence for entry in read_visual_genome(tmp_path / "a.json", frozenset({"77"}))]
    assert phrases == ["red car", "old car"]
    assert [entry.sentence for entry in read_visual_genome(tmp_path / "r.json")] == ["man riding horse"]
    (tmp_path / "t.txt").write_text("one\n\n two \n")
    assert [entry.sentence.strip() for entry in read_text_file(tmp_path / "t.txt")] == ["one", "two"]


def karpathy(path: Path, photos: int = 12) -> Path:
    splits = ["train"] * (photos - 4) + ["val"] * 2 + ["test"] * 2
    images = [
        {
            "filename": f"p{n}.jpg",
            "split": split,
            "sentences": [{"raw": f"{split} caption {c} of {n}"} for c in range(2)],
        }
        for n, split in enumerate(splits)
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"images": images}, file)
    return path


class ToyEncoder:
    fingerprint = "toy"

    def encode(self, sentences: Sequence[str], progress: Progress = quiet) -> torch.Tensor:
        return unit(len(sentences), 8)


def test_captions_of_val_and_test_never_enter(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("a further sentence\n")
    texts = build.build_textdb([karpathy(tmp_path / "d.json.gz")], [tmp_path / "more.txt"], encoder=ToyEncoder())
    assert len(texts) == 17
    assert all(sentence.startswith(("train", "a further")) for sentence in texts.sentences)
    assert texts.manifest.sources[0] == {"file": "d.json.gz", "kind": "captions", "split": "train", "sentences": 16}
    with pytest.raises(DataError, match="no sentence was given"):
        build.build_textdb()
    with pytest.raises(DataError, match="cannot read .*none.txt as text"):
        build.build_textdb(texts=[tmp_path / "none.txt"])


# The bridge


def toy_pairs(photos: int = 60, width: int = 12, vectors: int = 8) -> Pairs:
    """A photo's features are a linear image of its captions' vectors: learnable."""
    hidden = unit(photos, vectors, seed=1)
    way = torch.randn(vectors, width, generator=torch.Generator().manual_seed(2))
    features = (hidden @ way)[:, None].expand(-1, 3, -1) + 0.05 * torch.randn(photos, 3, width)
    captions = F.normalize(hidden.repeat_interleave(2, dim=0) + 0.05 * torch.randn(2 * photos, vectors), dim=-1)
    rows = tuple((2 * n, 2 * n + 1) for n in range(photos))
    return Pairs(tuple(f"p{n}" for n in range(photos)), features, captions, rows)


CONFIG = BridgeConfig(features=12, vectors=8, hidden=16, folds=3, epochs=40, batch=20, dropout=0.0, lr=1e-2)


@pytest.fixture(scope="module")
def fitted() -> CrossFitted:
    torch.manual_seed(0)
    return train_bridge(toy_pairs(), "toy", CONFIG)


def trained_on(fitted: CrossFitted, bridge: int) -> set[str]:
    """Bridge 0 is for everybody; bridge n leaves fold n - 1 out"""
    return {photo for photo, fold in fitted.folds.items() if fold != bridge - 1}


def test_no_photo_is_served_by_a_bridge_that_has_seen_it(fitted: CrossFitted) -> None:
    for photo in fitted.folds:
        index = fitted.serves(photo)
        assert index > 0
        assert photo not in trained_on(fitted, index)
    assert fitted.serves("a photo of yours") == 0
    assert trained_on(fitted, 0) == set(fitted.folds)
    sizes = [len(trained_on(fitted, index)) for index in range(1, 4)]
    assert sizes == [40, 40, 40]


def test_training_really_leaves_the_fold_out() -> None:
    """Change the photos of one fold: the bridge that serves them must not change at all, the others must."""
    torch.manual_seed(0)
    pairs = toy_pairs()
    config = BridgeConfig(features=12, vectors=8, hidden=16, folds=3, epochs=2, batch=20)
    before = train_bridge(pairs, "toy", config)
    fold = torch.tensor([before.folds[photo] for photo in pairs.photos])
    changed = pairs.features.clone()
    changed[fold == 1] += 5.0
    after = train_bridge(Pairs(pairs.photos, changed, pairs.vectors, pairs.rows), "toy", config)
    for index, same in enumerate((False, False, True, False)):
        pairs_of = zip(before.bridges[index].parameters(), after.bridges[index].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs_of) == same


def test_each_photo_goes_through_its_own_bridge(fitted: CrossFitted) -> None:
    features = torch.randn(4, 3, 12)
    ids = ["p0", "stranger", "p5", "p9"]
    found = fitted(features, ids)
    for index, photo in enumerate(ids):
        assert_close(found[index], fitted.bridges[fitted.serves(photo)](features[index]))
    assert_close(found.norm(dim=-1), torch.ones(4, 3))


def test_the_bridge_learns_what_can_be_learned(fitted: CrossFitted) -> None:
    pairs = toy_pairs()
    held_out = fitted(pairs.features[:, :1].float(), pairs.photos)[:, 0]
    assert recall(held_out, pairs.vectors, pairs.rows)["recall@5"] > 60
    assert recall(unit(60, 8, seed=9), pairs.vectors, pairs.rows)["recall@5"] < 30


def test_recall_counts_by_hand() -> None:
    vectors = torch.eye(4)
    queries = torch.tensor([[1.0, 0.5, 0, 0], [0, 0.5, 1.0, 0.7]])
    recalls = recall(queries, vectors, [(1,), (0, 3)], ranks=(1, 2, 4))
    assert recalls == {"recall@1": 0.0, "recall@2": 100.0, "recall@4": 100.0}


def test_a_bridge_survives_the_way_to_disk_and_damage_is_noticed(tmp_path: Path, fitted: CrossFitted) -> None:
    fitted.save(tmp_path, {"val": {"recall@1": 1.0}})
    again = CrossFitted.load(tmp_path)
    assert again.fingerprint == fitted.fingerprint
    features = torch.randn(2, 1, 12)
    assert torch.equal(again(features, ["p0", "x"]), fitted(features, ["p0", "x"]))
    weights = (tmp_path / "bridge.safetensors").read_bytes()
    (tmp_path / "bridge.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        CrossFitted.load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="haav bridge"):
        CrossFitted.load(tmp_path)


# Text views


def photos_with_regions(ids: tuple[str, ...], width: int = 12) -> PhotoBatch:
    return PhotoBatch(ids, None, patch_regions=[PhotoView(torch.randn(15, width)) for _ in ids])


def test_text_views_hold_the_nearest_sentences_and_never_the_photos_own(fitted: CrossFitted) -> None:
    texts = database(sentences=120, owners=60)
    extractor = TextFiveExtractor(fitted, texts)
    assert extractor.spec == ViewSpec(8, 20, {"crop": 5, "rank": 4})
    photos = photos_with_regions(("p0", "p1", "yours"))
    views = extractor.extract(photos)
    for photo, view, regions in zip(photos.ids, views, photos.once("patch_regions", list), strict=True):
        assert view.tokens.shape == (20, 8)
        assert view.indices["crop"].tolist() == [crop for crop in range(5) for _ in range(4)]
        assert view.indices["rank"].tolist() == [0, 1, 2, 3] * 5
        own = {texts.sentences[row] for row in texts.rows_of(photo)}
        assert not own & set(view.labels)
        queries = fitted(regions.tokens[None, 1:6], [photo])[0]
        _, rows = texts.search(queries, 4, [photo] * 5)
        assert view.labels == tuple(texts.sentences[row] for row in rows.flatten().tolist())
        assert torch.equal(view.tokens, texts.vectors[rows.flatten()])


def test_bridge_and_database_must_share_a_sentence_encoder(fitted: CrossFitted) -> None:
    texts = database()
    other = TextDatabase(texts.entries, texts.vectors, Manifest("another"))
    with pytest.raises(ViewError, match="vectors of toy, the text database holds those of another"):
        TextWholeExtractor(fitted, other)


def test_a_new_bridge_or_database_changes_the_fingerprint(fitted: CrossFitted) -> None:
    first = TextWholeExtractor(fitted, database()).fingerprint
    assert TextWholeExtractor(fitted, database(sentences=59)).fingerprint != first


def test_bridge_is_built_from_a_store_and_reports_recall_and_leak(tmp_path: Path) -> None:
    file = karpathy(tmp_path / "d.json.gz", photos=40)
    texts = build.build_textdb([file], encoder=ToyEncoder())
    settings = {"epochs": 2, "folds": 2, "hidden": 16, "batch": 8}
    with Store(tmp_path / "s", write=True) as store:
        store.add_view("patch_regions", ViewManifest(ViewSpec(12, 15), "toy"))
        store.put("patch_regions", {f"p{n}.jpg": PhotoView(torch.randn(15, 12)) for n in range(40)})
        found, report = build.build_bridge(store, load_dataset(file), texts, encoder=ToyEncoder(), **settings)
        other = TextDatabase(texts.entries, texts.vectors, Manifest("another"))
        with pytest.raises(DataError, match="vectors of toy; the text database has those of another"):
            build.build_bridge(store, load_dataset(file), other, encoder=ToyEncoder(), **settings)
    assert set(found.folds) == {f"p{n}.jpg" for n in range(36)}, "training photos only"
    assert set(report["val"]) == {"recall@1", "recall@5", "recall@10"}
    assert (report["photos"], report["candidates"]) == (2, 4)
    assert len(report["cosine_to_own_captions"]) == 3


class ToyRegions(Extractor):
    """The layout of `regions`, by other features"""

    name, licence, fingerprint = "toy_regions", "CC0", "toy-regions-1"
    spec = ViewSpec(12, 15, boxes=True)

    def extract(self, photos: PhotoBatch) -> list[PhotoView]:
        shades = torch.linspace(0, 1, 12 * 15).view(15, 12)
        return [PhotoView(shades * image.width) for image in photos.images]


def test_a_bridge_may_start_from_any_view_of_a_photo_and_its_crops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "_entries", {**extractors._entries, "toy_regions": ToyRegions})
    file = karpathy(tmp_path / "d.json.gz", photos=40)
    texts = build.build_textdb([file], encoder=ToyEncoder())
    settings = {"epochs": 2, "folds": 2, "hidden": 16, "batch": 8}
    images = {f"p{n}.jpg": Image.new("RGB", (10 + n, 9)) for n in range(40)}
    views = dict(zip(images, ToyRegions().extract(PhotoBatch(list(images), list(images.values()))), strict=True))
    with Store(tmp_path / "s", write=True) as store:
        store.add_view("toy_regions", ViewManifest(ToyRegions.spec, ToyRegions.fingerprint))
        store.put("toy_regions", views)
        store.add_view("short", ViewManifest(ViewSpec(12, 3), "toy"))

        def train(view: str) -> CrossFitted:
            dataset = load_dataset(file)
            return build.build_bridge(store, dataset, texts, encoder=ToyEncoder(), view=view, **settings)[0]

        with pytest.raises(DataError, match=r"unknown view 'toy_region'\. Did you mean 'toy_regions'"):
            train("toy_region")
        with pytest.raises(DataError, match="'short' has up to 3 tokens; a bridge needs 15"):
            train("short")
        train("toy_regions").save(tmp_path / "bridge")
    bridge = CrossFitted.load(tmp_path / "bridge")
    assert (bridge.view, bridge.made_by) == ("toy_regions", ("toy-regions-1",))
    assert (bridge.compact().view, bridge.compact().made_by) == (bridge.view, bridge.made_by)
    extractor = TextFiveExtractor(bridge, texts)
    assert extractor.reads == {"toy_regions": ("toy-regions-1",)}
    stored = PhotoBatch(["p3.jpg"], None, toy_regions=[views["p3.jpg"]])
    live = PhotoBatch(["p3.jpg"], [images["p3.jpg"]])
    assert extractor.extract(stored)[0].labels == extractor.extract(live)[0].labels
    refs = [PhotoRef("p3.jpg", str(tmp_path / "not there: the store is enough"))]
    texts.save(tmp_path / "texts")
    options = ExtractorOptions(bridge=tmp_path / "bridge", textdb=tmp_path / "texts")
    assert not extract(refs, tmp_path / "s", ["text_five"], options, workers=1).failures
    with Store(tmp_path / "s") as store:
        assert store.get("text_five", "p3.jpg").labels == extractor.extract(live)[0].labels


def test_real_sentences_that_mean_the_same_are_near() -> None:
    pytest.importorskip("transformers", reason="needs the hub extra")
    sentences = pytest.importorskip("haav.views.retrieval.sentences")
    try:
        weights.locate(sentences.WEIGHTS)
    except WeightsError as error:
        pytest.skip(str(error))
    vectors = (
        sentences.MiniLM()
        .encode(
            [
                "A dog runs on the beach.",
                "A plate of food on a table with a very long cloth.",
                "A puppy is running along the shore",
            ]
        )
        .float()
    )
    assert_close(vectors.norm(dim=1), torch.ones(3), rtol=1e-3, atol=1e-3)
    near = vectors @ vectors.T
    assert near[0, 2] > 0.6 > 0.3 > near[0, 1]


def test_a_sample_is_even_keeps_order_and_is_the_same_each_time() -> None:
    entries = [Entry(f"sentence number {index}") for index in range(2000)]
    kept = sample_entries(entries, 500)
    rows = [entries.index(entry) for entry in kept]
    assert len(kept) == 500
    assert rows == sorted(rows)
    assert kept == sample_entries(entries, 500)
    assert 200 < sum(row < 1000 for row in rows) < 300
    assert sample_entries(entries, 5000) == entries
    with pytest.raises(DataError, match="at least 1 sentence, not 0"):
        sample_entries(entries, 0)


def test_owners_are_found_without_parsing_sentences_that_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [Entry("a dog", ("p1", "p2")), Entry('says "[]]"'), Entry("ends with []]", ("p1",)), Entry("a cat")]
    whole = TextDatabase(entries, unit(4, 8).half(), Manifest("toy"))
    whole.save(tmp_path)
    loaded, parsed = TextDatabase.load(tmp_path), []
    monkeypatch.setattr(textdb, "json_of", lambda line: parsed.append(line) or json.loads(line))
    assert [loaded.rows_of(photo) for photo in ("p1", "p2", "p3")] == [[0, 2], [0], []]
    assert len(parsed) == 2


def test_a_compact_database_finds_nearly_the_same_and_is_a_quarter_the_size(tmp_path: Path) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(400, 384), dim=1)
    whole = TextDatabase([Entry(f"s{n}", (f"p{n}",)) for n in range(400)], vectors, Manifest("toy"))
    compact = whole.compact()
    assert F.cosine_similarity(compact.vectors, vectors).min() > 0.9998
    assert compact.rows_of("p3") == []
    compact.save(tmp_path / "compact", quantised=True)
    whole.save(tmp_path / "whole")
    loaded = TextDatabase.load(tmp_path / "compact")
    assert torch.equal(loaded.vectors, compact.vectors)
    assert loaded.sentences == whole.sentences
    sizes = [(tmp_path / name / "vectors.safetensors").stat().st_size for name in ("compact", "whole")]
    assert sizes[0] < 0.27 * sizes[1]
