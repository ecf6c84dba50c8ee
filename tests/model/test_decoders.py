"""The compared systems against their published equations, written out with plain loops. Laws that every decoder keeps
are in test_model.py, test_generate.py and test_pretrained.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from haav.config import Config
from haav.config.load import flags_from
from haav.errors import ConfigError
from haav.model.build import build_model, load_config
from haav.model.decoders import decoders
from haav.model.decoders.aoa import RefiningLayer
from haav.model.haav import Haav
from haav.studies.describe import count_parameters
from haav.studies.explain import weighing
from haav.train.objectives import CrossEntropy
from haav.types import Batch
from helpers import (
    SILENT,
    VIEWS,
    every_decoder,
    random_captions,
    random_view,
    random_views,
    tiny_captioner,
    tiny_config,
)

D, WORDS = 16, 23
"""of `tiny_config`"""


def _lstm(cell: nn.LSTMCell, x: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Hochreiter and Schmidhuber's, one vector at a time"""
    gates = cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ hidden + cell.bias_hh
    size = len(hidden)
    let_in, forget, new, let_out = (gates[part * size : (part + 1) * size] for part in range(4))
    memory = forget.sigmoid() * memory + let_in.sigmoid() * new.tanh()
    return let_out.sigmoid() * memory.tanh(), memory


def _tokens(model: Haav, views: dict[str, object], photo: int) -> list[Tensor]:
    """What a photo really has: the encoded tokens of all its views, one by one"""
    encoded = model.encode(views)
    return [
        tokens[photo, -1, place]
        for tokens, mask in zip(encoded.tokens, encoded.masks, strict=True)
        for place in range(mask.shape[1])
        if mask[photo, place]
    ]


def _up_down(model: Haav, features: list[Tensor], words: list[int]) -> list[Tensor]:
    part = model.decoder
    hidden1, memory1, hidden2, memory2 = (torch.zeros(D) for _ in range(4))
    mean = sum(features) / len(features)
    scores = []
    for word in words:
        x = torch.cat([hidden2, mean, part.words.weight[word]])
        hidden1, memory1 = _lstm(part.attention_lstm, x, hidden1, memory1)
        a = [part.score.weight[0] @ (part.key.weight @ v + part.query.weight @ hidden1).tanh() for v in features]
        share = torch.stack(a).softmax(dim=0)
        attended = sum(alpha * v for alpha, v in zip(share, features, strict=True))
        hidden2, memory2 = _lstm(part.language_lstm, torch.cat([attended, hidden1]), hidden2, memory2)
        scores.append(part.output.weight @ hidden2)
    return scores


def _attention_on_attention(part: nn.Module, x: Tensor, features: list[Tensor], heads: int) -> Tensor:
    query, keys_values = part.query.weight @ x, [part.key_value.weight @ v for v in features]
    attended, size = [], len(x) // heads
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        fit = torch.stack([query[own] @ pair[:D][own] / size**0.5 for pair in keys_values]).softmax(dim=0)
        attended.append(sum(share * pair[D:][own] for share, pair in zip(fit, keys_values, strict=True)))
    both = torch.cat([query, *attended])
    information = part.information.weight @ both + part.information.bias
    gate = (part.gate.weight @ both + part.gate.bias).sigmoid()
    return information * gate


def _aoa(model: Haav, features: list[Tensor], words: list[int]) -> list[Tensor]:
    part = model.decoder
    hidden, memory, context = (torch.zeros(D) for _ in range(3))
    mean = sum(features) / len(features)
    scores = []
    for word in words:
        x = torch.cat([part.words.weight[word], mean + context])
        hidden, memory = _lstm(part.lstm, x, hidden, memory)
        context = _attention_on_attention(part.attention, hidden, features, heads=4)
        scores.append(part.output.weight @ context)
    return scores


