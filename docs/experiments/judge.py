"""Photos with the captions of several models, for a judge who does not know which model said what.

    python judge.py draw DATASET IMAGES OUT CAPTIONS.json [CAPTIONS.json …]
    python judge.py count OUT

`draw` takes sixty val photos by a fixed seed and writes OUT/sheet-1.png … with the photos. Each has the captions that
the models say of it, once each, in random order. OUT/key.json has the models. The judge writes OUT/verdicts.json,
{"1a": "right", "1b": "half", …}: right, half (the main thing is there, something else is misnamed or made up) or wrong.
`count` counts the verdicts of each model. CAPTIONS.json is what `haav predict` wrote.
"""

from __future__ import annotations

import json
import random
import sys
import textwrap
from collections import Counter
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from haav.data.annotations import load_dataset
from haav.data.predictions import match, read_predictions
from haav.photos.images import load_image
from haav.photos.sources import find_photos

SEED, PHOTOS, COLUMNS, ROWS, SIDE, TEXT = 20, 60, 3, 2, 420, 130


def draw(dataset: str, images: str, out: Path, files: list[str]) -> None:
    photos = load_dataset(dataset).split("val")
    chosen = random.Random(SEED).sample([photo.id for photo in photos], PHOTOS)
    captions = {Path(file).stem: match(read_predictions(file).captions, photos) for file in files}
    refs = {ref.id: ref for ref in find_photos(images.split(","))}
    out.mkdir(parents=True, exist_ok=True)
    key, cells, shuffle = {}, [], random.Random(len(files))
    for number, photo in enumerate(chosen, 1):
        said: dict[str, list[str]] = {}
        for model, texts in captions.items():
            said.setdefault(texts[photo], []).append(model)
        texts = shuffle.sample(sorted(said), len(said))
        labels = {f"{number}{letter}": text for letter, text in zip("abcdefgh", texts, strict=False)}
        key |= {label: {"models": said[text], "caption": text, "photo": photo} for label, text in labels.items()}
        cells.append(cell(load_image(refs[photo].read()), labels))
    for sheet in range(0, PHOTOS, COLUMNS * ROWS):
        page = Image.new("RGB", (COLUMNS * (SIDE + 10), ROWS * (SIDE + TEXT + 10)), "white")
        for place, picture in enumerate(cells[sheet : sheet + COLUMNS * ROWS]):
            row, column = divmod(place, COLUMNS)
            page.paste(picture, (column * (SIDE + 10), row * (SIDE + TEXT + 10)))
        page.save(out / f"sheet-{1 + sheet // (COLUMNS * ROWS):02d}.png")
    (out / "key.json").write_text(json.dumps(key, indent=1), encoding="utf-8")


def cell(photo: Image.Image, labels: dict[str, str]) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE + TEXT), "white")
    picture.paste(photo.resize((SIDE, SIDE)))
    lines = [line for label, text in labels.items() for line in textwrap.wrap(f"{label}: {text}", 52)]
    ImageDraw.Draw(picture).multiline_text((4, SIDE + 4), "\n".join(lines), "black", ImageFont.load_default(16))
    return picture


def count(out: Path) -> None:
    key = json.loads((out / "key.json").read_text(encoding="utf-8"))
    verdicts = json.loads((out / "verdicts.json").read_text(encoding="utf-8"))
    missing = sorted(key.keys() - verdicts.keys())
    if missing:
        raise SystemExit(f"no verdict of {', '.join(missing)}")
    counts: dict[str, Counter[str]] = {}
    for label, entry in key.items():
        for model in entry["models"]:
            counts.setdefault(model, Counter())[verdicts[label]] += 1
    for model, by_verdict in sorted(counts.items()):
        print(f"{model}: " + ", ".join(f"{by_verdict[name]} {name}" for name in ("right", "half", "wrong")))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["draw", dataset, images, out, *files] if files:
            draw(dataset, images, Path(out), files)
        case ["count", out]:
            count(Path(out))
        case _:
            raise SystemExit(__doc__)
