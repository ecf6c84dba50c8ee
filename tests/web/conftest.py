"""A captioner with chance weights, a client of its app, and a real server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import haav
from haav.config import override
from haav.inference.captioner import Captioner
from helpers import save_model


@pytest.fixture(scope="session")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Captioner:
    loaded = haav.load(save_model(tmp_path_factory.mktemp("models") / "model"))
    return loaded.with_config(override(loaded.config, "decode", {"min_words": 4}))


@pytest.fixture(scope="session")
def client(captioner: Captioner) -> Iterator[Any]:
    pytest.importorskip("fastapi", reason="needs the web extra")
    from fastapi.testclient import TestClient

    from haav.web.server import build_app
    from haav.web.service import Limits

    app = build_app(captioner, Limits(upload=300_000, pixels=2_000_000, photos=3))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def start_server(captioner: Captioner) -> Iterator[Callable[..., str]]:
    """Starts a real server on a free port; takes the arguments of `build_app` and returns its address"""
    pytest.importorskip("fastapi", reason="needs the web extra")
    import uvicorn

    from haav.web.server import build_app, server_settings

    with ExitStack() as started:

        def start(*arguments: Any, **keywords: Any) -> str:
            bound = started.enter_context(socket.socket())
            bound.bind(("127.0.0.1", 0))
            server = uvicorn.Server(server_settings(build_app(captioner, *arguments, **keywords)))
            thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
            thread.start()
            started.callback(thread.join, 10)
            started.callback(setattr, server, "should_exit", True)
            while not server.started:
                time.sleep(0.05)
            return f"http://127.0.0.1:{bound.getsockname()[1]}"

        yield start


@pytest.fixture(scope="session")
def address(start_server: Callable[..., str]) -> str:
    from haav.web.service import Limits

    return start_server(Limits(waiting=2, batch=1, photos=2))


@pytest.fixture
def explanation_gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Explanations wait until it is set. Captions do not."""
    from haav.web import service

    gate, explain = threading.Event(), service.explain

    def slow(*arguments: Any) -> Any:
        gate.wait(20)
        return explain(*arguments)

    monkeypatch.setattr(service, "explain", slow)
    return gate