@pytest.mark.parametrize(("decoder", "published"), [("up_down", _up_down), ("aoa", _aoa)])
@pytest.mark.parametrize("encoding", ["concat_views", "shared"])
def test_a_compared_system_is_its_published_equations(decoder: str, published: object, encoding: str) -> None:
    model = build_model(tiny_config(decoder=decoder, encoding=encoding).model).eval()
    views = {name: random_view(spec, 2, [spec.max_tokens, 2]) for name, spec in VIEWS.items()}
    captions = random_captions(batch=2)
    with torch.no_grad():
        logits = model(views, captions).logits
        for photo in range(2):
            features = _tokens(model, views, photo)
            for caption in range(2):
                slow = published(model, features, captions[photo, caption].tolist())
                assert_close(logits[photo, caption], torch.stack(slow))


def test_the_refining_layer_is_its_published_equation() -> None:
    layer = RefiningLayer(D, 4, 0, 0, dropout=0.0)
    x, mask = torch.randn(1, 5, D), torch.tensor([[True, True, False, True, False]])
    real = [x[0, place] for place in (0, 1, 3)]
    refined = layer(x, mask)
    for place in (0, 1, 3):
        refinement = _attention_on_attention(layer.refine, x[0, place], real, heads=4)
        assert_close(refined[0, place], layer.norm(x[0, place] + refinement))


def test_up_down_reads_views_without_an_encoder() -> None:
    model = build_model(tiny_config(decoder="up_down").model).eval()
    views = random_views()
    for embedded, tokens in zip(model.encoding.embed(views), model.encode(views).tokens, strict=True):
        assert torch.equal(tokens[:, 0], embedded.tokens)


def _parts(decoder: str) -> dict[str, int]:
    config = tiny_config(decoder=decoder, encoding="concat_views")
    return count_parameters(config)


def test_parameters_of_up_down_are_counted_by_hand() -> None:
    parts = _parts("up_down")
    attention_lstm = 4 * D * (3 * D + D) + 2 * 4 * D
    language_lstm = 4 * D * (2 * D + D) + 2 * 4 * D
    attention = D * D + D * D + D
    assert parts["decoder layers"] == attention_lstm + language_lstm + attention == 7_952
    assert parts["encoder"] == 0
    assert parts["word embedding"] == parts["word output"] == WORDS * D


def test_parameters_of_aoanet_are_counted_by_hand() -> None:
    parts = _parts("aoa")
    attention_on_attention = 3 * D * D + 2 * (2 * D * D + D)
    lstm = 4 * D * (2 * D + D) + 2 * 4 * D
    assert parts["decoder layers"] == lstm + attention_on_attention == 5_024
    assert parts["encoder"] == 2 * (attention_on_attention + 2 * D)
    assert parts["word embedding"] == parts["word output"] == WORDS * D


@every_decoder
def test_no_count_is_below_the_bound_that_guards_loading(decoder: str) -> None:
    from haav.pretrained import _least_elements

    for sizes in ({}, {"d_ff": 1, "max_words": 1, "memory_slots": 0}, {"decoder_layers": 9, "d_ff": 999}):
        config = tiny_config(decoder=decoder, **sizes)
        elements = sum(tensor.numel() for tensor in build_model(config.model).state_dict().values())
        assert _least_elements(config.model) <= elements


