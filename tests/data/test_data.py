from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close

from haav.cli.main import main
from haav.data.annotations import Dataset, Photo, check_dataset, load_dataset
from haav.data.collate import collate, pad_captions, stack
from haav.data.loader import ShuffledBatches, StoredPhotos, build_loader, to_device
from haav.errors import ConfigError, DataError, HaavError, StoreError
from haav.store import Store, ViewManifest
from haav.text import SPECIAL, Vocabulary
from haav.types import PhotoView, ViewSpec
from helpers import VIEWS, tiny_model

WANT = Dataset((Photo("a.jpg", "train", ("one", "two")), Photo("b.jpg", "val", ("three",)), Photo("c.jpg", "test")))


def test_karpathys_json(tmp_path: Path) -> None:
    images = [
        {"filename": "a.jpg", "split": "restval", "sentences": [{"raw": "one "}, {"raw": "two"}]},
        {"filename": "b.jpg", "split": "val", "sentences": [{"raw": "three"}]},
        {"filename": "c.jpg", "split": "test", "sentences": []},
    ]
    (tmp_path / "d.json").write_text(json.dumps({"images": images, "dataset": "x"}))
    assert load_dataset(tmp_path / "d.json") == WANT
    with gzip.open(tmp_path / "d.json.gz", "wt") as file:
        json.dump({"images": images}, file)
    assert load_dataset(tmp_path / "d.json.gz") == WANT


def test_cocos_json(tmp_path: Path) -> None:
    data = {
        "images": [{"id": 7, "file_name": "a.jpg"}, {"id": 8, "file_name": "b.jpg"}],
        "annotations": [{"image_id": 7, "caption": "one\n"}, {"image_id": 7, "caption": "two"}],
    }
    (tmp_path / "c.json").write_text(json.dumps(data))
    assert load_dataset(tmp_path / "c.json", split="val").photos == (
        Photo("a.jpg", "val", ("one", "two"), 7),
        Photo("b.jpg", "val", (), 8),
    )


def test_tables(tmp_path: Path) -> None:
    rows = [("a.jpg", "one", "train"), ("a.jpg", "two", "train"), ("b.jpg", "three", "val"), ("c.jpg", "", "test")]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "caption", "split"), *rows])
    assert load_dataset(tmp_path / "t.csv") == WANT
    lines = [json.dumps(dict(zip(("image", "caption", "split"), row, strict=True))) for row in rows]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert load_dataset(tmp_path / "t.jsonl") == WANT
    (tmp_path / "plain.csv").write_text('image,caption\nx.jpg,"a, b"\n')
    assert load_dataset(tmp_path / "plain.csv", split="val").photos == (Photo("x.jpg", "val", ("a, b",)),)


@pytest.mark.parametrize("separator", ["\t", ",", "#0\t"])
def test_a_folder_with_captions(tmp_path: Path, separator: str) -> None:
    for name in ("a.jpg", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "captions.txt").write_text(f"image,caption\na.jpg{separator}one\na.jpg{separator}two, three\n")
    assert load_dataset(tmp_path).photos == (Photo("a.jpg", "train", ("one", "two, three")), Photo("b.png", "train"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("d.json", "{", "is not whole JSON"),
        ("d.json", "[1]", "is neither Karpathy's JSON"),
        ("d.json", '{"images": [{"split": "train"}]}', "image 0 lacks 'filename'"),
        ("d.json", '{"images": [{"filename": "a", "split": "trian"}]}', "unknown split 'trian'. Did you mean 'train'"),
        (
            "d.json",
            '{"images": [{"filename": "a", "split": "train"}, {"filename": "a", "split": "val"}]}',
            "'a' is in two splits, train and val",
        ),
        ("d.json", '{"annotations": [{"image_id": 3, "caption": "x"}], "images": []}', "3 is missing"),
        ("t.csv", "picture,text\na,b\n", "row 1 has no 'image' (it has ['picture', 'text'])"),
        ("t.csv", "image,caption,split\na,b,train\na,c,val\n", "'a' is in two splits"),
        ("t.jsonl", '{"image": "a"}\n{bad', "is not whole JSONL"),
        ("t.jsonl", "[]", "row 1 has no 'image'"),
    ],
)
def test_broken_files_are_explained(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        load_dataset(tmp_path / name)
    assert says in str(caught.value)


def test_files_that_are_not_there_are_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.json is missing"):
        load_dataset(tmp_path / "none.json")
    (tmp_path / "f").mkdir()
    with pytest.raises(DataError, match="captions.txt"):
        load_dataset(tmp_path / "f")
    (tmp_path / "x.json.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot read"):
        load_dataset(tmp_path / "x.json.gz")
    with pytest.raises(ConfigError, match="unknown split 'tset'"):
        WANT.split("tset")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["images", "annotations", "filename", "split", "sentences", "raw", "id", "file_name", "image"]
            ),
            inner,
        )
    ),
    max_leaves=10,
)


