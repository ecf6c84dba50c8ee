"""The command that serves captions: serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from haav.cli.common import Backend, Device, Model, Overrides, Precision, fetch_weights_of, listed, load_captioner
from haav.errors import ConfigError

API_KEY = "HAAV_API_KEY"


def serve(
    *,
    host: Annotated[str, "address to listen on; 0.0.0.0 accepts other machines"] = "127.0.0.1",
    port: Annotated[int, "port to listen on"] = 8000,
    model: Model = "best",
    device: Device = "cpu",
    precision: Precision = None,
    backend: Backend = "auto",
    api_key: Annotated[
        str | None, f"key that clients must send; better in the variable {API_KEY}, as others can see flags"
    ] = None,
    cors: Annotated[str, "origins whose web pages may use the API, comma-separated, e.g. https://example.org"] = "",
    overrides: Overrides | None = None,
) -> int:
    """Serve a web page and an HTTP API (POST /v1/caption). Ctrl-C stops it."""
    from haav.web import server

    key = os.environ.get(API_KEY) if api_key is None else api_key
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise ConfigError(
            f"an API key has letters, digits and signs of ASCII; this one is empty or has others.\n"
            f"  Give another with --api-key or {API_KEY}, or neither for a server without a key."
        )
    origins = server.check_origins(listed(cors))
    with server.bind(host, port) as bound:
        captioner = load_captioner(model, overrides, device, precision, backend=backend)
        fetch_weights_of(captioner)
        server.run(captioner, bound, name=Path(model).name, api_key=key, cors=origins)
    return 0
