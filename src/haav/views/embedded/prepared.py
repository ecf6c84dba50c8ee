"""Towers of 8-bit integers, kept in the cache as they are computed with.

Reading float weights and rounding them takes a second of every process that captions one photo. The rounded weights
are a file of their own. It can be deleted at any time. Without a cache that can be written, there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from haav.cache import cache_home
from haav.errors import HaavError
from haav.files import make_folder, write_atomically
from haav.views.embedded.vit import State, VisionTransformer, VitConfig, resolve_precision, rounds_to_int8

FORMAT = 1
"""to be raised with any change of what `VisionTransformer` makes of its weights"""


def load_tower(
    config: VitConfig, key: str, precision: str, read: Callable[[], State], smooth: State | None = None
) -> VisionTransformer:
    """The tower of the weights that `read` returns. `key` changes with these weights and with `smooth`."""
    precision = resolve_precision(precision)
    file = prepared_file(key) if precision == "int8" and rounds_to_int8() else None
    if file is None:
        return VisionTransformer(config, read(), precision, smooth)
    try:
        return VisionTransformer.restore(config, load_file(file))
    except (OSError, KeyError, SafetensorError):  # not there, damaged, or of another tower
        tower = VisionTransformer(config, read(), precision, smooth)
    with suppress(HaavError):  # a cache that cannot be written
        make_folder(file.parent)
        write_atomically(file, lambda path: save_file(tower.state_dict(), path))
    return tower


def prepared_file(key: str) -> Path | None:
    """None without a home folder"""
    try:
        return cache_home() / "prepared" / f"{key}-int8-{FORMAT}.safetensors"
    except RuntimeError:
        return None
