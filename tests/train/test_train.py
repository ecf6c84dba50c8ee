"""Training on the toy world: objectives against slow versions, and runs that are stopped, killed and resumed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from haav.cli.main import main
from haav.config import Config
from haav.config.load import find_recipe, flags_from, recipe_names
from haav.data.annotations import load_dataset
from haav.data.loader import ShardedBatches
from haav.data.toy import make_toy
from haav.errors import CheckpointError, ConfigError, StoreError
from haav.evaluate.reward import CiderReward
from haav.generate.beam import BeamSearch
from haav.generate.rules import Never
from haav.inference.captioner import Captioner
from haav.locks import try_lock
from haav.model.build import load_config
from haav.model.dropout import Dropout, threshold
from haav.model.haav import Haav
from haav.model.layers import FeedForward
from haav.model.losses import self_critical
from haav.pretrained import load_weights
from haav.store import Store, shards
from haav.store.shards import write_shards
from haav.text import BOS, EOS, PAD, SPECIAL, UNK, Vocabulary
from haav.train import loop
from haav.train.checkpoint import Position, load_checkpoint, save_checkpoint
from haav.train.objectives import CrossEntropy, Learner, Objective, SelfCritical, StepInput
from haav.train.run import LOCK, RunFiles
from haav.train.schedule import build_schedule
from haav.train.setup import prepare
from haav.types import Batch, View
from helpers import (
    SILENT,
    assert_identical,
    checkpoint_weights,
    every_decoder,
    random_captions,
    random_views,
    tiny_model,
)

pytest.importorskip("lightning_fabric", reason="needs the train extra")


def toy(*flags: str, epochs: int = 2) -> Config:
    pairs = [
        ("--train.epochs", str(epochs)),
        ("--train.checkpoint_every", "3"),
        *zip(flags[::2], flags[1::2], strict=True),
    ]
    return load_config(file=find_recipe("toy"), flags=flags_from(pairs))


# Objectives


def batch_of(views: Any, captions: torch.Tensor | None) -> Batch:
    return Batch(tuple(f"p{n}" for n in range(len(next(iter(views.values())).tokens))), views, captions)


def captions_with_ends() -> torch.Tensor:
    """(3, 2, 8): <bos> words <eos> <pad>, of different lengths; the last photo has one caption"""
    captions = torch.full((3, 2, 8), PAD)
    for photo in range(3):
        for number in range(1 if photo == 2 else 2):
            length = 2 + photo + number
            captions[photo, number, 0] = BOS
            captions[photo, number, 1 : length + 1] = random_captions(1, 1, length)[0, 0]
            captions[photo, number, length + 1] = EOS
    return captions


def test_one_encoding_for_all_captions_gives_the_gradients_of_photo_caption_pairs() -> None:
    model, views, captions = tiny_model(**SILENT).train(), random_views(), captions_with_ends()
    CrossEntropy()(model, model.encode(views), batch_of(views, captions))["xe"].backward()
    together = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    rows = [(photo, number) for photo in range(3) for number in range(2) if captions[photo, number, 0] == BOS]
    pairs = {
        name: View(
            view.tokens[[photo for photo, _ in rows]],
            view.mask[[photo for photo, _ in rows]],
            {index: values[[photo for photo, _ in rows]] for index, values in view.indices.items()},
            None if view.boxes is None else view.boxes[[photo for photo, _ in rows]],
        )
        for name, view in views.items()
    }
    apart = torch.stack([captions[photo, number][None] for photo, number in rows])
    CrossEntropy()(model, model.encode(pairs), batch_of(pairs, apart))["xe"].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(together[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_cross_entropy_is_the_mean_over_real_words() -> None:
    model, views, captions = tiny_model(**SILENT), random_views(), captions_with_ends()
    found = CrossEntropy()(model, model.encode(views), batch_of(views, captions))["xe"]
    logprobs = model(views, captions[:, :, :-1]).logprobs
    each = [
        -logprobs[photo, number, at, captions[photo, number, at + 1]]
        for photo in range(3)
        for number in range(2)
        for at in range(7)
        if captions[photo, number, at + 1] != PAD
    ]
    assert_close(found, torch.stack(each).mean())


def test_self_critical_by_hand() -> None:
    # Rewards 1, 2, 6: the others' means are 4, 3.5, 1.5, advantages -3, -1.5, 4.5; log-probabilities a word -1, -2, -1.
    loss = self_critical(torch.tensor([[-2.0, -8.0, -3.0]]), torch.tensor([[1.0, 2, 6]]), torch.tensor([[2, 4, 3]]))
    assert loss.item() == pytest.approx(-(3 + 3 - 4.5) / 3)


VOCABULARY = Vocabulary((*SPECIAL, *(f"w{number}" for number in range(4, 23))))
REFERENCES = {"p0": ["w5 w6 w7", "w8 w9"], "p1": ["w10 w11", "w5 w12"], "p2": ["w13 w14 w15 w16", "w6"]}


def critic(**options: Any) -> SelfCritical:
    reward = CiderReward(REFERENCES, end_token=options.get("end_token", True))
    return SelfCritical(reward, VOCABULARY, (Never([UNK, PAD, BOS]),), hypotheses=3, explore="beam", max_words=6)


@every_decoder
def test_scst_gradient_equals_the_one_through_stepwise_decoding(decoder: str) -> None:
    torch.manual_seed(1)
    model, views = tiny_model(**SILENT, decoder=decoder).train(), random_views()
    objective = critic()
    found = objective(model, model.encode(views), batch_of(views, random_captions()))
    found["scst"].backward()
    fast = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    # The slow way: the same captions, word by word through the cache, with the graph kept.
    from haav.generate.loop import generate

    tokens = generate(model, model.encode(views), BeamSearch(3), objective.rules, 6).tokens
    cache = model.init_cache(model.encode(views))
    last, total = torch.full((3, 3, 1), BOS), torch.zeros(3, 3)
    for at in range(tokens.shape[2]):
        decoded = model.decode(last, cache)
        cache, last = decoded.cache, tokens[:, :, at : at + 1]
        step = decoded.logprobs[:, :, -1].gather(2, last)[..., 0]
        total = total + step.where(last[..., 0] != PAD, 0.0)
    rewards = torch.from_numpy(objective.score(("p0", "p1", "p2"), tokens)).float()
    lengths = (tokens != PAD).sum(dim=2)
    slow = self_critical(total, rewards, lengths)
    assert rewards.std() > 0, "the test must be able to tell"
    assert_close(found["scst"].detach(), slow.detach())
    slow.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert_close(fast[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)
    assert model.training, "writing captions leaves the mode as it was"


def gradients(model: Haav, objective: Objective, batch: Batch, bfloat16: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        losses = objective(model, model.encode(batch.views), batch)
    next(iter(losses.values())).backward()
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


def test_bfloat16_has_the_gradients_of_float32_but_for_rounding() -> None:
    model, batch = tiny_model(**SILENT).train(), batch_of(random_views(), captions_with_ends())
    exact, rounded = (gradients(model, CrossEntropy(), batch, bfloat16) for bfloat16 in (False, True))
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        assert (tensor - rounded[name]).norm() < 0.1 * tensor.norm(), name


def test_self_critical_training_reaches_every_weight_in_bfloat16() -> None:
    # Captions are written without gradients and read with them under one autocast, which keeps weights it has rounded.
    torch.manual_seed(1)
    model, batch = tiny_model(**SILENT).train(), batch_of(random_views(), captions_with_ends())
    exact, rounded = (gradients(model, critic(), batch, bfloat16) for bfloat16 in (False, True))
    taught = {name for name, tensor in exact.items() if tensor.any()}
    assert taught == {name for name, tensor in rounded.items() if tensor.any()}
    assert "decoder.output.weight" in taught


def test_self_critical_training_can_keep_imitating_people() -> None:
    torch.manual_seed(1)
    model, batch = tiny_model(**SILENT).train(), batch_of(random_views(), captions_with_ends())
    both = replace(critic(), imitate=CrossEntropy(0.1), xe_weight=0.3)
    losses, _ = Learner(model, None, both, 0.0)(StepInput([batch]))
    scst, _ = Learner(model, None, critic(), 0.0)(StepInput([batch]))
    xe, _ = Learner(model, None, CrossEntropy(0.1), 0.0)(StepInput([batch]))
    assert_close(losses["loss"], scst["loss"] + 0.3 * xe["loss"])
    assert_close(losses["scst"], scst["scst"])
    assert_close(losses["xe"], xe["xe"])


def test_photos_without_captions_have_the_contrastive_loss_only(tmp_path: Path) -> None:
    setup = prepare(toy("--data.label_fraction", "0.5", "--train.unlabelled_batch", "8"), tmp_path)
    assert len(setup.labelled) == 80
    assert len(setup.unlabelled) == 80
    assert not set(setup.labelled.ids) & set(setup.unlabelled.ids)
    learner = setup.learner.train()
    losses, keys = learner(StepInput([setup.unlabelled[list(range(8))]]))
    assert set(losses) == {"loss", "contrast"}
    assert_close(losses["loss"].detach(), learner.contrast_weight * losses["contrast"])
    assert keys[0].shape == (24, 32)
    losses["loss"].backward()
    assert learner.model.decoder.output.weight.grad is None
    both, _ = learner(StepInput([setup.labelled[[0, 1]], setup.unlabelled[[0, 1]]]))
    assert set(both) == {"loss", "xe", "contrast"}


def test_a_captions_weight_counts_like_copies_of_it() -> None:
    model = tiny_model(**SILENT).eval()
    views, captions = random_views(), captions_with_ends()
    twice = torch.cat([captions, captions[:, :1]], dim=1)  # the first caption of each photo once more
    weights = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0]])
    copied = CrossEntropy(0.1)(model, model.encode(views), batch_of(views, twice))["xe"]
    weighted = CrossEntropy(0.1)(model, model.encode(views), replace(batch_of(views, captions), weights=weights))["xe"]
    assert_close(weighted, copied)
    even = replace(batch_of(views, captions), weights=torch.full((3, 2), 0.01))
    plain = CrossEntropy(0.1)(model, model.encode(views), batch_of(views, captions))["xe"]
    assert_close(CrossEntropy(0.1)(model, model.encode(views), even)["xe"], plain)
    assert not torch.allclose(plain, weighted)


def test_captions_by_a_system_teach_words_and_earn_nothing(tmp_path: Path) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    photos = load_dataset(dataset).split("train")
    rows = [{"image": photo.id, "caption": "a machine wrote this", "by": "Net"} for photo in photos[:40]]
    machine = tmp_path / "machine.jsonl"
    machine.write_text("\n".join(map(json.dumps, rows)))
    places = ("--data.dataset", f"{dataset},{machine}:machine:0.25", "--data.store", str(store))
    setup = prepare(toy(*places), tmp_path)
    assert len(setup.labelled) == len(photos)
    batch = setup.labelled[[0, 50]]
    assert batch.weights is not None
    assert batch.weights.tolist() == [[1, 1, 1, 1, 1, 0.25], [1, 1, 1, 1, 1, 0]]
    assert "machine" not in setup.vocabulary.words
    drawn = loop._Run._draw_captions  # a draw keeps each caption's own weight
    run = type("Run", (), {"config": replace(setup.config.train, captions=3), "position": Position()})()
    kept = drawn(run, batch, 0)
    for row in range(2):
        for caption, weight in zip(kept.captions[row], kept.weights[row], strict=True):
            original = [c[: len(caption)].tolist() for c in batch.captions[row]].index(caption.tolist())
            assert batch.weights[row, original] == weight
    rewarded = prepare(toy(*places, "--train.objective", "scst"), tmp_path)
    assert rewarded.labelled[[0]].weights is None
    assert rewarded.labelled[[0]].captions.shape[1] == 5
    loop.train(toy(*places, epochs=1), tmp_path / "run")
    other = prepare(toy("--data.dataset", f"{dataset},{machine}:machine", "--data.store", str(store)), tmp_path)
    assert setup.fingerprint != other.fingerprint


def test_members_of_an_ensemble_learn_each_for_itself() -> None:
    model = tiny_model(encoding="model_per_view", **SILENT).train()
    views, captions = random_views(), captions_with_ends()
    losses, keys = Learner(model, None, CrossEntropy(), 0.05)(StepInput([batch_of(views, captions)]))
    losses["loss"].backward()
    assert keys == []
    alone = model.members[1]
    name = alone.encoding.embed.names[0]
    together = alone.decoder.output.weight.grad.clone()
    alone.zero_grad()
    CrossEntropy()(alone, alone.encode({name: views[name]}), batch_of(views, captions))["xe"].backward()
    assert_close(together, alone.decoder.output.weight.grad)


# Parts


def test_schedules_by_hand() -> None:
    constant = build_schedule("constant", 4, 100, 10)
    assert [constant(step) for step in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1, 1, 1]
    cosine = build_schedule("cosine", 0, 100, 10)
    assert [round(cosine(step), 6) for step in (0, 50, 100)] == [1, 0.5, 0]
    cyclic = build_schedule("cyclic", 0, 100, 10)
    assert [round(cyclic(step), 6) for step in (0, 5, 10, 20)] == [1, 0.5, 0, 1]


FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(401, 503, dtype=dtype, requires_grad=True)
    layer = Dropout(p)
    assert layer.is_fast(x)
    found = layer(x)
    assert found.dtype == dtype
    assert (found == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert found.float().mean().item() == pytest.approx(1, abs=0.02)
    assert found.max().item() == pytest.approx(1 / (1 - p), rel=torch.finfo(dtype).eps)
    found.sum().backward()
    assert torch.equal(x.grad, found.detach()), "the gradient goes where the value went"
    assert not torch.equal(layer(x), found)
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.4, 0.4981, 0.5, 0.9])
def test_a_share_p_of_all_patterns_lies_below_the_threshold(p: float) -> None:
    patterns = torch.arange(-(2**31), 2**31, 997).to(torch.int32).view(torch.float32)
    assert (patterns <= threshold(p, torch.float32)).double().mean().item() == pytest.approx(p, abs=1e-6)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    assert (patterns <= threshold(p, torch.bfloat16)).double().mean().item() == pytest.approx(p, abs=2**-16)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_after_relu_is_both_one_after_the_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 200).to(dtype).requires_grad_()
    layer = Dropout(0.3)
    found, scale = layer.after_relu(x * 1.0)
    kept = found != 0
    assert torch.equal(found, x.relu() * kept)
    assert scale == 1 / 0.7
    assert kept.sum().item() / (x > 0).sum().item() == pytest.approx(0.7, abs=0.01)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    assert torch.equal(x.grad, upstream * kept)
    plain, one = layer.eval().after_relu(x)
    assert (one, plain.equal(x.relu())) == (1.0, True)


def test_feed_forward_keeps_its_mean_under_dropout() -> None:
    torch.manual_seed(0)
    layer = FeedForward(8, 64, 0.5)
    layer.norm = torch.nn.Identity()
    x = torch.randn(1, 8)
    mean = layer.train()(x.expand(100_000, -1)).mean(dim=0)
    torch.testing.assert_close(mean, layer.eval()(x)[0], atol=0.02, rtol=0)


def test_norms_and_biases_do_not_decay_unless_all_do() -> None:
    model = tiny_model()
    decays, rest = loop._groups(model, 0.05, decay_all=False)
    assert all(parameter.dim() > 1 for parameter in decays["params"])
    assert rest["weight_decay"] == 0
    assert len(decays["params"]) + len(rest["params"]) == len(list(model.parameters()))
    assert len(loop._groups(model, 0.05, decay_all=True)[1]["params"]) == 0


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_valid_config(name: str) -> None:
    load_config(file=find_recipe(name))
    head = find_recipe(name).read_text()
    assert f"haav train {name}" in head, "its head says how to run it"


# Runs


def test_a_toy_run_learns_and_leaves_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", "toy", "--out", str(out), "--train.epochs", "6"]) == 0
    assert "best CIDEr on val" in capsys.readouterr().out
    rows = RunFiles(out).metrics()
    scores = [row["CIDEr"] for row in rows if "CIDEr" in row]
    assert len(scores) == 6
    assert max(scores) > 1.0 > scores[0]
    for name in ("config.yaml", "vocabulary.json", "checkpoint.safetensors", "curves.png", "best"):
        assert (out / name).exists(), name
    assert list((out / "tensorboard").iterdir())
    captioner = Captioner.from_pretrained(out / "best")
    assert captioner.config.data.dataset == "", "a saved model names no files of this machine"
    assert main(["train", "toy", "--out", str(out)]) == 2
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--train.ema", "0.9", "--train.accumulate", "2", "--train.captions", "2")])
def test_a_run_that_is_stopped_and_resumed_ends_bit_for_bit_as_the_unbroken_one(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = toy(*flags)
    loop.train(config, whole)

    def interrupt(status: loop.Status) -> None:
        if status.step in (3, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = loop.train(config, broken, report=interrupt)
    stops = 0
    while not outcome.finished:
        stops += 1
        outcome = loop.resume(broken, report=interrupt)
    assert stops == 2
    assert_identical(whole, broken)
    assert [row["step"] for row in RunFiles(whole).metrics()] == [row["step"] for row in RunFiles(broken).metrics()]


def test_a_run_that_recomputes_ends_bit_for_bit_as_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "haav.model.recompute.checkpoint", lambda *args, **kwargs: calls.append(1) or checkpoint(*args, **kwargs)
    )
    loop.train(toy(epochs=1), tmp_path / "plain")
    assert not calls
    loop.train(toy("--train.recompute", "true", epochs=1), tmp_path / "recomputed")
    assert calls
    assert_identical(tmp_path / "plain", tmp_path / "recomputed")


def _train_in_a_process(out: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "haav", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )


def _assert_survives_kills(tmp_path: Path, kills: int, flags: list[str], seed: int) -> None:
    """Start, kill at a random step, resume, kill again …; steps are drawn so that every kill hits."""
    whole, broken, chance = tmp_path / "whole", tmp_path / "broken", random.Random(seed)
    words = ["toy", "--train.checkpoint_every", "2", *flags]
    process = _train_in_a_process(whole, *words, "--out", str(whole))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    total = _steps(whole)
    for kill in range(kills):
        again = ["--resume", str(broken)] if kill else [*words, "--out", str(broken)]
        process = _train_in_a_process(broken, *again)
        step = 0.8 * total * (kill + chance.random()) / kills
        # A run that has no config yet cannot be resumed, it begins anew.
        while process.poll() is None and not ((broken / "config.yaml").exists() and _steps(broken) >= step):
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.05))  # somewhere between two checkpoints
        assert process.poll() is None, "it ended before the kill"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = _train_in_a_process(broken, "--resume", str(broken))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert _steps(broken) == _steps(whole)
    assert_identical(whole, broken)


def _steps(folder: Path) -> int:
    return int(json.loads(load_weights(folder / "checkpoint.safetensors")[1]["position"])["step"])


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    _assert_survives_kills(tmp_path, kills=1, flags=["--train.epochs", "4"], seed=1)


def test_two_commands_do_not_train_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Until the first is killed, which leaves nothing to clean up."""
    run = tmp_path / "run"
    process = _train_in_a_process(run, "toy", "--train.epochs", "1000", "--out", str(run))
    try:
        while process.poll() is None and not (run / "config.yaml").exists():
            time.sleep(0.01)
        assert main(["train", "--resume", str(run)]) == 2
        assert f"another command is training in {run}" in capsys.readouterr().err
        assert process.poll() is None, "the first goes on"
    finally:
        process.kill()
        process.communicate()
    step = _steps(run)
    assert main(["train", "--resume", str(run), "--epochs", "1"]) == 0
    assert _steps(run) >= step


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["xe", "scst"])
def test_ten_kills_each_of_cross_entropy_and_self_critical_runs(tmp_path: Path, objective: str) -> None:
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        flags = ["--train.objective", objective, "--train.epochs", "6" if objective == "xe" else "3"]
        _assert_survives_kills(tmp_path / str(number), kills=2, flags=flags, seed=number)


