"""Encodes sentences as vectors. The embedded encoder is the frozen MiniLM-L6.

An encoder is needed only to build a text database. Captioning a photo reads the stored vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from haav import weights
from haav.errors import DataError
from haav.types import Progress, quiet
from haav.weights.load_once import load_once

WIDTH = 384
WEIGHTS = "minilm-l6"
INSTALL = 'pip install "haav[hub]"'


class SentenceEncoder(Protocol):
    """The encoder of a text database: `MiniLM`, or CLIP's text tower (views/hub/clip.py)."""

    @property
    def fingerprint(self) -> str: ...
    def encode(self, sentences: Sequence[str], progress: Progress = ...) -> Tensor: ...


class MiniLM:
    @property
    def fingerprint(self) -> str:
        return f"minilm-l6-{weights.find(WEIGHTS).fingerprint}"

    @torch.no_grad()
    def encode(self, sentences: Sequence[str], progress: Progress = quiet) -> Tensor:
        """(N, 384) float16 unit rows"""
        tokenizer, model = _load()

        def embed(texts: list[str]) -> Tensor:
            tokens = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
            states: Tensor = model(**tokens).last_hidden_state
            real: Tensor = tokens["attention_mask"][..., None].to(states.dtype)
            return (states * real).sum(dim=1) / real.sum(dim=1)

        return encode_by_length(sentences, WIDTH, embed, progress)


def encode_by_length(
    sentences: Sequence[str], width: int, embed: Callable[[list[str]], Tensor], progress: Progress, batch: int = 256
) -> Tensor:
    """(N, width) float16 unit rows. Batches hold sentences of similar length, to reduce padding."""
    vectors = torch.zeros(len(sentences), width, dtype=torch.float16)
    order = sorted(range(len(sentences)), key=lambda row: len(sentences[row]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        vectors[rows] = F.normalize(embed([sentences[row] for row in rows]), dim=1).half()
        progress(min(start + batch, len(order)), len(order))
    return vectors


@load_once
def _load() -> tuple[Any, Any]:
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise DataError(f"building a text database needs transformers.\n  {INSTALL}") from None
    folder = str(weights.locate(WEIGHTS))
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
