"""A frozen vision transformer in plain PyTorch, for the towers of CLIP and DINOv2.

Both are pre-norm transformers. Their loaders (clip.py, dinov2.py) map the weights to the names used here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haav.cpu import check_bfloat16, has_fbgemm, has_vnni
from haav.errors import ConfigError, unknown

PRECISIONS = ("auto", "float32", "bfloat16", "int8")
SMOOTHED = ("qkv", "fc1", "fc2")
"""layers whose inputs have a few channels far larger than the rest"""
QUICK = 1.702
"""factor of CLIP's approximate GELU, x · sigmoid(1.702 x)"""
AT_ONCE = 2
"""photos that a CPU computes at once. The blocks of more are so large that the system maps them anew for each step."""
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class VitConfig:
    width: int
    heads: int
    layers: int
    patch: int
    """side of a patch in pixels"""
    eps: float
    """of the layer norms"""
    quick_gelu: bool
    """x · sigmoid(1.702 x) instead of the exact GELU"""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    patch_layer: int = 0
    """layer whose patches are returned, counted from 1; 0: the last. The class token is always that of the last."""


class VisionTransformer(nn.Module):
    """Pixels → hidden states: the class token first, then the patches row by row."""

    def __init__(
        self, config: VitConfig, state: State, precision: str = "float32", smooth: State | None = None
    ) -> None:
        """`state`: patch.weight, patch.bias, cls, positions, perhaps pre_norm.*, and layers.N.{norm1, qkv, out, norm2,
        fc1, fc2}.{weight, bias}, or the `state_dict` of an int8 tower (see `restore`); `smooth`: for int8,
        layers.N.{qkv, fc1, fc2} → divisor of each input channel"""
        super().__init__()
        self.config = config
        self.precision = resolve_precision(precision)
        self.patch_layer = config.patch_layer or config.layers
        if "kernel" in state:
            self.kernel, self.bias = _frozen(state["kernel"]), _frozen(state["bias"])
        else:
            mean, std = torch.tensor(config.mean).view(3, 1, 1), torch.tensor(config.std).view(3, 1, 1)
            # Normalising the pixels is folded into the patch convolution.
            kernel = state["patch.weight"]
            self.kernel = _frozen(kernel / (255 * std))
            self.bias = _frozen(state["patch.bias"] - (kernel * (mean / std)).sum(dim=(1, 2, 3)))
        self.cls, self.positions = _frozen(state["cls"]), _frozen(state["positions"])
        self.pre_norm = _norm(state, "pre_norm", config.eps) if "pre_norm.weight" in state else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(config, _under(state, f"layers.{layer}."), self.precision, _under(smooth or {}, f"layers.{layer}."))
            for layer in range(config.layers)
        )

    @classmethod
    def restore(cls, config: VitConfig, tensors: State) -> VisionTransformer:
        """The int8 tower whose `state_dict` the tensors are"""
        return cls(config, {name.replace("blocks.", "layers."): tensor for name, tensor in tensors.items()}, "int8")

    @property
    def gigaflops(self) -> float:
        """Per photo, two per multiply-add: patch convolution, linear layers, both products of attention"""
        tokens, width = len(self.positions), self.config.width
        patches = 2 * (tokens - 1) * 3 * self.config.patch**2 * width
        layers = self.config.layers * (24 * tokens * width**2 + 4 * tokens**2 * width)
        if self.patch_layer < self.config.layers:  # the last layer computes one token, with keys and values of all
            layers -= (tokens - 1) * (18 * width**2 + 4 * tokens * width)
        return (patches + layers) / 1e9

    @torch.no_grad()
    def forward(self, pixels: Tensor) -> Tensor:
        """pixels (B, 3, side, side) uint8 RGB → (B, 1 + patches, D) float32"""
        if len(pixels) <= AT_ONCE or self.kernel.device.type != "cpu":
            return self._hidden(pixels)
        return torch.cat([self._hidden(few) for few in pixels.split(AT_ONCE)])

    def _hidden(self, pixels: Tensor) -> Tensor:
        x = F.conv2d(pixels.to(self.kernel), self.kernel, self.bias, self.config.patch).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.positions
        hidden: Tensor = self.pre_norm(x)
        patches = hidden[:, 1:]
        for layer, block in enumerate(self.blocks, start=1):
            class_token_only = self.patch_layer < layer == self.config.layers
            hidden = block(hidden, outputs=1 if class_token_only else None)
            if layer == self.patch_layer:
                patches = hidden[:, 1:].clone()
        return torch.cat([hidden[:, :1], patches], dim=1)


