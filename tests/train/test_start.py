"""Training that starts from a model: new words, steps for a small set, what is kept of the start."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from haav.cli.main import main
from haav.config import ConfidenceConfig, Config
from haav.config.load import find_recipe, flags_from
from haav.data.annotations import Photo, load_dataset
from haav.data.collate import collate
from haav.data.toy import make_toy
from haav.errors import ConfigError
from haav.evaluate.scores import SLOW, evaluate
from haav.inference.captioner import Captioner
from haav.inference.novelty import Novelty
from haav.inference.pack import pack
from haav.inference.predict import predict
from haav.model.build import load_config
from haav.model.haav import Haav
from haav.pretrained import load_pretrained, load_weights, read_config
from haav.store import Store, ViewManifest
from haav.text import BOS, EOS, PAD, SPECIAL
from haav.train import loop
from haav.train.objectives import CrossEntropy, Learner, Start, StepInput
from haav.train.rehearsal import read_rehearsal
from haav.train.run import RunFiles
from haav.train.setup import Setup, prepare
from haav.types import Batch
from haav.views.retrieval.text import nearest_texts
from haav.views.retrieval.textdb import TextDatabase
from helpers import SILENT, WORDS, assert_identical, random_views, save_text_model, tiny_model

pytest.importorskip("lightning_fabric", reason="needs the train extra")

THING, WORD = "kite", "bello"


def shows_thing(photo: Photo) -> bool:
    return THING in photo.captions[0].split()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy world, a model that has never met one of its things, and a few photos of that thing with a new word"""
    folder = tmp_path_factory.mktemp("world")
    dataset, store = make_toy(folder / "toy")
    photos = load_dataset(dataset).photos
    images = [
        {"filename": photo.id, "split": photo.split, "sentences": [{"raw": text} for text in photo.captions]}
        for photo in photos
        if not shows_thing(photo)
    ]
    (folder / "known.json").write_text(json.dumps({"images": images}))
    flags = {"data.dataset": folder / "known.json", "data.store": store, "train.epochs": 8, "train.evaluate_every": 8}
    loop.train(configured("toy", None, flags), folder / "run")
    model, config, vocabulary = load_pretrained(folder / "run" / "best")
    config = replace(config, confidence=ConfidenceConfig(0.5, 0.8), decode=replace(config.decode, beam=4))
    draw = np.random.default_rng(0).normal
    novelty = Novelty.fit("grid", *(draw(size=(40, 12)).astype(np.float32) for _ in range(2)))
    Captioner(model, config, vocabulary, novelty=novelty).save_pretrained(folder / "base")
    mine = [photo for photo in photos if photo.split == "train" and shows_thing(photo)][:12]
    captions = {photo.id: [photo.captions[0].replace(THING, WORD)] for photo in mine}
    captions[mine[0].id] = [f"{captions[mine[0].id][0]} mimi"]
    (folder / "mine.json").write_text(json.dumps(captions))
    return folder


def configured(recipe: str, init: Path | None, flags: dict[str, Any]) -> Config:
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    start = None if init is None else read_config(init)
    return load_config(file=find_recipe(recipe), flags=flags_from(pairs), init=start)


def finetuning(world: Path, **flags: Any) -> Config:
    """`finetune` on the photos of the new thing; keyword arguments are settings, with __ for a dot"""
    settings = {"data.dataset": world / "mine.json", "data.store": world / "toy" / "store", "train.lr": 0.002}
    settings |= {name.replace("__", "."): value for name, value in flags.items()}
    return configured("finetune", world / "base", settings)


def test_a_new_word_is_appended_and_starts_as_what_the_model_predicts_in_its_place(world: Path, tmp_path: Path) -> None:
    said: list[str] = []
    setup = prepare(finetuning(world), tmp_path, world / "base", say=said.append)
    base, config, vocabulary = load_pretrained(world / "base")
    assert setup.vocabulary.words == (*vocabulary.words, WORD)
    assert setup.config.model == replace(config.model, vocabulary_size=len(vocabulary) + 1)
    assert any(f"'{WORD}' will be learnt" in line for line in said)
    total = torch.zeros(len(vocabulary))
    for row, photo in enumerate(setup.labelled.photos):  # the slow way: word by word
        before = setup.vocabulary.encode(photo.captions[0])
        before = before[: before.index(len(vocabulary))]
        with torch.no_grad():
            total += base(setup.labelled[[row]].views, torch.tensor(before)[None, None]).logprobs[0, 0, -1].exp()
    for token, word in enumerate(vocabulary.words):
        if word in SPECIAL or token in vocabulary.dangling:
            total[token] = 0
    shares = total / total.sum()
    assert isinstance(base, Haav)
    assert isinstance(setup.model, Haav)
    for layer in ("words", "output"):
        old, new = getattr(base.decoder, layer).weight, getattr(setup.model.decoder, layer).weight
        assert torch.equal(new[:-1], old)
        assert_close(new[-1], sum(share * row for share, row in zip(shares, old, strict=True)))
        assert new.requires_grad