@given(value=json_values, name=st.sampled_from(["d.json", "d.jsonl", "d.csv"]))
@settings(max_examples=300, deadline=None)
def test_any_json_gives_a_dataset_or_a_haav_error(tmp_path_factory: pytest.TempPathFactory, value, name: str) -> None:
    file = tmp_path_factory.mktemp("fuzz") / name
    file.write_text(json.dumps(value))
    try:
        assert isinstance(load_dataset(file), Dataset)
    except HaavError as error:
        assert str(error)  # noqa: PT017


def many(photos: int = 50) -> Dataset:
    return Dataset(
        (*(Photo(f"{n}", "train", ("c0", "c1", "c2", "c3")) for n in range(photos)), Photo("v", "val", ("x",)))
    )


def labelled(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    return {photo.id: photo.captions for photo in dataset.split("train") if photo.captions}


def test_label_fractions_are_seeded_nested_and_leave_val_alone() -> None:
    tenth, half = many().label_fraction(0.1), many().label_fraction(0.5)
    assert len(labelled(tenth)) == 5
    assert len(labelled(half)) == 25
    assert labelled(tenth).items() <= labelled(half).items()
    assert tenth == many().label_fraction(0.1)
    assert labelled(tenth) != labelled(many().label_fraction(0.1, seed=1))
    assert len(tenth.photos) == 51
    assert tenth.split("val") == many().split("val")
    assert many().label_fraction(1.0) == many()


def test_label_fractions_by_caption() -> None:
    thinned = many().label_fraction(0.25, by="caption")
    assert sum(len(captions) for captions in labelled(thinned).values()) == 50
    assert len(labelled(thinned)) > 25
    with pytest.raises(ConfigError, match="between 0 and 1"):
        many().label_fraction(1.5)
    with pytest.raises(ConfigError, match="unknown way"):
        many().label_fraction(0.5, by="photos")


def test_check_finds_missing_duplicate_and_shared_photos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_dataset(WANT, {"a.jpg": "1", "b.jpg": "1", "z.jpg": "2"})
    assert found.photos == {"train": 1, "val": 1, "test": 1}
    assert found.captions == {"train": 2, "val": 1}
    assert found.captions_per_photo == {0: 1, 1: 1, 2: 1}
    assert (found.missing, found.surplus, found.unlabelled) == (("c.jpg",), 1, 1)
    assert found.shared == (("a.jpg", "b.jpg"),)

    (tmp_path / "t.csv").write_text("image,caption,split\na.png,one,train\nb.png,two,val\n")
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4), "red").save(tmp_path / name)
    assert main(["dataset", str(tmp_path / "t.csv"), "--images", str(tmp_path)]) == 1
    assert "1 photos are shared between splits: a.png = b.png" in " ".join(capsys.readouterr().out.split())
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "b.png")
    assert main(["dataset", str(tmp_path / "t.csv"), "--images", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["photos"] == {"train": 1, "val": 1}


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "", "t.csv is empty"),
        ("t.jsonl", "\n", "t.jsonl is empty"),
        ("t.json", "", "t.json is empty"),
        ("t.csv", "image,caption\n", "t.csv names no photo"),
        ("t.json", "{}", "t.json names no photo"),
        ("t.json", '{"images": [], "annotations": []}', "t.json names no photo"),
        ("t.csv", "image,caption\na.jpg,\nb.jpg,\n", "no photo of .*t.csv has a caption"),
        ("t.csv", "image,text\na.jpg,a dog\n", "has a caption. In a table, captions are in the column 'caption'"),
        ("t.csv", "image,caption\na.jpg,   \n", "no photo of .*t.csv has a caption"),
        ("t.jsonl", '{"image": "a.jpg"}\n', "no photo of .*t.jsonl has a caption"),
    ],
)
def test_data_sets_without_photos_or_captions_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str, flags: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["dataset", str(tmp_path / name), *flags]) != 0
    assert re.search(says, capsys.readouterr().err)


