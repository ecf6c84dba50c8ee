"""What the project claims about speed, as ratios in one run: `make bench`, or `python -m benchmarks [name …]`."""

from __future__ import annotations

import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from benchmarks.plain import plain_beam_search, plain_training_loss

from haav.evaluate.reward import CiderReward
from haav.evaluate.scores import SLOW, evaluate
from haav.generate import BeamSearch, Generated, generate
from haav.model.build import build_model
from haav.model.layers import Dropout
from haav.presets import load_config
from haav.text import BOS, EOS
from haav.train.momentum import build_contrast
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.types import Batch, View


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The quickest of several runs after a first: what the machine can do when nobody disturbs it"""
    work()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def random_captions(photos: int, each: int, seed: int = 0) -> list[list[str]]:
    """Sentences of 8 to 14 words, common words far more often than rare ones, as in captions"""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(8000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    return [[" ".join(rng.choices(words, weights, k=rng.randint(8, 14))) for _ in range(each)] for _ in range(photos)]


def decoding() -> dict[str, Any]:
    """Beam 5, ten photos, the release's sizes, against the release's way."""
    torch.manual_seed(0)
    config = load_config("release")
    model, momentum = (build_model(config.model).eval() for _ in range(2))
    views = release_views(config, 10)

    def ours(n_best: int | None = None) -> Generated:
        with torch.no_grad():
            return generate(model, model.encode(views), BeamSearch(5, n_best=n_best), max_words=20)

    def plain() -> torch.Tensor:
        return plain_beam_search(model, momentum, views, 5, 20)

    whole = seconds(ours, times=3)
    slow_whole = seconds(plain, times=1)
    end_after(model, ours, words=10)
    found = ours()
    same = torch.equal(found.tokens, plain()[:, :, : found.tokens.shape[2]])
    slow, fast, one = seconds(plain, times=2), seconds(ours), seconds(lambda: ours(1))
    sizes = "/".join(str(spec.max_tokens) for spec in config.model.views.values())
    return {
        "what": f"beam 5, 10 photos, views {sizes}, {config.model.vocabulary_size:,} words",
        "words a caption": found.lengths.float().mean().item(),
        "same captions": same,
        "the release's way, s": slow,
        "haav, five captions a photo, s": fast,
        "haav, the best one, s": one,
        "photos a second": 10 / one,
        "times faster, five captions": slow / fast,
        "times faster, the best one": slow / one,
        "times faster if no caption ended before 20 words": slow_whole / whole,
    }


def end_after(model: Any, write: Callable[[], Generated], words: int) -> None:
    """Fit the end token's weights so that captions end after `words` or so, as a trained model's do."""
    seen: list[torch.Tensor] = []
    hook = model.decoder.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    write()
    hook.remove()
    states = torch.cat(seen)
    wanted = torch.cat([torch.full((len(part),), 15.0 if at >= words else -15.0) for at, part in enumerate(seen)])
    gram = states.T @ states + 1e-2 * torch.eye(states.shape[1])
    with torch.no_grad():
        model.decoder.output.weight[EOS] = torch.linalg.solve(gram, states.T @ wanted)


def training() -> dict[str, Any]:
    """An XE step with the contrastive loss at the release's sizes, batch 50, against the release's way"""
    torch.manual_seed(0)
    config = load_config("release")
    quiet = replace(config.model, dropout=0.0, channel_dropout=0.0, token_dropout=0.0, view_dropout=0.0)
    small = release_views(config, 4)
    words = torch.randint(4, config.model.vocabulary_size, (50, 5, 13))
    words[:, :, 0] = BOS
    # The same loss first, without chance; then the time, with all dropouts.
    model = build_model(quiet)
    contrast = build_contrast(model.encoding, quiet, config.contrast)
    contrast.enqueue(
        torch.nn.functional.normalize(torch.randn(config.contrast.queue_size, config.model.d_model), dim=1)
    )
    plain_loss = plain_training_loss(model, contrast, small, words[:4, 0], 0.05)
    own, _ = Learner(model, contrast, CrossEntropy(), 0.05)(StepInput([Batch(("",) * 4, small, words[:4, :1])]))
    agree = abs(plain_loss.item() - own["loss"].item()) < 1e-3

    views = release_views(config, 50)
    model = build_model(config.model)
    contrast = build_contrast(model.encoding, config.model, config.contrast)
    contrast.enqueue(
        torch.nn.functional.normalize(torch.randn(config.contrast.queue_size, config.model.d_model), dim=1)
    )
    learner = Learner(model, contrast, CrossEntropy(), 0.05).train()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-5)

    def step(captions: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        losses, keys = learner(StepInput([Batch(("",) * 50, views, words[:, :captions])]))
        losses["loss"].backward()
        optimizer.step()
        contrast.enqueue(keys[0])
        contrast.follow(model.encoding)

    one, five = seconds(lambda: step(1), times=3), seconds(lambda: step(5), times=2)
    for part in learner.modules():
        if isinstance(part, Dropout):
            part.__class__ = torch.nn.Dropout

    def plain() -> None:
        optimizer.zero_grad(set_to_none=True)
        plain_training_loss(model, contrast, views, words[:, 0], 0.05).backward()
        optimizer.step()
        contrast.follow(model.encoding)

    slow = seconds(plain, times=2)
    return {
        "what": "XE step with contrast, batch 50, the release's sizes, captions of 12 words",
        "same loss": agree,
        "the release's way, one caption a photo, s": slow,
        "haav, one caption a photo, s": one,
        "haav, five captions a photo, s": five,
        "times faster, a step": slow / one,
        "times the captions a second, five a photo": 5 * slow / five,
    }


def full_queue(config: Any) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(config.contrast.queue_size, config.model.d_model), dim=1)


def release_views(config: Any, photos: int) -> dict[str, View]:
    """Random views of the release's lengths and widths"""
    return {
        name: View(
            torch.randn(photos, spec.max_tokens, spec.dim),
            torch.ones(photos, spec.max_tokens, dtype=torch.bool),
            {index: torch.randint(0, size, (photos, spec.max_tokens)) for index, size in spec.indices.items()},
            torch.rand(photos, spec.max_tokens, 4) if spec.boxes else None,
        )
        for name, spec in config.model.views.items()
    }


