from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from haav.cli.main import main
from haav.config import override
from haav.data.annotations import Photo, load_dataset
from haav.data.predictions import load_objects, load_references, match, names_for, read_predictions, save_predictions
from haav.errors import ConfigError, DataError, ImageError
from haav.inference.caption_file import CaptionFile, MadeWith
from haav.inference.captioner import Captioner
from haav.inference.predict import predict
from haav.inference.stream import CaptionedPhoto, PhotoItem
from haav.pretrained import saved_dtype
from haav.store import Store, ViewManifest
from haav.text import SPECIAL, Vocabulary
from haav.types import Caption, PhotoView, ViewSpec
from helpers import VIEWS, random_views, tiny_config, tiny_model

WORDS = Vocabulary((*SPECIAL, "a", "the", *(f"w{number}" for number in range(6, 23))))
PHOTOS = tuple(Photo(f"COCO_val2014_{n:012d}.jpg", "val", ("a w7 w8", "the w9"), None) for n in range(1, 5))
CAPTIONS = {photo.id: f"a w{n}" for n, photo in enumerate(PHOTOS, 6)}


# Files


@pytest.mark.parametrize("name", ["p.json", "p.json.gz", "p.jsonl", "map.json"])
def test_every_layout_of_predictions_is_read(tmp_path: Path, name: str) -> None:
    rows = [{"image_id": photo, "caption": text} for photo, text in CAPTIONS.items()]
    path = tmp_path / name
    if name == "p.jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif name == "map.json":
        path.write_text(json.dumps(CAPTIONS))
    else:
        data = json.dumps(rows).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_predictions(path).captions == CAPTIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "is not whole JSON"),
        ("3", "must be a list of"),
        ('[{"image_id": 1}]', "entry 1 must have 'image_id' and a text 'caption', not {\"image_id\": 1}"),
        ('[{"image_id": true, "caption": "a"}]', "entry 1 must have"),
        ('[["a", "b"]]', "entry 1 must have"),
        ('[{"image_id": 1, "caption": "a"}, {"image_id": "1", "caption": "b"}]', "'1' has more than one caption"),
        ("[" * 100_000, "is not whole JSON"),
    ],
)
def test_broken_predictions_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(DataError) as error:
        read_predictions(tmp_path / "p.json")
    assert message in str(error.value)


def test_photos_are_found_by_name_stem_or_number() -> None:
    for rename in (str, lambda name: name.removesuffix(".jpg"), lambda name: str(int(name[13:25]))):
        assert match({rename(name): text for name, text in CAPTIONS.items()}, PHOTOS) == CAPTIONS
    numbered = [Photo("x.jpg", "val", ("a",), coco_id=77)]
    assert match({"77": "b"}, numbered) == {"x.jpg": "b"}


def test_missing_and_surplus_photos_are_errors_that_name_the_first() -> None:
    wrong = dict(list(CAPTIONS.items())[1:]) | {"other.jpg": "a"}
    with pytest.raises(DataError) as error:
        match(wrong, PHOTOS)
    assert f"1 of 4 photos have no caption (first: {PHOTOS[0].id})" in str(error.value)
    assert "1 captions are of photos that have no references (first: other.jpg)" in str(error.value)


@pytest.mark.parametrize(
    ("by", "names", "references"),
    [
        ("name", ["/photos/a/1.jpg", "/photos/b/2.jpg"], ["1.jpg", "val/2.jpg"]),
        ("stem", ["/photos/000001.png", "2"], ["0001.jpg", "val2014/2.jpg"]),
        ("id", ["/photos/COCO_val2014_000000000001.jpg", "000002.jpg"], ["1.jpg", "000000000002.jpg"]),
    ],
)
def test_photos_are_matched_whatever_folders_endings_and_zeros_they_have(
    by: str, names: list[str], references: list[str]
) -> None:
    photos = [Photo(name, "val") for name in references]
    captions = dict(zip(names, ("one", "two"), strict=True))
    expected = dict(zip(references, ("one", "two"), strict=True))
    assert match(captions, photos, by) == expected
    assert match(captions, photos) == expected, "found without being told"


def test_a_scheme_that_confuses_photos_is_refused() -> None:
    with pytest.raises(DataError, match="'a/1.jpg' and 'b/1.jpg' both match the photo '1.jpg'"):
        match({"a/1.jpg": "x", "b/1.jpg": "y"}, [Photo("1.jpg", "val")], "name")
    with pytest.raises(DataError, match="--match-by name does not tell all photos of the references apart"):
        match({"1.jpg": "x"}, [Photo("a/1.jpg", "val"), Photo("b/1.jpg", "val")], "name")
    with pytest.raises(ConfigError, match="unknown scheme 'nam'. Did you mean 'name'"):
        match({}, [Photo("1.jpg", "val")], "nam")


