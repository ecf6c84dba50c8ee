"""Laws that every encoding and aggregator keeps, and the paper's claims about cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from haav.errors import ViewError
from haav.model.aggregators import aggregators
from haav.model.aggregators.base import TwoTierAggregator
from haav.model.build import build_contrast, build_model
from haav.model.check_views import check_views
from haav.model.embed import ViewEmbedding
from haav.model.encodings import encodings
from haav.model.haav import Haav
from haav.model.layers import (
    Attention,
    Dropout,
    FeedForward,
    SetAttention,
    drop_tokens,
    drop_views,
    keep_channels,
    masked_softmax,
    sinusoids,
)
from haav.studies.describe import cost, count_parameters, describe, with_equal_views
from haav.types import EncodedViews, KeyValues, View, ViewSpec
from helpers import (
    SILENT,
    VIEWS,
    combinations,
    cross_entropy,
    every_decoder,
    every_variant,
    random_captions,
    random_view,
    random_views,
    tiny_config,
    tiny_model,
)

every_single_model = pytest.mark.parametrize(
    "variant",
    [variant for variant in combinations() if len(encodings.get(variant["encoding"]).split(tuple(VIEWS))) == 1],
    ids=lambda variant: "-".join(variant.values()),
)
KEEPS_VIEWS = [name for name in encodings if encodings.get(name).keeps_views]
TWO_TIERS = [name for name in aggregators if issubclass(aggregators.get(name), TwoTierAggregator)]


@every_variant
def test_shapes_and_probabilities(variant: dict[str, str]) -> None:
    model = tiny_model(**variant)
    decoded = model(random_views(), random_captions())
    assert decoded.logits.shape == (3, 2, 5, 23)
    assert_close(decoded.logprobs.exp().sum(dim=-1), torch.ones(3, 2, 5))
    if model.members == (model,) and model.decoder.exposes_weights:
        assert decoded.weights is not None
        assert decoded.weights.shape == (3, 2, 5, 2, 4, 3)
        assert_close(decoded.weights.sum(dim=-1), torch.ones(3, 2, 5, 2, 4))
    else:
        assert decoded.weights is None


@every_variant
@pytest.mark.parametrize("cls", ["learned", "mean"])
def test_each_parameter_gets_a_gradient(variant: dict[str, str], cls: str) -> None:
    model = tiny_model(**variant, cls=cls).train()
    with torch.no_grad():  # as after a step: what starts as 0 holds back the gradient of its other factor
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    captions = random_captions(words=8)
    loss = 0.0
    for _ in range(4):  # several draws of every dropout
        loss = loss + cross_entropy(model(random_views(), captions).logits[:, :, :-1], captions[:, :, 1:], pad=1)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        gradient = parameter.grad
        if name.endswith("key_value.bias"):
            gradient = gradient.chunk(2)[1]  # a bias on all keys moves all scores alike: softmax cannot see it
        assert gradient.abs().max() > 0, name


def test_each_parameter_of_the_contrastive_head_gets_a_gradient() -> None:
    for outputs in ("last", "all"):
        config = tiny_config(encoder_outputs=outputs)
        model = build_model(config.model)
        contrast = build_contrast(model.encoding, config.model, config.contrast)
        views = random_views()
        contrast(views, model.encode(views)).loss.backward()
        for name, parameter in (*contrast.projector.named_parameters(), *model.encoding.named_parameters()):
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        assert all(p.grad is None for p in contrast.momentum_encoding.parameters())


@every_variant
def test_what_lies_in_padding_changes_nothing(variant: dict[str, str]) -> None:
    model, captions = tiny_model(**variant), random_captions()
    lengths = [5, 2, 3]
    views = {name: random_view(spec, 3, [min(n, spec.max_tokens) for n in lengths]) for name, spec in VIEWS.items()}
    noisy = {
        name: replace(
            view,
            tokens=torch.where(view.mask[..., None], view.tokens, 1e4 * torch.randn_like(view.tokens)),
            boxes=None if view.boxes is None else torch.where(view.mask[..., None], view.boxes, torch.tensor(9.0)),
            indices={key: torch.where(view.mask, index, 0) for key, index in view.indices.items()},
        )
        for name, view in views.items()
    }
    assert_close(model(noisy, captions).logits, model(views, captions).logits)


@every_variant
def test_padding_a_view_longer_changes_nothing(variant: dict[str, str]) -> None:
    model, captions = tiny_model(**variant), random_captions()
    views = random_views()
    longer = {name: _pad(view, 3) for name, view in views.items()}
    assert_close(model(longer, captions).logits, model(views, captions).logits)


@every_variant
def test_an_absent_view_changes_nothing_however_it_is_absent(variant: dict[str, str]) -> None:
    model, captions = tiny_model(**variant), random_captions()
    views = random_views()
    left_out = {name: view for name, view in views.items() if name != "objects"}
    masked = views | {"objects": replace(views["objects"], mask=torch.zeros(3, 5, dtype=torch.bool))}
    without, hidden = model(left_out, captions), model(masked, captions)
    assert_close(without.logits, hidden.logits)
    assert without.logits.isfinite().all()
    assert not torch.allclose(without.logits, model(views, captions).logits), "the view must matter when it is there"
    if hidden.weights is not None:
        assert (hidden.weights[..., 0] == 0).all(), "an absent view gets weight exactly 0"
        assert_close(hidden.weights.sum(dim=-1), torch.ones(hidden.weights.shape[:-1]))


@every_variant
def test_a_photo_is_captioned_alike_alone_and_in_a_batch(variant: dict[str, str]) -> None:
    """Also the photo without objects, beside ones that have them."""
    model, captions = tiny_model(**variant), random_captions()
    views = {name: random_view(spec, 3, [spec.max_tokens, 0, 2]) for name, spec in VIEWS.items() if name != "grid"}
    views["grid"] = random_view(VIEWS["grid"], 3)
    together = model(views, captions).logits
    for photo in range(3):
        alone = {name: _rows(view, slice(photo, photo + 1)) for name, view in views.items()}
        assert_close(model(alone, captions[photo : photo + 1]).logits, together[photo : photo + 1])


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_view_at_all_gives_finite_numbers_and_gradients(variant: dict[str, str], dtype: torch.dtype) -> None:
    model = tiny_model(**variant).to(dtype).train()
    views = {name: random_view(spec, 2, [0, spec.max_tokens]) for name, spec in VIEWS.items()}
    decoded = model(views, random_captions(batch=2))
    assert decoded.logits.isfinite().all()
    decoded.logits.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_variant
def test_bfloat16_is_close_to_float32(variant: dict[str, str]) -> None:
    model, views, captions = tiny_model(**variant), random_views(), random_captions()
    exact = model(views, captions).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(views, captions).logits
    assert mixed.dtype == (torch.float32 if len(model.members) > 1 else torch.bfloat16)
    assert_close(mixed.float(), exact, rtol=0.1, atol=0.1)
    assert_close(model.bfloat16()(views, captions).logits.float(), exact, rtol=0.1, atol=0.1)


@every_variant
def test_cached_decoding_equals_uncached(variant: dict[str, str]) -> None:
    model, views, captions = tiny_model(**variant), random_views(), random_captions(words=6)
    whole = model(views, captions)
    cache = model.init_cache(model.encode(views))
    logits, weights = [], []
    for words in captions.split([1, 2, 1, 2], dim=2):
        step = model.decode(words, cache)
        cache = step.cache
        logits.append(step.logits)
        weights.append(step.weights)
    assert_close(torch.cat(logits, dim=2), whole.logits)
    if whole.weights is not None:
        assert_close(torch.cat(weights, dim=2), whole.weights)


@every_variant
def test_five_captions_against_one_encoding_equal_five_passes(variant: dict[str, str]) -> None:
    model, views = tiny_model(**variant), random_views()
    captions = random_captions(captions=5)
    together = model(views, captions).logits
    for index in range(5):
        assert_close(model(views, captions[:, index : index + 1]).logits, together[:, index : index + 1])


@every_variant
def test_later_words_change_nothing_before_them(variant: dict[str, str]) -> None:
    model, views, captions = tiny_model(**variant), random_views(), random_captions()
    other = captions.clone()
    other[:, :, 3:] = 1  # <pad> needs no mask: nobody in front of it can see it
    assert_close(model(views, other).logits[:, :, :3], model(views, captions).logits[:, :, :3])


@every_single_model
def test_permuting_views_permutes_weights_and_nothing_else(variant: dict[str, str]) -> None:
    order = ("text", "objects", "grid")
    model = tiny_model(**variant)
    permuted = tiny_model(**variant, views={name: VIEWS[name] for name in order})
    permuted.load_state_dict(model.state_dict())
    views, captions = random_views(), random_captions()
    first, second = model(views, captions), permuted({name: views[name] for name in reversed(order)}, captions)
    assert_close(first.logits, second.logits)
    if first.weights is not None:
        columns = [tuple(VIEWS).index(name) for name in order]
        assert_close(second.weights, first.weights[..., columns])


@every_decoder
def test_beams_share_their_photos_memory(decoder: str) -> None:
    model = tiny_model(decoder=decoder)
    cache = model.init_cache(model.encode(random_views()))
    first = model.decode(random_captions(captions=1, words=1), cache)
    beams = first.cache.reorder(torch.tensor([0, 1, 2]).repeat_interleave(5))
    assert {len(past) for past in (*beams.words, *beams.state)} == {3 * 5}
    for before, after in zip(cache.memory, beams.memory, strict=True):
        for old, new in zip(before.sources, after.sources, strict=True):
            assert new.memory.keys.data_ptr() == old.memory.keys.data_ptr()
            assert new.memory.keys.shape[0] == 3


@every_decoder
def test_reordered_cache_continues_the_chosen_captions(decoder: str) -> None:
    model, views = tiny_model(decoder=decoder), random_views()
    captions = random_captions(captions=3)
    decoded = model.decode(captions[:, :, :4], model.init_cache(model.encode(views)))
    beams = torch.tensor([[2, 0], [1, 1], [0, 2]])
    chosen = captions[torch.arange(3)[:, None], beams]
    rows = (beams + 3 * torch.arange(3)[:, None]).flatten()
    continued = model.decode(chosen[:, :, 4:], decoded.cache.reorder(rows))
    assert_close(continued.logits, model(views, chosen).logits[:, :, 4:])


# The paper's claims about parameters and cost


def _counts(encoding: str, views: int) -> tuple[int, int]:
    """(projections, everything else)"""
    config = tiny_config(encoding=encoding)
    config = replace(
        config, model=with_equal_views(config.model, views), contrast=replace(config.contrast, enabled=False)
    )
    parts = count_parameters(config)
    return parts["view projections"], sum(parts.values()) - parts["view projections"]


def test_parameters_apart_from_projections_are_constant_in_views_when_shared() -> None:
    rest = {_counts("shared", views)[1] for views in (1, 2, 5)}
    assert len(rest) == 1


def test_parameters_are_linear_in_views_when_unshared() -> None:
    one, two, five = (_counts("unshared", views)[1] for views in (1, 2, 5))
    assert two > one
    assert five - one == 4 * (two - one)
    encoder = count_parameters(tiny_config(encoding="shared"))["encoder"]
    assert two - one == encoder


def test_model_per_view_is_as_many_whole_models_as_views() -> None:
    one, four = (_counts("model_per_view", views) for views in (1, 4))
    assert four == (4 * one[0], 4 * one[1])


@pytest.mark.parametrize("encoding", KEEPS_VIEWS)
def test_encoding_and_step_are_linear_in_views(encoding: str) -> None:
    growth = describe(tiny_config(encoding=encoding)).growth
    for name in ("encoding", "encoding_attention", "memory", "step"):
        costs = {views: getattr(flops, name) for views, flops in growth.items()}
        slope = costs[2] - costs[1]
        assert slope > 0
        assert costs == {views: costs[1] + slope * (views - 1) for views in (1, 2, 4, 8, 16)}, name
        if name != "step":  # a step also attends to words and scores the vocabulary, whatever the views
            assert costs[1] == slope


def test_attention_is_quadratic_in_views_when_concatenated() -> None:
    config = tiny_config(encoding="concat_views", memory_slots=0)
    described = describe(config)
    costs = {views: flops.encoding_attention for views, flops in described.growth.items()}
    assert costs == {views: costs[1] * views**2 for views in (1, 2, 4, 8, 16)}
    assert described.exponents["encoding_attention"] == 2


def test_counted_attention_is_the_formula() -> None:
    """Scores and mixing: 2 products × 2 FLOPs × S × (S + slots) × D per layer."""
    config = tiny_config(views={"grid": VIEWS["grid"]})
    tokens, layers = 4 + 1, 2
    assert cost(config.model).encoding_attention == layers * 4 * tokens * (tokens + 3) * 16


# Attention against the slow obvious version


def _obvious_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    mixed = torch.zeros_like(query)
    for row, one in enumerate(query):
        real = [position for position in range(len(keys)) if mask[position]]
        scores = torch.stack([one @ keys[position] / len(one) ** 0.5 for position in real])
        mixed[row] = sum(
            weight * values[position] for weight, position in zip(scores.softmax(dim=0), real, strict=True)
        )
    return mixed


@pytest.mark.parametrize("weighed", [True, False])
def test_attention_and_its_gradients_equal_the_slow_obvious_version(weighed: bool) -> None:
    layer = Attention(d_model=8, heads=2, dropout=0.0, slots=2)
    x, mask = torch.randn(3, 8, requires_grad=True), torch.tensor([True, False, True])
    found = layer(x[None], layer.keys_values(x[None]), mask[None, None, None], weighed)[0]
    keys, values = layer.key_value(x).chunk(2, dim=-1)
    keys = torch.cat([keys, layer.slot_keys * 4**0.5])
    values = torch.cat([values, layer.slot_values * 2**0.5])
    real = torch.cat([mask, torch.tensor([True, True])])
    heads = [
        _obvious_attention(layer.query(x)[:, part], keys[:, part], values[:, part], real)
        for part in (slice(0, 4), slice(4, 8))
    ]
    expected = layer.norm(x + layer.output(torch.cat(heads, dim=-1)))
    assert_close(found, expected)
    inputs, further = [x, *layer.parameters()], torch.randn(3, 8)
    wanted = torch.autograd.grad((expected * further).sum(), inputs)
    assert_close(torch.autograd.grad((found * further).sum(), inputs), wanted, atol=1e-5, rtol=1e-4)


def test_set_attention_equals_attention_over_the_same_items() -> None:
    few, many = SetAttention(8, 2, 0.0), Attention(8, 2, 0.0)
    many.load_state_dict(few.state_dict())
    query, items = torch.randn(5, 8), torch.randn(5, 3, 8)
    mask = torch.tensor([[True, True, True], [True, False, True]]).repeat(3, 1)[:5]
    found, weights = few(query, items, mask)
    memory: KeyValues = many.keys_values(items)
    assert_close(found, many(query[:, None], memory, mask[:, None, None])[:, 0])
    assert (weights[~mask[:, None].expand_as(weights)] == 0).all()


def test_masked_softmax_of_nothing_is_zero() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    weights = masked_softmax(scores, torch.tensor([[False] * 3, [True, False, True]]))
    assert (weights[0] == 0).all()
    assert weights[1, 1] == 0
    weights.sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


# The three dropouts


@given(
    mask=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5),
    p=st.floats(0, 0.999),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_thinning_keeps_a_real_one_and_adds_none(mask: list[list[bool]], p: float, seed: int) -> None:
    torch.manual_seed(seed)
    before = torch.tensor(mask)
    for after in (drop_tokens(before, p), drop_views(before, p, "photo"), drop_views(before, p, "batch")):
        assert not (after & ~before).any()
        assert torch.equal(after.any(dim=1), before.any(dim=1))


def test_dropped_share_is_what_was_asked_for() -> None:
    many = torch.ones(200, 200, dtype=torch.bool)
    assert abs(drop_tokens(many, 0.3).float().mean().item() - 0.7) < 0.01


def test_channels_are_dropped_across_views_and_tokens() -> None:
    specs = {"a": VIEWS["grid"], "b": VIEWS["grid"]}
    model = tiny_model(**(SILENT | {"channel_dropout": 0.5}), views=specs).train()
    embed = model.encoding.embed
    first, second = embed(random_views(specs=specs))
    dropped = (first.tokens[:, 1:] == 0).all(dim=1)
    assert torch.equal(dropped, (second.tokens[:, 1:] == 0).all(dim=1))
    assert 0 < dropped.sum() < dropped.numel()
    assert torch.equal((first.tokens[:, 1:] == 0).any(dim=1), dropped), "whole channels only"


def test_elements_are_dropped_one_by_one_under_the_release() -> None:
    model = tiny_model(**(SILENT | {"channel_dropout": 0.5}), channel_dropout_unit="element").train()
    tokens = model.encoding.embed(random_views())[1].tokens[:, 1:]
    zero = tokens == 0
    assert not torch.equal(zero.any(dim=1), zero.all(dim=1))


@pytest.mark.parametrize(("leaves", "padding"), [("zero", False), ("padding", True)])
def test_dropped_tokens_become_zeros_or_padding(leaves: str, padding: bool) -> None:
    model = tiny_model(**(SILENT | {"token_dropout": 0.6}), token_dropout_leaves=leaves, cls="mean").train()
    views = random_views()
    plain = model.eval().encoding.embed(views)[1]
    embedded = model.train().encoding.embed(views)[1]
    dropped = (embedded.tokens == 0).all(dim=-1)
    assert dropped.any()
    assert not dropped[:, 0].any(), "[CLS] is never dropped"
    assert_close(embedded.tokens[:, 0], plain.tokens[:, 0])
    assert torch.equal(~embedded.mask, dropped if padding else torch.zeros_like(dropped))


def test_view_dropout_hides_views_from_the_decoder_only() -> None:
    model = tiny_model(**(SILENT | {"view_dropout": 0.6})).train()
    encoded = model.encode(random_views(batch=40))
    assert not encoded.present.all()
    assert encoded.present.any(dim=1).all()
    assert encoded.cls_mask.all(), "the contrastive loss still sees every view"
    decoded = model.decode(random_captions(batch=40), model.init_cache(encoded))
    gone = ~encoded.present[:, None, None, None, None].expand_as(decoded.weights)
    assert (decoded.weights[gone] == 0).all()


def test_release_draws_view_dropout_once_for_the_batch() -> None:
    model = tiny_model(**(SILENT | {"view_dropout": 0.6}), view_dropout_draw="batch").train()
    draws = [model.encode(random_views()).present for _ in range(20)]
    assert all((present == present[0]).all() for present in draws)
    assert not all(present.all() for present in draws)


def test_evaluation_draws_nothing() -> None:
    model, views, captions = tiny_model(), random_views(), random_captions()
    before = torch.get_rng_state()
    model(views, captions)
    assert torch.equal(torch.get_rng_state(), before)


# Ensembles


def test_an_ensemble_averages_word_probabilities() -> None:
    model, views, captions = tiny_model(encoding="model_per_view"), random_views(), random_captions()
    alone = [
        member({name: views[name]}, captions).logprobs.exp() for name, member in zip(VIEWS, model.members, strict=True)
    ]
    assert_close(model(views, captions).logprobs.exp(), torch.stack(alone).mean(dim=0))


def test_a_member_that_sees_nothing_has_no_say() -> None:
    model, captions = tiny_model(encoding="model_per_view"), random_captions()
    views = random_views()
    objects = random_view(VIEWS["objects"], 3, [5, 0, 5])
    found = model(views | {"objects": objects}, captions).logprobs
    rest = {name: view for name, view in views.items() if name != "objects"}
    assert_close(found[1], model(rest, captions).logprobs[1])


# What a user may get wrong


def test_wrong_views_are_named() -> None:
    model = tiny_model()
    views = random_views()
    with pytest.raises(ViewError, match=r"unknown view 'gird'\. Did you mean 'grid'"):
        check_views(model, {"gird": views["grid"]})
    with pytest.raises(ViewError, match=r"view 'grid' has shape \(3, 5, 10\); this model takes \(photos, tokens, 6\)"):
        check_views(model, {"grid": View(views["objects"].tokens, views["objects"].mask)})
    with pytest.raises(ViewError, match="view 'text' lacks crop, rank"):
        check_views(model, {"text": replace(views["text"], indices={})})
    with pytest.raises(ViewError, match="view 'objects' lacks boxes"):
        check_views(model, {"objects": replace(views["objects"], boxes=None)})
    with pytest.raises(ViewError, match="float32 mask"):
        check_views(model, {"grid": replace(views["grid"], mask=torch.ones(3, 4))})
    with pytest.raises(ViewError, match="has 2 photos"):
        check_views(model, {"grid": views["grid"], "text": random_view(VIEWS["text"], 2)})
    with pytest.raises(ViewError, match="no view was given"):
        check_views(model, {})
    with pytest.raises(ViewError, match="unknown view 'gird'"):
        check_views(tiny_model(encoding="model_per_view"), {"gird": views["grid"]})


def test_a_caption_longer_than_its_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="13 words: this model has positions for 12"):
        tiny_model()(random_views(), random_captions(words=13))


def _pad(view: View, extra: int) -> View:
    def grow(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor[:, :1].expand(-1, extra, *tensor.shape[2:])], dim=1)

    mask = torch.cat([view.mask, torch.zeros(len(view.mask), extra, dtype=torch.bool)], dim=1)
    indices = {name: grow(index) for name, index in view.indices.items()}
    return View(grow(view.tokens), mask, indices, None if view.boxes is None else grow(view.boxes))


def _rows(view: View, rows: slice) -> View:
    indices = {name: index[rows] for name, index in view.indices.items()}
    return View(view.tokens[rows], view.mask[rows], indices, None if view.boxes is None else view.boxes[rows])


def test_haav_is_one_model_and_its_own_only_member() -> None:
    model = tiny_model()
    assert isinstance(model, Haav)
    assert model.members == (model,)


# Formulas that a mutation could bend unseen


@pytest.mark.parametrize("name", ["mean", "max", "sigmoid", "tanh"])
def test_pooling_and_gating_are_their_formulas(name: str) -> None:
    part = aggregators.get(name)(("a", "b", "c"), layers=1, d_model=8, heads=2, dropout=0.0)
    query, found = torch.randn(2, 4, 8), torch.randn(2, 4, 3, 8)
    context = part.across(query, found, torch.tensor([[[True, True, True]], [[True, False, True]]])).context
    for photo, views in enumerate(("abc", "ac")):
        seen = [found[photo, :, "abc".index(view)] for view in views]
        if name in ("mean", "max"):
            stacked = torch.stack(seen)
            expected = stacked.mean(dim=0) if name == "mean" else stacked.amax(dim=0)
        else:
            squash = getattr(torch, name)
            pairs = list(zip(views, seen, strict=True))
            gated = [squash(part.gates[view](torch.cat([query[photo], one], -1))) * one for view, one in pairs]
            expected = torch.stack(gated).sum(dim=0) / len(seen) ** 0.5
        assert_close(context[photo], expected)


def test_lv2_begins_as_the_mean_over_present_views() -> None:
    """Three views worked by hand: (1, 2), (3, 6) and (5, 1) have the mean (3, 3); without the second it is (3, 1.5)."""
    part = aggregators.get("hierarchical_from_mean")(("a", "b", "c"), layers=1, d_model=2, heads=1, dropout=0.5)
    contexts = torch.tensor([[1.0, 2], [3, 6], [5, 1]]).expand(2, 1, 3, 2)
    gathered = part.across(torch.randn(2, 1, 2), contexts, torch.tensor([[[True, True, True]], [[True, False, True]]]))
    assert_close(gathered.context, torch.tensor([[[3.0, 3.0]], [[3.0, 1.5]]]), rtol=0, atol=1e-6)
    third, half = [1 / 3, 1 / 3, 1 / 3], [0.5, 0.0, 0.5]
    assert_close(gathered.weights, torch.tensor([[[third]], [[half]]]))


def test_lv2_from_the_mean_is_its_formula_wherever_training_leads() -> None:
    part = aggregators.get("hierarchical_from_mean")(("a", "b", "c"), layers=1, d_model=8, heads=2, dropout=0.0)
    for parameter in part.parameters():
        nn.init.normal_(parameter)
    lv2, query, contexts = part.across_views, torch.randn(1, 1, 8), torch.randn(1, 1, 3, 8)
    gathered = part.across(query, contexts, torch.tensor([[[True, False, True]]]))
    keys, values = lv2.key_value(contexts[0, 0]).chunk(2, dim=-1)
    asked, seen = lv2.query(lv2.norm(query[0])), torch.tensor([True, False, True])
    heads = [_obvious_attention(asked[:, h], keys[:, h], values[:, h], seen) for h in (slice(0, 4), slice(4, 8))]
    assert_close(gathered.context[0], lv2.output(torch.cat(heads, dim=-1)))


@pytest.mark.parametrize("outputs", ["last", "all"])
def test_a_start_from_the_mean_sends_the_encoder_the_gradient_of_the_mean(outputs: str) -> None:
    """The paper's start sends less of it."""
    ours, mean, paper = (
        tiny_model(**SILENT, aggregator=name, encoder_outputs=outputs)
        for name in ("hierarchical_from_mean", "mean", "hierarchical")
    )
    mean.load_state_dict({name: ours.state_dict()[name] for name in mean.state_dict()})
    common = mean.state_dict()
    paper.load_state_dict(common, strict=False)
    views, captions = random_views(), random_captions()
    logits = [model(views, captions).logits for model in (ours, mean, paper)]
    assert_close(logits[0], logits[1])
    for one in logits:
        one.log_softmax(dim=-1)[..., 5].mean().backward()
    for (name, first), second in zip(ours.encoding.named_parameters(), mean.encoding.parameters(), strict=True):
        assert_close(first.grad, second.grad, msg=name)
    reaching = [sum(float(p.grad.norm() ** 2) for p in model.encoding.parameters()) for model in (ours, paper)]
    assert reaching[0] > reaching[1]


