from __future__ import annotations

import json
from pathlib import Path

import pytest

from haav.data.annotations import Photo, load_dataset
from haav.data.mixture import Mixture, Source, load_mixture, parse_sources
from haav.errors import ConfigError, DataError
from haav.views.retrieval.build import build_textdb


def write(path: Path, images: dict[str, tuple[str, list[tuple[str, str | None]]]]) -> str:
    """Karpathy's JSON: name → split and captions with their authors"""
    entries = [
        {
            "filename": name,
            "split": split,
            "sentences": [{"raw": text} | ({"by": author} if author else {}) for text, author in captions],
        }
        for name, (split, captions) in images.items()
    ]
    path.write_text(json.dumps({"images": entries}))
    return str(path)


@pytest.fixture
def people(tmp_path: Path) -> str:
    images = {"a": ("train", [("one", None), ("two", None)]), "v": ("val", [("three", None)]), "u": ("train", [])}
    return write(tmp_path / "people.json", images)


@pytest.fixture
def both(tmp_path: Path) -> str:
    images = {
        "a": ("train", [("by net", "Net")]),
        "b": ("train", [("by net too", "Net"), ("four", "human")]),
        "c": ("train", [("by net alone", "Net")]),
        "w": ("val", [("by net on val", "Net")]),
    }
    return write(tmp_path / "both.json", images)


def captions_of(mixture: Mixture) -> dict[str, tuple[str, ...]]:
    return {photo.id: photo.captions for photo in mixture.train}


def test_captions_by_systems_are_kept_apart(both: str, tmp_path: Path) -> None:
    photos = {photo.id: photo for photo in load_dataset(both).photos}
    assert photos["b"] == Photo("b", "train", ("four",), machine_captions=("by net too",))
    assert photos["c"].captions == ()
    rows = [{"image": "b", "caption": "four"}, {"image": "b", "caption": "by net too", "by": "Net"}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_dataset(tmp_path / "t.jsonl").photos == (photos["b"],)


def test_one_data_set_is_as_before(people: str) -> None:
    mixture = load_mixture(parse_sources(people))
    assert captions_of(mixture) == {"a": ("one", "two")}
    assert mixture.weights is None
    assert [photo.id for photo in mixture.unlabelled] == ["u"]
    assert [photo.id for photo in mixture.val] == ["v"]


def test_a_photo_of_several_data_sets_is_one_photo_with_all_captions(people: str, both: str) -> None:
    mixture = load_mixture(parse_sources(f"{people},{both}:machine:0.5,{both}"))
    assert captions_of(mixture) == {
        "a": ("one", "two", "by net"),
        "b": ("by net too", "four"),
        "c": ("by net alone",),
    }
    assert mixture.weights == ((1, 1, 0.5), (0.5, 1), (0.5,))


def test_references_and_val_are_by_people_only(people: str, both: str) -> None:
    mixture = load_mixture(parse_sources(f"{people},{both}:machine,{both}"))
    assert mixture.references == {"a": ("one", "two"), "b": ("four",)}
    assert sorted(mixture.sentences) == ["four", "one", "two"]
    assert [photo.id for photo in mixture.val] == ["v"]
    rewarded = mixture.with_references_only()
    assert captions_of(rewarded) == dict(mixture.references)
    assert {photo.id for photo in rewarded.unlabelled} == {"u", "c"}


def test_the_text_database_has_no_caption_by_a_system(both: str) -> None:
    class Lengths:
        """A sentence encoder that needs no weights."""

        fingerprint = "lengths"

        def encode(self, sentences: list[str], progress: object = None) -> object:
            import torch

            return torch.tensor([[float(len(sentence))] for sentence in sentences])

    database = build_textdb([both], encoder=Lengths())  # type: ignore[arg-type]
    assert [(entry.sentence, entry.owners) for entry in database.entries] == [("four", ("b",))]


def test_role_machine_of_a_file_without_authors_takes_all_captions(people: str) -> None:
    mixture = load_mixture([Source(people, "machine")])
    assert captions_of(mixture) == {"a": ("one", "two")}
    assert mixture.references == {}
    assert mixture.val == ()


def test_role_photos_takes_no_captions(people: str, both: str) -> None:
    mixture = load_mixture(parse_sources(f"{people},{both}:photos"))
    assert captions_of(mixture) == {"a": ("one", "two")}
    assert [photo.id for photo in mixture.unlabelled] == ["u", "b", "c"]


def test_a_photo_in_two_splits_is_refused(people: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.json", {"v": ("train", [("three", None)])})
    with pytest.raises(DataError, match="'v' is in split val of one data set and in train of other.json"):
        load_mixture(parse_sources(f"{people},{other}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.json:machin", "unknown role 'machin'. Did you mean 'machine'"),
        ("a.json:machine:heavy", "not 'heavy'"),
        ("a.json:machine:0", "above 0"),
        ("a.json:machine:nan", "above 0"),
        ("a:b:c:d", "PATH\\[:ROLE"),
        (":machine", "PATH\\[:ROLE"),
    ],
)
def test_a_wrong_source_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sources(text)