def test_what_haav_caption_writes_is_scored_and_failed_photos_are_left_out_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_with = MadeWith("model", "0123456789ab", {})
    items = {name: PhotoItem(f"/photos/{name}", lambda: b"") for name in ("0001.jpg", "0002.jpg", "0003.jpg")}
    good = {name: Caption("a dog runs", (), 0.0, 0.5) for name in ("0001.jpg", "0002.jpg")}
    for name in ("first.jsonl", "named.json"):
        with CaptionFile(tmp_path / name, made_with) as file:
            file.add([CaptionedPhoto(items[photo], caption=caption) for photo, caption in good.items()])
            file.add([CaptionedPhoto(items["0003.jpg"], error=ImageError("not a picture"))])
    (tmp_path / "other.json").write_text(json.dumps({"1": "a dog", "2": "a cat", "3": "a man"}))
    (tmp_path / "references.json").write_text(json.dumps({f"{n}.jpg": ["a dog runs", "a dog"] for n in (1, 2, 3)}))
    for name in ("first.jsonl", "named.json"):
        words = ["evaluate", "--predictions", str(tmp_path / name), "--skip", "METEOR,SPICE", "--json"]
        words += ["--references", str(tmp_path / "references.json")]
        assert main(words) == 1
        shown = capsys.readouterr().err
        assert "1 photos failed and have no caption (first: /photos/0003.jpg: not a picture)" in shown
        assert "leave them out with --skip-failed" in shown
        assert main([*words, "--skip-failed", "--compare", str(tmp_path / "other.json")]) == 0
        shown = capsys.readouterr()
        assert "left out: /photos/0003.jpg: not a picture" in shown.err
        data = json.loads(shown.out)
        assert (data["photos"], data["compare"]["photos"]) == (2, 2)
        assert main([*words, "--skip-failed", "--match-by", "name"]) == 1
        assert "3 of 3 photos have no caption" in capsys.readouterr().err
    with CaptionFile(tmp_path / "failed.jsonl", made_with) as file:
        file.add([CaptionedPhoto(item, error=ImageError("not a picture")) for item in items.values()])
    words[2] = str(tmp_path / "failed.jsonl")
    assert main([*words, "--skip-failed"]) == 1
    assert "all 3 photos failed, so there is nothing to score" in capsys.readouterr().err


def test_the_coco_server_gets_numbers(tmp_path: Path) -> None:
    save_predictions(tmp_path / "s.json", CAPTIONS, names_for("coco-server", PHOTOS))
    assert json.loads((tmp_path / "s.json").read_text())[0] == {"image_id": 1, "caption": "a w6"}
    save_predictions(tmp_path / "p.json", CAPTIONS, names_for("coco", PHOTOS))
    assert read_predictions(tmp_path / "p.json").captions == CAPTIONS
    with pytest.raises(DataError, match=r"takes numbers; 1 photos have none \(first: cat.jpg\)"):
        names_for("coco-server", [Photo("cat.jpg", "val")])
    with pytest.raises(DataError, match="the same number"):
        names_for("coco-server", [Photo("a/1.jpg", "val"), Photo("b/1.jpg", "val")])
    with pytest.raises(ConfigError, match="Did you mean 'coco'"):
        names_for("cocoo", PHOTOS)


def test_names_that_two_photos_share_are_not_used() -> None:
    photos = [Photo("a/1.jpg", "val"), Photo("b/1.jpg", "val")]
    with pytest.raises(DataError, match="2 of 2 photos have no caption"):
        match({"1": "x"}, photos)
    swapped = [Photo("1.jpg", "val", (), coco_id=2), Photo("2.jpg", "val", (), coco_id=1)]
    assert match({"1": "one", "2": "two"}, swapped) == {"1.jpg": "two", "2.jpg": "one"}, "COCO's numbers are meant"


def test_pycocoevalcaps_own_layout_is_read_and_captions_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"1": [{"image_id": 1, "caption": "a dog"}], "2": ["b"]}))
    assert [photo.captions for photo in load_references(tmp_path / "r.json")] == [("a dog",), ("b",)]
    (tmp_path / "r.json").write_text(json.dumps({"1": [7]}))
    with pytest.raises(DataError, match="must have a text as caption, not 7"):
        load_references(tmp_path / "r.json")
    (tmp_path / "r.json").write_text('{"1": ["a"], "1": ["b"]}')
    with pytest.raises(DataError, match="'1' stands there more than once"):
        load_references(tmp_path / "r.json")
    (tmp_path / "p.jsonl").write_text('{"image_id": 1, "caption": "a\u2028b"}\n', encoding="utf-8")
    assert read_predictions(tmp_path / "p.jsonl").captions == {"1": "a\u2028b"}
    (tmp_path / "t.json").write_text(json.dumps({"images": [{"id": 5, "file_name": "x.jpg"}]}))
    assert load_dataset(tmp_path / "t.json", "test").split("test") == (Photo("x.jpg", "test", (), 5),)