def test_all_of_lv2_learns_after_its_first_step_from_the_mean() -> None:
    model = tiny_model(**SILENT, aggregator="hierarchical_from_mean")
    views, captions = random_views(), random_captions()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(views, captions).logits[:, :, :-1], captions[:, :, 1:], pad=1).backward()
        optimizer.step()
    lv2 = model.decoder.layers[0].aggregator.across_views
    keys, values = lv2.key_value.weight.grad.chunk(2)
    assert all(gradient.abs().max() > 0 for gradient in (keys, values, lv2.query.weight.grad, lv2.output.weight.grad))
    assert model(views, captions).weights.std(dim=-1).max() > 0, "views differ in weight by now"


def test_weights_trained_from_either_start_load_into_the_other() -> None:
    ours, paper = (tiny_model(aggregator=name) for name in ("hierarchical_from_mean", "hierarchical"))
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (ours, paper)]
    assert shapes[0] == shapes[1]
    paper.load_state_dict(ours.state_dict())


def test_joint_attention_is_that_over_all_tokens_and_its_shares_are_the_weights() -> None:
    joint = aggregators.get("joint")(("a", "b"), layers=1, d_model=8, heads=2, dropout=0.0)
    plain = aggregators.get("concat_tokens")(("a", "b"), layers=1, d_model=8, heads=2, dropout=0.0)
    plain.attention.load_state_dict(joint.within.state_dict())
    tokens = (torch.randn(3, 1, 5, 8), torch.randn(3, 1, 2, 8))
    masks = (torch.ones(3, 5, dtype=torch.bool), torch.tensor([[True, False], [True, True], [True, True]]))
    present = torch.tensor([[True, True], [True, True], [False, True]])
    encoded, query = EncodedViews(("a", "b"), tokens, masks, present), torch.randn(3, 4, 8)
    found, expected = joint(query, joint.build_memory(encoded)), plain(query, plain.build_memory(encoded))
    assert_close(found.context, expected.context)
    for photo, word, head in itertools.product(range(3), range(4), range(2)):
        asked = (joint.within.query(query[photo, word]) / 4**0.5)[4 * head : 4 * head + 4]
        own = []
        for part, mask, there in zip(tokens, masks, present[photo], strict=True):
            keys = joint.within.key_value(part[photo, 0])[:, 4 * head : 4 * head + 4]
            own.append((keys @ asked).exp() * mask[photo] * there)
        whole = torch.cat(own).sum()
        assert_close(found.weights[photo, word, head], torch.stack([part.sum() / whole for part in own]))
        assert_close(found.looks[0][photo, 0, head, word], torch.cat(own) / whole)


