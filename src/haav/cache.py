"""Where this machine keeps what can be fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """$HAAV_CACHE, $XDG_CACHE_HOME/haav or ~/.cache/haav. Raises RuntimeError without a home folder."""
    haav_cache, xdg_cache = os.environ.get("HAAV_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(haav_cache) if haav_cache else (Path(xdg_cache) if xdg_cache else Path.home() / ".cache") / "haav"
