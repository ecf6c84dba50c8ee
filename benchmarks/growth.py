"""What more views cost: python -m benchmarks growth. Each size has a process, and so a peak of memory, of its own.

Equal views, the sizes of preset `best`. Powers of |V| come from the growth between 2, 4 and 8 views, so that what does
not depend on views at all (words, embeddings, the interpreter) does not flatten them: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from benchmarks.common import end_after, peak_gigabytes

from haav.generate.beam import BeamSearch
from haav.generate.loop import Generated, generate
from haav.model.build import build_model, load_config, resolve
from haav.studies.bench import seconds
from haav.studies.describe import blank_view, cost
from haav.train.loop import keep_memory
from haav.train.objectives import CrossEntropy, Learner, StepInput
from haav.types import Batch, Views, ViewSpec

ENCODINGS = ("shared", "unshared", "concat_views", "model_per_view")
COUNTS = (1, 2, 4, 8)
PHOTOS, CAPTIONS, TOKENS, WIDTH = 10, 2, 100, 512


def measure(encoding: str, count: int) -> dict[str, float]:
    """Training and beam 5 with `count` views, in this process"""
    keep_memory()
    torch.manual_seed(0)
    config = load_config("best")
    spec = ViewSpec(WIDTH, TOKENS)
    views_of = {f"view{index}": spec for index in range(count)}
    sizes = replace(config.model, views=views_of, vocabulary_size=6000, encoding=encoding, aggregator="auto")
    config, problems = resolve(replace(config, model=sizes, contrast=replace(config.contrast, enabled=False)))
    assert not problems, problems
    model = build_model(config.model)
    learner = Learner(model, None, CrossEntropy(0.1), 0.0).train()
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    views = _views(count)
    batch = Batch(("",) * PHOTOS, views, torch.randint(4, 6000, (PHOTOS, CAPTIONS, 13)))

    def step() -> None:
        losses, _ = learner(StepInput([batch]))
        losses["loss"].backward()
        for parameter in trained:
            parameter.grad = None

    step_seconds = seconds(step, times=3)
    peak = peak_gigabytes()
    model.eval()

    @torch.no_grad()
    def write() -> Generated:
        return generate(model, model.encode(views), BeamSearch(5, n_best=1), max_words=12)

    for member in model.members:
        end_after(member, write, words=10)
    flops = cost(config.model)
    return {
        "parameters": float(sum(parameter.numel() for parameter in trained)),
        "step": step_seconds,
        "caption": seconds(write, times=3) / PHOTOS,
        "memory": peak,
        "flops": flops.encoding + flops.memory + 10 * flops.step,
        "attention": float(flops.encoding_attention),
    }


def _views(count: int) -> Views:
    blank = blank_view(ViewSpec(WIDTH, TOKENS))
    mask = blank.mask.expand(PHOTOS, -1)
    return {
        f"view{index}": replace(blank, tokens=torch.randn(PHOTOS, TOKENS, WIDTH), mask=mask) for index in range(count)
    }


def exponent(costs: list[float]) -> float:
    """From costs at V, 2V, 4V"""
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    return math.log2(second / first) if first > 0 and second > 0 else float("nan")


def growth() -> dict[str, Any]:
    """Captions a second, memory and FLOPs against the number of views, for each way to encode them"""
    found: dict[str, Any] = {
        "what": f"{PHOTOS} photos, views of {TOKENS} tokens × {WIDTH}; XE step with {CAPTIONS} captions a photo; beam 5"
    }
    for encoding in ENCODINGS:
        per_count: dict[int, dict[str, float]] = {}
        for count in COUNTS:
            words = [sys.executable, "-m", __spec__.name, encoding, str(count)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            own = per_count[count] = json.loads(done.stdout)
            found[f"{encoding}, {count} views"] = (
                f"{own['parameters'] / 1e6:.1f} M parameters; "
                f"training {PHOTOS * CAPTIONS / own['step']:.1f} captions/s, {own['memory']:.2f} GB; "
                f"beam 5 {1 / own['caption']:.1f} captions/s; {own['flops'] / 1e9:.2f} GFLOP a photo"
            )
        for name in ("step", "caption", "memory", "flops", "attention"):
            found[f"{encoding}, power of |V|: {name}"] = exponent([per_count[count][name] for count in COUNTS[1:]])
    return found


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