def test_the_meshed_decoder_gates_encoder_layers_as_m2_does() -> None:
    part = aggregators.get("concat_tokens")(("all",), layers=3, d_model=8, heads=2, dropout=0.0)
    tokens, mask, query = torch.randn(2, 3, 5, 8), torch.ones(2, 5, dtype=torch.bool), torch.randn(2, 4, 8)
    found = part(
        query, part.build_memory(EncodedViews(("all",), (tokens,), (mask,), torch.ones(2, 1, dtype=torch.bool)))
    )
    expected = torch.zeros(2, 4, 8)
    for layer, gate in enumerate(part.gates):
        seen = part.attention(query, part.attention.keys_values(tokens[:, layer]), None)
        expected = expected + gate(torch.cat([query, seen], dim=-1)).sigmoid() * seen
    assert_close(found.context, expected / 3**0.5)


@pytest.mark.parametrize(
    "variant",
    [variant for variant in combinations() if variant["encoding"] in KEEPS_VIEWS],
    ids=lambda variant: "-".join(variant.values()),
)
def test_a_dropped_view_is_as_if_it_were_absent(variant: dict[str, str]) -> None:
    model, views, captions = tiny_model(**variant), random_views(), random_captions()
    dropped = replace(model.encode(views), present=torch.tensor([[False, True, True]]).expand(3, -1))
    rest = {name: view for name, view in views.items() if name != "objects"}
    assert_close(model.decode(captions, model.init_cache(dropped)).logits, model(rest, captions).logits)