def reward() -> dict[str, Any]:
    """200 captions (40 photos × 5), 5 references each, document frequency of 25,000 captions: against pycocoevalcap"""
    references = {f"p{number}": texts for number, texts in enumerate(random_captions(5000, 5))}
    score = CiderReward(references, end_token=False)
    photos = list(references)[:40]
    captions = [references[f"p{number + 1}"] for number in range(40)]
    fast = seconds(lambda: score(photos, captions), times=20)
    found = {"what": "reward of 200 captions, 25,000 captions of document frequency", "haav, ms": 1000 * fast}
    if shutil.which("java") is None:
        return found | {"pycocoevalcap": "– (java not found)"}
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer, cider = PTBTokenizer(), Cider()

    def theirs() -> None:
        wanted = {n: [{"caption": text} for text in references[photos[n // 5]]] for n in range(200)}
        said = {n: [{"caption": captions[n // 5][n % 5]}] for n in range(200)}
        cider.compute_score(tokenizer.tokenize(wanted), tokenizer.tokenize(said))

    slow = seconds(theirs, times=3)
    return found | {"pycocoevalcap with its tokenizer, ms": 1000 * slow, "times faster": slow / fast}


def scoring() -> dict[str, Any]:
    """BLEU, ROUGE-L and CIDEr of 5,000 photos with five references, tokenised, without and with the intervals"""
    references = {f"p{number}": texts for number, texts in enumerate(random_captions(5000, 5))}
    captions = {photo: texts[0] for photo, texts in references.items()}
    plain = seconds(lambda: evaluate(captions, references, skip=SLOW, resamples=1), times=2)
    whole = seconds(lambda: evaluate(captions, references, skip=SLOW), times=1)
    return {
        "what": "BLEU, ROUGE-L, CIDEr of 5,000 photos × 5 references",
        "scores, s": plain,
        "with 1,000 bootstrap samples, s": whole,
    }


BENCHMARKS = {"decoding": decoding, "training": training, "reward": reward, "scoring": scoring}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark '{unknown[0]}'. Available: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} on {torch.get_num_threads()} threads"
    )
    print(machine)
    for name in names or BENCHMARKS:
        for key, value in BENCHMARKS[name]().items():
            print(f"{name:10} {key}: {value:.4g}" if isinstance(value, float) else f"{name:10} {key}: {value}")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
