"""Files of each layout, small but of the real widths, go into a store and come out with the same numbers."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from haav.data.collate import stack
from haav.errors import ConfigError, DataError, HaavError, StoreError
from haav.model.build import load_config
from haav.store import Store
from haav.types import PhotoView
from haav.views import feature_files, importers
from haav.views.feature_files import LAYOUTS
from haav.views.importers import import_features

h5py = pytest.importorskip("h5py")
SIZE = (640.0, 480.0)
BOXES = np.float32([[64, 48, 320, 240], [0, 0, 640, 480], [320, 120, 480, 360]])
FRACTIONS = np.float32(
    [[0.1, 0.1, 0.5, 0.5, 0.4, 0.4], [0, 0, 1, 1, 1, 1], [0.5, 0.25, 0.75, 0.75, 0.25, 0.5]],
)


def _features(count: int = 3, width: int = 2048, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)


def _row(photo: object, features: np.ndarray, boxes: np.ndarray = BOXES, count: int | None = None) -> str:
    cells = [photo, 640, 480, len(features) if count is None else count]
    cells += [base64.b64encode(np.float32(array).tobytes()).decode() for array in (boxes, features)]
    return "\t".join(map(str, cells)) + "\n"


def _get(store: Path, view: str, photo: str) -> PhotoView:
    with Store(store) as opened:
        return opened.get(view, photo)


def _same(tensor: torch.Tensor, expected: np.ndarray) -> None:
    torch.testing.assert_close(tensor.float(), torch.from_numpy(np.float32(expected)), rtol=1e-3, atol=1e-3)


def _hdf5(path: Path, arrays: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    return path


def _texts(shape: tuple[int, ...]) -> np.ndarray:
    """ "0 3" at crop 0, rank 3"""
    return np.array(
        ["{} {}".format(*((0, *position) if len(position) == 1 else position)) for position in np.ndindex(shape)],
        object,
    ).reshape(shape)


def _txt_ctx(path: Path, photos: tuple[int, ...] = (1,), width: int = 768, k: int = 16) -> Path:
    """As the authors' script writes it: twice the ranks that their models read"""
    arrays = {}
    for photo in photos:
        for part, shape in {"whole": (8 * k,), "five": (5, 2 * k), "nine": (9, k)}.items():
            numbers = _features(int(np.prod(shape)), width, seed=photo + len(part)).reshape(*shape, width)
            arrays |= {f"{photo}/{part}/features": numbers, f"{photo}/{part}/scores": numbers[..., 0]}
            arrays |= {f"{photo}/{part}/texts": _texts(shape).tolist()}
    return _hdf5(path, arrays)


# Objects


def test_tsv_rows_become_objects_of_the_preset(tmp_path: Path) -> None:
    source, store = tmp_path / "val.tsv", tmp_path / "store"
    source.write_text(_row(391895, _features()) + _row(7, _features(2, seed=1), BOXES[:2]))
    summary = import_features("bottom_up_tsv", source, store)
    assert (summary.photos, summary.skipped, summary.failures) == (2, 0, [])
    photo = _get(store, "objects", "391895")
    _same(photo.tokens, np.concatenate([_features(), FRACTIONS], axis=1))
    assert photo.boxes is not None
    _same(photo.boxes, FRACTIONS[:, :4])
    _same(_get(store, "objects", "7").tokens[:, :2048], _features(2, seed=1))
    with Store(store) as opened:
        manifest = opened.views["objects"]
        assert all(problem is None for _, problem in opened.verify("objects"))
    assert manifest.source == "imported: val.tsv"
    assert manifest.fingerprint.startswith("bottom_up_tsv-")


def test_a_folder_of_tsv_parts_is_one_source_and_a_photo_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "train.tsv.0").write_text(_row(1, _features()))
    (tmp_path / "train.tsv.1").write_text("\t".join(feature_files.COLUMNS) + "\n\n" + _row(2, _features()))
    (tmp_path / "val.tsv").write_text(_row(1, _features(seed=9)))
    (tmp_path / "train.tsv.lineidx").write_text("0\n")
    summary = import_features("bottom_up_tsv", tmp_path, tmp_path / "store")
    assert (summary.photos, summary.skipped, summary.failures) == (2, 1, [])
    _same(_get(tmp_path / "store", "objects", "1").tokens[:, :2048], _features())