def test_sinusoids_worked_by_hand() -> None:
    row = [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)]
    assert_close(sinusoids(3, 4)[[0, 2]], torch.tensor([[0.0, 1, 0, 1], row]))


def test_kept_channels_are_scaled_and_drawn_for_each_photo() -> None:
    kept = keep_channels(50, 40, 0.2, torch.zeros(1))
    assert set(kept.unique().tolist()) == {0.0, 1.25}
    assert not (kept == kept[:1]).all()


def test_blocks_drop_where_the_release_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Dropout, "forward", lambda self, x: (seen.append(x.shape[-1]), x)[1])
    monkeypatch.setattr(Dropout, "after_relu", lambda self, x: (seen.append(x.shape[-1]), (x.relu(), 1.0))[1])
    FeedForward(8, 24, 0.1)(torch.randn(2, 8))
    layer = Attention(8, 2, 0.1)
    layer(torch.randn(1, 3, 8), layer.keys_values(torch.randn(1, 3, 8)), None)
    assert seen == [24, 8, 8]


@pytest.mark.parametrize("outputs", ["last", "all"])
@pytest.mark.parametrize("encoding", KEEPS_VIEWS)
def test_cls_alone_is_the_cls_of_all(encoding: str, outputs: str) -> None:
    model = tiny_model(encoding=encoding, encoder_outputs=outputs).eval()
    views = random_views()
    whole, alone = model.encoding(views), model.encoding(views, cls_only=True)
    assert_close(alone.cls, whole.cls)
    assert {tokens.shape[2] for tokens in alone.tokens} == {1}
    assert torch.equal(alone.present, whole.present)


