"""How much of a photo reaches its words before much is learnt: python -m benchmarks signal, in the toy world; or
python -m benchmarks.signal flickr8k-xe --data.dataset dataset_flickr8k.json.gz --data.store views

The same small model by aggregator: at the start and after some steps, how much the next words change (KL divergence)
when photos are exchanged, how strong the encoder's gradient is beside the decoder's, and how strong by itself: an
aggregator with parameters of its own adds to the decoder's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from haav.config.load import find_recipe, flags_from
from haav.data.loader import ShuffledBatches
from haav.model.build import load_config
from haav.model.haav import Haav
from haav.text import PAD
from haav.train.objectives import CrossEntropy
from haav.train.setup import prepare
from haav.types import Batch, View, Views

STEPS = (0, 20, 40)
PHOTOS = 20
SMALL = {
    "--model.d_model": "96",
    "--model.d_ff": "384",
    "--model.heads": "4",
    "--model.encoder_layers": "1",
    "--model.decoder_layers": "2",
    "--contrast.enabled": "false",
}
RATE, WARMUP = 1e-3, 60


def signal(recipe: str = "toy", settings: Mapping[str, str] | None = None) -> dict[str, Any]:
    what = "words that change when photos are exchanged; encoder's gradient / decoder's; encoder's alone"
    found: dict[str, Any] = {"what": what}
    for aggregator in ("hierarchical", "hierarchical_from_mean", "mean", "joint"):
        with tempfile.TemporaryDirectory() as folder:
            flags = {**SMALL, "--model.aggregator": aggregator, **(settings or {})}
            for step, changed, encoder, decoder in _measure(recipe, flags, Path(folder)):
                shown = f"KL {changed:.5f}, gradient {encoder / decoder:.3f}, encoder's {encoder:.3f}"
                found[f"{aggregator}, step {step}"] = shown
    return found


def _measure(recipe: str, flags: Mapping[str, str], folder: Path) -> Iterable[tuple[int, float, float, float]]:
    """(step, change of words, norm of the encoder's gradient, norm of the decoder's)"""
    setup = prepare(load_config(file=find_recipe(recipe), flags=flags_from(list(flags.items()))), folder)
    model, loss = setup.model, CrossEntropy()
    assert isinstance(model, Haav)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = ShuffledBatches(len(setup.labelled), PHOTOS, drop_last=True)
    for step in range(max(STEPS) + 1):
        batches.epoch, index = divmod(step, len(batches))
        batch = setup.labelled[list(batches)[index]]
        optimizer.zero_grad(set_to_none=True)
        loss(model.train(), model.encode(batch.views), batch)["xe"].backward()
        if step in STEPS:
            norms = (_norm(part.parameters()) for part in (model.encoding, model.decoder))
            yield step, _changed(model.eval(), batch), *norms
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP)
        optimizer.step()
    setup.close()


@torch.no_grad()
def _changed(model: Haav, batch: Batch) -> float:
    """Mean KL divergence of the next words from those with another photo's views"""
    assert batch.captions is not None
    real = batch.captions[:, :, 1:] != PAD

    def words(views: Views) -> Tensor:
        return model.teacher_force(batch.captions[:, :, :-1], real, model.encode(views)).log_softmax(dim=-1)

    own, others = words(batch.views), words({name: _exchanged(view) for name, view in batch.views.items()})
    return float((own.exp() * (own - others)).sum(dim=-1).mean())


def _exchanged(view: View) -> View:
    def turn(x: Tensor) -> Tensor:
        return x.roll(1, dims=0)

    indices = {name: turn(index) for name, index in view.indices.items()}
    return View(turn(view.tokens), turn(view.mask), indices, None if view.boxes is None else turn(view.boxes))


def _norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    return float(sum(one.grad.norm() ** 2 for one in parameters if one.grad is not None)) ** 0.5


if __name__ == "__main__":
    recipe, *words = sys.argv[1:]
    for name, value in signal(recipe, dict(zip(words[::2], words[1::2], strict=True))).items():
        print(f"{name}: {value}")
