"""Read photos at addresses (s3://, gs://, hf://, https://), through fsspec. Only the command line accepts addresses."""

from __future__ import annotations

import re
from typing import Any

from haav.errors import ConfigError, ImageError, printable

SCHEMES = ("s3", "gs", "hf", "http", "https")
READ_ONLY = ("hf", "http", "https")
_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)})://", re.IGNORECASE)


def is_remote(path: str) -> bool:
    return _ADDRESS.match(path) is not None


def filesystem(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it. Options come from fsspec's own configuration."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f'reading {printable(address)} needs fsspec.\n  pip install "haav[remote]"') from None
    try:
        # Other processes write too, so what was listed before says nothing.
        system, path = fsspec.core.url_to_fs(address, use_listings_cache=False)
    except ImportError as error:  # s3fs for s3://, gcsfs for gs:// and so on
        raise ConfigError(f"reading {printable(address)} needs another package: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{printable(address)} cannot be read: {error}") from None
    return system, path


def read_remote(address: str, offset: int, size: int | None, name: str, most: int) -> bytes:
    """A whole object, or a range of one. Raises ImageError if it cannot be read or is too large."""
    system, path = filesystem(address)
    try:
        length = system.size(path) if size is None else size
        if length is not None and length > most:
            raise ImageError(f"{printable(name)} has {length:,} bytes; at most {most:,} are read.")
        data: bytes = system.cat_file(path, start=offset, end=None if size is None else offset + size)
        return data
    except ImageError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ImageError(f"{printable(name)} cannot be read: {describe(error)}") from None


def describe(error: BaseException) -> str:
    """An error of a remote file system, in one line"""
    if isinstance(error, FileNotFoundError):
        return "it does not exist."
    if isinstance(error, PermissionError):
        return "access is denied."
    return f"{type(error).__name__}: {printable(str(error))[:200]}"