def test_box_geometry_is_sides_width_and_height() -> None:
    embed = ViewEmbedding(ViewSpec(3, 1, boxes=True), 6, learned_cls=True, token_dropout=0.0, dropped_is_padding=False)
    with torch.no_grad():
        embed.project.weight.zero_()
        embed.project.bias.zero_()
        embed.geometry.weight.copy_(torch.eye(6))
    view = replace(random_view(embed.spec, 1), boxes=torch.tensor([[[0.1, 0.2, 0.4, 0.9]]]))
    assert_close(embed(view, nn.Identity()).tokens[0, 1], torch.tensor([0.1, 0.2, 0.4, 0.9, 0.3, 0.7]))


def test_view_dropout_hides_the_share_that_was_asked_for() -> None:
    model = tiny_model(**(SILENT | {"view_dropout": 0.4})).train()
    hidden = 1 - torch.cat([model.encode(random_views(batch=200)).present for _ in range(5)]).float().mean().item()
    assert hidden == pytest.approx(0.4 - 0.4**3 / 3, abs=0.03)  # a photo's last view stays


def test_a_step_costs_what_the_formula_says() -> None:
    d, inner, views, layers, tokens = 16, 24, 3, 2, sum(spec.max_tokens + 1 for spec in VIEWS.values())
    itself = 8 * d * d + 4 * d
    within = 2 * d * d + views * 2 * d * d + 4 * d * tokens  # one query for all views
    # Lv2: query, output, and the query carried to the keys and back from the values; then 4 heads × 3 views, twice.
    across = 8 * d * d + 4 * 4 * views * d
    found = cost(tiny_config().model)
    assert found.step == layers * (itself + within + across + 4 * d * inner) + 2 * d * 23
    assert found.memory == layers * 4 * d * d * tokens