@pytest.mark.slow
def test_self_critical_training_starts_from_a_model_and_raises_the_reward(tmp_path: Path) -> None:
    loop.train(toy(epochs=5), tmp_path / "xe")
    flags = ("--train.objective", "scst", "--train.lr", "0.001", "--train.warmup_steps", "0")
    loop.train(toy(*flags, epochs=4), tmp_path / "scst", init=tmp_path / "xe" / "best")
    with pytest.raises(ConfigError, match="reads objects, grid, text, and training it further cannot change that"):
        loop.train(toy("--data.views", "grid"), tmp_path / "other", init=tmp_path / "xe" / "best")
    before, after = (
        max(row["CIDEr"] for row in RunFiles(tmp_path / name).metrics() if "CIDEr" in row) for name in ("xe", "scst")
    )
    assert after > before


def test_steps_without_a_finite_loss_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    config = toy("--train.bad_steps", "3")
    setup = prepare(config, tmp_path)
    run = loop._Run(setup, RunFiles(tmp_path), lambda _: None, loop._connect(setup.config))
    plain, calls = setup.learner.objective, []

    def sometimes(model: Any, encoded: Any, batch: Batch) -> dict[str, torch.Tensor]:
        calls.append(1)
        found = plain(model, encoded, batch)
        return {"xe": found["xe"] * (math.nan if len(calls) == 2 or len(calls) > 4 else 1.0)}

    setup.learner.objective = sometimes
    before = [parameter.clone() for parameter in setup.model.parameters()]
    with pytest.raises(loop.TrainingError, match=r"3 steps in a row had no finite loss, xe.*\n.*Lower train.lr"):
        run.go()
    assert run.position.skipped == 4
    assert all(parameter.isfinite().all() for parameter in setup.model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, setup.model.parameters(), strict=True))


