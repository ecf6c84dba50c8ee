"""HAAV: photos to captions, and where each word came from."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from haav.errors import HaavError
    from haav.inference.captioner import Captioner, load
    from haav.inference.options import CaptionOptions
    from haav.types import Caption
    from haav.views.options import ExtractorOptions

__version__ = "0.2.0"
__all__ = ["Caption", "CaptionOptions", "Captioner", "ExtractorOptions", "HaavError", "__version__", "load"]

_HOME = {
    "load": "haav.inference.captioner",
    "Captioner": "haav.inference.captioner",
    "Caption": "haav.types",
    "CaptionOptions": "haav.inference.options",
    "ExtractorOptions": "haav.views.options",
    "HaavError": "haav.errors",
}

# OpenMP's threads spin for long while they wait for each other. On a busy machine, a caption took up to minutes
# (docs/explanation/performance.md). The variables are read when torch is first imported. A user's choice is kept.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def __getattr__(name: str) -> Any:
    """Import public names lazily, so that `haav --help` does not import torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'haav' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