@every_variant
def test_nan_in_padding_reaches_no_gradient(variant: dict[str, str]) -> None:
    model = tiny_model(**variant).train()
    views = {name: random_view(spec, 2, [2, 3]) for name, spec in VIEWS.items()}
    poisoned = {
        name: replace(
            view,
            tokens=view.tokens.masked_fill(~view.mask[..., None], torch.nan),
            boxes=None if view.boxes is None else view.boxes.masked_fill(~view.mask[..., None], torch.nan),
            indices={key: index.masked_fill(~view.mask, 999) for key, index in view.indices.items()},
        )
        for name, view in views.items()
    }
    model(poisoned, random_captions(batch=2)).logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_variant
def test_a_blind_photo_is_not_captioned_from_its_padding(variant: dict[str, str]) -> None:
    model, captions = tiny_model(**variant), random_captions(batch=1)
    blind = {name: random_view(spec, 1, [0]) for name, spec in VIEWS.items()}
    longer = {name: _pad(view, 4) for name, view in blind.items()}
    assert_close(model(blind, captions).logits, model(longer, captions).logits)


def test_a_batch_of_no_photos_gives_no_captions() -> None:
    assert tiny_model()(random_views(batch=0), random_captions(batch=0)).logits.shape == (0, 2, 5, 23)