def test_a_run_that_diverges_before_it_is_evaluated_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        loop.TrainingError, match=r"training diverged: after step \d+.*learning rate.*\n  Lower train.lr"
    ):
        loop.train(toy("--train.lr", "1e30", epochs=1), tmp_path / "run")


def test_what_cannot_be_resumed_is_said(tmp_path: Path) -> None:
    out = tmp_path / "run"
    loop.train(toy(epochs=1), out)
    good = (out / "checkpoint.safetensors").read_bytes()
    (out / "checkpoint.safetensors").write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        loop.resume(out)
    (out / "checkpoint.safetensors").write_bytes(good)
    text = (out / "config.yaml").read_text()
    (out / "config.yaml").write_text(text.replace("lr: 0.004", "lr: 0.005"))
    with pytest.raises(CheckpointError, match="a run with other settings"):
        loop.resume(out)
    (out / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match="is not a training run"):
        loop.resume(tmp_path / "nothing")
    assert loop.resume(out, epochs=2).position.epoch == 2, "more epochs than planned are fine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a recipe, or --resume RUN"),
        (["toy"], "a new run needs a folder: --out DIR"),
        (["toyy", "--out", "x"], "unknown recipe 'toyy'. Did you mean 'toy'?"),
        (["toy", "--out", "x", "--train.select_on", "test"], "'--train.select_on' is one of val, not 'test'"),
        (["toy", "--out", "x", "--train.precision", "16"], "'--train.precision' is one of 32, bf16, not '16'"),
        (["toy", "--out", "x", "--data.dataset", ""], "training needs --data.dataset"),
        (["toy", "--out", "x", "--data.views", "objects,smell"], "view 'smell' is not in the store"),
        (
            ["toy", "--out", "x", "--train.unlabelled_batch", "4"],
            "asks for photos without captions, and there are none",
        ),
        (["--resume", "x", "--train.lr", "1"], "a resumed run keeps its settings"),
    ],
)
def test_mistakes_are_named_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x" / "config.yaml").exists()


