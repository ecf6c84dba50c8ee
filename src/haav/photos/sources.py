"""Finds photos in folders, tar files and lists. The references returned can be read by any process."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path

from haav.errors import DataError, HaavError, ImageError, printable
from haav.files import read_text
from haav.photos.formats import HEAD, TAR, FileFormat, format_of
from haav.photos.images import MAX_BYTES, read_photo, refuse_address, regular_file, unreadable
from haav.photos.remote import is_remote, read_remote

_SUFFIXES = """
    .jpg .jpeg .jpe .jfif .png .webp .avif .heic .heif .hif .bmp .gif .tif .tiff .jp2 .j2k .jpf .jpx .ppm .pgm .pbm .pnm
    .jxl .psd .xcf .tga .dng .nef .cr2 .cr3 .arw .orf .rw2 .raf
"""
SUFFIXES = frozenset(_SUFFIXES.split())
"""endings of photos, also of those that cannot be read. In a folder, such files are photos without a look inside;
other files are told by their content"""
MAX_LIST_BYTES = 100_000_000


@dataclass(frozen=True)
class PhotoRef:
    """A photo's name and the location of its bytes: a file, or a range of a tar file."""

    id: str
    path: str
    offset: int = 0
    size: int = -1
    fault: str = ""
    """why it cannot be read, if that was found without reading it"""

    @property
    def place(self) -> str:
        """The location as shown to users."""
        return self.path if self.size < 0 else f"{self.path}/{self.id}"

    def read(self) -> bytes:
        if self.fault:
            raise ImageError(self.fault)
        if is_remote(self.path):
            return read_remote(self.path, self.offset, None if self.size < 0 else self.size, self.place, MAX_BYTES)
        return read_photo(self.path, self.offset, None if self.size < 0 else self.size, self.place)


@dataclass
class Search:
    """The photos of a source, and what else is there."""

    photos: list[PhotoRef] = field(default_factory=list)
    """also what cannot be read, with its `fault`"""
    others: Counter[str] = field(default_factory=Counter)
    """files that are not photos, counted by their endings"""
    tars: list[str] | None = None
    """tar files, if they are only listed and not opened"""
    linked_folders: list[str] = field(default_factory=list)
    """links to folders, which are not followed: they may lead in circles"""

    @property
    def note(self) -> str:
        """What was left out, in one line"""
        parts = []
        if self.others:
            common = [f"{count:,} {printable(ending)}" for ending, count in self.others.most_common(5)]
            more = ["…"] if len(self.others) > 5 else []
            parts.append(f"{_plural(self.others.total(), 'other file')} ({', '.join(common + more)})")
        if self.linked_folders:
            first = printable(self.linked_folders[0])
            parts.append(f"{_plural(len(self.linked_folders), 'linked folder')}, the first {first}")
        return f"not read: {'; '.join(parts)}" if parts else ""


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def photos_of(source: str, recursive: bool = True, open_tars: bool = True) -> Search:
    """Photos of a folder (and of the tar files in it), a tar file, a list of paths (.txt or @FILE), a picture, or a
    pattern. Never raises: what cannot be read is a photo with a fault. Without `recursive`, folders inside of folders
    are left out. Without `open_tars`, tar files are listed in `tars`.
    """
    search = Search(tars=None if open_tars else [])
    try:
        _add_source(source, search, recursive)
    except HaavError as error:
        search.photos.append(PhotoRef(source, source, fault=str(error)))
    return search


def find_photos(sources: Sequence[str | Path], note: Callable[[str], object] = lambda text: None) -> list[PhotoRef]:
    """Photos of folders (and of the tar files in them), tar files, lists of paths (.txt or @FILE), single pictures.

    A photo is named by its path inside the folder or tar. Two photos of the same name are an error. `note` is told
    what was left out, e.g. files that are not photos.
    """
    refs: dict[str, PhotoRef] = {}
    search = Search()
    for source in sources:
        try:
            _add_source(str(source), search)
        except ImageError as error:
            raise DataError(str(error)) from None
    for ref in map(_with_utf8_id, search.photos):
        if ref.id in refs and refs[ref.id] != ref:
            raise DataError(
                f"two photos are called '{printable(ref.id)}': in {printable(refs[ref.id].path)} and in "
                f"{printable(ref.path)}.\n  Extract them into two stores, or put them under different folders of one."
            )
        refs[ref.id] = ref
    names = ", ".join(printable(str(source)) for source in sources)
    if search.note:
        note(f"{names}: {search.note}.")
    if not refs:
        raise DataError(f"no photo in {names}.")
    return list(refs.values())


def _with_utf8_id(ref: PhotoRef) -> PhotoRef:
    """Stores and data sets name photos in UTF-8."""
    try:
        ref.id.encode()
    except UnicodeEncodeError:
        fault = f"the name of {printable(ref.place)} is not UTF-8. Rename the file first."
        return replace(ref, id=printable(ref.id), fault=fault)
    return ref


