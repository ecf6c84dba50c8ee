"""Pack a model into a portable directory: float16 weights, and the bridge and text database of its text views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from haav.errors import ConfigError, ViewError
from haav.inference.captioner import Captioner
from haav.pretrained import find_model
from haav.views import find_extractor_class
from haav.views.live import BRIDGE, TEXTDB, own_texts
from haav.views.retrieval.bridge import CrossFitted
from haav.views.retrieval.textdb import TextDatabase

LOADERS: dict[str, Callable[[str | Path], CrossFitted | TextDatabase]] = {
    BRIDGE: CrossFitted.load,
    TEXTDB: TextDatabase.load,
}


def pack(
    model: str | Path,
    out: str | Path,
    bridge: str | Path | None = None,
    textdb: str | Path | None = None,
    like: str | Path | None = None,
) -> dict[str, int]:
    """Write the packed model. Returns bytes by part. `like` is a packed model whose bridge and database are reused."""
    captioner = Captioner.from_pretrained(model)
    out = Path(out)
    beside = [own_texts(find_model(place)) for place in (like, model) if place is not None]
    classes = {name: find_extractor_class(name) for name in captioner.views}
    needs = {name: cls.needs for name, cls in classes.items() if cls is not None and cls.needs}
    texts: dict[str, CrossFitted | TextDatabase] = {}
    for need in dict.fromkeys(need for needed in needs.values() for need in needed):
        choices = [{BRIDGE: bridge, TEXTDB: textdb}.get(need), *(paths.get(need) for paths in beside)]
        folder = next((choice for choice in choices if choice is not None), None)
        if folder is None or need not in LOADERS:
            names = ", ".join(name for name, needed in needs.items() if need in needed)
            raise ConfigError(f"this model reads {names}: give the --{need} of its photos, or --like MODEL.")
        texts[need] = LOADERS[need](folder).compact()
    for view, needed in needs.items():
        for need in needed:
            _check_part(captioner.config.made_by.get(view, ()), view, need, texts[need].origin)
    captioner.save_pretrained(out, torch.float16)
    for need, part in texts.items():
        if isinstance(part, CrossFitted):
            part.save(out / need, half=True)
        else:
            part.save(out / need, quantised=True)
    parts = {"model": out, BRIDGE: out / BRIDGE, TEXTDB: out / TEXTDB}
    return {
        name: sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        for name, folder in parts.items()
        if folder.is_dir()
    }


def _check_part(accepted: Sequence[str], view: str, need: str, origin: str) -> None:
    """Raise ViewError if the fingerprint of a view names another part than the one to pack (`Extractor.needs`)."""
    if accepted and not any(f"{need}-{origin}" in fingerprint for fingerprint in accepted):
        raise ViewError(
            f"the model was trained with another {need} of '{view}' than the one to pack.\n"
            f"  trained with  {' or '.join(accepted)}\n  given         {need}-{origin}\n"
            f"  Give the --{need} that its training photos were extracted with."
        )
