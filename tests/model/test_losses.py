from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from haav.model.build import build_contrast, build_model
from haav.model.contrast import MomentumContrast
from haav.model.losses import info_nce_terms
from haav.text import PAD
from haav.train.objectives import CrossEntropy
from haav.types import Batch
from helpers import SILENT, cross_entropy, random_captions, random_view, random_views, tiny_config, tiny_model


def info_nce(
    queries: Tensor, keys: Tensor, mask: Tensor, queue: Tensor, temperature: float, positives: str = "others"
) -> Tensor:
    """The mean term, where queries and keys are of the same photos"""
    terms, pairs = info_nce_terms(queries, mask, keys, mask, 0, queue, temperature, positives)
    return terms / pairs.clamp(min=1)


def test_info_nce_worked_by_hand() -> None:
    """Two photos, two views, vectors in the plane, temperature 1/2, one key in the queue.

    Queries = keys: photo 0 has views (1,0), (0,1); photo 1 has (1,0), (-1,0); queue (0,1).
    Scores are twice the inner products. Positives "others": each view against the other view.

    photo 0, view 0: pos 2·0 = 0;  negatives 2, -2 (photo 1), 0 (queue) → log(e^0 + e^2 + e^-2 + e^0) - 0
    photo 0, view 1: pos 0;        negatives 0, 0, 2                    → log(1 + 1 + 1 + e^2) - 0
    photo 1, view 0: pos -2;       negatives 2, 0, 0                    → log(e^-2 + e^2 + 1 + 1) + 2
    photo 1, view 1: pos -2;       negatives -2, 0, 0                   → log(e^-2 + e^-2 + 1 + 1) + 2
    """
    vectors = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [-1.0, 0.0]]])
    queue = torch.tensor([[0.0, 1.0]])
    e2, e_2 = math.exp(2), math.exp(-2)
    terms = [
        math.log(1 + e2 + e_2 + 1),
        math.log(3 + e2),
        math.log(e_2 + e2 + 2) + 2,
        math.log(2 * e_2 + 2) + 2,
    ]
    mask = torch.ones(2, 2, dtype=torch.bool)
    found = info_nce(vectors, vectors, mask, queue, temperature=0.5, positives="others")
    assert found.item() == pytest.approx(sum(terms) / 4, abs=1e-6)


@pytest.mark.parametrize("positives", ["others", "all"])
@pytest.mark.parametrize("queue_size", [0, 7])
def test_info_nce_equals_the_slow_obvious_sum(positives: str, queue_size: int) -> None:
    queries, keys = (F.normalize(torch.randn(4, 3, 5), dim=-1) for _ in range(2))
    queue = F.normalize(torch.randn(queue_size, 5), dim=-1)
    mask = torch.tensor([[True, True, True], [True, False, True], [False, False, False], [True, True, False]])
    terms = []
    for photo, view in mask.nonzero().tolist():
        score = queries[photo, view] / 0.1
        negatives = [score @ keys[b, v] for b, v in mask.nonzero().tolist() if b != photo]
        negatives += [score @ key for key in queue]
        for other in range(3):
            if mask[photo, other] and (positives == "all" or other != view):
                positive = score @ keys[photo, other]
                terms.append(torch.stack([positive, *negatives]).logsumexp(dim=0) - positive)
    found = info_nce(queries, keys, mask, queue, temperature=0.1, positives=positives)
    assert_close(found, torch.stack(terms).mean())


def test_info_nce_of_a_lone_photo_without_a_queue_is_zero_and_differentiable() -> None:
    queries = torch.randn(1, 2, 5, requires_grad=True)
    loss = info_nce(queries, torch.randn(1, 2, 5), torch.ones(1, 2, dtype=torch.bool), torch.zeros(0, 5), 0.06)
    loss.backward()
    assert loss.item() == 0
    assert queries.grad is not None
    assert queries.grad.isfinite().all()


def test_cross_entropy_counts_real_words_only() -> None:
    model, views, captions = tiny_model(), random_views(), random_captions()
    captions[0, 1, 3:] = captions[2, 0, 1:] = PAD
    found = CrossEntropy()(model, model.encode(views), Batch(("a", "b", "c"), views, captions))["xe"]
    assert_close(found, cross_entropy(model(views, captions).logits[:, :, :-1], captions[:, :, 1:], PAD))


def test_captions_of_nothing_but_padding_cost_nothing() -> None:
    model, views = tiny_model(), random_views()
    captions = torch.full((3, 2, 5), PAD)
    loss = CrossEntropy()(model, model.encode(views), Batch(("a", "b", "c"), views, captions))["xe"]
    loss.backward()
    assert loss.item() == 0


def contrast_of(**model: object) -> tuple[torch.nn.Module, MomentumContrast]:
    config = tiny_config(**model)
    network = build_model(config.model)
    return network, build_contrast(network.encoding, config.model, config.contrast)


@pytest.mark.parametrize("batches", [[3, 3, 3, 3], [7, 5, 11, 2], [20, 1, 19], [50, 3], [0, 4]])
def test_queue_wraps_for_batches_that_do_not_divide_it(batches: list[int]) -> None:
    _, contrast = contrast_of()
    kept: list[torch.Tensor] = []
    for size in batches:
        keys = torch.randn(size, 16)
        contrast.enqueue(keys)
        kept += list(keys)
    newest = kept[-20:]
    assert int(contrast.filled) == len(newest)
    rows = {tuple(row.tolist()) for row in contrast.queue[: int(contrast.filled)]}
    assert rows == {tuple(key.tolist()) for key in newest}