def test_references_say_which_split(tmp_path: Path) -> None:
    images = [
        {"filename": f"{n}.jpg", "split": s, "cocoid": n, "sentences": [{"raw": "a"}]}
        for n, s in enumerate(("val", "test"))
    ]
    (tmp_path / "k.json").write_text(json.dumps({"images": images}))
    with pytest.raises(ConfigError, match="has the splits test, val: say which with --split"):
        load_references(tmp_path / "k.json")
    [photo] = load_references(tmp_path / "k.json", "test")
    assert photo.coco_id == 1
    with pytest.raises(DataError, match="no photos in split 'train', only in: test, val"):
        load_references(tmp_path / "k.json", "train")
    coco = {"images": [{"id": 5, "file_name": "x.jpg"}], "annotations": [{"image_id": 5, "caption": "b"}]}
    (tmp_path / "c.json").write_text(json.dumps(coco))
    assert load_references(tmp_path / "c.json") == (Photo("x.jpg", "train", ("b",), 5),)
    (tmp_path / "m.json").write_text(json.dumps({"x": ["b", "c"], "y": []}))
    assert [photo.captions for photo in load_references(tmp_path / "m.json", "val")] == [("b", "c"), ()]


def test_objects_are_matched_like_captions(tmp_path: Path) -> None:
    (tmp_path / "o.json").write_text(json.dumps({"1": ["dog"], "9": ["cat"]}))
    assert load_objects(tmp_path / "o.json", PHOTOS) == {PHOTOS[0].id: ("dog",)}
    (tmp_path / "o.json").write_text(json.dumps({"cat": ["dog"]}))
    with pytest.raises(DataError, match=r"names none of the 4 photos \(first of its names: cat\)"):
        load_objects(tmp_path / "o.json", PHOTOS)
    (tmp_path / "o.json").write_text("[1]")
    with pytest.raises(DataError, match="must be {id:"):
        load_objects(tmp_path / "o.json", PHOTOS)


# A model over a store


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """A store, a data set of seven val photos, two models of the same words and other views"""
    torch.manual_seed(0)
    names = [f"COCO_val2014_{n:012d}.jpg" for n in range(1, 8)]
    with Store(tmp_path / "store", write=True) as store:
        for name, spec in VIEWS.items():
            store.add_view(name, ViewManifest(spec, "toy"))
            views = random_views(7)[name]
            store.put(
                name,
                {
                    photo: PhotoView(
                        views.tokens[n, : 1 + n % spec.max_tokens],
                        {index: values[n, : 1 + n % spec.max_tokens] for index, values in views.indices.items()},
                        None if views.boxes is None else views.boxes[n, : 1 + n % spec.max_tokens],
                    )
                    for n, photo in enumerate(names)
                },
            )
    images = [{"filename": n, "split": "val", "sentences": [{"raw": "a w7 w9"}, {"raw": "the w8 w10."}]} for n in names]
    (tmp_path / "data.json").write_text(json.dumps({"images": images}))
    two = {name: VIEWS[name] for name in ("grid", "text")}
    for folder, settings in (("all", {}), ("two", {"views": two})):
        Captioner(tiny_model(**settings), tiny_config(**settings), WORDS).save_pretrained(tmp_path / folder)
    return {name: str(tmp_path / name) for name in ("store", "data.json", "all", "two", "out.json")}


def run(*words: str) -> int:
    return main(list(words))