class Block(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x))"""

    def __init__(self, config: VitConfig, state: dict[str, Tensor], precision: str, smooth: State) -> None:
        super().__init__()
        self.heads, self.quick_gelu = config.heads, config.quick_gelu
        self.norm1, self.norm2 = _norm(state, "norm1", config.eps), _norm(state, "norm2", config.eps)
        divide = smooth if precision == "int8" else {}
        # A layer norm absorbs the divisors of its output channels into its weights, at no cost.
        for norm, layer in ((self.norm1, "qkv"), (self.norm2, "fc1")):
            if layer in divide:
                norm.weight.div_(divide[layer])
                norm.bias.div_(divide[layer])
        # x · sigmoid(c x) = silu(c x) / c takes one pass over the hidden states
        if config.quick_gelu and "fc1.weight" in state:
            state = state | {"fc1.weight": state["fc1.weight"] * QUICK, "fc1.bias": state["fc1.bias"] * QUICK}
            state |= {"fc2.weight": state["fc2.weight"] / QUICK}
        self.qkv, self.out, self.fc1, self.fc2 = (
            _linear(state, name, precision, divide.get(name)) for name in ("qkv", "out", "fc1", "fc2")
        )
        multiplier = 1 / divide["fc2"] if "fc2" in divide else state.get("divide_hidden")
        self.divide_hidden = None if multiplier is None else _frozen(multiplier)

    def forward(self, x: Tensor, outputs: int | None = None) -> Tensor:
        """x (B, S, D), changed in place. With `outputs`, only the first so many tokens are computed and returned."""
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        if outputs is not None:
            x, queries = x[:, :outputs], queries[:, :, :outputs]
        context = F.scaled_dot_product_attention(queries, keys, values)
        x += self.out(context.transpose(1, 2).flatten(2)).view_as(x)
        hidden = self.fc1(self.norm2(x))
        hidden = F.silu(hidden, inplace=True) if self.quick_gelu else F.gelu(hidden)
        if self.divide_hidden is not None:
            hidden.mul_(self.divide_hidden)
        x += self.fc2(hidden).view_as(x)
        return x


class Int8Linear(nn.Module):
    """A linear layer whose product is computed on 8-bit integers.

    Weights have one scale per output channel, inputs one per token. Integers of the whole row are summed exactly in
    32 bits, so the only error is the rounding of weights and inputs to 1 part in 127 of their largest.
    """

    def __init__(self, steps: Tensor, scale: Tensor, bias: Tensor) -> None:
        """The weight is steps (out, in) int8 × scale (out)"""
        super().__init__()
        self.register_buffer("steps", steps)
        self.register_buffer("scale", scale)
        self.bias = _frozen(bias)

    @classmethod
    def round(cls, weight: Tensor, bias: Tensor) -> Int8Linear:
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
        return cls((weight / scale).round().to(torch.int8), scale[:, 0].contiguous(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D)"""
        rows = x.flatten(0, -2)
        largest = torch.maximum(rows.amax(dim=1, keepdim=True), -rows.amin(dim=1, keepdim=True)).clamp_(min=1e-12)
        steps = torch.mul(rows, 127 / largest).round_().to(torch.int8)
        product = torch._int_mm(steps, self.get_buffer("steps").t()).float()
        product.mul_(largest.div_(127))
        return torch.addcmul(self.bias, product, self.get_buffer("scale")).view(*x.shape[:-1], -1)


