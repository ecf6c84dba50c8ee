"""A model directory that captions photos anywhere: small weights, and what its text views are retrieved with."""

from __future__ import annotations

from pathlib import Path

import torch

from haav.bridge import CrossFitted
from haav.captioner import Captioner
from haav.errors import ConfigError
from haav.look import BRIDGE, TEXTDB, own_texts
from haav.pretrained import find_model
from haav.textdb import TextDatabase


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
    if like is not None:
        own = own_texts(find_model(like))
        bridge, textdb = bridge or own.get(BRIDGE), textdb or own.get(TEXTDB)
    reads_text = [view for view in captioner.views if view.startswith("text")]
    if reads_text and (bridge is None or textdb is None):
        names = ", ".join(reads_text)
        raise ConfigError(f"this model reads {names}: give the --bridge and --textdb of its photos, or --like MODEL.")
    if bridge is None or textdb is None:
        captioner.save_pretrained(out, torch.float16)
    else:
        way, texts = CrossFitted.load(bridge).compact(), TextDatabase.load(textdb).compact()
        captioner.save_pretrained(out, torch.float16)
        way.save(out / BRIDGE, half=True)
        texts.save(out / TEXTDB, quantised=True)
    parts = {"model": out, BRIDGE: out / BRIDGE, TEXTDB: out / TEXTDB}
    return {
        name: sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        for name, folder in parts.items()
        if folder.is_dir()
    }
