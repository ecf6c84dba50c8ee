"""The decoder's step as an ONNX graph: one word of each caption and its past → scores of the next word, the new past.

`haav export` writes it to a file. `OnnxModel` (backends.py) runs it in the memory of this process.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from haav.errors import HaavError
from haav.model.decoders.transformer import TransformerDecoder
from haav.types import Aggregated, KeyValues, Memory, Source

OPSET = 17
PHOTOS, CAPTIONS, PAST = 2, 3, 4
"""sizes that graphs are traced with; all of them are dynamic in the graph"""
Axes = dict[str, dict[int, str]]


def to_onnx(
    module: nn.Module, example: tuple[Tensor, ...], inputs: Sequence[str], outputs: Sequence[str], axes: Axes
) -> bytes:
    """The module as an ONNX file, traced with the example"""
    try:
        import onnx  # noqa: F401  # torch's exporter needs it, and says so less clearly
    except ModuleNotFoundError:
        raise HaavError("an export needs onnx.\n  pip install 'haav[onnx]'") from None
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # Tracing warns of every Python branch on a tensor. The examples are chosen to take the right branches.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            example,
            file,  # type: ignore[arg-type]  # this exporter writes to buffers too
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=OPSET,
            do_constant_folding=False,
            dynamo=False,
        )
    return file.getvalue()


def flat_memory(memory: Sequence[Memory]) -> dict[str, Tensor]:
    """The tensors of a cache's memory by the names that graphs give them.

    Keys and values of each decoder layer and source, then what all layers share: biases, `present`, `owners` if any.
    """
    first = memory[0]
    flat: dict[str, Tensor] = {}
    for number, layer in enumerate(memory):
        for place, source in enumerate(layer.sources):
            flat[f"memory.{number}.{place}.keys"] = source.memory.keys
            flat[f"memory.{number}.{place}.values"] = source.memory.values
    for place, source in enumerate(first.sources):
        flat[f"memory.{place}.bias"] = source.bias
    flat["memory.present"] = first.present
    return flat if first.owners is None else flat | {"memory.owners": first.owners}


def axes_of_memory(names: Iterable[str]) -> Axes:
    """Dynamic axes of the memory: photos, and tokens where they are"""
    tokens = {"keys": 2, "values": 2, "bias": 3, "owners": 1}
    axes: Axes = {name: {0: "photos"} for name in names}
    for name, own in axes.items():
        field = name.rsplit(".", 1)[1]
        if field in tokens:
            own[tokens[field]] = f"{name}.tokens"
    return axes


class Step(nn.Module):
    """One step of the decoder. The position is a tensor, so that the graph serves every position."""

    outputs = ("scores", "weights")

    def __init__(self, decoder: TransformerDecoder, sources: int, owned: bool) -> None:
        super().__init__()
        self.decoder, self.sources, self.owned = decoder, sources, owned

    def forward(self, words: Tensor, position: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        """words (B, C) → scores (B, C, words), view weights of the last layer (B, C, H, V), the past of each layer"""
        layers = len(self.decoder.layers)
        rest = iter(flat)
        pairs = [[KeyValues(next(rest), next(rest)) for _ in range(self.sources)] for _ in range(layers)]
        biases = [next(rest) for _ in range(self.sources)]
        present, owners = next(rest), next(rest) if self.owned else None
        past = [next(rest) for _ in range(layers)]
        x = (self.decoder.words(words) + self.decoder.get_buffer("positions")[position + 1])[:, :, None]
        known: list[Tensor] = []
        gathered: Aggregated | None = None
        for layer, layer_pairs, before in zip(self.decoder.layers, pairs, past, strict=True):
            memory = Memory(tuple(Source(*part) for part in zip(layer_pairs, biases, strict=True)), present, owners)
            x, gathered, after = layer(x, before, None, memory, layer is self.decoder.layers[-1])
            known.append(after)
        assert gathered is not None
        weights = x.new_zeros(*words.shape, 0, 0) if gathered.weights is None else gathered.weights
        return (self.decoder.output(x[:, :, 0]), weights, *known)


def step_to_onnx(step: Step, memory: Mapping[str, Tensor]) -> bytes:
    """The step as an ONNX file. `memory`: an example of `PHOTOS` photos, by name"""
    decoder = step.decoder
    width = 2 * decoder.words.embedding_dim
    past = {f"past.{layer}": torch.zeros(PHOTOS * CAPTIONS, PAST, width) for layer in range(len(decoder.layers))}
    words = torch.zeros(PHOTOS, CAPTIONS, dtype=torch.int64)
    outputs = [*step.outputs, *(f"known.{layer}" for layer in range(len(past)))]
    axes: Axes = {name: {0: "photos", 1: "captions"} for name in ("words", *step.outputs)}
    axes |= {name: {0: "rows", 1: "past"} for name in past}
    axes |= {name: {0: "rows", 1: "known"} for name in outputs[2:]}
    axes |= axes_of_memory(memory)
    example = (words, torch.tensor(PAST), *memory.values(), *past.values())
    return to_onnx(step, example, ["words", "position", *memory, *past], outputs, axes)
