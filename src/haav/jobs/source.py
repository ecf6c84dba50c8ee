"""Cut sources of photos into parts. A part is the unit of work, of failure and of commit."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from haav.errors import DataError, ImageError, printable
from haav.inference.stream import PhotoItem
from haav.photos.formats import HEAD, format_of
from haav.photos.images import MAX_BYTES
from haav.photos.remote import describe, filesystem, is_remote
from haav.photos.sources import SUFFIXES, PhotoRef, photos_of

PART = 256
"""photos of a part, where the source has no parts of its own"""


@dataclass(frozen=True)
class SourcePart:
    """A tar file, a row group of a Parquet file, or some photos. It can be sent to another machine."""

    name: str
    """of the source, for people and for the record of the part"""
    tar: str = ""
    parquet: str = ""
    row_group: int = 0
    refs: tuple[PhotoRef, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SourcePart:
        fields = json.loads(text)
        return cls(**{**fields, "refs": tuple(PhotoRef(**ref) for ref in fields["refs"])})

    def items(self) -> Iterator[PhotoItem]:
        """Its photos, in order. Raises DataError if the part itself cannot be read to its end."""
        return (item for _, item in self.photos())

    def photos(self) -> Iterator[tuple[str, PhotoItem]]:
        """The same, each with its id: its name inside of the folder, tar or Parquet file"""
        if self.tar:
            return _tar_photos(self.tar)
        if self.parquet:
            return _parquet_photos(self.parquet, self.row_group)
        return ((ref.id, PhotoItem(ref.place, ref.read)) for ref in self.refs)


def find_parts(sources: Sequence[str], size: int = PART) -> list[SourcePart]:
    """Parts of folders, tar files, Parquet files, lists, patterns and addresses, in a stable order.

    Photos that are files by themselves are put together, `size` in a part.
    """
    parts: list[SourcePart] = []
    loose: list[PhotoRef] = []
    for source in sources:
        for file in _files_of(source):
            if isinstance(file, PhotoRef):
                loose.append(file)
            elif _is_table(Path(file)):
                groups = _parquet_file(file).num_row_groups
                parts += [SourcePart(f"{file}#{group}", parquet=file, row_group=group) for group in range(groups)]
            else:
                parts.append(SourcePart(file, tar=file))
    for start in range(0, len(loose), size):
        refs = tuple(loose[start : start + size])
        parts.append(SourcePart(f"{refs[0].place} and {len(refs) - 1} more", refs=refs))
    if not parts:
        raise DataError(f"no photo in {', '.join(map(printable, sources))}.")
    name, times = Counter(part.name for part in parts).most_common(1)[0]
    if times > 1:
        raise DataError(f"{printable(name)} was given {times} times.")
    return parts


def _files_of(source: str) -> Iterator[str | PhotoRef]:
    """Tar and Parquet files as paths, photos as references"""
    if is_remote(source):
        yield from _remote_files(source)
        return
    path = Path(source)
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
    elif any(wildcard in source for wildcard in "*?[") and not path.exists():
        tables = sorted(match for match in path.parent.glob(path.name) if _is_table(match))
    else:
        tables = [path] if _is_table(path) else []
    search = photos_of(source, open_tars=False)
    yield from sorted(search.tars or ())
    yield from map(str, tables)
    yield from (ref for ref in search.photos if not _is_table(Path(ref.path)))


def _is_table(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _remote_files(source: str) -> Iterator[str | PhotoRef]:
    system, path = filesystem(source)
    try:
        if any(wildcard in path for wildcard in "*?["):
            found = sorted(system.glob(path))
        else:
            found = sorted(system.find(path)) if system.isdir(path) else [path]
    except Exception as error:  # each file system has errors of its own
        raise DataError(f"{printable(source)} cannot be listed: {describe(error)}") from None
    if not found:
        raise DataError(f"nothing is at {printable(source)}.")
    for entry in found:
        address = source if len(found) == 1 and entry == path else system.unstrip_protocol(entry)
        ending = Path(entry).suffix.lower()
        if ending in (".tar", ".parquet"):
            yield address
        elif ending in SUFFIXES:
            yield PhotoRef(Path(entry).name, address)


def _open(path: str) -> AbstractContextManager[BinaryIO]:
    if not is_remote(path):
        return open(path, "rb")
    system, inside = filesystem(path)
    file: AbstractContextManager[BinaryIO] = system.open(inside, "rb", block_size=8_000_000)
    return file


def _tar_photos(path: str) -> Iterator[tuple[str, PhotoItem]]:
    """Members of a tar that are photos, read as one stream"""
    try:
        with _open(path) as opened:
            file = _Stream(opened)
            tar = tarfile.open(fileobj=file, mode="r|")  # type: ignore[call-overload]  # noqa: SIM115
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is None:
                    continue
                photo = member.name.removeprefix("./")
                name = f"{path}/{photo}"
                if member.size > MAX_BYTES:
                    yield photo, PhotoItem(name, partial(_too_large, name, member.size))
                    continue
                data = content.read()
                file_format = format_of(data[:HEAD])
                if Path(member.name).suffix.lower() in SUFFIXES or (file_format is not None and file_format.picture):
                    yield photo, PhotoItem(name, partial(bytes, data))
            if not file.ends_as_a_tar():
                raise EOFError("it is cut off")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{printable(path)} is not a whole, uncompressed tar file: {describe(error)}") from None


class _Stream:
    """A file that is read from its beginning to its end. tarfile takes a tar that is cut off for one that ends."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.tail = file, b""

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.tail = (self.tail + data[-tarfile.BLOCKSIZE :])[-tarfile.BLOCKSIZE :]
        return data

    def ends_as_a_tar(self) -> bool:
        while self.read(1_000_000):
            pass
        return self.tail == bytes(tarfile.BLOCKSIZE)


