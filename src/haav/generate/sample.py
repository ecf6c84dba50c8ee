"""Random sampling of captions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from haav.generate.loop import Captions, Choice, largest
from haav.text import EOS, PAD


@dataclass(frozen=True)
class Sampling:
    """Draws `samples` captions per photo, word by word and independently."""

    samples: int = 1
    temperature: float = 1.0
    """values below 1 favour the most probable words"""
    top_k: int = 0
    """draw among this many most probable words; 0: among all"""
    top_p: float = 1.0
    """draw among the most probable words with this total probability, at least one word"""
    generator: torch.Generator | None = None

    def choose(self, captions: Captions, logprobs: Tensor) -> Choice:
        photos, known, _ = logprobs.shape
        # Before the first word there is one empty caption per photo, which all samples continue.
        chances, logprobs = (part.expand(-1, self.samples, -1) for part in (self.chances(logprobs), logprobs))
        words = torch.multinomial(chances.flatten(0, 1), 1, generator=self.generator).view(photos, self.samples, 1)
        parents = np.minimum(np.arange(self.samples), known - 1)
        return Choice(
            np.broadcast_to(parents, (photos, self.samples)),
            words[..., 0].cpu().numpy(),
            logprobs.gather(2, words)[..., 0].cpu().numpy(),
        )

    def chances(self, logprobs: Tensor) -> Tensor:
        """Probabilities to draw words with.

        A caption whose words are all forbidden gets <pad> and is missing. A caption without finite scores gets <eos>.
        """
        scores = logprobs / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        chances = scores.softmax(dim=-1)
        if self.top_p < 1:
            ranked, words = chances.sort(dim=-1, descending=True)
            dropped = ranked.cumsum(dim=-1) - ranked >= self.top_p
            dropped[..., 0] = False
            ranked = ranked.masked_fill(dropped, 0.0)
            chances = torch.zeros_like(chances).scatter(-1, words, ranked)
        dead, broken = logprobs.isneginf().all(dim=-1), logprobs.isnan().any(dim=-1)
        chances[dead | broken] = 0.0
        chances[..., PAD].masked_fill_(dead, 1.0)
        chances[..., EOS].masked_fill_(broken, 1.0)
        return chances

    def settled(self, captions: Captions, max_words: int) -> np.ndarray:
        return np.asarray(captions.ended.all(axis=1))

    def result(self, captions: Captions) -> np.ndarray:
        return largest(captions.scores, captions.scores.shape[1])