def test_damaged_rows_are_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_files, "MAX_ROW", 60_000)
    broken = _features()
    broken[1, 5] = np.nan
    rows = {
        "good": _row("good", _features()),
        "short": "short\t640\t480\n",
        "base64": _row("base64", _features())[:-4] + "?!=\n",
        "count": _row("count", _features(), count=4),
        "number": _row("number", _features()).replace("640", "wide"),
        "flat": _row("flat", _features()).replace("640", "0"),
        "nan": _row("nan", broken),
        "wide": _row("wide", _features(width=100)),
        "endless": "endless\t" + "A" * 200_000 + "\n",
        "": _row("", _features()),
        "x" * 600: _row("x" * 700, _features()),
        "last": _row("last", _features()),
    }
    source = tmp_path / "some.tsv"
    source.write_text("".join(rows.values()))
    summary = import_features("bottom_up_tsv", source, tmp_path / "store")
    said = {failure.image: failure.error for failure in summary.failures}
    assert set(said) == set(rows) - {"good", "last"}
    assert summary.photos == 2
    assert all(failure.views == ("objects",) for failure in summary.failures)
    assert "row 2 of some.tsv has 3 cells instead of 6" in said["short"]
    assert "4 boxes, but 12 box numbers" in said["count"]
    assert "size is (0.0, 480.0)" in said["flat"]
    assert "not finite" in said["nan"]
    assert "3 × 106 where the first record allows 50 × 2054" in said["wide"]
    assert "more than 60,000 bytes" in said["endless"]
    with Store(tmp_path / "store") as store:
        assert store.ids("objects") == ["good", "last"]


def test_rows_of_zeros_are_padding_and_at_most_fifty_objects_stay(tmp_path: Path) -> None:
    features, boxes = _features(60), np.tile(BOXES, (20, 1))
    features[[3, 59]], boxes[[3, 59]] = 0, 0
    empty = _row("none", features[:0], boxes[:0])
    zeros = _row("zeros", np.zeros((3, 2048)), np.zeros((3, 4)))
    (tmp_path / "a.tsv").write_text(empty + _row("many", features, boxes) + zeros)
    summary = import_features("bottom_up_tsv", tmp_path / "a.tsv", tmp_path / "store")
    assert (summary.photos, summary.failures) == (3, [])
    _same(_get(tmp_path / "store", "objects", "many").tokens[:, :2048], np.delete(features, 3, axis=0)[:50])
    for lacking in ("none", "zeros"):
        assert _get(tmp_path / "store", "objects", lacking).tokens.shape == (0, 2054)


def test_npz_files_of_every_spelling_give_the_same_objects(tmp_path: Path) -> None:
    folder, size = tmp_path / "feats", {"image_w": 640, "image_h": np.int64(480)}
    folder.mkdir()
    info = np.array({"objects_id": [1]}, dtype=object)  # a pickle: must not be read
    np.savez(folder / "a.npz", x=_features(), bbox=BOXES, num_bbox=3, info=info, **size)
    np.savez_compressed(folder / "b.npz", features=_features(), boxes=BOXES, **size)
    np.savez(folder / "c.npz", feat=_features(), bbox=FRACTIONS[:, :4])
    np.savez(folder / "d.npz", x=_features().T, bbox=BOXES, **size)
    np.save(folder / "e.npy", np.concatenate([_features(), FRACTIONS], axis=1))
    np.save(folder / "e_info.npy", info)
    summary = import_features("bottom_up_npz", folder, tmp_path / "store")
    assert (summary.photos, summary.failures) == (5, [])
    for photo in "abcde":
        record = _get(tmp_path / "store", "objects", photo)
        _same(record.tokens, np.concatenate([_features(), FRACTIONS], axis=1))
        assert record.boxes is not None
        _same(record.boxes, FRACTIONS[:, :4])