def test_an_average_of_the_weights_follows_them(tmp_path: Path) -> None:
    setup = prepare(replace(toy("--train.ema", "0.5")), tmp_path)
    run = loop._Run(setup, RunFiles(tmp_path), lambda _: None, loop._connect(setup.config))
    name, weight = next((n, p) for n, p in setup.model.named_parameters() if p.dim() > 1)
    first = weight.detach().clone()
    with torch.no_grad():
        weight += 1
    run._after_step([torch.zeros(0, 32)])
    assert_close(dict(run.ema.named_parameters())[name], first + 0.5)


def test_a_set_without_val_is_trained_and_its_last_model_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    training = load_dataset(dataset).split("train")
    rows = [{"image": photo.id, "caption": text} for photo in training for text in photo.captions]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--data.dataset", str(tmp_path / "train.jsonl"), "--data.store", str(store), "--train.epochs", "1"]
    assert main(["train", "toy", *words, "--out", str(tmp_path / "run")]) == 0
    assert "no val photos to select a model: the last one is in" in capsys.readouterr().out
    last = {
        name: tensor
        for name, tensor in checkpoint_weights(tmp_path / "run").items()
        if name.startswith("learner.model.")
    }
    saved, _ = load_weights(tmp_path / "run" / "best" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, last[f"learner.model.{name}"]), name


