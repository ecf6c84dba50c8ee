"""A training step at the release's sizes against the release's way: time, and peak memory of a process of its own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from benchmarks.common import end_after, peak_gigabytes
from benchmarks.plain import by_torch, plain_self_critical_loss, plain_training_loss
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from haav.cpu import check_bfloat16
from haav.errors import ConfigError
from haav.evaluate.reward import CiderReward
from haav.generate.beam import BeamSearch
from haav.generate.loop import Generated, generate
from haav.model.build import build_contrast, build_model, load_config
from haav.model.recompute import recompute
from haav.studies.bench import matmul_rate, seconds
from haav.studies.describe import FUSED
from haav.studies.speed import random_views
from haav.text import BOS, SPECIAL, Vocabulary
from haav.train.loop import keep_memory
from haav.train.objectives import CrossEntropy, Learner, Objective, SelfCritical, StepInput
from haav.types import Batch

WEIGHT = 0.05
"""of the contrastive loss"""
ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
WORDS = 20
"""the longest caption of a search"""


class Bench:
    """A model of the release's sizes with everything that a step needs"""

    def __init__(self, photos: int, silent: bool = False, bfloat16: bool = False) -> None:
        torch.manual_seed(0)
        self.bfloat16 = bfloat16
        self.config = load_config("release")
        sizes = self.config.model
        if silent:
            sizes = replace(sizes, dropout=0.0, channel_dropout=0.0, token_dropout=0.0, view_dropout=0.0)
        self.ids = tuple(f"p{index}" for index in range(photos))
        self.views = random_views(self.config.model.views, photos)
        self.captions = torch.randint(len(SPECIAL), sizes.vocabulary_size, (photos, 5, 13))
        self.captions[:, :, 0] = BOS
        self.model = build_model(sizes)
        self.contrast = build_contrast(self.model.encoding, sizes, self.config.contrast)
        past = torch.randn(self.config.contrast.queue_size, sizes.d_model)
        self.contrast.enqueue(torch.nn.functional.normalize(past, dim=1))
        self.optimizer = torch.optim.AdamW(
            [*self.model.parameters(), *self.contrast.projector.parameters()], lr=1e-5, fused=True
        )

    def losses(self, objective: Objective, captions: int = 1) -> tuple[Tensor, Tensor]:
        """Ours, and the keys for the queue"""
        learner = Learner(self.model, self.contrast, objective, WEIGHT).train()
        batch = Batch(self.ids, self.views, self.captions[:, :captions])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            losses, keys = learner(StepInput([batch]))
        return losses["loss"], keys[0]

    def step(self, objective: Objective, captions: int = 1) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss, keys = self.losses(objective, captions)
        loss.backward()
        self.optimizer.step()
        self.contrast.enqueue(keys)
        self.contrast.follow(self.model.encoding)

    def plain_step(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.contrast.follow(self.model.encoding)

    def self_critical(self) -> SelfCritical:
        """Five beams that end after ten words or so, as a trained model's do; some of them are the references."""
        self.model.eval()
        end_after(self.model, self.write, words=10)
        named = (f"w{index}" for index in range(self.config.model.vocabulary_size - len(SPECIAL)))
        vocabulary = Vocabulary((*SPECIAL, *named))
        written = self.write().tokens[:, 1::2].tolist()
        texts = [[" ".join(vocabulary.decode(words)) for words in photo] for photo in written]
        self.model.train()
        return SelfCritical(CiderReward(dict(zip(self.ids, texts, strict=True))), vocabulary, (), 5, "beam", WORDS)

    @torch.no_grad()
    def write(self) -> Generated:
        return generate(self.model, self.model.encode(self.views), BeamSearch(5), max_words=WORDS)

    def plain_self_critical_loss(self, objective: SelfCritical) -> Tensor:
        def reward(tokens: Tensor) -> Tensor:
            return torch.from_numpy(objective.score(self.ids, tokens)).float()

        return plain_self_critical_loss(self.model, self.contrast, self.views, 5, WORDS, WEIGHT, reward)


def xe(captions: int, bfloat16: bool = False, again: bool = False) -> float:
    bench = Bench(50, bfloat16=bfloat16)
    if again:
        recompute(bench.model)
    return seconds(lambda: bench.step(CrossEntropy(), captions), times=3)


def plain_xe() -> float:
    bench = Bench(50)
    by_torch(bench.model, bench.contrast)

    def step() -> None:
        bench.plain_step(plain_training_loss(bench.model, bench.contrast, bench.views, bench.captions[:, 0], WEIGHT))

    return seconds(step, times=2)


def scst(photos: int, bfloat16: bool = False) -> float:
    bench = Bench(photos, bfloat16=bfloat16)
    objective = bench.self_critical()
    return seconds(lambda: bench.step(objective), times=2)


def plain_scst(photos: int) -> float:
    bench = Bench(photos)
    objective = bench.self_critical()
    by_torch(bench.model, bench.contrast)
    return seconds(lambda: bench.plain_step(bench.plain_self_critical_loss(objective)), times=1)


RUNS = {
    "xe-1": lambda: xe(1),
    "xe-5": lambda: xe(5),
    "xe-1-bfloat16": lambda: xe(1, bfloat16=True),
    "xe-5-bfloat16": lambda: xe(5, bfloat16=True),
    "xe-1-recomputed": lambda: xe(1, again=True),
    "xe-1-bfloat16-recomputed": lambda: xe(1, bfloat16=True, again=True),
    "plain-xe": plain_xe,
    "scst-8": lambda: scst(8),
    "scst-8-bfloat16": lambda: scst(8, bfloat16=True),
    "scst-40": lambda: scst(40),
    "plain-scst-8": lambda: plain_scst(8),
}


def alone(name: str) -> tuple[float, float]:
    """Seconds a step and gigabytes at the peak, by a process that does nothing else"""
    done = subprocess.run([sys.executable, "-m", __spec__.name, name], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    return found["seconds"], found["gigabytes"]


def _backward_flop(grad: list[int], query: list[int], keys: list[int], *_: Any, **__: Any) -> int:
    """Four products, as in attention that is written out"""
    return 8 * math.prod(query) * keys[-2]


def step_gigaflops(captions: int) -> float:
    """All matrix products of a step of 50 photos, forward and backward, two a multiply-add; of 10 photos, times five"""
    bench = Bench(10)
    with FlopCounterMode(display=False, custom_mapping=FUSED | {ATTENTION_BACKWARD: _backward_flop}) as counter:
        bench.step(CrossEntropy(), captions)
    return 5 * counter.get_total_flops() / 1e9


def same_loss() -> bool:
    """Both ways, without chance"""
    bench = Bench(4, silent=True)
    plain = plain_training_loss(bench.model, bench.contrast, bench.views, bench.captions[:, 0], WEIGHT)
    ours, _ = bench.losses(CrossEntropy())
    return abs(plain.item() - ours.item()) < 1e-3


def same_self_critical_loss() -> bool:
    bench = Bench(3, silent=True)
    objective = bench.self_critical()
    ours, _ = bench.losses(objective)
    return abs(bench.plain_self_critical_loss(objective).item() - ours.item()) < 1e-3


def has_bfloat16() -> bool:
    """Whether the machine has units for it, as its speed tells"""
    try:
        check_bfloat16()
    except ConfigError:
        return False
    return matmul_rate(dtype=torch.bfloat16) > 1.2 * matmul_rate()


def in_bfloat16(slow: float, one: str, five: str | None = None) -> dict[str, Any]:
    """The same step as `train.precision bf16` takes it, where that makes sense"""
    if not has_bfloat16():
        return {"in bfloat16": "– (this machine has no units for it)"}
    took, memory = alone(one)
    found = {"in bfloat16, s": took, "in bfloat16, times faster": slow / took, "in bfloat16, peak memory, GB": memory}
    if five is not None:
        took, memory = alone(five)
        found |= {"in bfloat16, times the captions a second, five a photo": 5 * slow / took}
        took, memory = alone(f"{one}-recomputed")
        found |= {"in bfloat16, recomputed, s": took, "in bfloat16, recomputed, peak memory, GB": memory}
    return found


def training() -> dict[str, Any]:
    """An XE step with the contrastive loss, batch 50, against the release's way"""
    slow, slow_memory = alone("plain-xe")
    one, one_memory = alone("xe-1")
    five, five_memory = alone("xe-5")
    again, again_memory = alone("xe-1-recomputed")
    peak, work, work_five = matmul_rate(), step_gigaflops(1), step_gigaflops(5)
    return {
        "what": "XE step with contrast, batch 50, the release's sizes, captions of 12 words",
        "same loss": same_loss(),
        "the release's way, one caption a photo, s": slow,
        "haav, one caption a photo, s": one,
        "haav, five captions a photo, s": five,
        "times faster, a step": slow / one,
        "times the captions a second, five a photo": 5 * slow / five,
        "peak memory, the release's way, GB": slow_memory,
        "peak memory, one caption, GB": one_memory,
        "peak memory, five captions, GB": five_memory,
        "one caption, recomputed, s": again,
        "one caption, recomputed, peak memory, GB": again_memory,
        "a large matrix product, GFLOP/s": peak,
        "GFLOP a step, one caption and five": f"{work:.0f}, {work_five:.0f}",
        "one caption: of the large product's rate, %": 100 * work / one / peak,
        "five captions: of the large product's rate, %": 100 * work_five / five / peak,
        **in_bfloat16(slow, "xe-1-bfloat16", "xe-5-bfloat16"),
    }


def self_critical() -> dict[str, Any]:
    """A self-critical step, five beams, against a search that keeps its graph"""
    slow, slow_memory = alone("plain-scst-8")
    fast, fast_memory = alone("scst-8")
    whole, whole_memory = alone("scst-40")
    return {
        "what": f"SCST step with contrast, 5 beams of at most {WORDS} words, the release's sizes",
        "same loss": same_self_critical_loss(),
        "8 photos, the release's way, s": slow,
        "8 photos, haav, s": fast,
        "40 photos, haav, s": whole,
        "times faster, 8 photos": slow / fast,
        "peak memory, 8 photos, the release's way, GB": slow_memory,
        "peak memory, 8 photos, haav, GB": fast_memory,
        "peak memory, 40 photos, haav, GB": whole_memory,
        **in_bfloat16(slow, "scst-8-bfloat16"),
    }


if __name__ == "__main__":
    name = sys.argv[1]
    if not name.startswith("plain"):
        keep_memory()
    took = RUNS[name]()
    peak = peak_gigabytes()
    print(json.dumps({"seconds": took, "gigabytes": peak}))
