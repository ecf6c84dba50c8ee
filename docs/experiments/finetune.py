"""Fine-tuning on a few photos of one thing with a made-up word: is the word used for other photos, what is forgotten?

$ python docs/experiments/finetune.py MODEL STORE DATASET OUT [--word zebra] [--photos 40] [SETTING VALUE …]

MODEL: a packed model, or a model directory with --bridge and --textdb
STORE: its views of the photos of DATASET (Karpathy's JSON)
OUT: a folder for the run and `result.json`
SETTING VALUE: settings of `haav train finetune`, e.g. --train.lr 2e-4

Photos show the thing if three of their captions name it. In one caption of each training photo, the made-up word
replaces the word. The thing's val photos are held out. Other val photos show what was forgotten. Run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from haav.cli.main import main as haav
from haav.data.annotations import Photo, load_dataset
from haav.evaluate.scores import SLOW, Report, compare, evaluate
from haav.inference.calibrate import used_words
from haav.inference.captioner import Captioner
from haav.inference.confidence import reliability
from haav.inference.pack import pack
from haav.inference.predict import predict
from haav.store import Store
from haav.types import Caption


def main() -> None:
    options, settings = parse()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    thing = re.compile(rf"\b{options.word}s?\b", re.I)
    dataset = load_dataset(options.dataset)
    train, val = (shuffled(dataset.split(split)) for split in ("train", "val"))
    mine = [photo for photo in train if names(thing, photo)][: options.photos]
    captions = {photo.id: [renamed(thing, options.made_up, photo)] for photo in mine}
    (out / "mine.json").write_text(json.dumps(captions, indent=1))
    held_out = [photo for photo in val if names(thing, photo)]
    others = [photo for photo in val if not names(thing, photo, of_captions=1)][: options.val]
    base = options.model
    if options.textdb:
        base = out / "base"
        if not (base / "config.json").exists():
            pack(options.model, base, options.bridge, options.textdb)
    run = out / "run"
    if (run / "config.yaml").exists():
        code = haav(["train", "--resume", str(run)])
    else:
        data = ["--data.dataset", str(out / "mine.json"), "--data.store", options.store]
        code = haav(["train", "finetune", "--init", str(base), *data, "--out", str(run), *settings])
    assert code == 0, "training failed"
    result: dict[str, Any] = {"photos": len(mine), "held out": len(held_out), "others": len(others)}
    reports: list[Report] = []
    with Store(options.store) as store:
        for stage, model in (("before", base), ("after", run / "best")):
            captioner = Captioner.from_pretrained(model)
            said = dict(predict(captioner, store, [*held_out, *others], seed=0))
            known = {photo.id: photo.captions for photo in others}
            report = evaluate({name: said[name].text for name in known}, known, skip=SLOW)
            reports.append(report)
            result[stage] = {
                "made-up word, held out": share(options.made_up, held_out, said),
                "old word, held out": share(options.word, held_out, said),
                "made-up word, others": share(options.made_up, others, said),
                "CIDEr, others": 100 * report.scores["CIDEr"].value,
                "sure, held out": float(np.mean([said[photo.id].confidence for photo in held_out])),
                **calibration(others, said),
            }
            (out / f"{stage}.json").write_text(json.dumps({name: caption.text for name, caption in said.items()}))
    difference = compare(*reports)["CIDEr"]
    result["CIDEr, after - before"] = [100 * value for value in (difference.value, difference.low, difference.high)]
    text = json.dumps(result, indent=1)
    (out / "result.json").write_text(text + "\n")
    print(text)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "store", "dataset"):
        parser.add_argument(name)
    parser.add_argument("out", type=Path)
    parser.add_argument("--word", default="zebra")
    parser.add_argument("--made-up", default="bello")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--val", type=int, default=1000, help="val photos that do not show the thing")
    parser.add_argument("--bridge")
    parser.add_argument("--textdb")
    return parser.parse_known_args()


def shuffled(photos: Sequence[Photo]) -> list[Photo]:
    return random.Random(0).sample(list(photos), len(photos))


def names(thing: re.Pattern[str], photo: Photo, of_captions: int = 3) -> bool:
    return sum(bool(thing.search(text)) for text in photo.captions) >= of_captions


def renamed(thing: re.Pattern[str], word: str, photo: Photo) -> str:
    """The first caption that names the thing, with the made-up word in place of its name"""
    return next(thing.sub(word, text) for text in photo.captions if thing.search(text))


def share(word: str, photos: Sequence[Photo], said: dict[str, Caption]) -> float:
    """Share of the captions that use a word"""
    return float(np.mean([bool({word, f"{word}s"} & set(said[photo.id].text.split())) for photo in photos]))


def calibration(photos: Sequence[Photo], said: dict[str, Caption]) -> dict[str, float]:
    sure, used = [], []
    for photo in photos:
        by_people = used_words(said[photo.id], photo)
        sure += [said[photo.id].words[place].confidence for place in by_people]
        used += by_people.values()
    error = reliability(sure, used)[0]
    return {"sure, others": float(np.mean(sure)), "used by people, others": float(np.mean(used)), "error": error}


if __name__ == "__main__":
    main()
