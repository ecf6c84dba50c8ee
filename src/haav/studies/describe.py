"""Parameters and cost of a configuration, counted while the real modules run on one blank photo.

FLOPs are those of the executed matrix products, two per multiply-add. Weights are never initialised.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from haav.config import Config, ModelConfig
from haav.data.collate import blank_view
from haav.generate.loop import CaptionModel
from haav.model.build import build_contrast, build_model
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.text import BOS
from haav.types import Views, ViewSpec

GROWTH = (1, 2, 4, 8, 16)
HEAD = "contrastive head (training only)"


@dataclass(frozen=True)
class Cost:
    """FLOPs for one photo whose views have their maximum length."""

    encoding: int
    """views → encoded views"""
    encoding_attention: int
    """the part of `encoding` that is attention scores and mixing"""
    memory: int
    """cross-attention keys and values, once per photo"""
    step: int
    """the first word of one caption"""


@dataclass(frozen=True)
class Description:
    encoding: str
    decoder: str
    aggregator: str
    contrastive: bool
    parameters: int
    """all trained parameters, including the contrastive head"""
    inference_parameters: int
    parts: dict[str, int]
    views: dict[str, ViewSpec]
    flops: Cost
    growth: dict[int, Cost]
    """number of equal views → cost"""
    exponents: dict[str, float]
    """exponent of V in the growth of each cost: 1 is linear, 2 is quadratic"""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def describe(config: Config) -> Description:
    parts = count_parameters(config)
    growth = {count: cost(with_equal_views(config.model, count)) for count in GROWTH}
    return Description(
        encoding=config.model.encoding,
        decoder=config.model.decoder,
        aggregator=config.model.aggregator,
        contrastive=bool(config.contrast.enabled),
        parameters=sum(parts.values()),
        inference_parameters=sum(size for name, size in parts.items() if name != HEAD),
        parts=parts,
        views=config.model.views,
        flops=cost(config.model),
        growth=growth,
        exponents={
            name: _exponent([asdict(growth[count])[name] for count in (4, 8, 16)]) for name in asdict(growth[1])
        },
    )


def count_parameters(config: Config) -> dict[str, int]:
    """Trainable parameters by part, of which `HEAD` is not part of a saved model"""
    with torch.device("meta"):
        model = build_model(config.model)
        parts = _parts(model)
        if config.contrast.enabled:
            assert isinstance(model, Haav)
            parts[HEAD] = _size(build_contrast(model.encoding, config.model, config.contrast).projector)
    return parts


def _exponent(costs: list[int]) -> float:
    """Growth exponent from costs at V, 2V and 4V. It uses increments, so a constant part does not count."""
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    return round(math.log2(second / first), 3) if first and second else 0.0


def cost(config: ModelConfig) -> Cost:
    with torch.device("meta"):
        network = build_model(config).eval()
    return _count(network.to_empty(device="cpu"), {name: blank_view(spec) for name, spec in config.views.items()})


def _product_flop(x: list[int], weight: list[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x) * weight[0]


def _attention_flop(query: list[int], keys: list[int], *_: Any, **__: Any) -> int:
    return 4 * math.prod(query) * keys[-2]


FUSED: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop}
"""kernels that torch's counter does not know"""
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    FUSED[torch.ops.mkldnn._linear_pointwise] = _product_flop


def _count(model: CaptionModel, views: Views) -> Cost:
    word = torch.full((1, 1, 1), BOS)
    with torch.no_grad():
        with FlopCounterMode(display=False, custom_mapping=FUSED) as encoding:
            encoded = model.encode(views)
        with FlopCounterMode(display=False, custom_mapping=FUSED) as memory:
            cache = model.init_cache(encoded)
        with FlopCounterMode(display=False, custom_mapping=FUSED) as step:
            model.decode(word, cache)
    # Batched products are attention, the others linear maps.
    attention = encoding.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)
    return Cost(encoding.get_total_flops(), attention, memory.get_total_flops(), step.get_total_flops())


def with_equal_views(config: ModelConfig, count: int) -> ModelConfig:
    """The same model with `count` views, each a copy of its longest view."""
    longest = max(config.views.values(), key=lambda spec: spec.max_tokens)
    return replace(config, views={f"view{index}": longest for index in range(count)})


def _parts(model: Haav | Ensemble) -> dict[str, int]:
    """Trainable parameters by part, summed over the members of an ensemble."""
    parts = dict.fromkeys(["view projections", "encoder", "decoder layers", "word embedding", "word output"], 0)
    for member in model.members:
        decoder = member.decoder
        projections = _size(member.encoding.embed)
        parts["view projections"] += projections
        parts["encoder"] += _size(member.encoding) - projections
        parts["decoder layers"] += _size(decoder) - _size(decoder.words) - _size(decoder.output)
        parts["word embedding"] += _size(decoder.words)
        parts["word output"] += _size(decoder.output)
    return parts


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
