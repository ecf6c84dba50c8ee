"""A model directory that captions photos anywhere: small weights, and what its text views are retrieved with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from haav.errors import ConfigError, ViewError
from haav.inference.captioner import Captioner
from haav.pretrained import find_model
from haav.views import extractor_kind
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
    """Write it → bytes by part. `like`: a packed model whose bridge and text database serve this one too"""
    captioner = Captioner.from_pretrained(model)
    out = Path(out)
    beside = [own_texts(find_model(place)) for place in (like, model) if place is not None]
    kinds = {name: extractor_kind(name) for name in captioner.views}
    needs = {name: kind.needs for name, kind in kinds.items() if kind is not None and kind.needs}
    texts: dict[str, CrossFitted | TextDatabase] = {}
    for need in dict.fromkeys(need for needed in needs.values() for need in needed):
        choices = [{BRIDGE: bridge, TEXTDB: textdb}.get(need), *(own.get(need) for own in beside)]
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
    """A view's fingerprint names what it was retrieved with (`Extractor.needs`)"""
    if accepted and not any(f"{need}-{origin}" in fingerprint for fingerprint in accepted):
        raise ViewError(
            f"the model was trained with another {need} of '{view}' than the one to pack.\n"
            f"  trained with  {' or '.join(accepted)}\n  given         {need}-{origin}\n"
            f"  Give the --{need} that its training photos were extracted with."
        )
