"""A small captioner in a folder, photos in a tar, and an S3 endpoint on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import save_model, write_tar


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Three shards with 5, 5 and 4 photos"""
    (tmp_path / "shards").mkdir()
    sizes = (5, 5, 4)
    return [write_tar(tmp_path / "shards" / f"{index}.tar", size, 5 * index) for index, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bucket. fsspec finds its endpoint in the environment."""
    pytest.importorskip("moto.server", reason="needs the dev extra")
    pytest.importorskip("s3fs", reason="needs the remote extra")
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("photos")
        yield "s3://photos"
    server.stop()