def test_wrong_positions_are_named() -> None:
    model, text = tiny_model(), random_view(VIEWS["text"], 2)
    far = replace(text, indices=text.indices | {"rank": torch.full((2, 6), 3)})
    with pytest.raises(ViewError, match="'rank' of view 'text' goes from 3 to 3; this model has 0 to 2"):
        check_views(model, {"text": far})
    short = replace(text, indices=text.indices | {"rank": torch.zeros(2, 5, dtype=torch.int64)})
    with pytest.raises(ViewError, match=r"has shape \(2, 5\); it must be \(2, 6\)"):
        check_views(model, {"text": short})
    boxes = replace(random_view(VIEWS["objects"], 2), boxes=torch.zeros(2, 5, 3))
    with pytest.raises(ViewError, match=r"boxes of view 'objects' have shape \(2, 5, 3\)"):
        check_views(model, {"objects": boxes})
    with pytest.raises(ViewError, match="has 3 photos, view 'text' has 2"):
        check_views(tiny_model(encoding="model_per_view"), {"text": text, "grid": random_view(VIEWS["grid"], 3)})


@pytest.mark.parametrize("outputs", ["last", "all"])
@pytest.mark.parametrize("aggregator", TWO_TIERS)
def test_looks_are_where_each_word_looks_within_each_view(aggregator: str, outputs: str) -> None:
    model = tiny_model(aggregator=aggregator, encoder_outputs=outputs).eval()
    views, captions = random_views(), random_captions(3, 2, 5)
    decoded = model(views, captions)
    layers = 1 if outputs == "last" else 3
    assert len(decoded.looks) == len(model.decoder.layers)
    encoded = model.encode(views)
    for per_view in decoded.looks:
        for look, mask in zip(per_view, encoded.masks, strict=True):
            assert look.shape[:2] == (3, min(layers, look.shape[1]))
            assert look.shape[3:] == (2 * 5, mask.shape[1])
            seen = mask[:, None, None, None]
            assert_close(look.masked_fill(~seen, 0).sum(dim=-1)[mask.any(dim=1)], look.sum(dim=-1)[mask.any(dim=1)])
            assert (look.masked_fill(seen, 0)[mask.any(dim=1)] == 0).all(), "padding is never looked at"


@pytest.mark.parametrize("outputs", ["last", "all"])
def test_what_joint_looks_at_in_a_view_is_what_its_attention_over_that_view_alone_would(outputs: str) -> None:
    joint = tiny_model(encoder_outputs=outputs, aggregator="joint", decoder_layers=1).eval()
    views, captions = random_views(), random_captions(3, 2, 5)
    encoded = joint.encode(views)
    whole = joint.decode(captions, joint.init_cache(encoded)).looks_by_view(encoded)
    for index, (name, mask) in enumerate(zip(encoded.names, encoded.masks, strict=True)):
        only = torch.zeros_like(encoded.present)
        only[:, index] = encoded.present[:, index]
        alone = replace(encoded, present=only)
        looks = joint.decode(captions, joint.init_cache(alone)).looks_by_view(alone)[index]
        there = encoded.present[:, index]
        assert there.any()
        assert whole[index].shape == (3, 4, 2 * 5, mask.shape[1])
        assert_close(whole[index][there], looks[there], msg=name)
