"""A folder for the output of a job: a local path, or an address such as s3://bucket/captions."""

from __future__ import annotations

import shutil
from pathlib import Path

from haav.errors import DataError, printable
from haav.files import make_folder, write_atomically
from haav.photos.remote import READ_ONLY, describe, filesystem, is_remote


class Folder:
    """Files appear whole or not at all: local ones are renamed into place, object stores do so by themselves."""

    def __init__(self, place: str) -> None:
        self.place = place.rstrip("/")
        self.remote = is_remote(place)
        if self.remote and place.partition(":")[0].lower() in READ_ONLY:
            raise DataError(f"{printable(place)} can only be read. Write to a folder, s3:// or gs://.")

    def create(self) -> None:
        if not self.remote:
            make_folder(Path(self.place))

    def names(self) -> set[str]:
        """Names of the files that are in it"""
        if not self.remote:
            root = Path(self.place)
            return {file.name for file in root.iterdir()} if root.is_dir() else set()
        system, path = filesystem(self.place)
        try:
            return {entry.rsplit("/", 1)[-1] for entry in system.ls(path, detail=False)}
        except FileNotFoundError:
            return set()
        except Exception as error:  # each file system has errors of its own
            raise DataError(f"{printable(self.place)} cannot be listed: {describe(error)}") from None

    def read(self, name: str) -> bytes:
        try:
            if not self.remote:
                return (Path(self.place) / name).read_bytes()
            system, path = filesystem(self.place)
            data: bytes = system.cat_file(f"{path}/{name}")
            return data
        except Exception as error:
            raise DataError(f"{printable(self.place)}/{name} cannot be read: {describe(error)}") from None

    def write(self, name: str, data: bytes | Path) -> None:
        """`data`: the content, or a local file that has it"""
        if not self.remote:

            def copy(file: Path) -> None:
                if isinstance(data, bytes):
                    file.write_bytes(data)
                else:
                    shutil.copyfile(data, file)

            write_atomically(Path(self.place) / name, copy)
            return
        system, path = filesystem(self.place)
        try:
            if isinstance(data, bytes):
                system.pipe_file(f"{path}/{name}", data)
            else:
                system.put_file(str(data), f"{path}/{name}")
        except Exception as error:
            raise DataError(f"{printable(self.place)}/{name} cannot be written: {describe(error)}") from None
