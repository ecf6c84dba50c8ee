"""The seam between encoded views and words: `init_cache(EncodedViews) -> Cache`, `decoder(tokens, Cache) -> Decoded`.

The transformer is HAAV's. The others are systems that the paper is compared with, on the same views.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.dropout import Dropout
from haav.model.linear import Linear
from haav.registry import Registry
from haav.types import Aggregated, Cache, Decoded, EncodedViews, Memory


@dataclass(frozen=True)
class DecoderSizes:
    """What a decoder is built from. Each uses what it needs."""

    layers: int
    d_model: int
    heads: int
    d_ff: int
    dropout: float
    vocabulary_size: int
    max_words: int


class Decoder(nn.Module, ABC):
    uses_aggregator: ClassVar[bool]
    """whether the setting `aggregator` means anything to it"""
    exportable: ClassVar[bool]
    """whether haav.export.onnx can write its step as a graph"""
    encoder_layer: ClassVar[type[nn.Module] | None]
    """the layers of the encoder that belongs to it; None: it reads embedded views as they are"""

    def __init__(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary_size, sizes.d_model)
        self.build(new_aggregator, sizes)
        self.output = Linear(sizes.d_model, sizes.vocabulary_size, bias=False)

    @staticmethod
    @abstractmethod
    def least_rows(encoder_layers: int, slots: int, sizes: DecoderSizes) -> int:
        """A lower bound of its elements and those of its encoder, words left out, in rows of `d_model`."""

    @abstractmethod
    def build(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        """Make what lies between the embedding of words and the output."""

    @abstractmethod
    def init_cache(self, encoded: EncodedViews) -> Cache:
        """The cache before the first word: what is computed once per photo."""

    @abstractmethod
    def read(self, tokens: Tensor, cache: Cache, weighed: int | None = 0) -> tuple[Tensor, list[Aggregated], Cache]:
        """tokens (B, C, T) → (B, C, T, D) states that `output` turns into scores, what each layer gathered, the cache
        after these words. `weighed`: as in `forward`"""

    def read_whole(self, tokens: Tensor, targets: Tensor, cache: Cache) -> Tensor:
        """Whole captions (B, C, T) → (N, D) states of the N tokens that have a target, (B, C, T) bool. For losses"""
        states, _, _ = self.read(tokens, cache)
        return states[targets]

    @property
    def exposes_weights(self) -> bool:
        """Whether it says how much each view counted"""
        return False

    def forward(self, tokens: Tensor, cache: Cache, weighed: int | None = None) -> Decoded:
        """tokens (B, C, T) int64, the next T words of C captions of each photo

        `weighed`: how many of the last layers say how much each view counted, which takes longer; None: all
        """
        states, gathered, cache = self.read(tokens, cache, weighed)
        given = [layer.weights for layer in gathered if layer.weights is not None]
        weights = [part.view(*tokens.shape, *part.shape[2:]) for part in given]
        looks = tuple(layer.looks for layer in gathered if layer.looks)
        return Decoded(self.output(states), torch.stack(weights, dim=3) if weights else None, cache, looks)

    def add_words(self, shares: Tensor) -> None:
        """Add a word per row of `shares` (new words, words). It starts as that mixture of the words before it."""
        for layer in (self.words, self.output):
            layer.weight = nn.Parameter(torch.cat([layer.weight, shares @ layer.weight]).detach())
        self.words.num_embeddings = self.output.out_features = len(self.words.weight)


class RecurrentDecoder(Decoder):
    """Reads words one by one. What it knows of a caption is a few vectors; a subclass says how a word changes them.

    It attends to the tokens of all views as one sequence.
    """

    uses_aggregator = False
    exportable = False
    state_size: ClassVar[int]
    """number of vectors that are carried from word to word; all are 0 before the first"""

    def __init__(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        super().__init__(new_aggregator, sizes)
        self.dropout = Dropout(sizes.dropout)

    @abstractmethod
    def step(self, words: Tensor, state: tuple[Tensor, ...], memory: Memory) -> tuple[Tensor, tuple[Tensor, ...]]:
        """embedded words (B, C, D), state vectors (B, C, D) → (B, C, D) for `output`, the new state vectors"""

    def read(self, tokens: Tensor, cache: Cache, weighed: int | None = 0) -> tuple[Tensor, list[Aggregated], Cache]:
        (memory,) = cache.memory
        words = self.words(tokens)
        start = torch.zeros_like(words[:, :, 0])
        state = tuple(vectors.view_as(start) for vectors in cache.state) or (start,) * self.state_size
        hidden = []
        for word in words.unbind(dim=2):
            now, state = self.step(word, state, memory)
            hidden.append(now)
        length = cache.length + tokens.shape[2]
        after = Cache(cache.memory, (), length, tuple(vectors.flatten(0, 1) for vectors in state))
        return self.dropout(torch.stack(hidden, dim=2)), [], after


def visible_tokens(encoded: EncodedViews) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, D) the last encoder layer's tokens of all views, 0 where hidden, (B, S) their mask, (B, D) their mean"""
    visible = [mask & encoded.present[:, [index]] for index, mask in enumerate(encoded.masks)]
    mask = torch.cat(visible, dim=1)
    tokens = torch.cat([view[:, -1] for view in encoded.tokens], dim=1).masked_fill(~mask[..., None], 0.0)
    return tokens, mask, tokens.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def lstm(cell: nn.LSTMCell, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, C, …), hidden and memory (B, C, D) → the new ones"""
    new_hidden, new_memory = cell(x.flatten(0, 1), (hidden.flatten(0, 1), memory.flatten(0, 1)))
    return new_hidden.view_as(hidden), new_memory.view_as(memory)


decoders: Registry[Decoder] = Registry("decoder")