def test_queue_overwrites_the_oldest_first() -> None:
    _, contrast = contrast_of()
    contrast.enqueue(torch.arange(18.0)[:, None].expand(-1, 16))
    contrast.enqueue(torch.arange(18.0, 23.0)[:, None].expand(-1, 16))
    assert contrast.queue[:, 0].tolist() == [20.0, 21.0, 22.0, *map(float, range(3, 20))]
    assert int(contrast.position) == 3


def test_an_empty_queue_is_no_negative() -> None:
    network, contrast = contrast_of(**SILENT)
    views = random_views()
    result = contrast(views, network.encode(views))
    bare = info_nce(result.queries, result.keys, result.mask, torch.zeros(0, 16), 0.06)
    assert_close(result.loss, bare)


def test_absent_views_make_no_keys_and_no_terms() -> None:
    network, contrast = contrast_of(**SILENT)
    views = random_views() | {"objects": random_view(tiny_config().model.views["objects"], 3, [5, 0, 5])}
    result = contrast(views, network.encode(views))
    assert result.mask.tolist() == [[True] * 3, [False, True, True], [True] * 3]
    assert (result.queries[1, 0] == 0).all()
    contrast.enqueue(result.keys[result.mask])
    assert int(contrast.filled) == 8
    assert_close(contrast.queue[:8].norm(dim=-1), torch.ones(8))


def test_absent_views_take_no_part_in_batch_statistics() -> None:
    network, contrast = contrast_of(**SILENT)
    views = random_views()
    encoded = network.encode(views)
    mask = encoded.cls_mask.clone()
    mask[1, 0] = False
    before = contrast.projector(encoded.cls, mask)
    changed = encoded.cls.clone()
    changed[1, 0] = 1e3
    assert_close(contrast.projector(changed, mask), before)


def test_momentum_copy_follows_slowly_and_is_never_trained() -> None:
    network, contrast = contrast_of()
    old = {name: p.clone() for name, p in contrast.momentum_encoding.named_parameters()}
    with torch.no_grad():
        for parameter in network.encoding.parameters():
            parameter.add_(1.0)
    contrast.follow(network.encoding)
    for name, parameter in contrast.momentum_encoding.named_parameters():
        assert_close(parameter, old[name] + 0.001)
        assert not parameter.requires_grad


def test_contrast_needs_no_captions_and_trains_the_encoding() -> None:
    network, contrast = contrast_of(**SILENT)
    optimizer = torch.optim.AdamW([*network.encoding.parameters(), *contrast.projector.parameters()], lr=3e-3)
    views = random_views(batch=8)
    losses = []
    for _ in range(30):
        result = contrast(views, network.encode(views))
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        contrast.follow(network.encoding)
        losses.append(result.loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_lone_view_is_skipped_instead_of_breaking_batch_norm() -> None:
    network, contrast = contrast_of(**SILENT)
    views = {"grid": random_view(tiny_config().model.views["grid"], 1)}
    result = contrast(views, network.encode(views))
    result.loss.backward()
    assert result.loss.item() == 0


def test_momentum_copy_is_not_part_of_the_model() -> None:
    network, contrast = contrast_of()
    assert not any("momentum" in name or "projector" in name for name in network.state_dict())
    assert not {id(p) for p in network.parameters()} & {id(p) for p in contrast.parameters()}
    assert network(random_views(), random_captions()).logits.isfinite().all()


def test_the_momentum_projector_follows_and_is_never_trained() -> None:
    network, contrast = contrast_of()
    old = [parameter.clone() for parameter in contrast.momentum_projector.parameters()]
    with torch.no_grad():
        for parameter in contrast.projector.parameters():
            parameter.add_(1.0)
    contrast.follow(network.encoding)
    for before, after in zip(old, contrast.momentum_projector.parameters(), strict=True):
        assert_close(after, before + 0.001)
        assert not after.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_info_nce_is_exact_under_autocast(dtype: torch.dtype) -> None:
    vectors, mask = F.normalize(torch.randn(8, 4, 64), dim=-1), torch.ones(8, 4, dtype=torch.bool)
    queue = F.normalize(torch.randn(50, 64), dim=-1)
    exact = info_nce(vectors, vectors.flip(0), mask, queue, 0.06)
    with torch.autocast("cpu", dtype=dtype):
        assert_close(info_nce(vectors, vectors.flip(0), mask, queue, 0.06), exact)


def test_contrast_works_on_a_bfloat16_model_and_keeps_its_copy_in_float32() -> None:
    config = tiny_config()
    network = build_model(config.model).bfloat16()
    contrast = build_contrast(network.encoding, config.model, config.contrast)
    views = random_views()
    result = contrast(views, network.encode(views))
    result.loss.backward()
    contrast.enqueue(result.keys[result.mask])
    contrast.follow(network.encoding)
    assert {p.dtype for p in contrast.momentum_encoding.parameters()} == {torch.float32}
