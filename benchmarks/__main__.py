"""What the project claims about speed, as ratios in one run: `make bench`, or `python -m benchmarks [name …]`.

Results are kept for each commit, in bench/COMMIT.json. What is measured again replaces what was there.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.annotations import annotations
from benchmarks.backends import backends
from benchmarks.busy import busy
from benchmarks.common import end_after, random_captions
from benchmarks.growth import exponent, growth
from benchmarks.loading import loading
from benchmarks.operations import operations
from benchmarks.others import others
from benchmarks.padding import padding
from benchmarks.plain import by_torch, plain_beam_search
from benchmarks.scale import scale
from benchmarks.signal import signal
from benchmarks.towers import towers
from benchmarks.training import self_critical, training

import haav
from haav.evaluate.reward import CiderReward
from haav.evaluate.scores import SLOW, evaluate
from haav.files import write_atomically
from haav.generate.backends import OnnxModel
from haav.generate.beam import BeamSearch
from haav.generate.loop import Generated, generate
from haav.generate.rules import Ending
from haav.inference.parallel import side_by_side
from haav.model.build import build_model, load_config
from haav.studies.bench import bench, machine, seconds
from haav.studies.speed import random_views
from haav.types import View, Views

RESULTS, ONE = Path("bench"), "--one"


def decoding() -> dict[str, Any]:
    """Beam 5, ten photos, the release's sizes, against the release's way."""
    torch.manual_seed(0)
    config = load_config("release")
    model, momentum = (build_model(config.model).eval().requires_grad_(False) for _ in range(2))
    views = random_views(config.model.views, 10)

    def ours(n_best: int | None = None) -> Generated:
        with torch.no_grad():
            return generate(model, model.encode(views), BeamSearch(5, n_best=n_best), max_words=20)

    halves = [{name: _rows(view, rows) for name, view in views.items()} for rows in (slice(0, 5), slice(5, 10))]

    def in_lanes(backend: OnnxModel) -> list[Generated]:
        @torch.no_grad()
        def caption(part: Views) -> Generated:
            return generate(backend, backend.encode(part), BeamSearch(5, n_best=1), max_words=20)

        return list(side_by_side(caption, halves))

    def plain_way() -> Callable[[], torch.Tensor]:
        theirs = copy.deepcopy(model)
        by_torch(theirs, momentum)
        return lambda: plain_beam_search(theirs, momentum.encoding, views, 5, 20)

    whole = seconds(ours, times=3)
    slow_whole = seconds(plain_way(), times=1)
    end_after(model, ours, words=10)
    plain = plain_way()
    found = ours()
    same = torch.equal(found.tokens, plain()[:, :, : found.tokens.shape[2]])
    slow, fast, one = seconds(plain, times=2), seconds(ours), seconds(lambda: ours(1))
    lanes = seconds(partial(in_lanes, OnnxModel(model)))
    sizes = "/".join(str(spec.max_tokens) for spec in config.model.views.values())
    return {
        "what": f"beam 5, 10 photos, views {sizes}, {config.model.vocabulary_size:,} words",
        "words a caption": found.lengths.float().mean().item(),
        "same captions": same,
        "the release's way, s": slow,
        "haav, five captions a photo, s": fast,
        "haav, the best one, s": one,
        "haav, the best one, onnxruntime, five photos per core, s": lanes,
        "photos a second": 10 / lanes,
        "times faster, five captions": slow / fast,
        "times faster, the best one": slow / one,
        "times faster, the best one, onnxruntime, five photos per core": slow / lanes,
        "times faster if no caption ended before 20 words": slow_whole / whole,
    }


def _rows(view: View, rows: slice) -> View:
    return View(
        view.tokens[rows],
        view.mask[rows],
        {name: index[rows] for name, index in view.indices.items()},
        None if view.boxes is None else view.boxes[rows],
    )


def photos() -> dict[str, Any]:
    """What `haav bench` measures"""
    return bench(haav.load(), "best")


def reward() -> dict[str, Any]:
    """200 captions (40 photos × 5), 5 references each, document frequency of 25,000 captions: against pycocoevalcap"""
    references = {f"p{index}": texts for index, texts in enumerate(random_captions(5000, 5))}
    score = CiderReward(references, end_token=False)
    photos = list(references)[:40]
    captions = [references[f"p{index + 1}"] for index in range(40)]
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
    references = {f"p{index}": texts for index, texts in enumerate(random_captions(5000, 5))}
    captions = {photo: texts[0] for photo, texts in references.items()}
    plain = seconds(lambda: evaluate(captions, references, skip=SLOW, resamples=1), times=2)
    whole = seconds(lambda: evaluate(captions, references, skip=SLOW), times=1)
    return {
        "what": "BLEU, ROUGE-L, CIDEr of 5,000 photos × 5 references",
        "scores, s": plain,
        "with 1,000 bootstrap samples, s": whole,
    }


def length() -> dict[str, Any]:
    """Beam 5, ten photos, the release's sizes: captions of 5, 10 and 20 words"""
    torch.manual_seed(0)
    config = load_config("release")
    model = build_model(config.model).eval()
    views = random_views(config.model.views, 10)
    took = {}
    for words in (5, 10, 20):

        @torch.no_grad()
        def write(words: int = words) -> Generated:
            return generate(model, model.encode(views), BeamSearch(5), [Ending(words)], max_words=words + 1)

        assert write().lengths.min() == words + 1
        took[words] = seconds(write, times=3)
    return {
        "what": "beam 5, 10 photos: captions of exactly so many words",
        **{f"{words} words, ms a photo": 100 * each for words, each in took.items()},
        "power of the number of words": exponent([took[5], took[10], took[20]]),
    }