def test_features_without_boxes_keep_their_width(tmp_path: Path) -> None:
    np.savez(tmp_path / "1.npz", feat=_features())
    np.save(tmp_path / "2.npy", _features())
    import_features("bottom_up_npz", tmp_path, tmp_path / "store", view="bare")
    with Store(tmp_path / "store") as store:
        assert store.views["bare"].spec.dim == 2048
        assert store.get("bare", "2").boxes is None
        _same(store.get("bare", "1").tokens, _features())


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("trapped",)


def test_bad_npz_files_are_named_and_pickles_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(feature_files, "MAX_NUMBERS", 1 << 16)
    folder = tmp_path / "feats"
    folder.mkdir()
    np.savez(folder / "0good.npz", x=_features(), bbox=BOXES, image_w=640, image_h=480)
    np.savez(folder / "pixels.npz", x=_features(), bbox=BOXES)
    np.savez(folder / "boxes.npz", x=_features(), bbox=BOXES[:2], image_w=640, image_h=480)
    np.savez(folder / "keys.npz", y=_features())
    np.savez(folder / "trap.npz", x=np.array(_Trap(), dtype=object))
    np.save(folder / "trap2.npy", np.array(_Trap(), dtype=object))
    np.savez_compressed(folder / "bomb.npz", x=np.zeros((100, 2048), np.float32))
    np.save(folder / "huge.npy", np.zeros((100, 2048), np.float32))
    (folder / "cut.npz").write_bytes((folder / "0good.npz").read_bytes()[:3000])
    (folder / "empty.npy").write_bytes(b"")
    summary = import_features("bottom_up_npz", folder, tmp_path / "store")
    said = {failure.image: failure.error for failure in summary.failures}
    assert set(said) == {"pixels", "boxes", "keys", "trap", "trap2", "bomb", "huge", "cut", "empty"}
    assert summary.photos == 1
    assert "image_w, image_h" in said["pixels"]
    assert "(2, 4) instead of (3, 4)" in said["boxes"]
    assert "found: y" in said["keys"]
    assert "unpacks to more" in said["bomb"]
    assert "819,328 bytes" in said["huge"]
    assert "allow_pickle=False" in said["trap"]
    assert not Path("trapped").exists()


def test_oscar_features_are_taken_as_they_are_without_their_padding(tmp_path: Path) -> None:
    rows = np.concatenate([_features(), FRACTIONS], axis=1)
    wrong = np.concatenate([_features(), np.roll(FRACTIONS, 1, axis=1)], axis=1)
    padded = np.concatenate([rows, np.zeros((47, 2054), np.float32)])
    arrays = {"1/obj_features": padded, "1/num_boxes": 3, "2/obj_features": rows.astype(np.float64)}
    source = _hdf5(tmp_path / "oscar.hdf5", arrays | {"3/obj_features": wrong})
    summary = import_features("oscar_hdf5", source, tmp_path / "store")
    assert [(failure.image, "no box" in failure.error) for failure in summary.failures] == [("3", True)]
    for name in "12":
        photo = _get(tmp_path / "store", "objects", name)
        _same(photo.tokens, rows)
        assert photo.boxes is not None
        _same(photo.boxes, FRACTIONS[:, :4])


def test_six_numbers_that_are_no_boxes_are_only_features(tmp_path: Path) -> None:
    rows = np.concatenate([_features(), FRACTIONS * 600], axis=1)  # pixels
    good = np.concatenate([_features(), FRACTIONS], axis=1)
    source = _hdf5(tmp_path / "oscar.hdf5", {"1/obj_features": rows, "2/obj_features": good})
    assert import_features("oscar_hdf5", source, tmp_path / "store").photos == 2
    _same(_get(tmp_path / "store", "objects", "1").tokens, rows)
    assert [_get(tmp_path / "store", "objects", name).boxes for name in "12"] == [None, None]