def test_words_of_ensembles_are_added_to_every_member(world: Path, tmp_path: Path) -> None:
    flags = {"data.dataset": world / "known.json", "data.store": world / "toy" / "store"}
    fresh = prepare(configured("toy", None, flags | {"model.encoding": "model_per_view"}), tmp_path)
    Captioner(fresh.model, fresh.saved_config, fresh.vocabulary).save_pretrained(tmp_path / "base")
    setup = prepare(finetuning(world), tmp_path, tmp_path / "base")
    sizes = {len(member.decoder.words.weight) for member in setup.model.members}
    assert sizes == {len(fresh.vocabulary) + 1}


def test_a_model_without_views_to_contrast_is_trained_further_and_resumed_without_the_contrastive_loss(
    world: Path, tmp_path: Path
) -> None:
    flags = {"data.dataset": world / "known.json", "data.store": world / "toy" / "store", "train.epochs": 1}
    fresh = prepare(configured("toy", None, flags | {"model.encoding": "concat_views"}), tmp_path)
    Captioner(fresh.model, fresh.saved_config, fresh.vocabulary).save_pretrained(tmp_path / "base")
    config = configured("toy", None, flags)
    assert config.contrast.enabled, "the recipe's own model has views to contrast"
    loop.train(config, tmp_path / "run", init=tmp_path / "base")
    assert loop.resume(tmp_path / "run").finished