BENCHMARKS = {
    "decoding": decoding,
    "operations": operations,
    "backends": backends,
    "training": training,
    "padding": padding,
    "self-critical": self_critical,
    "reward": reward,
    "scoring": scoring,
    "scale": scale,
    "annotations": annotations,
    "growth": growth,
    "length": length,
    "loading": loading,
    "signal": signal,
    "towers": towers,
    "photos": photos,
    "busy": busy,
    "others": others,
}


def main(names: list[str]) -> int:
    """Each benchmark has a process, and so a peak of memory, of its own."""
    if {"-h", "--help"} & {*names}:
        print(f"{__doc__}\nBenchmarks: {', '.join(BENCHMARKS)}.")
        return 0
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark '{unknown[0]}'. Available: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    about = {"machine": machine(), "cores": os.cpu_count(), "haav": haav.__version__, "day": time.strftime("%Y-%m-%d")}
    found: dict[str, Any] = {}
    results = RESULTS / f"{commit()}.json"
    RESULTS.mkdir(exist_ok=True)
    if results.exists():
        found = json.loads(results.read_text())
    print(" · ".join(map(str, about.values())))
    for name in names or BENCHMARKS:
        found[name] = about | _apart(name)
        for key, value in list(found[name].items())[len(about) :]:
            print(
                f"{name:13} {key}: {value:.4g}" if isinstance(value, float) else f"{name:13} {key}: {value}", flush=True
            )
        write_atomically(results, lambda file: file.write_text(json.dumps(found, indent=1)))
    print(f"all of it as JSON: {results}")
    return 0


def commit() -> str:
    """The commit that is checked out; "changed" is added if files differ from it"""
    here = Path(__file__).parent
    name = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=-changed"], cwd=here, capture_output=True
    )
    return name.stdout.decode().strip() or "unknown"


def _apart(name: str) -> dict[str, Any]:
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks", ONE, name], stdout=subprocess.PIPE)
    assert process.stdout is not None
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise SystemExit(f"benchmark '{name}' failed.")
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found | {"peak memory, GB": usage.ru_maxrss / 2**20, "took, s": time.monotonic() - started}


if __name__ == "__main__":
    if sys.argv[1:2] == [ONE]:
        print(json.dumps(BENCHMARKS[sys.argv[2]]()))
    else:
        raise SystemExit(main(sys.argv[1:]))