def test_imported_photos_go_into_one_batch_also_where_nothing_was_detected(tmp_path: Path) -> None:
    rows = [_row("a", BOXES[:0], BOXES[:0]), _row("b", _features()), _row("c", np.zeros((3, 2048)), np.zeros((3, 4)))]
    (tmp_path / "a.tsv").write_text("".join(rows))
    import_features("bottom_up_tsv", tmp_path / "a.tsv", tmp_path / "store")
    with Store(tmp_path / "store") as store:
        view = stack(store.get_many("objects", ["a", "b", "c"]))
    assert view.mask.sum(dim=1).tolist() == [0, 3, 0]
    assert view.boxes is not None
    _same(view.boxes[1], FRACTIONS[:, :4])


# The authors' files


def test_vis_ctx_gives_the_grid(tmp_path: Path) -> None:
    arrays = {"5/grid_features": _features(50, 768), "5/pooled_features": _features(1, 512)[0]}
    source = _hdf5(tmp_path / "vis_ctx.hdf5", arrays | {"6/grid_features": _features(51, 768)})
    summary = import_features("vis_ctx_hdf5", source, tmp_path / "store")
    _same(_get(tmp_path / "store", "grid", "5").tokens, _features(50, 768))
    assert [(failure.image, "51 × 768" in failure.error) for failure in summary.failures] == [("6", True)]


def test_txt_ctx_gives_three_views_with_crop_rank_and_texts(tmp_path: Path) -> None:
    source = _txt_ctx(tmp_path / "txt_ctx.hdf5")
    summary = import_features("txt_ctx_hdf5", source, tmp_path / "store")
    assert (summary.photos, summary.failures) == (1, [])
    with h5py.File(source) as file:
        expected = {part: file[f"1/{part}/features"][()] for part in ("whole", "five", "nine")}
    whole = _get(tmp_path / "store", "text_whole", "1")
    _same(whole.tokens, expected["whole"][:64])
    assert whole.indices["crop"].tolist() == [0] * 64
    assert whole.indices["rank"].tolist() == list(range(64))
    for part, crops, ranks in (("five", 5, 16), ("nine", 9, 8)):
        photo = _get(tmp_path / "store", f"text_{part}", "1")
        _same(photo.tokens, expected[part][:, :ranks].reshape(crops * ranks, 768))
        pairs = list(zip(photo.indices["crop"].tolist(), photo.indices["rank"].tolist(), strict=True))
        assert pairs == [(crop, rank) for crop in range(crops) for rank in range(ranks)]
        assert photo.labels == tuple(f"{crop} {rank}" for crop, rank in pairs)


