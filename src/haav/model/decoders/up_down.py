"""Up-Down: Anderson et al., "Bottom-up and top-down attention for image captioning", CVPR 2018, §3.2.

Two LSTMs and one soft attention. There is no encoder: the attention sees the views as they are embedded. The widths of
both LSTMs, of the words and of the attention are `d_model`. The output has no bias, as all of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from haav.model.aggregators import Aggregator
from haav.model.decoders.base import DecoderSizes, RecurrentDecoder, decoders, lstm, visible_tokens
from haav.model.layers import hide
from haav.types import Cache, EncodedViews, KeyValues, Memory, Source


@decoders.register("up_down")
class UpDownDecoder(RecurrentDecoder):
    encoder_layer = None
    state_size = 4  # hidden and memory of the attention LSTM, then those of the language LSTM

    @staticmethod
    def least_rows(encoder_layers: int, slots: int, sizes: DecoderSizes) -> int:
        return 30 * sizes.d_model

    def build(self, new_aggregator: Callable[[], Aggregator], sizes: DecoderSizes) -> None:
        d_model = sizes.d_model
        self.attention_lstm = nn.LSTMCell(3 * d_model, d_model)
        self.language_lstm = nn.LSTMCell(2 * d_model, d_model)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.score = nn.Linear(d_model, 1, bias=False)

    def init_cache(self, encoded: EncodedViews) -> Cache:
        tokens, mask, mean = visible_tokens(encoded)
        memory = KeyValues(self.key(tokens)[:, None], tokens[:, None])
        source = Source(memory, hide(mask[:, None, None], tokens.dtype))
        return Cache((Memory((source,), encoded.present, summary=mean),), words=())

    def step(self, words: Tensor, state: tuple[Tensor, ...], memory: Memory) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden1, memory1, hidden2, memory2 = state
        assert memory.summary is not None
        mean = memory.summary[:, None].expand_as(words)
        hidden1, memory1 = lstm(self.attention_lstm, torch.cat([hidden2, mean, words], dim=-1), hidden1, memory1)
        attended = self.attend(hidden1, memory.sources[0])
        hidden2, memory2 = lstm(self.language_lstm, torch.cat([attended, hidden1], dim=-1), hidden2, memory2)
        return hidden2, (hidden1, memory1, hidden2, memory2)

    def attend(self, hidden: Tensor, source: Source) -> Tensor:
        """hidden (B, C, D) → the mean of the tokens, weighted by softmax of w·tanh(key of the token + query)"""
        scores = self.score((source.memory.keys + self.query(hidden)[:, :, None]).tanh()).squeeze(-1)
        attended: Tensor = (scores + source.bias[:, 0]).softmax(dim=-1) @ source.memory.values[:, 0]
        return attended
