"""Finds photos in folders, tar files and lists. The references returned can be read by any process."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from haav.errors import DataError, ImageError
from haav.photos.images import MAX_BYTES

SUFFIXES = frozenset([".jpg", ".jpeg", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".jfif"])


@dataclass(frozen=True)
class PhotoRef:
    """A photo's name and the location of its bytes: a file, or a range of a tar file."""

    id: str
    path: str
    offset: int = 0
    size: int = -1

    @property
    def place(self) -> str:
        """The location as shown to users."""
        return self.path if self.size < 0 else f"{self.path}/{self.id}"

    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(MAX_BYTES + 1 if self.size < 0 else min(self.size, MAX_BYTES + 1))
        except (OSError, ValueError) as error:
            raise ImageError(f"cannot read {self.path}: {error}.") from None
        if len(data) > MAX_BYTES:
            raise ImageError(f"{self.path} has more than {MAX_BYTES:,} bytes.")
        return data


def photos_of(source: str) -> tuple[list[PhotoRef], str]:
    """Photos of a folder (and of the tar files in it), a tar file, a list of paths (.txt), a picture, or a pattern.

    Returns the photos and a message about what failed, which is empty if nothing did. Never raises.
    """
    refs: list[PhotoRef] = []
    faults: list[str] = []
    try:
        path = Path(source)
        pattern = not path.exists() and any(wildcard in source for wildcard in "*?[")
        places = sorted(Path(name) for name in glob(source, recursive=True)) if pattern else [path]
        files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    except (OSError, ValueError) as error:
        return [], f"cannot look for photos there: {error}."
    alone = len(files) == 1
    for file in files:
        if not (alone or file.suffix.lower() in SUFFIXES or _is_tar(file)):
            continue  # folders may hold other files
        try:
            refs.extend(_of(file))
        except (DataError, OSError, ValueError) as error:
            faults.append(str(error))
    return refs, "; ".join(faults[:3])


def find_photos(sources: Iterable[str | Path]) -> list[PhotoRef]:
    """Photos of folders (and of the tar files in them), tar files, lists of paths (.txt), single pictures.

    A photo is named by its path inside the folder or tar. Two photos of the same name are an error.
    """
    refs: dict[str, PhotoRef] = {}
    for source in sources:
        for ref in _of(Path(source)):
            if ref.id in refs and refs[ref.id] != ref:
                raise DataError(
                    f"two photos are called '{ref.id}': in {refs[ref.id].path} and in {ref.path}.\n"
                    "  Extract them into two stores, or put them under different folders of one."
                )
            refs[ref.id] = ref
    if not refs:
        raise DataError(f"no photo in {', '.join(map(str, sources))}. Known endings: {', '.join(sorted(SUFFIXES))}.")
    return list(refs.values())


def _of(source: Path) -> Iterator[PhotoRef]:
    if source.is_dir():
        for file in sorted(source.rglob("*")):
            if file.suffix.lower() in SUFFIXES:
                yield PhotoRef(file.relative_to(source).as_posix(), str(file))
            elif _is_tar(file):
                yield from _of_tar(file)
    elif not source.exists():
        raise DataError(f"{source} does not exist. Give a folder, a .tar, a .txt list of paths, or a picture.")
    elif _is_tar(source):
        yield from _of_tar(source)
    elif source.suffix.lower() in SUFFIXES:
        yield PhotoRef(source.name, str(source))
    else:
        yield from _of_list(source)


def _is_tar(path: Path) -> bool:
    return path.suffix.lower() == ".tar"


def _of_tar(path: Path) -> Iterator[PhotoRef]:
    """Members by offset, so that workers read them without unpacking or scanning the tar again."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isfile() and Path(member.name).suffix.lower() in SUFFIXES:
                    yield PhotoRef(member.name.removeprefix("./"), str(path), member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a whole, uncompressed tar file: {error}.") from None


def _of_list(path: Path) -> Iterator[PhotoRef]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list {path}: {error}.") from None
    for line in filter(None, map(str.strip, lines)):
        yield PhotoRef(line, str(path.parent / line))


def digests(photos: Iterable[PhotoRef]) -> dict[str, str]:
    """Photo name → SHA-256 of its bytes. Equal digests mean the same picture under two names."""
    return {photo.id: hashlib.sha256(photo.read()).hexdigest() for photo in photos}
