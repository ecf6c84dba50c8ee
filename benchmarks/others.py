"""What a user would run instead: BLIP-base and GIT-base through transformers, beside haav on the same photos.

Their weights are random, since no hub is needed to time them: what a network costs does not depend on its values.
Eleven words are forced, as captions have them. Nothing here says anything about the quality of their captions.
Each system has processes of its own: one that stays warm, and a few that caption one photo and end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import haav
from haav.photos.images import load_image
from haav.studies.bench import seconds

BEAM, WORDS, PHOTOS, STARTS = 3, 11, 8, 3
SIDES = {"BLIP-base": 384, "GIT-base": 224}
OURS = "haav"


def others() -> dict[str, Any]:
    """Latency, throughput, memory and cold start of each, and how many times ours they are"""
    found: dict[str, Any] = {"what": f"beam {BEAM}, {WORDS} words; BLIP and GIT in float32 with random weights"}
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OURS, *SIDES):
            place = Path(folder) / name
            if name in SIDES:
                _alone("save", name, place)  # so that a cold start reads weights, as a user's does
            warm, memory = _alone("warm", name, place)
            starts = [_cold(name, place) for _ in range(STARTS)]
            measured[name] = {**warm, "memory, GB": memory, "cold start, s": float(np.median(starts))}
    for name, values in measured.items():
        for what, value in values.items():
            found[f"{name}: {what}"] = value
            if name in SIDES and what in measured[OURS]:
                worse = measured[OURS][what] / value if what == "photos/s" else value / measured[OURS][what]
                found[f"{name}: {what}, times worse than haav"] = worse
    return found


def sample() -> Image.Image:
    return load_image(resources.files("haav").joinpath("samples", "cat.jpg").read_bytes())


def save(name: str, place: Path) -> None:
    from transformers import BlipConfig, BlipForConditionalGeneration, GitConfig, GitForCausalLM

    torch.manual_seed(0)
    model = BlipForConditionalGeneration(BlipConfig()) if name == "BLIP-base" else GitForCausalLM(GitConfig())
    model.save_pretrained(place)


def captioner_of(name: str, place: Path) -> Any:
    """A function of a list of pictures"""
    if name == OURS:
        ours = haav.load()
        return lambda images: ours.caption(images if len(images) > 1 else images[0], beam=BEAM)
    from transformers import BlipForConditionalGeneration, GitForCausalLM

    model = (BlipForConditionalGeneration if name == "BLIP-base" else GitForCausalLM).from_pretrained(place).eval()
    side = SIDES[name]

    def caption(images: list[Image.Image]) -> None:
        arrays = np.stack([np.array(image.resize((side, side))) for image in images])
        pixels = torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1
        more = {"input_ids": torch.full((len(images), 1), 101)} if name == "GIT-base" else {}
        with torch.no_grad():
            model.generate(
                pixel_values=pixels,
                num_beams=BEAM,
                max_new_tokens=WORDS,
                min_new_tokens=WORDS,
                do_sample=False,
                **more,
            )

    return caption


def warm(name: str, place: Path) -> dict[str, float]:
    caption, image = captioner_of(name, place), sample()
    times = 10 if name == OURS else 3
    one = seconds(lambda: caption([image]), times)
    many = seconds(lambda: caption([image] * PHOTOS), max(2, times // 3))
    return {"one photo, ms": 1000 * one, "photos/s": PHOTOS / many}


def _alone(what: str, name: str, place: Path) -> tuple[dict[str, float], float]:
    """What a process of its own measured, and the gigabytes of its peak"""
    command = [sys.executable, "-m", "benchmarks.others", what, name, str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answer = process.stdout.read()
    _, process.returncode, usage = os.wait4(process.pid, 0)
    if process.returncode:
        raise SystemExit(f"{name} failed to run.")
    return json.loads(answer.splitlines()[-1]), usage.ru_maxrss / 2**20


def _cold(name: str, place: Path) -> float:
    """Seconds from the start of a process to the end of one that captioned one photo"""
    started = time.perf_counter()
    _alone("cold", name, place)
    return time.perf_counter() - started


if __name__ == "__main__":
    what, name, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    result: dict[str, float] = {}
    if what == "save":
        save(name, place)
    elif what == "warm":
        result = warm(name, place)
    else:
        captioner_of(name, place)([sample()])
    print(json.dumps(result))