class FbgemmLinear(nn.Module):
    """`Int8Linear` for CPUs without VNNI, on FBGEMM's kernel for AVX2.

    AVX2 sums pairs of products in 16 bits, so weights are rounded to 1 part in 63: 2 · 255 · 63 still fits.
    """

    STEPS = 63

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        scale = (weight.abs().amax(dim=1) / self.STEPS).clamp(min=1e-12)
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # PyTorch will drop quantized tensors; has_fbgemm() will then be False
            warnings.simplefilter("ignore", UserWarning)
            steps = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(steps, None)
        self.bias = _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D)"""
        rows = x.flatten(0, -2)
        largest = torch.maximum(rows.amax(dim=1, keepdim=True), -rows.amin(dim=1, keepdim=True)).clamp_(min=1e-12)
        # The kernel has one scale for all rows. Rows are scaled to −1 … 1, and an extra last row fixes that range.
        scaled = rows.new_empty(len(rows) + 1, rows.shape[1])
        torch.div(rows, largest, out=scaled[:-1])
        scaled[-1, ::2], scaled[-1, 1::2] = -1, 1
        product = torch.ops.quantized.linear_dynamic(scaled, self.packed)[:-1]
        return torch.addcmul(self.bias, product, largest).view(*x.shape[:-1], -1)


class Float32Linear(nn.Module):
    """`nn.Linear` without random initialisation."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = _frozen(weight), _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class BFloat16Linear(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = _frozen(weight.bfloat16()), _frozen(bias.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight, self.bias).float()


def resolve_precision(precision: str) -> str:
    """`auto`: int8 where it is faster, float32 elsewhere"""
    if precision not in PRECISIONS:
        raise ConfigError(unknown("precision", precision, PRECISIONS))
    if precision == "bfloat16":
        check_bfloat16()
    if precision != "auto":
        return precision
    return "int8" if has_vnni() or has_fbgemm() else "float32"


def rounds_to_int8() -> bool:
    """Whether `int8` is computed by `Int8Linear` on this CPU, not by `FbgemmLinear`"""
    return has_vnni() or not has_fbgemm()


def smoothing(tower: VisionTransformer, pixels: Tensor, alpha: float = 0.6) -> dict[str, Tensor]:
    """Divisors that spread the rounding error of int8 between inputs and weights (SmoothQuant), by channel.

    `tower`: in float32; `pixels`: a few dozen photos that show which channels are large.
    """
    largest: dict[str, Tensor] = {}

    def watch(name: str) -> object:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            peak = inputs[0].flatten(0, -2).abs().amax(dim=0)
            largest[name] = torch.maximum(largest[name], peak) if name in largest else peak

        return hook

    layers = {f"layers.{i}.{name}": getattr(b, name) for i, b in enumerate(tower.blocks) for name in SMOOTHED}
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    for batch in pixels.split(8):
        tower(batch)
    for handle in handles:
        handle.remove()
    divisors = {}
    for name, layer in layers.items():
        weights = layer.weight.abs().amax(dim=0)
        divisors[name] = (largest[name].clamp(min=1e-4) ** alpha / weights.clamp(min=1e-4) ** (1 - alpha)).clamp(
            min=1e-3
        )
    return divisors


def _under(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.contiguous(), requires_grad=False)


def _norm(state: State, name: str, eps: float) -> nn.LayerNorm:
    weight = state[f"{name}.weight"]
    norm = nn.LayerNorm(len(weight), eps).requires_grad_(False)
    norm.weight.copy_(weight)
    norm.bias.copy_(state[f"{name}.bias"])
    return norm


def _linear(state: State, name: str, precision: str, divide: Tensor | None) -> nn.Module:
    bias = state[f"{name}.bias"]
    if f"{name}.steps" in state:
        return Int8Linear(state[f"{name}.steps"], state[f"{name}.scale"], bias)
    weight = state[f"{name}.weight"]
    if precision == "int8":
        weight = weight if divide is None else weight * divide
        return Int8Linear.round(weight, bias) if rounds_to_int8() else FbgemmLinear(weight, bias)
    if precision == "bfloat16":
        return BFloat16Linear(weight, bias)
    return Float32Linear(weight, bias)