def _too_large(name: str, size: int) -> bytes:
    raise ImageError(f"{printable(name)} has {size:,} bytes; at most {MAX_BYTES:,} are read.")


def _parquet_file(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError('reading Parquet needs pyarrow.\n  pip install "haav[remote]"') from None
    try:
        system, inside = filesystem(path) if is_remote(path) else (None, path)
        return pyarrow.parquet.ParquetFile(inside, filesystem=system)
    except Exception as error:
        raise DataError(f"{printable(path)} is not a Parquet file that can be read: {describe(error)}") from None


def _parquet_photos(path: str, group: int) -> Iterator[tuple[str, PhotoItem]]:
    """Rows of a row group. A column image, jpg, png, bytes or path has bytes, a path, or a struct with either."""
    file = _parquet_file(path)
    columns = file.schema_arrow.names
    column = next((name for name in ("image", "jpg", "png", "bytes", "path") if name in columns), None)
    if column is None:
        raise DataError(f"{printable(path)} has no column image, jpg, png, bytes or path, but {', '.join(columns)}.")
    names = next((name for name in ("id", "name", "key", "__key__") if name in columns), None)
    row = 0
    for batch in file.iter_batches(64, row_groups=[group], columns=[name for name in (column, names) if name]):
        for fields in batch.to_pylist():
            label = str(fields[names]) if names else f"{group}-{row}"
            row += 1
            yield label, _parquet_photo(f"{path}/{label}", fields[column], path)


def _parquet_photo(name: str, value: Any, home: str) -> PhotoItem:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return PhotoItem(name, partial(bytes, value))
    if isinstance(value, str):
        path = value if is_remote(value) or Path(value).is_absolute() else f"{home.rpartition('/')[0] or '.'}/{value}"
        return PhotoItem(path, PhotoRef(value, path).read)
    return PhotoItem(name, partial(_no_photo, name))


def _no_photo(name: str) -> bytes:
    raise ImageError(f"{printable(name)} has neither bytes nor a path.")