def test_a_set_without_captions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no training photo with a caption"):
        loop.train(toy("--data.label_fraction", "0"), tmp_path / "none")


# Several processes

WITHOUT_CHANCE = [
    word
    for name in ("dropout", "channel_dropout", "token_dropout", "view_dropout")
    for word in (f"--model.{name}", "0")
]
RANKS = """
import sys
from pathlib import Path
from safetensors.torch import save_file
from haav.config.load import flags_from
from haav.model.build import load_config
from haav.config.load import find_recipe
from haav.train import loop
from haav import distributed
from haav.train.run import RunFiles
from haav.train.setup import prepare

out, words = Path(sys.argv[1]), sys.argv[2:]
config = load_config(file=find_recipe("toy"), flags=flags_from(list(zip(words[::2], words[1::2]))))
fabric = loop._connect(config)
setup = prepare(config, out)
files = RunFiles(out)
files.claim(fabric.device)
files.begin(setup.config, setup.vocabulary)
run = loop._Run(setup, files, lambda _: None, fabric)
run.go()
contrast = setup.learner.contrast
queue = {"queue": contrast.queue, "filled": contrast.filled[None]}
save_file(queue, str(out / f"queue{distributed.rank()}.safetensors"))
"""


def test_a_run_streams_from_shards_and_reads_each_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, store = make_toy(tmp_path / "toy")
    with Store(store) as opened:
        write_shards(opened, sorted(opened.views), tmp_path / "shards", shard_size=40)
    read: list[str] = []
    plain = shards.read_shard
    monkeypatch.setattr(shards, "read_shard", lambda path: (read.append(path.name), plain(path))[1])
    flags = ("--data.dataset", str(dataset), "--data.store", str(tmp_path / "shards"))
    outcome = loop.train(toy(*flags, epochs=1), tmp_path / "run")
    assert outcome.finished
    training = {photo.id for photo in load_dataset(dataset).split("train")}
    holding = [
        file.name
        for file in (tmp_path / "shards").glob("*.tar")
        if training.intersection(photo for photo, _ in plain(file))
    ]
    epoch = read[: len(holding)]
    assert sorted(epoch) == sorted(set(epoch)), "no shard is read twice in the epoch"
    assert set(epoch) <= set(holding)


