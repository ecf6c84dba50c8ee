"""Clients that hang up, send half a request, or no HTTP at all: over real sockets."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from helpers import SAMPLES, save_model

pytest.importorskip("fastapi", reason="needs the web extra")
import httpx

from haav.web.connection import Connection
from haav.web.service import Limits

CAT = (SAMPLES / "cat.jpg").read_bytes()


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def read_all(connection: socket.socket) -> bytes:
    """All bytes until the server closes the connection"""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def closed_after_one_more_byte(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("start", [b"", b"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Le"])
def test_a_request_without_the_end_of_its_headers_is_closed_in_time(
    address: str, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(Connection, "seconds", 0.5)
    with connect(address) as connection:
        connection.sendall(start)
        assert read_all(connection) == b""


def test_headers_that_drip_and_a_second_request_are_limited_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "seconds", 0.5)
    with connect(address) as connection:
        connection.sendall(b"GET /v1/health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.settimeout(0.1)
        deadline = time.monotonic() + 20
        while not closed_after_one_more_byte(connection):
            assert time.monotonic() < deadline


def test_a_complete_request_may_take_longer_than_its_headers_may(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "seconds", 0.3)
    with connect(address) as connection:
        head = f"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: {len(CAT)}\r\n"
        connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + CAT[:1000])
        time.sleep(0.8)
        connection.sendall(CAT[1000:])
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_the_rest_of_an_upload_that_is_answered_already_is_limited_too(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "seconds", 0.5)
    with connect(address) as connection:
        connection.sendall(b"POST /v1/health HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")
        connection.settimeout(0.1)
        deadline = time.monotonic() + 20
        while not closed_after_one_more_byte(connection):
            assert time.monotonic() < deadline


def test_what_is_no_http_gets_the_error_body_of_the_api(address: str) -> None:
    with connect(address) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body) == {"error": "this is not a valid HTTP request."}


def test_clients_that_hang_up_or_send_no_http_leave_no_trace_in_the_log(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    command = [sys.executable, "-m", "haav", "serve", "--model", str(model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[0]
        assert httpx.get(f"{address}/v1/ready", timeout=60).status_code == 200, "it listens when it prints its address"
        for content_type in ("multipart/form-data; boundary=x", "application/json", "image/jpeg"):
            with connect(address) as connection:
                head = f"POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Type: {content_type}\r\n"
                connection.sendall(head.encode() + b"Content-Length: 100000\r\n\r\n--x\r\n")
                time.sleep(0.2)
        with connect(address) as connection:
            connection.sendall(b"POST /v1/health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 405")
            connection.sendall(b"this is no chunk\r\n")
            read_all(connection)
        deadline = time.monotonic() + 30
        while 'path="/v1/caption",status="499"} 3' not in httpx.get(f"{address}/metrics", timeout=60).text:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert log == ""


def test_the_refusal_of_a_large_upload_reaches_the_client_that_still_sends(start_server: Callable[..., str]) -> None:
    address = start_server(Limits(upload=100_000))
    with connect(address) as connection:
        head = "POST /v1/caption HTTP/1.1\r\nHost: a\r\nContent-Type: image/jpeg\r\nContent-Length: 900000\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(9):
            connection.sendall(bytes(100_000))
            time.sleep(0.01)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert answer.endswith(b'{"error":"a request has at most 100,000 bytes."}')
