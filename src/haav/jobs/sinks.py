"""Formats of the captions of a part: JSON lines, Parquet, or WebDataset with the photos."""

from __future__ import annotations

import io
import json
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from haav.errors import ConfigError
from haav.inference.caption_file import caption_line
from haav.inference.stream import CaptionedPhoto
from haav.jobs.folder import Folder
from haav.photos.images import load_image, to_jpeg
from haav.registry import Registry
from haav.store.shards import add_member


class CaptionSink(ABC):
    """Writes the captions of one part to a file. Photos come in order."""

    ending: str

    def __init__(self, file: BinaryIO, made_with: Mapping[str, Any]) -> None:
        self.file, self.made_with = file, made_with

    @abstractmethod
    def add(self, photo: CaptionedPhoto) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Write what is still to be written. The file stays open."""

    @staticmethod
    @abstractmethod
    def join(folder: Folder, names: Iterable[str], out: Path) -> None:
        """Put the files of parts together, in this order."""


sinks: Registry[CaptionSink] = Registry("output format")


@sinks.register("jsonl")
class JsonLines(CaptionSink):
    """What `haav caption --out` writes"""

    ending = "jsonl"

    def add(self, photo: CaptionedPhoto) -> None:
        self.file.write(caption_line(photo, self.made_with))

    def close(self) -> None:
        pass  # each line was written when it came

    @staticmethod
    def join(folder: Folder, names: Iterable[str], out: Path) -> None:
        with open(out, "wb") as joined:
            for name in names:
                joined.write(folder.read(name))


@sinks.register("parquet")
class Parquet(CaptionSink):
    """Columns image, caption, confidence, unfamiliar, error; words and n_best as JSON"""

    ending = "parquet"

    def __init__(self, file: BinaryIO, made_with: Mapping[str, Any]) -> None:
        super().__init__(file, made_with)
        self.rows: list[dict[str, Any]] = []
        _pyarrow()

    def add(self, photo: CaptionedPhoto) -> None:
        row = json.loads(caption_line(photo, {}))
        self.rows.append(
            {
                "image": row["image"],
                "caption": row.get("caption"),
                "confidence": row.get("confidence"),
                "unfamiliar": row.get("unfamiliar"),
                "words": json.dumps(row["words"]) if "words" in row else None,
                "n_best": json.dumps(row["n_best"]) if "n_best" in row else None,
                "error": row.get("error"),
            }
        )

    def close(self) -> None:
        arrow, parquet = _pyarrow()
        text = arrow.string()
        fields = dict.fromkeys(("image", "caption", "words", "n_best", "error"), text)
        types = fields | {"confidence": arrow.float32(), "unfamiliar": arrow.bool_()}
        order = ("image", "caption", "confidence", "unfamiliar", "words", "n_best", "error")
        schema = arrow.schema([(name, types[name]) for name in order], {"made_with": json.dumps(self.made_with)})
        parquet.write_table(arrow.Table.from_pylist(self.rows, schema), self.file)

    @staticmethod
    def join(folder: Folder, names: Iterable[str], out: Path) -> None:
        _, parquet = _pyarrow()
        writer = None
        try:
            for name in names:
                table = parquet.read_table(io.BytesIO(folder.read(name)))
                writer = writer or parquet.ParquetWriter(out, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()


@sinks.register("webdataset")
class WebDataset(CaptionSink):
    """Samples of a tar: KEY.jpg is the photo, KEY.txt its caption, KEY.json all of it. Failed photos are left out."""

    ending = "tar"

    def __init__(self, file: BinaryIO, made_with: Mapping[str, Any]) -> None:
        super().__init__(file, made_with)
        self.tar = tarfile.open(fileobj=file, mode="w")  # noqa: SIM115  # closed by `close`
        self.count = 0

    def add(self, photo: CaptionedPhoto) -> None:
        key = f"{self.count:09d}"
        self.count += 1
        if photo.caption is None:
            return
        data = photo.item.read()
        image = data if isinstance(data, bytes) and data[:2] == b"\xff\xd8" else to_jpeg(load_image(data), 1024, 95)
        add_member(self.tar, f"{key}.jpg", image)
        add_member(self.tar, f"{key}.txt", photo.caption.text.encode())
        add_member(self.tar, f"{key}.json", caption_line(photo, self.made_with))

    def close(self) -> None:
        self.tar.close()

    @staticmethod
    def join(folder: Folder, names: Iterable[str], out: Path) -> None:
        raise ConfigError("WebDataset stays in parts: give a folder or an address as --out.")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError('writing Parquet needs pyarrow.\n  pip install "haav[remote]"') from None
    return pyarrow, pyarrow.parquet
