"""Disks that fill up, places that cannot be written, files that vanish, two at one place, servers that are told to end.

Nothing is imitated: commands run in processes of their own, and the system refuses them. A limit on the size of files
stands for a full disk, since that needs no rights.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import haav
from haav.cli.main import main
from haav.store import Store
from helpers import SAMPLES, assert_identical, make_photos, save_model

pytest.importorskip("lightning_fabric", reason="needs the train extra")

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CAT = str(SAMPLES / "cat.jpg")


def run(*words: str, largest: int | None = None) -> subprocess.CompletedProcess[str]:
    """haav with these words; `largest`: bytes that a file may have"""

    def limit() -> None:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    command = [sys.executable, "-m", "haav", *words]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, preexec_fn=limit)


def refused(done: subprocess.CompletedProcess[str], *says: str) -> None:
    """It failed, said why and what to do, and showed no reader its inside"""
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    for text in says:
        assert re.search(text, done.stderr), done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


def test_extraction_goes_on_after_the_disk_was_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["extract", "--images", str(make_photos(tmp_path / "photos", 12)), "--store", str(tmp_path / "s")]
    words += ["--views", "grid", "--workers", "1", "--batch", "2"]
    refused(run(*words, largest=1_200_000), "cannot write|File too large", "run the same command again")
    with Store(tmp_path / "s") as store:
        kept = store.ids("grid")
        assert not [fault for _, fault in store.verify("grid") if fault]
    assert 0 < len(kept) < 12
    assert main(words) == 0
    assert f"{12 - len(kept)} photos extracted, {len(kept)} already stored, 0 failed" in capsys.readouterr().out


def test_two_extractions_into_one_store_end_whole(tmp_path: Path) -> None:
    words = ["extract", "--images", str(make_photos(tmp_path / "photos", 10)), "--store", str(tmp_path / "s")]
    words += ["--views", "grid", "--workers", "1", "--batch", "1"]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: run(*words), range(2)))
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]
    with Store(tmp_path / "s") as store:
        assert len(store.ids("grid")) == 10
        assert not [fault for _, fault in store.verify("grid") if fault]


@pytest.mark.slow
def test_training_goes_on_after_the_disk_was_full(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "toy", "--train.epochs", "2", "--train.checkpoint_every", "5", "--out", str(out)]
    whole = run(*words[:-1], str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    size = (tmp_path / "whole" / "checkpoint.safetensors").stat().st_size
    refused(run(*words, largest=size - 1000), "cannot write", "Make room")
    again = ["train", "--resume", str(out)] if (out / "checkpoint.safetensors").exists() else words
    done = run(*again)
    assert done.returncode == 0, done.stderr
    assert_identical(tmp_path / "whole", out)


def test_captions_go_on_after_the_disk_was_full(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_photos(tmp_path / "photos", 6)
    words = ["caption", str(photos), "--model", str(model), "--batch", "1", "--out", str(tmp_path / "c.jsonl")]
    refused(run(*words, largest=600), "cannot write .*c.jsonl")
    partly = (tmp_path / "c.jsonl").read_bytes()
    assert partly
    assert main(words) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "c.jsonl").read_bytes().splitlines()]
    assert sorted(Path(row["image"]).name for row in rows) == sorted(photo.name for photo in photos.iterdir())
    assert main([*words[:-1], "/dev/full"]) == 1
    assert "/dev/full" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["caption", CAT, "--out", "/dev/null/c.jsonl"],
        ["explain", CAT, "--out", "/dev/null/why"],
        ["extract", "--images", str(SAMPLES), "--store", "/dev/null/s", "--views", "grid"],
        ["train", "toy", "--out", "/dev/null/run"],
        ["pack", "best", "--out", "/dev/null/model", "--like", "best"],
        ["export", "best", "--out", "/dev/null/out"],
        ["predict", "--store", "nowhere", "--out", "/dev/null/p.json"],
        ["textdb", "--out", "/dev/null/t", "--captions", "nowhere.json"],
        ["evaluate", "--predictions", "nowhere.json", "--references", "nowhere.json"],
        ["store", "info", "nowhere"],
        ["train", "--resume", "nowhere"],
        ["report", "nowhere", "--out", "/dev/null/r.html"],
    ],
)
def test_places_that_cannot_be_read_or_written_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert re.search("nowhere|/dev/null", capsys.readouterr().err)


@pytest.mark.slow
def test_files_that_vanish_stop_no_batch(tmp_path: Path, model: Path) -> None:
    photos = make_photos(tmp_path / "photos", 30)
    command = [sys.executable, "-m", "haav", "caption", str(photos), "--model", str(model), "--batch", "1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    rows = [json.loads(process.stdout.readline())]
    last = sorted(photos.iterdir())[-1]
    last.unlink()
    rest, errors = process.communicate()
    rows += [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 3, errors
    assert len(rows) == 30
    assert [row["image"] for row in rows if "error" in row] == [str(last)]


def test_no_command_reads_the_clock_on_the_wall() -> None:
    """It may be set back or forward at any time; what is measured is measured by a clock that cannot."""
    source = Path(haav.__file__).parent
    wall = re.compile(r"time\.time\(|datetime\.|date\.today|utcnow")
    assert [str(file) for file in source.rglob("*.py") if wall.search(file.read_text())] == []


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def server(model: Path) -> Any:
    pytest.importorskip("fastapi", reason="needs the web extra")
    httpx = pytest.importorskip("httpx", reason="needs the dev extra")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-m", "haav", "serve", "--model", str(model), "--port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        started.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{address}/v1/health").status_code == 200:
                    return process, address
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError("the server does not begin")

    yield start
    for process in started:
        process.kill()
        process.wait()


def ask(address: str) -> int:
    """The status of a request, 0 where the connection broke"""
    import httpx

    try:
        files = {"image": ("cat.jpg", Path(CAT).read_bytes(), "image/jpeg")}
        return int(httpx.post(f"{address}/v1/caption", files=files, timeout=60).status_code)
    except httpx.TransportError:
        return 0


def waiting(address: str) -> int:
    """Requests in line"""
    import httpx

    return int(httpx.get(f"{address}/v1/health", timeout=60).json()["waiting"])


def wait_until(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_server_that_is_told_to_end_answers_what_it_has_taken(server: Any) -> None:
    process, address = server()
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, address) for _ in range(6)]
        wait_until(lambda: waiting(address) > 0 or any(answer.done() for answer in answers))
        process.send_signal(signal.SIGTERM)
        statuses = [answer.result() for answer in answers]
    assert set(statuses) <= {0, 200}
    assert 200 in statuses
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors


def test_a_killed_server_can_be_started_again_at_once(server: Any) -> None:
    process, address = server()
    assert ask(address) == 200
    process.kill()
    process.wait()
    assert ask(address) == 0
    _, address = server()
    assert ask(address) == 200


def test_a_port_that_cannot_be_is_refused_before_an_address_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "99999"]) == 2
    shown = capsys.readouterr()
    assert "a port is a number from 0 to 65535, not 99999" in shown.err
    assert shown.out == ""


def test_a_port_that_is_taken_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--model", str(model), "--port", str(taken.getsockname()[1])]) == 2
    shown = capsys.readouterr()
    assert re.search("cannot listen at .*: Address already in use", shown.err)
    assert "--port" in shown.err
    assert shown.out == ""