def test_imported_views_are_what_the_presets_expect(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(_row(1, _features()))
    objects = _hdf5(tmp_path / "oscar.hdf5", {"1/obj_features": _features(9, 2054)})
    grid = _hdf5(tmp_path / "vis_ctx.hdf5", {"1/grid_features": _features(50, 768)})
    import_features("oscar_hdf5", objects, tmp_path / "store")
    import_features("vis_ctx_hdf5", grid, tmp_path / "store")
    import_features("txt_ctx_hdf5", _txt_ctx(tmp_path / "txt_ctx.hdf5"), tmp_path / "store")
    import_features("bottom_up_tsv", tmp_path / "a.tsv", tmp_path / "store", view="tsv")
    with Store(tmp_path / "store") as store:
        specs = {name: manifest.spec for name, manifest in store.views.items()}
    wanted = load_config("release").model.views
    assert {name: specs[name] for name in wanted} == dict(wanted)
    assert specs["tsv"] == wanted["objects"]
    assert specs["text_nine"].indices == {"crop": 9, "rank": 8}


def test_files_of_xmodal_ctx_have_other_sizes(tmp_path: Path) -> None:
    """16 texts whatever the crop, 512 wide; its visual context has no grid"""
    arrays = {"1/whole/features": _features(16, 512), "1/whole/texts": np.array([b"caf\xc3\xa9", b"\xff"] * 8)}
    text = _hdf5(tmp_path / "txt_ctx.hdf5", arrays)
    import_features("txt_ctx_hdf5", text, tmp_path / "store", view="text_whole")
    photo = _get(tmp_path / "store", "text_whole", "1")
    assert photo.tokens.shape == (16, 512)
    assert photo.labels is not None
    assert photo.labels[:2] == ("café", "�")
    pooled = _hdf5(tmp_path / "vis_ctx.hdf5", {"1": _features(1, 768)[0]})
    with pytest.raises(DataError, match=r"one vector \(768,\): a file of Xmodal-Ctx"):
        import_features("vis_ctx_hdf5", pooled, tmp_path / "store")


def test_a_photo_that_lacks_one_text_view_keeps_the_others(tmp_path: Path) -> None:
    source = _txt_ctx(tmp_path / "txt_ctx.hdf5", photos=(1, 2), width=8)
    with h5py.File(source, "a") as file:
        del file["2/nine"]
        del file["2/five/features"]
        file["2/five/features"] = np.zeros((4, 16, 8), np.float32)
    summary = import_features("txt_ctx_hdf5", source, tmp_path / "store")
    assert [(failure.image, failure.views) for failure in summary.failures] == [
        ("2", ("text_five",)),
        ("2", ("text_nine",)),
    ]
    assert "(4, 16, 8) instead of (5, ranks, width)" in summary.failures[0].error
    assert "no nine in /2; found: five, whole" in summary.failures[1].error
    assert _get(tmp_path / "store", "text_whole", "2").tokens.shape == (64, 8)


# Resuming


def test_an_interrupted_import_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importers, "BATCH", 4)
    source, store = tmp_path / "a.tsv", tmp_path / "store"
    source.write_text("".join(_row(index, _features(seed=index)) for index in range(10)))

    def stop(done: int, todo: int) -> None:
        assert (done, todo) == (4, 10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_features("bottom_up_tsv", source, store, progress=stop)
    with Store(store) as opened:
        assert opened.count("objects") == 4
    read, told = [], []
    monkeypatch.setattr(feature_files, "_row", lambda *given, row=feature_files._row: read.append(given) or row(*given))
    summary = import_features("bottom_up_tsv", source, store, progress=lambda *given: told.append(given))
    assert (summary.photos, summary.skipped, summary.failures) == (6, 4, [])
    assert len(read) == 6 + 1, "one for the probe; what is there is not even decoded"
    assert told[-1] == (10, 10)
    for index in range(10):
        _same(_get(store, "objects", str(index)).tokens[:, :2048], _features(seed=index))
    again = import_features("bottom_up_tsv", source, store)
    assert (again.photos, again.skipped) == (0, 10)


def test_text_views_are_resumed_each_for_itself(tmp_path: Path) -> None:
    source = _txt_ctx(tmp_path / "txt_ctx.hdf5", photos=(1, 2), width=8)
    import_features("txt_ctx_hdf5", source, tmp_path / "store", view="text_five")
    summary = import_features("txt_ctx_hdf5", source, tmp_path / "store")
    assert (summary.photos, summary.skipped) == (2, 0)
    assert import_features("txt_ctx_hdf5", source, tmp_path / "store").skipped == 2


def test_another_file_is_not_mixed_into_a_view(tmp_path: Path) -> None:
    source = tmp_path / "a.tsv"
    source.write_text(_row(1, _features()))
    import_features("bottom_up_tsv", source, tmp_path / "store")
    source.write_text(_row(1, _features(seed=1)))
    with pytest.raises(StoreError, match="another extractor"):
        import_features("bottom_up_tsv", source, tmp_path / "store")


# Mistakes


def test_unknown_kinds_and_views_are_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'oscar_hdf5'\?\n  Available: bottom_up_npz, "):
        import_features("oscar_hdf", tmp_path, tmp_path / "store")
    with pytest.raises(ConfigError, match=r"'text_fives'. Did you mean 'text_five'"):
        import_features("txt_ctx_hdf5", tmp_path, tmp_path / "store", view="text_fives")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_sources_that_do_not_fit_say_what_was_found_and_leave_no_store(layout: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        import_features(layout, tmp_path / "nowhere", tmp_path / "store")
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=f"is a folder, .*'{layout}' reads"):
        import_features(layout, tmp_path / "void", tmp_path / "store")
    other = tmp_path / "other.txt"
    other.write_text("a caption\n")
    with pytest.raises(DataError, match="does not look like|cannot read .* as HDF5"):
        import_features(layout, other, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("oscar_hdf5", r"no obj_features or features in /1; found: boxes \(3, 4\), parts\."),
        ("vis_ctx_hdf5", "no grid_features in /1; found: boxes"),
        ("txt_ctx_hdf5", "no whole in /1; found: boxes"),
    ],
)
def test_missing_keys_are_told_with_what_is_there(layout: str, says: str, tmp_path: Path) -> None:
    source = _hdf5(tmp_path / "x.hdf5", {"1/boxes": BOXES, "1/parts/x": BOXES})
    with pytest.raises(DataError, match=says):
        import_features(layout, source, tmp_path / "store")


