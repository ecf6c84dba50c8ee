"""How many tensor operations one decoding step is, and which part they belong to. No clock is involved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import haav
from haav.generate.build import build_rules, build_strategy
from haav.generate.loop import generate
from haav.model.haav import Haav
from haav.studies.speed import random_views
from haav.types import Cache

STEP = 5
"""the step that is counted: all rules apply, and no caption has ended"""


class CountByPart(TorchDispatchMode):
    """Counts operations under the name that was entered last."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = ["search and rules"]
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[self.parts[-1]] += 1
        return func(*args, **(kwargs or {}))

    def inside(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            self.parts.append(part)
            try:
                return work(*arguments, **options)
            finally:
                self.parts.pop()

        return watched


def operations() -> dict[str, Any]:
    """The shipped model, views of full length, step by step at beams 3 and 5"""
    captioner = haav.load()
    model = captioner.model
    assert isinstance(model, Haav)
    results: dict[str, Any] = {"what": f"operations of step {STEP}, the shipped model"}
    for beam in (3, 5):
        decode = replace(captioner.config.decode, beam=beam, min_words=8)
        strategy, rules = build_strategy(decode, captioner.vocabulary), build_rules(decode, captioner.vocabulary)
        for batch in (1, 16):
            torch.manual_seed(0)
            with torch.no_grad():
                encoded = model.encode(random_views(captioner.config.model.views, batch))
                generate(model, encoded, strategy, rules, 12, weighed=1)  # packs the weights
                parts = _count(model, lambda: generate(model, encoded, strategy, rules, 12, weighed=1))  # noqa: B023
            results[f"beam {beam}, batch {batch}"] = sum(parts.values())
            results |= {f"beam {beam}, batch {batch}: {part}": count for part, count in sorted(parts.items())}
    return results


def _count(model: Haav, work: Callable[[], Any]) -> Counter[str]:
    """Operations by part from one call of `decode` to the next"""
    counter = CountByPart()
    marks: list[Counter[str]] = []
    watched: list[tuple[nn.Module, str]] = [(model.decoder, "embedding, cache and output")]
    for layer in model.decoder.layers:
        watched += [(layer.get_submodule(part), part.replace("_", " ")) for part in ("aggregator", "feed_forward")]
        watched += [(layer.get_submodule("attention"), "self-attention")]
    reorder, decode = Cache.reorder, model.decode

    def marked(*arguments: Any) -> Any:
        marks.append(counter.operations.copy())
        return decode(*arguments)

    for module, part in watched:
        module.forward = counter.inside(part, module.forward)
    model.decode = marked  # type: ignore[method-assign]
    Cache.reorder = counter.inside("order of the cache", reorder)  # type: ignore[method-assign]
    try:
        with counter:
            work()
    finally:
        Cache.reorder = reorder  # type: ignore[method-assign]
        del model.decode
        for module, _ in watched:
            del module.forward
    return marks[STEP + 1] - marks[STEP]
