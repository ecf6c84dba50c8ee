"""The preset `release` computes what the authors' released model computes.

`golden/release.safetensors` holds a small instance of it with random weights: inputs, outputs, gradients.
Another such file, of other sizes, can be given in the environment variable HAAV_GOLDEN.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.testing import assert_close

from haav.config import Config
from haav.generate.beam import BeamSearch
from haav.generate.loop import generate
from haav.inference.convert import convert, rename
from haav.model.build import build_contrast, build_model
from haav.model.contrast import MomentumContrast
from haav.model.haav import Haav
from haav.text import EOS, PAD
from haav.types import View
from helpers import ROOT, cross_entropy

GOLDEN = Path(os.environ.get("HAAV_GOLDEN") or ROOT / "tests" / "golden" / "release.safetensors")
VIEWS = ("objects", "grid", "text_whole", "text_five")
OUTPUT = {"rtol": 1e-5, "atol": 1e-5}
GRADIENT = {"rtol": 1e-4, "atol": 1e-4}


@dataclass(frozen=True)
class Golden:
    tensors: dict[str, Tensor]
    dims: dict[str, float]
    config: Config
    model: Haav
    contrast: MomentumContrast

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def views(self) -> dict[str, View]:
        objects = self["inputs.objects"]
        rank_whole = self["inputs.text_whole.rank"]
        five = {"crop": self["inputs.text_five.crop"], "rank": self["inputs.text_five.rank"]}
        return {
            # The file pads with zero rows; here that becomes a mask, once.
            "objects": View(objects, objects.abs().sum(dim=-1) != 0),
            "grid": _all_real(self["inputs.grid"]),
            "text_whole": _all_real(
                self["inputs.text_whole"], {"crop": torch.zeros_like(rank_whole), "rank": rank_whole}
            ),
            "text_five": _all_real(self["inputs.text_five"], five),
        }

    @property
    def captions(self) -> Tensor:
        return self["inputs.captions"][:, None]


def _all_real(tokens: Tensor, indices: dict[str, Tensor] | None = None) -> View:
    return View(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool), indices or {})


@pytest.fixture
def golden() -> Golden:
    """Fresh for each test: training mode moves running statistics."""
    with safe_open(GOLDEN, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        dims = json.loads(file.metadata()["dims"])
    converted = convert(GOLDEN, heads=dims.get("heads", 8))
    config = converted.captioner.config
    # The file was made with every dropout at 0 and with its own momentum and temperature.
    silent = replace(config.model, dropout=0.0, channel_dropout=0.0, token_dropout=0.0, view_dropout=0.0)
    contrast = replace(config.contrast, momentum=dims["ema"], temperature=dims["temperature"])
    config = replace(config, model=silent, contrast=contrast)
    model = build_model(config.model)
    assert isinstance(model, Haav)
    model.load_state_dict(converted.captioner.model.state_dict())
    rebuilt = build_contrast(model.encoding, config.model, config.contrast)
    assert converted.contrast is not None
    rebuilt.load_state_dict(converted.contrast.state_dict())
    return Golden(tensors, dims, config, model.eval(), rebuilt.eval())


def test_sizes_are_read_off_the_file(golden: Golden) -> None:
    model, dims = golden.config.model, golden.dims
    assert model.d_model == dims["dim"]
    assert model.memory_slots == dims["memory_slots"]
    assert model.vocabulary_size == dims["vocab"]
    assert [spec.dim for spec in model.views.values()] == [dims["d_obj"], dims["d_vis"], dims["d_txt"], dims["d_txt"]]
    assert golden.config.contrast.queue_size == dims["queue"]


def test_projected_views_and_cls_agree(golden: Golden) -> None:
    embedded = golden.model.encoding.embed(golden.views)
    for name, view in zip(VIEWS, embedded, strict=True):
        tokens = view.tokens.shape[1]
        expected, padding = golden[f"eval.views.{name}"], golden[f"eval.padding.{name}"][:, 0, 0]
        assert_close(view.tokens, expected[:, :tokens], **OUTPUT)
        assert torch.equal(view.mask, ~padding[:, :tokens])
        assert padding[:, tokens:].all(), "the release pads to the longest view; nothing real may lie there"


def test_encoded_views_agree(golden: Golden) -> None:
    with torch.no_grad():
        encoded = golden.model.encode(golden.views)
    assert encoded.names == VIEWS
    for name, tokens, mask in zip(VIEWS, encoded.tokens, encoded.masks, strict=True):
        expected = golden[f"eval.encoded.{name}"][:, :, : tokens.shape[2]]
        assert_close(tokens.transpose(1, 2)[mask], expected.transpose(1, 2)[mask], **OUTPUT)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_log_probabilities_agree(golden: Golden, mode: str) -> None:
    golden.model.train(mode == "train")
    with torch.no_grad():
        found = golden.model(golden.views, golden.captions).logprobs[:, 0]
    real = golden["inputs.captions"] != PAD
    expected = golden[f"{mode}.logprob"]
    assert_close(found[real], expected[real], **OUTPUT)
    # Behind <pad> the release multiplies everything by 0: a constant, which ours does not compute.
    assert_close(expected[~real], torch.full_like(expected[~real], -math.log(expected.shape[-1])))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_projected_cls_and_contrastive_loss_agree(golden: Golden, mode: str) -> None:
    golden.model.train(mode == "train")
    golden.contrast.train(mode == "train")
    with torch.no_grad():
        contrast = golden.contrast(golden.views, golden.model.encode(golden.views))
    assert_close(contrast.queries, golden[f"{mode}.view_cls"], **OUTPUT)
    assert_close(contrast.keys, golden[f"{mode}.view_cls_ema"], **OUTPUT)
    assert_close(contrast.loss, golden[f"{mode}.contrastive_loss"], **OUTPUT)


def test_all_beams_agree_token_for_token(golden: Golden) -> None:
    tokens, logprobs = golden["eval.beam.tokens"], golden["eval.beam.logprob"]
    with torch.no_grad():
        encoded = golden.model.encode(golden.views)
        found = generate(golden.model, encoded, BeamSearch(tokens.shape[1]), max_words=tokens.shape[2])
    # After <eos> the release goes on with word 0 at no cost, ours with <pad>.
    ended = (tokens == EOS).cumsum(dim=-1) - (tokens == EOS).long() > 0
    steps = found.tokens.shape[2]
    assert ended[..., steps:].all(), "the search may only stop early where every beam has ended"
    assert torch.equal(found.tokens, tokens.masked_fill(ended, PAD)[..., :steps])
    assert_close(found.logprobs, logprobs.masked_fill(ended, 0.0)[..., :steps], **OUTPUT)


def test_losses_and_every_gradient_agree_in_training(golden: Golden) -> None:
    model, contrast = golden.model.train(), golden.contrast.train()
    encoded = model.encode(golden.views)
    decoded = model.decode(golden.captions, model.init_cache(encoded))
    words = cross_entropy(decoded.logits[:, :, :-1], golden.captions[:, :, 1:], PAD)
    views = contrast(golden.views, encoded).loss
    (words + golden.dims["contrastive_weight"] * views).backward()
    assert_close(words, golden["train.word_loss"], **OUTPUT)
    assert_close(views, golden["train.contrastive_loss"], **OUTPUT)

    expected = rename({name.removeprefix("grad."): g for name, g in golden.tensors.items() if name.startswith("grad.")})
    trained = dict(model.named_parameters()) | {
        f"projector.{name}": parameter for name, parameter in contrast.projector.named_parameters()
    }
    assert trained.keys() == expected.keys()
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, expected[name], **GRADIENT, msg=lambda text, name=name: f"{name}: {text}")


def test_queue_and_momentum_agree_after_a_step(golden: Golden) -> None:
    model, contrast = golden.model.train(), golden.contrast.train()
    with torch.no_grad():
        result = contrast(golden.views, model.encode(golden.views))
        contrast.enqueue(result.keys[result.mask])
        contrast.follow(model.encoding)
    assert_close(contrast.queue, golden["after.queue"], **OUTPUT)
    assert contrast.position == golden["after.queue_ptr"][0] % len(contrast.queue)
    moved = {name.removeprefix("after.ema."): t for name, t in golden.tensors.items() if name.startswith("after.ema.")}
    state = contrast.state_dict()
    for name, expected in rename(moved).items():
        assert_close(state[f"momentum_{name}"], expected, **OUTPUT)
    assert moved