@pytest.mark.parametrize(("readers", "batch"), [(1, 10), (2, 10), (3, 10)])
def test_readers_of_shards_share_no_photo_and_no_shard(readers: int, batch: int) -> None:
    groups = [list(range(start, start + 20)) for start in range(0, 240, 20)]
    batches = ShardedBatches(groups, batch, seed=3, readers=readers, window=2)
    cuts = [batch * number // readers for number in range(readers + 1)]
    seen: list[int] = []
    own: list[set[int]] = [set() for _ in range(readers)]
    for rows in batches:
        assert len(rows) == batch
        seen += rows
        for reader in range(readers):
            own[reader] |= {row // 20 for row in rows[cuts[reader] : cuts[reader + 1]]}
    assert len(seen) == len(set(seen)) == len(batches) * batch
    assert len(seen) > 0.8 * 240
    assert sum(map(len, own)) == len(set.union(*own)), "each shard has one reader"
    first = list(batches)
    assert list(batches) == first
    batches.epoch = 1
    assert list(batches) != first
    with pytest.raises(StoreError, match="13 processes need at least as many shards"):
        ShardedBatches(groups, batch, 3, readers=13, window=2)


def run_alone_and_together(tmp_path: Path, ranks: int, *flags: str) -> tuple[list[Any], list[Any]]:
    """What one process logs, and what several do"""
    script = tmp_path / "run.py"
    script.write_text(RANKS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    for command, folder in (([sys.executable], "one"), (launch, "many")):
        done = subprocess.run(
            [*command, str(script), str(tmp_path / folder), "--train.epochs", "2", *flags, *WITHOUT_CHANCE],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, many = (RunFiles(tmp_path / folder).metrics() for folder in ("one", "many"))
    assert len(one) == len(many) > 2
    return one, many


@pytest.mark.slow
def test_several_processes_lose_as_much_as_one_in_bfloat16(tmp_path: Path) -> None:
    one, many = run_alone_and_together(tmp_path, 2, "--train.precision", "bf16")
    for first, second in zip(one, many, strict=True):
        for name in first.keys() & {"xe", "contrast"}:
            assert second[name] == pytest.approx(first[name], rel=0.03), name


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", ["xe", pytest.param("scst", marks=pytest.mark.slow)])
def test_several_processes_do_what_one_does(tmp_path: Path, ranks: int, objective: str) -> None:
    """Losses, scores and queue; with 3, a batch of 20 does not even divide."""
    one, many = run_alone_and_together(tmp_path, ranks, "--train.objective", objective)
    for first, second in zip(one, many, strict=True):
        for name in first.keys() - {"captions_per_second"}:
            assert second[name] == pytest.approx(first[name], rel=1e-5, abs=1e-5), name
    queues = [load_weights(tmp_path / "many" / f"queue{rank}.safetensors")[0] for rank in range(ranks)]
    [alone] = [load_weights(tmp_path / "one" / "queue0.safetensors")[0]]
    for queue in queues:
        assert torch.equal(queue["queue"], queues[0]["queue"])
        assert_close(queue["queue"], alone["queue"], atol=1e-4, rtol=1e-3)
        assert torch.equal(queue["filled"], alone["filled"])


@pytest.mark.slow
def test_each_of_several_processes_ends_where_another_command_trains(tmp_path: Path) -> None:
    """Otherwise those that did not look at the lock wait for the first for ever."""
    run, script = tmp_path / "run", tmp_path / "run.py"
    run.mkdir()
    script.write_text(RANKS)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(run)]
    with open(run / LOCK, "ab") as file:
        assert try_lock(file)
        ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode
    assert ended.stderr.count(f"ConfigError: another command is training in {run}") == 2


def test_a_run_leaves_no_file_open(tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if link.is_symlink()]

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    assert main(["train", "toy", "--out", str(tmp_path / "run"), "--train.epochs", "1"]) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "2"]) == 0
    assert [name for name in opened() if str(tmp_path) in name] == []


@pytest.mark.parametrize("extra", range(1, 9))
def test_random_numbers_of_every_process_come_back_wherever_in_the_file_they_lie(tmp_path: Path, extra: int) -> None:
    """torch reads a state of random numbers in place, and one that is not aligned ends the process"""
    module = torch.nn.Linear(extra, 1, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    states = torch.stack([torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)])
    save_checkpoint(tmp_path / "checkpoint", {"learner": module}, optimizer, Position(step=3), "a run", states)
    with torch.random.fork_rng(devices=[]):
        for rank in (0, 1):
            position = load_checkpoint(tmp_path / "checkpoint", {"learner": module}, optimizer, "a run", rank)
            assert position == Position(step=3)
            assert torch.equal(torch.get_rng_state(), states[rank])