def _add_source(source: str, search: Search, recursive: bool = True) -> None:
    """Raises HaavError if the source itself cannot be read."""
    path = Path(source)
    try:
        refuse_address(source)
        if not os.path.lexists(source):
            if source.startswith("@"):
                return _add_list(Path(source[1:]), search)
            if any(wildcard in source for wildcard in "*?["):
                return _add_pattern(source, search, recursive)
            raise DataError(
                f"{printable(source)} does not exist. Give a picture, a folder, a .tar, a pattern, or a list of paths "
                "(.txt or @FILE)."
            )
        if stat.S_ISDIR(os.stat(path).st_mode):
            return _add_folder(path, search, recursive)
        file_format, is_text = _inspect(path)
        if file_format is TAR or _is_tar(path):
            return _add_tar(path, search)
        if file_format is None and path.suffix.lower() == ".txt":
            return _add_list(path, search)
    except (OSError, ValueError) as error:
        raise ImageError(unreadable(source, error)) from None
    fault = ""
    if file_format is None and is_text:
        fault = f"{printable(source)} is text, not a photo. For a list of paths, write @{printable(source)}"
    search.photos.append(PhotoRef(path.name, str(path), fault=fault))


def _add_pattern(pattern: str, search: Search, recursive: bool) -> None:
    path = Path(pattern)
    if "**" in path.parts:  # unlike Path.glob, glob follows links, which may lead in circles
        matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    else:
        matches = sorted(map(Path, glob(pattern)))
    if not matches:
        raise DataError(f"no file matches the pattern {printable(pattern)}.")
    for match in dict.fromkeys(matches):
        if match.is_dir():
            _add_folder(match, search, recursive)
        else:
            _add_entry(match, match.name, search)


def _add_folder(root: Path, search: Search, recursive: bool) -> None:
    """Photos by name, folder by folder. Raises OSError if the folder itself cannot be read."""
    waiting = _entries(root)
    while waiting:
        entry = waiting.pop()
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        if path.is_dir() and not recursive:
            continue
        if entry.is_symlink() and path.is_dir():
            search.linked_folders.append(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            try:
                waiting += _entries(path)
            except OSError as error:
                search.photos.append(PhotoRef(name, entry.path, fault=unreadable(path, error)))
        else:
            _add_entry(path, name, search)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """In reverse order, as a stack"""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name, reverse=True)


def _add_entry(path: Path, name: str, search: Search) -> None:
    """Add a file of a folder or pattern, among which there may be files of any kind."""
    try:
        if path.suffix.lower() in SUFFIXES:
            regular_file(path)
            search.photos.append(PhotoRef(name, str(path)))
            return
        file_format, _ = _inspect(path)
        if file_format is TAR or _is_tar(path):
            _add_tar(path, search)
        elif file_format is not None and file_format.picture:
            search.photos.append(PhotoRef(name, str(path)))
        else:
            search.others[_ending(path)] += 1
    except HaavError as error:
        search.photos.append(PhotoRef(name, str(path), fault=str(error)))
    except (OSError, ValueError) as error:
        search.photos.append(PhotoRef(name, str(path), fault=unreadable(path, error)))


def _inspect(path: Path) -> tuple[FileFormat | None, bool]:
    """The format of a file by its content, and whether it may be text"""
    regular_file(path)
    with open(path, "rb") as file:
        head = file.read(HEAD)
    return format_of(head), bool(head) and not _CONTROLS.search(head)


_CONTROLS = re.compile(rb"[\x00-\x08\x0e-\x1a]")
"""bytes that no text has"""


def _is_tar(path: Path) -> bool:
    return path.suffix.lower() == ".tar"


def _ending(path: Path) -> str:
    return path.suffix.lower() or "without an ending"


def _add_tar(path: Path, search: Search) -> None:
    """Members by offset, so that workers read them without unpacking or scanning the tar again."""
    if search.tars is not None:
        search.tars.append(str(path))
        return
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isfile():
                    _add_member(tar, member, path, search)
                elif not member.isdir():
                    search.others["link" if member.issym() or member.islnk() else "device"] += 1
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{printable(str(path))} is not a whole, uncompressed tar file: {error}.") from None


def _add_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, search: Search) -> None:
    if Path(member.name).suffix.lower() not in SUFFIXES:
        content = tar.extractfile(member)
        file_format = format_of(content.read(HEAD)) if content else None
        if file_format is None or not file_format.picture:
            search.others[_ending(Path(member.name))] += 1
            return
    search.photos.append(PhotoRef(member.name.removeprefix("./"), str(path), member.offset_data, member.size))


def _add_list(path: Path, search: Search) -> None:
    size = regular_file(path).st_size
    if size > MAX_LIST_BYTES:
        raise DataError(f"the list {printable(str(path))} has {size:,} bytes; at most {MAX_LIST_BYTES:,} are read.")
    for line in filter(None, map(str.strip, read_text(path, MAX_LIST_BYTES).split("\n"))):
        try:
            refuse_address(line)
            search.photos.append(PhotoRef(line, str(path.parent / line)))
        except ImageError as error:
            search.photos.append(PhotoRef(line, line, fault=str(error)))


def digests(photos: Iterable[PhotoRef]) -> dict[str, str]:
    """Photo name → SHA-256 of its bytes. Equal digests mean the same picture under two names."""
    return {photo.id: hashlib.sha256(photo.read()).hexdigest() for photo in photos}