@every_decoder
def test_steps_of_training_lower_the_loss(decoder: str) -> None:
    model = build_model(tiny_config(decoder=decoder, **SILENT).model)
    batch = Batch(("a", "b", "c"), random_views(), random_captions(words=6))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = CrossEntropy()(model, model.encode(batch.views), batch)["xe"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@every_decoder
def test_teacher_forcing_is_decoding_where_there_is_a_target(decoder: str) -> None:
    model = build_model(tiny_config(decoder=decoder).model).eval()
    encoded, captions = model.encode(random_views()), random_captions()
    targets = torch.rand(captions.shape) < 0.5
    logits = model.decode(captions, model.init_cache(encoded)).logits
    assert_close(model.teacher_force(captions, targets, encoded), logits[targets])


def captions_of_lengths(lengths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Random captions (B, C, T), and where they have targets"""
    longest = max(length for photo in lengths for length in photo)
    targets = torch.arange(longest) < torch.tensor(lengths)[..., None]
    return random_captions(len(lengths), len(lengths[0]), longest), targets


def test_the_transformer_reads_the_captions_of_a_photo_as_one_row_of_words() -> None:
    model = build_model(tiny_config().model).eval()
    captions, targets = captions_of_lengths([[3, 9, 2], [1, 0, 4], [5, 5, 1]])
    rows: list[torch.Size] = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape))
    model.teacher_force(captions, targets, model.encode(random_views()))
    assert rows == [(3, 1, 3 + 9 + 2, D)] * len(model.decoder.layers), "one row per photo, as long as the longest"


def test_gradients_of_captions_in_one_row_are_those_of_a_row_each() -> None:
    model = build_model(tiny_config(**SILENT).model)
    captions, targets = captions_of_lengths([[3, 9, 2], [1, 0, 4], [5, 5, 1]])
    views, words = random_views(), torch.randint(WORDS, (int(targets.sum()),))

    def gradients(logits: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(nn.functional.cross_entropy(logits, words), parameters))

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    encoded = model.encode(views)
    wanted = gradients(model.decode(captions, model.init_cache(encoded)).logits[targets])
    found = gradients(model.teacher_force(captions, targets, model.encode(views)))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


@every_decoder
def test_a_new_word_starts_as_the_mixture_it_is_given(decoder: str) -> None:
    model = build_model(tiny_config(decoder=decoder).model).eval()
    shares = torch.zeros(1, WORDS)
    shares[0, [5, 7]] = 0.5
    views, captions = random_views(), random_captions()
    before = model(views, captions).logits
    model.decoder.add_words(shares)
    after = model(views, captions).logits
    assert_close(after[..., :-1], before)
    assert_close(after[..., -1], before[..., [5, 7]].mean(dim=-1))
    assert_close(model.decoder.words.weight[-1], model.decoder.words.weight[[5, 7]].mean(dim=0))


# Settings


def _load(*flags: tuple[str, str]) -> Config:
    return load_config("paper", flags=flags_from(flags))


@pytest.mark.parametrize("decoder", [name for name in decoders if not decoders.get(name).uses_aggregator])
def test_a_decoder_without_aggregator_takes_unused(decoder: str) -> None:
    assert _load(("--model.decoder", decoder)).model.aggregator == "unused"
    assert _load(("--model.decoder", decoder), ("--model.aggregator", "unused")).model.aggregator == "unused"
    with pytest.raises(ConfigError, match=f"decoder '{decoder}' has no aggregator, so 'joint' would change nothing"):
        _load(("--model.decoder", decoder), ("--model.aggregator", "joint"))


def test_mistakes_about_decoders_are_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown decoder 'updown'\. Did you mean 'up_down'"):
        _load(("--model.decoder", "updown"))
    with pytest.raises(ConfigError, match="unknown aggregator 'unused'"):
        _load(("--model.aggregator", "unused"))


def test_there_is_nothing_to_contrast_without_an_encoder() -> None:
    assert _load(("--model.decoder", "up_down")).contrast.enabled is False
    assert _load(("--model.decoder", "aoa")).contrast.enabled is True
    with pytest.raises(ConfigError, match="decoder 'up_down' has no encoder"):
        _load(("--model.decoder", "up_down"), ("--contrast.enabled", "true"))


@every_decoder
def test_only_a_decoder_that_weighs_views_is_explained(decoder: str, tmp_path) -> None:
    captioner = tiny_captioner(tmp_path, {}, decoder=decoder)
    captions = captioner.caption_views(random_views())
    if captioner.model.decoder.exposes_weights:
        assert weighing(captioner) is captioner.model
        return
    assert all(word.views is None for caption in captions for word in caption.words)
    with pytest.raises(ConfigError, match="does not weigh views"):
        weighing(captioner)
