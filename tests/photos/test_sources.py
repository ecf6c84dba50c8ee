"""Where photos are found, and what is said about everything else."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from haav.errors import DataError, ImageError
from haav.photos import sources
from haav.photos.sources import find_photos, photos_of
from helpers import make_photos

PDF = b"%PDF-1.7\n"


def ids(source: Path | str) -> list[str]:
    return [photo.id for photo in photos_of(str(source)).photos]


def fault(source: Path | str) -> str:
    (photo,) = photos_of(str(source)).photos
    with pytest.raises(ImageError) as caught:
        photo.read()
    return str(caught.value)


def test_photos_in_a_folder_are_told_by_ending_or_content(tmp_path: Path) -> None:
    photos = make_photos(tmp_path, 1)
    whole = (photos / "000.jpg").read_bytes()
    for name in ("IMG_1", "b.dat", "c.txt"):
        (photos / name).write_bytes(whole)
    (photos / "layers.psd").write_bytes(b"8BPS\0\x01")
    for name in ("notes.md", "more.md", "paper.pdf", "README"):
        (photos / name).write_bytes(PDF)
    search = photos_of(str(photos))
    assert [photo.id for photo in search.photos] == ["000.jpg", "IMG_1", "b.dat", "c.txt", "layers.psd"]
    assert search.note == "not read: 4 other files (2 .md, 1 without an ending, 1 .pdf)"
    with pytest.raises(ImageError, match="a Photoshop picture, which cannot be read. Save it as JPEG"):
        search.photos[-1].read()


def test_photos_in_a_tar_are_told_by_ending_or_content(tmp_path: Path) -> None:
    whole = (make_photos(tmp_path, 1) / "000.jpg").read_bytes()
    with tarfile.open(tmp_path / "photos.bin", "w") as tar:
        for name, data in {"a.jpg": whole, "b": whole, "c.pdf": PDF, "d.jpg": b""}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, kind in {"hard": tarfile.LNKTYPE, "soft": tarfile.SYMTYPE, "pipe": tarfile.FIFOTYPE}.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.jpg"
            tar.addfile(member)
    search = photos_of(str(tmp_path / "photos.bin"))
    assert [photo.id for photo in search.photos] == ["a.jpg", "b", "d.jpg"]
    assert search.photos[1].read() == whole
    with pytest.raises(ImageError, match=r"photos\.bin/d\.jpg is empty"):
        search.photos[2].read()
    assert search.note == "not read: 4 other files (2 link, 1 .pdf, 1 device)"


def test_a_list_is_read_only_where_it_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    for name in ("list.txt", "list"):
        Path(name).write_text("000.jpg\r\n\n001.jpg\n")
    assert ids("list.txt") == ids("@list") == ids("@list.txt") == ["000.jpg", "001.jpg"]
    assert "list is text, not a photo. For a list of paths, write @list" in fault("list")
    assert fault("@none") == "cannot read @none: No such file or directory."
    Path("photo.txt").write_bytes(Path("000.jpg").read_bytes())
    assert ids("photo.txt") == ["photo.txt"], "its content is a photo"


def test_lists_are_bounded_and_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\0\1" * 10)
    assert "binary.txt is not text in UTF-8" in fault(tmp_path / "binary.txt")
    (tmp_path / "long.txt").write_text("a.jpg\n" * 10)
    monkeypatch.setattr(sources, "MAX_LIST_BYTES", 59)
    assert "has 60 bytes; at most 59 are read" in fault(tmp_path / "long.txt")


def test_addresses_are_refused_with_what_to_do(tmp_path: Path) -> None:
    address = "https://example.org/cat.jpg"
    says = "https://example.org/cat.jpg is an address.*Download the photo first, or pipe it: curl -L"
    with pytest.raises(DataError, match=says):
        find_photos([address])
    assert "is an address" in fault(address)
    assert "is an address" in fault("ftp://example.org/*.jpg")
    assert "is an address" in fault("www.example.org/cat.jpg")
    assert fault("file:///photos/my%20cat.jpg").endswith("is an address. Give the path alone: /photos/my cat.jpg")
    (tmp_path / "list.txt").write_text(f"{address}\n")
    assert "is an address" in fault(tmp_path / "list.txt")


def test_broken_links_are_told_under_their_own_names(tmp_path: Path) -> None:
    make_photos(tmp_path, 1)
    for number in range(5):
        (tmp_path / f"link{number}.jpg").symlink_to(f"gone{number}.jpg")
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "circle").symlink_to("circle")
    faults = {photo.id: photo.fault for photo in photos_of(str(tmp_path)).photos if photo.fault}
    assert faults["link3.jpg"] == f"cannot read {tmp_path}/link3.jpg: it is a link to gone3.jpg, which does not exist."
    assert "it is a link to gone, which does not exist" in faults["link"]
    assert "symbolic links" in faults["circle"]
    assert len(faults) == 7
    assert "a link to gone, which does not exist" in fault(tmp_path / "link")


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.jpg"])
def test_folders_that_link_to_each_other_are_read_once(tmp_path: Path, pattern: str) -> None:
    photos = make_photos(tmp_path / "photos", 1)
    (photos / "deep").mkdir()
    for name in ("one", "two", "deep/three", "deep/four"):
        (photos / name).symlink_to(photos)
    search = photos_of(f"{photos}{pattern}")
    assert {photo.path for photo in search.photos} == {str(photos / "000.jpg")}
    if not pattern:
        assert search.note == f"not read: 4 linked folders, the first {photos}/deep/four"


def test_many_linked_folders_do_not_multiply(tmp_path: Path) -> None:
    """Each link doubles the number of paths per level if links are followed: 2 ** 40 of them."""
    photos = make_photos(tmp_path / "photos", 1)
    (photos / "one").symlink_to(".")
    (photos / "two").symlink_to(".")
    assert {photo.path for photo in photos_of(f"{photos}/**/*.jpg").photos} == {str(photos / "000.jpg")}


def test_a_pattern_without_a_match_is_told(tmp_path: Path) -> None:
    assert "no file matches the pattern" in fault(tmp_path / "*.jpg")


def test_photos_of_a_pattern_and_what_else_matches(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    (tmp_path / "photos" / "a.pdf").write_bytes(PDF)
    search = photos_of(f"{tmp_path}/photos/*")
    assert [photo.id for photo in search.photos] == ["000.jpg", "001.jpg"]
    assert search.note == "not read: 1 other file (1 .pdf)"


def test_find_photos_notes_what_it_left_out(tmp_path: Path) -> None:
    make_photos(tmp_path, 1)
    (tmp_path / "a.pdf").write_bytes(PDF)
    notes: list[str] = []
    assert len(find_photos([tmp_path], notes.append)) == 1
    assert notes == [f"{tmp_path}: not read: 1 other file (1 .pdf)."]


def test_photos_are_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/z.jpg", "a/b/c.jpg", "a.jpg", "c/a.jpg", "B.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert ids(tmp_path) == [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*.jpg"))]


def test_names_that_are_not_utf8_are_told_where_photos_are_stored_by_name(tmp_path: Path) -> None:
    whole = (make_photos(tmp_path, 1) / "000.jpg").read_bytes()
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(whole)
    good, bad = find_photos([tmp_path])
    assert (good.id, good.fault) == ("000.jpg", "")
    assert bad.id == r"caf\xe9.jpg"
    with pytest.raises(ImageError, match=r"caf\\xe9.jpg is not UTF-8. Rename the file first"):
        bad.read()
