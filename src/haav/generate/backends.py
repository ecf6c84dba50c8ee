"""What computes a decoding step: torch, or onnxruntime with the same step as a graph.

A step in torch is over a hundred calls on a handful of rows; in onnxruntime it is one. The graph is made from the
model in memory, so there are no files to keep in step with it (docs/experiments/2026-11-18-decoding-backends.md).
"""

from __future__ import annotations

import threading
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from haav.data.collate import blank_view
from haav.errors import ConfigError, unknown
from haav.generate.graph import PHOTOS, Step, flat_memory, step_to_onnx
from haav.generate.loop import CaptionModel
from haav.model.decoders.transformer import TransformerDecoder
from haav.model.embed import absent
from haav.model.ensemble import Ensemble
from haav.model.haav import Haav
from haav.text import BOS, UNK
from haav.types import Cache, Decoded, EncodedViews, Views

BACKENDS = ("auto", "torch", "onnxruntime")
SEARCHES = 20
"""searches after which `auto` makes the graph: it takes about as long as these searches have lost without it"""


class OnnxModel:
    """A model whose views torch encodes and whose next words onnxruntime computes.

    Its caches are those of the model, so each step goes to the one that can compute it: several words at once, and view
    weights of other layers than the last, are left to torch.
    """

    def __init__(self, model: Haav) -> None:
        decoder = model.decoder
        assert isinstance(decoder, TransformerDecoder)
        self.model = model
        self.layers, self.width = len(decoder.layers), 2 * decoder.words.embedding_dim
        self.most_words = len(decoder.get_buffer("positions")) - 1
        self.session = _session(_step_graph(model, decoder))
        self.inputs = frozenset(value.name for value in self.session.get_inputs())
        self._compare()

    def encode(self, views: Views) -> EncodedViews:
        return self.model.encode(views)

    def init_cache(self, encoded: EncodedViews) -> Cache:
        return self.model.init_cache(encoded)

    def decode(self, tokens: Tensor, cache: Cache, weighed: int | None = None) -> Decoded:
        photos, captions, new = tokens.shape
        if new != 1 or weighed not in (0, 1) or cache.length >= self.most_words:
            return self.model.decode(tokens, cache, weighed)
        past = cache.words or (torch.zeros(photos * captions, 0, self.width),) * self.layers
        tensors = {"words": tokens[:, :, 0]} | flat_memory(cache.memory)
        tensors |= {f"past.{layer}": words for layer, words in enumerate(past)}
        feed = {name: tensor.numpy() for name, tensor in tensors.items() if name in self.inputs}
        feed["position"] = np.array(cache.length)
        scores, weights, *known = map(torch.from_numpy, self.session.run(None, feed))
        after = Cache(cache.memory, tuple(known), cache.length + 1)
        # (B, C, H, V) of the last layer; empty if the aggregator has no weights
        given = weights[:, :, None, None] if weighed and weights.numel() else None
        return Decoded(scores[:, :, None], given, after)

    @torch.no_grad()
    def _compare(self) -> None:
        """Check two steps against torch: a branch of a new aggregator could be traced the wrong way."""
        embed = self.model.encoding.embed
        cache = self.init_cache(self.encode({name: blank_view(embed.spec(name)) for name in embed.names}))
        tokens = torch.tensor([[[BOS], [UNK]]])
        for _ in range(2):
            ours, decoded = self.model.decode(tokens, cache, 0), self.decode(tokens, cache, 0)
            if not torch.allclose(ours.logits, decoded.logits, rtol=1e-3, atol=1e-3, equal_nan=True):
                raise ConfigError("its scores differ from those of PyTorch for this model.")
            assert isinstance(decoded.cache, Cache)
            cache = decoded.cache


class Backend:
    """The choice of what computes the next search. Threads may share it.

    `auto` is onnxruntime where it can be, once `wait` searches were made, and torch elsewhere.
    """

    def __init__(self, name: str, model: Haav | Ensemble, wait: int = SEARCHES) -> None:
        check_backend(name)
        obstacle = None if name == "torch" else _obstacle(model)
        if obstacle and name == "onnxruntime":
            raise _refused(obstacle)
        self.name = name
        self._model = model
        self._onnx: OnnxModel | None = None
        self._wait = None if name == "torch" or obstacle else wait if name == "auto" else 0
        """searches that torch still computes; None: all"""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the graph now, if there is to be one. A server does so before the first client waits for it."""
        with self._lock:
            if self._wait is None or self._onnx is not None:
                return
            assert isinstance(self._model, Haav)
            try:
                self._onnx = OnnxModel(self._model)
            except Exception as error:  # of torch's exporter and of onnxruntime, without a common base
                if self.name == "onnxruntime":
                    raise _refused(str(error)) from error
                self._wait = None

    def next_search(self) -> CaptionModel:
        """The model that computes the next search"""
        if self._wait == 0:
            self.prepare()
        with self._lock:
            if self._wait:
                self._wait -= 1
            return self._onnx or self._model


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"backend onnxruntime: {reason}\n  With auto or torch, PyTorch computes the captions.")


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ConfigError(unknown("backend", str(name), BACKENDS))


def _obstacle(model: Haav | Ensemble) -> str | None:
    """Why onnxruntime cannot compute the steps of this model"""
    if not isinstance(model, Haav):
        return "it computes the words of a single model, and this is an ensemble."
    if not model.decoder.exportable:
        return f"the decoder {type(model.decoder).__name__} cannot be written as a graph."
    weight = model.decoder.words.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return f"it computes on the CPU in float32, and the model is on {weight.device} in {str(weight.dtype)[6:]}."
    missing = [package for package in ("onnx", "onnxruntime") if not _installed(package)]
    return f"it needs {' and '.join(missing)}.\n  pip install 'haav[onnx]'" if missing else None


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _step_graph(model: Haav, decoder: TransformerDecoder) -> bytes:
    embed = model.encoding.embed
    with torch.no_grad():
        blank = {name: absent(embed.spec(name), PHOTOS, "cpu") for name in embed.names}
        memory = model.init_cache(model.encode(blank)).memory
    step = Step(decoder, len(memory[0].sources), memory[0].owners is not None).eval()
    return step_to_onnx(step, flat_memory(memory))


def _session(graph: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Products of a few rows are not worth sharing out, and batches run one per core already (inference/parallel.py).
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