def test_predict_then_evaluate_by_command(world: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--store", world["store"], "--dataset", world["data.json"], "--out", world["out.json"]]
    assert run("predict", "--model", world["all"], *common, "--batch", "3") == 0
    batched = read_predictions(world["out.json"]).captions
    assert run("predict", "--model", world["all"], *common, "--batch", "1") == 0
    assert read_predictions(world["out.json"]).captions == batched, "the batch changes nothing"
    assert run("predict", "--model", f"{world['all']},{world['two']}", *common, "--decode.beam", "2") == 0
    assert run("predict", "--model", world["all"], *common, "--format", "coco-server", "--decode.min_words", "2") == 0
    assert set(read_predictions(world["out.json"]).captions) == {str(n) for n in range(1, 8)}
    assert run("predict", "--model", world["two"], "--store", world["store"], "--out", world["out.json"]) == 0
    assert len(read_predictions(world["out.json"]).captions) == 7, "without a data set, all photos of the store"
    capsys.readouterr()
    scoring = ["evaluate", "--predictions", world["out.json"], "--references", world["data.json"]]
    assert run(*scoring, "--skip", "METEOR", "--json", "--compare", world["out.json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["photos"] == 7
    assert data["METEOR"] is None
    assert data["difference"]["CIDEr"]["value"] == 0
    assert run(*scoring, "--skip", "METEOR,SPICE") == 0
    shown = capsys.readouterr().out
    assert "CIDEr" in shown
    assert "METEOR: – (left out)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "test"], "has no photos in split 'test'"),
        (["--split", "vall"], "unknown split 'vall'. Did you mean 'val'?"),
        (["--format", "cocoo"], "unknown format 'cocoo'. Did you mean 'coco'?"),
        (["--model.d_model", "12"], "'--model.d_model' cannot be changed after training"),
        (["--decode.beem", "3"], "unknown setting '--decode.beem'. Did you mean '--decode.beam'?"),
        (["--decode.samples", "0"], "'--decode.samples' must be at least 1, not 0"),
        (["--batch", "0"], "a batch has at least 1 photo, not 0"),
        (["--out", "no-such-folder/x.json"], "there is no folder no-such-folder"),
        (["--out", "."], ". is a folder; name a file"),
        (["--model", ","], "an ensemble needs at least one model"),
    ],
)
def test_mistakes_are_named(
    world: dict[str, str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    common = ["--model", world["all"], "--store", world["store"], "--dataset", world["data.json"]]
    assert run("predict", *common, "--out", world["out.json"], *words) in (1, 2)
    assert message in capsys.readouterr().err
    assert not Path(world["out.json"]).exists()


def test_models_of_other_words_make_no_ensemble(world: dict[str, str]) -> None:
    other = Vocabulary((*WORDS.words[:-1], "x"))
    first = Captioner.from_pretrained(world["all"])
    with pytest.raises(ConfigError, match="an ensemble needs one vocabulary"):
        Captioner.ensemble([first, Captioner(tiny_model(), tiny_config(), other)])
    assert Captioner.ensemble([first]) is first
    both = Captioner.ensemble([Captioner.from_pretrained(world["two"]), first])
    assert set(both.views) == set(VIEWS)


def test_calibrate_saves_what_it_fitted(world: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    before = Captioner.from_pretrained(world["all"])
    data = ["--store", world["store"], "--dataset", world["data.json"]]
    assert run("calibrate", world["all"], *data, "--decode.beam", "1") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["calibration error of the confidence"] < report["calibration error of the probabilities"]
    assert run("calibrate", f"{world['all']},{world['two']}", *data) == 2
    assert "give one model" in capsys.readouterr().err
    after = Captioner.from_pretrained(world["all"])
    assert after.config.confidence.offset == report["offset"] != before.config.confidence.offset
    assert after.config.decode == before.config.decode
    assert saved_dtype(world["all"]) == torch.float32
    after.save_pretrained(world["all"], torch.float16)
    assert run("calibrate", world["all"], *data) == 0
    assert saved_dtype(world["all"]) == torch.float16, "a model that was packed stays small"
    assert run("calibrate", world["all"], *data, "--split", "test") == 2
    assert "never on test" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_predict_yields_photos_in_order_however_many_threads_there_are(world: dict[str, str], method: str) -> None:
    photos = load_dataset(world["data.json"]).split("val")
    captioner = Captioner.from_pretrained(world["all"])
    captioner = captioner.with_config(override(captioner.config, "decode", {"method": method}))
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with Store(world["store"]) as store:
            own = [(photo, caption.text) for photo, caption in predict(captioner, store, photos, batch=2, seed=5)]
        assert [photo for photo, _ in own] == [photo.id for photo in photos]
        found.append(own)
    torch.set_num_threads(1)
    assert found[0] == found[1]


def test_retrieval_alone_says_the_nearest_or_the_most_agreed_on(tmp_path: Path) -> None:
    axes = torch.eye(4)
    sentences = ("odd one", "a dog", "a puppy", "a hound")
    tokens = torch.stack([axes[0], axes[1] + axes[2], axes[1], axes[1] + axes[3]])
    with Store(tmp_path / "s", write=True) as store:
        store.add_view("text_whole", ViewManifest(ViewSpec(4, 4), "toy"))
        store.put("text_whole", {"p.jpg": PhotoView(tokens, labels=sentences)})
    words = ["predict", "--store", str(tmp_path / "s"), "--out", str(tmp_path / "c.json"), "--baseline"]
    for baseline, expected in (("nearest", "odd one"), ("consensus", "a puppy")):
        assert main([*words, baseline]) == 0
        assert read_predictions(tmp_path / "c.json").captions == {"p.jpg": expected}
    assert main([*words, "best"]) == 2
