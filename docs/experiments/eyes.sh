#!/usr/bin/env bash
# Which frozen networks earn their place: everything behind docs/experiments/2026-11-17-eyes.md, from photos to table.
# Run it again after an interruption: each step does what is missing.
#
#   docs/experiments/eyes.sh DATA OUT [PHOTOS]
#
# DATA: a folder with dataset_coco.json.gz, images-*.tar and train_captions_without_images.txt
# OUT: a folder for views, runs and the table; PHOTOS: training photos (default 6000), and 1,000 val photos
set -euo pipefail
data=$1 out=$2 photos=${3:-6000}
haav=${HAAV:-haav}
# Large buffers are kept by the allocator instead of being given back to the kernel after each product.
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000
mkdir -p "$out"

subset=$out/dataset.json.gz
[ -e "$subset" ] || python3 - "$data/dataset_coco.json.gz" "$subset" "$photos" <<'PY'
import gzip, json, sys
source, target, count = sys.argv[1:]
images = json.load(gzip.open(source))["images"]
chosen = [one for one in images if one["split"] == "train"][: int(count)]
chosen += [one for one in images if one["split"] == "val"][:1000]
json.dump({"dataset": "coco", "images": chosen}, gzip.open(target, "wt"))
PY
[ -d "$out/photos" ] || python3 - "$subset" "$data" "$out/photos" <<'PY'
import gzip, json, pathlib, sys, tarfile
subset, data, target = sys.argv[1:]
wanted = {one["filename"] for one in json.load(gzip.open(subset))["images"]}
part = pathlib.Path(target + ".part")
part.mkdir(exist_ok=True)
for path in sorted(pathlib.Path(data).glob("images-*.tar")):
    with tarfile.open(path) as tar:
        for member in tar:
            name = pathlib.PurePosixPath(member.name).name
            if member.isfile() and name in wanted:
                (part / name).write_bytes(tar.extractfile(member).read())
part.rename(target)
PY

extract() { "$haav" extract --images "$out/photos" --store "$@"; }
ablate() { "$haav" ablate "$1" --out "$out/$1" --data.dataset "$subset" --data.store "$out/$2" --workers 2; }
[ -d "$out/texts" ] || "$haav" textdb --out "$out/texts" --captions "$subset" \
    --text "$data/train_captions_without_images.txt" --limit 60000

extract "$out/views" --views patches,patch_objects
extract "$out/views" --views patch_regions
[ -d "$out/bridge" ] || "$haav" bridge --store "$out/views" --view patch_regions --dataset "$subset" \
    --textdb "$out/texts" --out "$out/bridge" --epochs 20 --folds 3
extract "$out/views" --views text_whole,text_five --bridge "$out/bridge" --textdb "$out/texts"
extract "$out/views" --views dino_patches
ablate eyes views

# The first edition's views have a store of their own: its text views are called the same.
extract "$out/views-first" --views cells,objects,regions
[ -d "$out/bridge-first" ] || "$haav" bridge --store "$out/views-first" --view regions --dataset "$subset" \
    --textdb "$out/texts" --out "$out/bridge-first" --folds 3
extract "$out/views-first" --views text_whole,text_five --bridge "$out/bridge-first" --textdb "$out/texts"
ablate eyes-first views-first