def test_groups_and_arrays_in_wrong_places_are_told(tmp_path: Path) -> None:
    source = _hdf5(tmp_path / "x.hdf5", {"1/obj_features/deep": BOXES, "2/grid_features": 1.0, "3/none": 1})
    with pytest.raises(DataError, match="/1/obj_features is no array"):
        import_features("oscar_hdf5", source, tmp_path / "store")
    flat = _hdf5(tmp_path / "y.hdf5", {"1": _features(2, 8)})
    with pytest.raises(DataError, match=r"no whole in /1; found: an array \(2, 8\)"):
        import_features("txt_ctx_hdf5", flat, tmp_path / "store")
    with h5py.File(tmp_path / "z.hdf5", "w") as file:
        file.create_dataset("1/obj_features", shape=(1 << 20, 2054), dtype="f4", chunks=(1, 2054))
    with pytest.raises(DataError, match="no array of at most"):
        import_features("oscar_hdf5", tmp_path / "z.hdf5", tmp_path / "store")


def test_a_first_record_that_is_damaged_does_not_condemn_the_file(tmp_path: Path) -> None:
    source = _hdf5(tmp_path / "oscar.hdf5", {"1/other": BOXES, "2/obj_features": _features(2, 2054)})
    summary = import_features("oscar_hdf5", source, tmp_path / "store")
    assert [failure.image for failure in summary.failures] == ["1"]
    assert summary.photos == 1


def test_a_missing_h5py_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _hdf5(tmp_path / "oscar.hdf5", {"1/obj_features": _features(2, 2054)})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(HaavError, match="pip install h5py"):
        import_features("oscar_hdf5", source, tmp_path / "store")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{id}", "391895"),
        ("{id:012d}.jpg", "000000391895.jpg"),
        ("{id:012}.jpg", "000000391895.jpg"),
        ("val2014/COCO_val2014_{id:0>12}.jpg", "val2014/COCO_val2014_000000391895.jpg"),
    ],
)
def test_ids_become_photo_names(template: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(_row(391895, _features()) + _row("cat", _features()))
    summary = import_features("bottom_up_tsv", tmp_path / "a.tsv", tmp_path / "store", id_template=template)
    numeric = "12d" in template or "012" in template
    assert [failure.image for failure in summary.failures] == ["cat"] * numeric
    with Store(tmp_path / "store") as store:
        assert name in store.ids("objects")
        assert store.count("objects") == 2 - numeric


@pytest.mark.parametrize("template", ["", "photo.jpg", "{}", "{name}.jpg", "{id.real}", "{id:q}", "{id", "{id:{x}}"])
def test_templates_that_cannot_name_photos_are_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="id template"):
        import_features("bottom_up_tsv", tmp_path, tmp_path / "store", id_template=template)
