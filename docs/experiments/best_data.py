"""Prepares the data sets of best.sh: all photos, or the first of each data set for a quick run.

    python best_data.py DATA OUT PHOTOS

Writes OUT/coco.json.gz, OUT/coco-vinvl.json.gz, OUT/coco-machine.jsonl (VinVL's captions of COCO's training photos)
and OUT/tars.txt, the pictures, which is written last.
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path, PurePosixPath


def main(data: Path, out: Path, photos: int) -> None:
    coco, vinvl = (json.loads(gzip.decompress(path.read_bytes()))["images"] for path in sources(data))
    if photos:
        train, val = ([image for image in coco if image["split"] == split] for split in ("train", "val"))
        coco, vinvl = train[:photos] + val[: max(photos // 10, 20)], vinvl[:photos]
    for name, images in (("coco", coco), ("coco-vinvl", vinvl)):
        (out / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({"images": images}).encode(), 1))
    machine = json.loads(gzip.decompress((data / "coco-vinvl/vinvl_captions_of_coco.json.gz").read_bytes()))
    rows = [
        {"image": image["filename"], "caption": machine[str(image["imgid"])]["caption"], "by": "VinVL-base"}
        for image in coco
        if image["split"] == "train" and str(image["imgid"]) in machine
    ]
    (out / "coco-machine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tars = [tar for folder in ("coco", "coco-vinvl") for tar in sorted((data / folder).glob("images-*.tar"))]
    if photos:
        tars = [copy(tars, {image["filename"] for image in coco + vinvl}, out / "photos.tar")]
    (out / "tars.txt").write_text("".join(f"{tar}\n" for tar in tars))


def sources(data: Path) -> tuple[Path, Path]:
    return data / "coco/dataset_coco.json.gz", data / "coco-vinvl/dataset_coco_vinvl.json.gz"


def copy(tars: list[Path], wanted: set[str], target: Path) -> Path:
    """The wanted pictures of all tars in one"""
    with tarfile.open(target, "w") as new:
        for path in tars:
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.isfile() and PurePosixPath(member.name).name in wanted:
                        new.addfile(member, tar.extractfile(member))
    return target


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