def test_words_that_are_too_rare_are_named_with_what_to_do(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.dataset", str(world / "mine.json"), "--data.store", str(world / "toy" / "store")]
    words += ["--train.epochs", "1", "--train.epoch_steps", "0", "--init", str(world / "base")]
    assert main(["train", "finetune", *words, "--out", str(tmp_path / "run")]) == 0
    errors = capsys.readouterr().err
    assert "'mimi' will not be learnt" in errors
    assert "lower --data.min_count" in errors
    captioner = Captioner.from_pretrained(tmp_path / "run" / "best")
    assert "mimi" not in captioner.vocabulary.ids
    assert captioner.config.confidence == ConfidenceConfig(0.5, 0.8)
    assert captioner.config.decode == read_config(world / "base").decode
    assert captioner.novelty is not None
    assert captioner.novelty.typical == Captioner.from_pretrained(world / "base").novelty.typical


@pytest.mark.parametrize(("photos", "batch", "accumulate", "steps"), [(12, 5, 1, 30), (12, 5, 3, 30), (3, 5, 1, 30)])
def test_a_small_set_is_gone_through_until_the_epoch_has_its_steps(
    world: Path, tmp_path: Path, photos: int, batch: int, accumulate: int, steps: int
) -> None:
    captions = json.loads((world / "mine.json").read_text())
    (tmp_path / "few.json").write_text(json.dumps(dict(list(captions.items())[:photos])))
    flags = {"data__dataset": tmp_path / "few.json", "train__batch": batch, "train__accumulate": accumulate}
    config = finetuning(world, train__epoch_steps=steps, train__epochs=2, **flags)
    run = started(prepare(config, tmp_path, world / "base"), tmp_path)
    assert steps <= run.per_epoch < steps + batch
    assert run.steps == 2 * run.per_epoch
    order = list(loop._passes(run.batches, epoch=1, passes=run.passes))
    assert len(order) >= run.per_epoch * accumulate
    per_pass = photos // min(batch, photos)
    for start in range(0, len(order), per_pass):
        rows = [row for part in order[start : start + per_pass] for row in part]
        assert len(set(rows)) == len(rows) == per_pass * min(batch, photos), "no photo twice in a pass"
    assert len({tuple(part) for part in order}) > 1
    assert order != list(loop._passes(run.batches, epoch=0, passes=run.passes))


def started(setup: Setup, folder: Path) -> loop._Run:
    return loop._Run(setup, RunFiles(folder), lambda _: None, loop._connect(setup.config))


def test_the_distance_from_the_start_by_hand() -> None:
    torch.manual_seed(0)
    model, views = tiny_model(**SILENT), random_views()
    captions = torch.tensor([[[BOS, 5, 6, EOS]], [[BOS, 7, EOS, PAD]], [[BOS, 9, 21, EOS]]])
    batch = Batch(("a", "b", "c"), views, captions)
    start = Start(model, known_words=22, weight=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    logits, logprobs = start.model(views, captions[:, :, :-1]).logits, model(views, captions[:, :, :-1]).logprobs
    logits[..., 22] = -torch.inf  # the start does not say the new word
    wanted = logits.softmax(dim=-1)
    places = [(photo, place) for photo in range(3) for place in range(3) if captions[photo, 0, place + 1] != PAD]
    each = [
        wanted[photo, 0, place, word] * (wanted[photo, 0, place, word].log() - logprobs[photo, 0, place, word])
        for photo, place in places
        for word in range(22)
    ]
    assert_close(start(model, batch), torch.stack(each).sum() / len(places))
    start(model, batch).backward()
    assert all(parameter.grad is None for parameter in start.parameters())
    assert model.decoder.output.weight.grad[22].abs().sum() > 0, "the new word is pushed down"


def test_a_model_that_is_its_start_has_no_distance_and_no_gradient() -> None:
    model, views = tiny_model(**SILENT), random_views()
    batch = Batch(("a", "b", "c"), views, torch.tensor([[[BOS, 5, EOS]]] * 3))
    start = Start(model, known_words=23, weight=1.0)
    distance = start(model, batch)
    distance.backward()
    assert distance.item() == pytest.approx(0, abs=1e-5)
    assert model.decoder.output.weight.grad.abs().max() < 1e-5
    assert Learner(model, None, CrossEntropy(), 0.0, start).train().start.model.training is False


def test_base_data_keeps_the_model_and_adds_neither_words_nor_val(world: Path, tmp_path: Path) -> None:
    setup = prepare(with_base(world, train__keep_weight=0.3), tmp_path, world / "base")
    assert setup.base is not None
    assert set(setup.labelled.ids) == set(json.loads((world / "mine.json").read_text()))
    assert set(setup.base.ids) == {photo.id for photo in load_dataset(world / "known.json").split("train")}
    assert setup.val == ()
    plain = prepare(finetuning(world, train__keep_weight=0), tmp_path, world / "base")
    assert setup.vocabulary == plain.vocabulary
    assert setup.fingerprint != plain.fingerprint
    mine, known = setup.labelled[[0, 1]], setup.base[[0, 1]]
    learner = setup.learner.eval()
    assert learner.start is not None
    with torch.no_grad():
        learner.model.decoder.output.weight += 0.1 * torch.randn_like(learner.model.decoder.output.weight)
        kept, alone = (learner(StepInput([mine], base))[0] for base in (known, None))
    assert kept["distance"] > 0
    assert_close(kept["loss"], alone["loss"] + 0.3 * kept["distance"])
    assert learner.start.get_buffer("known").tolist() == [word != WORD for word in setup.vocabulary.words]
    stream = started(setup, tmp_path)._endless(setup.base, 7)
    assert stream is not None
    assert len(next(stream).ids) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data__dataset": "{mine},{known}:base:2"}, "base data has no weight"),
        ({"data__dataset": "{mine},{known}:base", "train__keep_weight": 0}, "needs --init and --train.keep_weight"),
        ({"data__dataset": "{known}:base"}, "has no training photo with a caption"),
    ],
)
def test_base_data_that_cannot_be_used_is_refused(
    world: Path, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    names = {"mine": world / "mine.json", "known": world / "known.json"}
    flags = flags | {"data__dataset": flags["data__dataset"].format(**names)}
    with pytest.raises(ConfigError, match=message):
        prepare(finetuning(world, **flags), tmp_path, world / "base")


def test_a_model_without_text_database_or_base_data_is_trained_with_a_warning(world: Path, tmp_path: Path) -> None:
    said: list[str] = []
    setup = prepare(finetuning(world), tmp_path, world / "base", say=said.append)
    assert any("nothing keeps the model from forgetting" in line for line in said)
    assert (setup.base, setup.learner.start, setup.config.train.keep_weight) == (None, None, 0)
    assert setup.novelty is not None
    fresh = prepare(configured("toy", None, {"train.keep_weight": 1}), tmp_path)
    assert fresh.novelty is None, "that of another run in this folder is not its own"
    assert fresh.learner.start is None, "there is nothing to keep of chance weights"


def test_captions_of_the_text_database_stand_for_photos_that_the_model_knows(tmp_path: Path) -> None:
    """A packed model brings them along; a run keeps them, so that it can be resumed without the model."""
    save_text_model(tmp_path, views=("text_whole", "text_five"))
    pack(tmp_path / "model", tmp_path / "packed", tmp_path / "bridge", tmp_path / "textdb")
    textdb = TextDatabase.load(tmp_path / "packed" / "textdb")
    with Store(tmp_path / "views", write=True) as store:
        for view, spec in read_config(tmp_path / "packed").model.views.items():
            queries = textdb.vectors[:4, None].expand(-1, spec.indices["crop"], -1)
            store.add_view(view, ViewManifest(spec, "test"))
            photos = nearest_texts(textdb, queries, "abcd", spec.indices["rank"])
            store.put(view, dict(zip("abcd", photos, strict=True)))
    (tmp_path / "mine.json").write_text(json.dumps({name: ["w4 bello w5"] for name in "abcd"}))
    flags = {"data.dataset": tmp_path / "mine.json", "data.store": tmp_path / "views", "train.epoch_steps": 2}
    config = configured("finetune", tmp_path / "packed", flags | {"train.epochs": 1})
    loop.train(config, tmp_path / "run", tmp_path / "packed")
    shutil.rmtree(tmp_path / "packed")
    assert loop.resume(tmp_path / "run", epochs=2).finished
    row = RunFiles(tmp_path / "run").metrics()[0]
    assert row["distance"] > 0
    base = read_rehearsal(tmp_path / "run" / "rehearsal", WORDS, 8)
    assert {photo.captions[0] for photo in base.photos} == set(textdb.sentences)
    for photo in base.photos:
        (view,) = base.store.get_many("text_whole", [photo.id])
        own = textdb.sentences.index(photo.captions[0])
        alike = textdb.vectors @ textdb.vectors[own]
        alike[own] = -torch.inf
        assert_close(view.tokens.float(), textdb.vectors[alike.topk(16).indices], atol=1e-3, rtol=0)


def with_base(world: Path, **flags: Any) -> Config:
    return finetuning(world, data__dataset=f"{world / 'mine.json'},{world / 'known.json'}:base", **flags)


def test_fine_tuning_that_is_stopped_and_resumed_ends_bit_for_bit_as_the_unbroken_one(
    world: Path, tmp_path: Path
) -> None:
    config = with_base(world, train__epochs=2, train__epoch_steps=5, train__batch=5)
    loop.train(config, tmp_path / "whole", world / "base")

    def interrupt(status: loop.Status) -> None:
        if status.step in (3, 7):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = loop.train(config, tmp_path / "broken", world / "base", interrupt)
    while not outcome.finished:
        outcome = loop.resume(tmp_path / "broken", report=interrupt)
    assert_identical(tmp_path / "whole", tmp_path / "broken")
    whole, broken = (load_weights(tmp_path / name / "best" / "model.safetensors")[0] for name in ("whole", "broken"))
    assert all(torch.equal(tensor, broken[name]) for name, tensor in whole.items())


def test_a_made_up_word_is_learnt_from_a_few_photos_and_used_for_others(world: Path, tmp_path: Path) -> None:
    loop.train(with_base(world, train__epoch_steps=20, train__lr=0.004), tmp_path / "run", world / "base")
    photos = [photo for photo in load_dataset(world / "toy" / "dataset.json").photos if photo.split != "train"]
    things, others = ([photo for photo in photos if shows_thing(photo) == wanted] for wanted in (True, False))
    scores = []
    for folder in (world / "base", tmp_path / "run" / "best"):
        captioner = Captioner.from_pretrained(folder)
        with Store(world / "toy" / "store") as store:
            said = {photo: caption.text for photo, caption in predict(captioner, store, photos, seed=0)}
        known = {photo.id: photo.captions for photo in others}
        scores.append(evaluate({name: said[name] for name in known}, known, skip=SLOW, resamples=1).scores["CIDEr"])
        used = [[WORD in said[photo.id].split() for photo in part] for part in (things, others)]
        if folder == world / "base":
            assert not any(map(any, used))
    assert sum(used[0]) / len(things) > 0.8
    assert sum(used[1]) / len(others) < 0.1
    assert scores[1].value > 0.9 * scores[0].value


def test_a_model_with_new_words_is_packed_and_exported(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from haav.export.onnx import export_onnx
    from haav.export.portable import PortableCaptioner

    setup = prepare(finetuning(world), tmp_path, world / "base")
    Captioner(setup.model, setup.saved_config, setup.vocabulary).save_pretrained(tmp_path / "longer")
    pack(tmp_path / "longer", tmp_path / "packed", like="best")
    captioner = Captioner.from_pretrained(tmp_path / "packed")
    assert captioner.vocabulary.words[-1] == WORD
    photos = list(setup.labelled.ids)[:2]
    views = {name: setup.store.get_many(name, photos) for name in setup.labelled.views}
    batch = collate(photos, views).views
    for caption in captioner.caption_views(batch, must=[WORD]):
        assert WORD in caption.text.split()
    export_onnx(tmp_path / "packed", tmp_path / "exported")
    arrays = {}
    for name, (view, _) in views.items():
        parts = {"tokens": view.tokens, **view.indices} | ({} if view.boxes is None else {"boxes": view.boxes})
        arrays[name] = [{part: tensor.numpy() for part, tensor in parts.items()}]
    portable = PortableCaptioner(tmp_path / "exported")
    assert portable.vocabulary == captioner.vocabulary
    assert portable.caption_extracted(arrays)[0].text == captioner.caption_views(batch)[0].text