# Batches


def photo(tokens: int, spec: ViewSpec = VIEWS["text"]) -> PhotoView:
    return PhotoView(
        torch.randn(tokens, spec.dim), {name: torch.arange(tokens) % n for name, n in spec.indices.items()}
    )


def test_views_are_padded_to_the_longest_of_the_batch() -> None:
    photos = [photo(2), photo(0), photo(4)]
    view = stack(photos)
    assert view.tokens.shape == (3, 4, 8)
    assert view.mask.sum(dim=1).tolist() == [2, 0, 4]
    for number, one in enumerate(photos):
        assert torch.equal(view.tokens[number][view.mask[number]], one.tokens)
        assert torch.equal(view.indices["rank"][number][view.mask[number]], one.indices["rank"])
    assert stack([photo(0), photo(0)]).tokens.shape == (2, 0, 8)


def test_captions_are_padded_and_may_be_missing() -> None:
    padded = pad_captions([[[2, 9, 3], [2, 8, 8, 3]], [[2, 3]], []])
    assert padded.tolist() == [[[2, 9, 3, 1], [2, 8, 8, 3]], [[2, 3, 1, 1], [1] * 4], [[1] * 4] * 2]
    assert collate(["a"], {"text": [photo(2)]}).captions is None


def test_a_model_reads_what_collation_makes() -> None:
    model = tiny_model(views={"text": VIEWS["text"]})
    photos = [photo(6), photo(3)]
    together = model.encode(collate(["a", "b"], {"text": photos}).views)
    alone = model.encode(collate(["b"], {"text": photos[1:]}).views)
    assert_close(together.tokens[0][1:, :, :4], alone.tokens[0])


def stored(path: Path, count: int = 7) -> Store:
    store = Store(path, write=True)
    store.add_view("text", ViewManifest(VIEWS["text"], "toy"))
    store.put("text", {f"{n}.jpg": photo(n % 4) for n in range(count)})
    return store


def test_loaders_give_every_photo_once_an_epoch_in_a_fixed_order(tmp_path: Path) -> None:
    words = Vocabulary((*SPECIAL, "a", "cat"))
    photos = [Photo(f"{n}.jpg", "train", ("a cat",) * (n % 3)) for n in range(7)]
    with stored(tmp_path) as store:
        data = StoredPhotos(store, ["text"], photos, words)
        for workers in (0, 2):
            batches = ShuffledBatches(len(data), 3, seed=5)
            loader = build_loader(data, batches, workers)
            epochs = []
            for epoch in range(2):
                batches.epoch = epoch
                epochs.append([batch.ids for batch in loader])
            assert sorted(name for batch in epochs[0] for name in batch) == sorted(data.ids)
            assert epochs[0] != epochs[1]
            assert [len(batch) for batch in epochs[0]] == [3, 3, 1]
            if workers == 0:
                expected = epochs
        assert epochs == expected, "the same with and without worker processes"
        batch = data[[2, 4]]
        assert batch.captions.tolist() == [[[2, 4, 5, 3], [2, 4, 5, 3]], [[2, 4, 5, 3], [1] * 4]]
        assert torch.equal(batch.views["text"].tokens[0, :2], store.get("text", "2.jpg").tokens)
        assert to_device(batch, "cpu").ids == ("2.jpg", "4.jpg")


def test_missing_views_are_reported_before_training_starts(tmp_path: Path) -> None:
    with stored(tmp_path) as store, pytest.raises(StoreError, match=r"missing for 2 of 9 photos \(first: 7.jpg\)"):
        StoredPhotos(store, ["text"], [Photo(f"{n}.jpg", "train") for n in range(9)], None)


def test_long_captions_are_cut_and_then_have_no_end(tmp_path: Path) -> None:
    words = Vocabulary((*SPECIAL, "a"))
    with stored(tmp_path) as store:
        data = StoredPhotos(store, ["text"], [Photo("1.jpg", "train", ("a " * 9, "a a"))], words, max_words=4)
        assert data[[0]].captions.tolist() == [[[2, 4, 4, 4, 4, 4], [2, 4, 4, 3, 1, 1]]]


def test_a_split_that_is_no_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(json.dumps({"images": [{"filename": "a.jpg", "split": None}]}))
    with pytest.raises(DataError, match="unknown split 'None'"):
        load_dataset(tmp_path / "d.json")
