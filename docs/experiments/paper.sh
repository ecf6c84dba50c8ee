#!/usr/bin/env bash
# The paper's tables on Flickr8k and COCO, from photos to verdicts: views, text databases, bridges, then
# `haav reproduce`. Run it again after an interruption: it goes on where it was cut off.
#
#   docs/experiments/paper.sh DATA OUT [TABLE …]
#
# DATA: a folder with flickr8k/ and coco/, each with photos in images-*.tar and captions in Karpathy's JSON
# OUT: a folder for views and runs; OUT/flickr8k/paper and OUT/coco/paper have the pages
# TABLE: tables of Flickr8k (default: all); tables of COCO are named coco:TABLE
# The page and its figure are copied to paper-SET.md and paper-SET.svg beside this script. Results of finished runs are kept
# there in paper-SET.tar.xz, without models and captions. Where OUT has no runs yet, they are unpacked first, so that on
# another machine a finished run is repeated only where its model is read (studies, second stages).
# SETTINGS: settings of all runs instead of the budgets below; WORKERS: runs in parallel (default: 2);
# ROWS: names of the rows to run, comma-separated (default: all rows of the tables)
set -euo pipefail
data=$1 out=$2 here=$(dirname "$0")
shift 2
tables=("$@")
[ ${#tables[@]} -gt 0 ] || tables=(all)
haav=${HAAV:-haav}
# Two views on Flickr8k. On COCO four, as in the paper: objects, the grid, sentences for the photo and for five crops.
declare -A looks=([flickr8k]=patches [coco]=patches,patch_objects) texts=([flickr8k]=text_whole [coco]=text_whole,text_five)
# Budgets: 12 epochs of Flickr8k in batches of 16 photos with all their captions are 4,500 steps, four of COCO are 4,760. The
# moving average of the weights is scored, so that curves are smooth enough to tell whether they are flat
# (2026-11-19-paper-tables.md). bfloat16 needs a CPU with units for it.
declare -A budgets=(
    [flickr8k]="--train.epochs 12 --train.evaluate_every 2 --train.batch 16 --train.captions 5 --train.ema 0.995
        --train.precision bf16 --rates 5e-4,1e-3,2e-3"
    [coco]="--train.epochs 4 --train.evaluate_every 1 --train.batch 16 --train.captions 5 --train.ema 0.995
        --train.precision bf16 --rates 5e-4,1e-3,2e-3 --data.views patches,patch_objects,text_whole,text_five"
)
# Large buffers are kept by the allocator instead of being given back to the kernel after each product, on large pages where
# the kernel has them: a page fault takes 11 µs on a rented machine.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000
# tcmalloc, where it is installed (Debian: libtcmalloc-minimal4), finds free blocks faster: a step takes a tenth less.
tcmalloc=$(ldconfig -p | awk '/libtcmalloc_minimal\.so\.4 / { path = $NF } END { print path }' || true)
if [ -n "$tcmalloc" ]; then
    export LD_PRELOAD=$tcmalloc TCMALLOC_RELEASE_RATE=0 TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES=1000000000
fi
step() { printf '\n== %s\n' "$*" >&2; }
# tars SET [COUNT]: its tars, or the first of them
tars() { find "$data/$1" -name 'images-*.tar' | sort | head -n "${2:-1000}" | paste -sd,; }

# look SET STORE VIEWS [COUNT]: what CLIP sees of the photos
look() {
    step "$1: what CLIP sees"
    "$haav" extract --images "$(tars "$1" "${4:-}")" --store "$2" --views "$3"
    "$haav" extract --images "$(tars "$1" "${4:-}")" --store "$2" --views patch_regions
}

# retrieve SET [FLAG VALUE …]: a text database of the set's own training captions, a bridge to it, and sentences
retrieve() {
    local set=$1 folder=$out/$1 dataset=$data/$1/dataset_$1.json.gz
    shift
    step "$set: text database, bridge, sentences"
    [ -e "$folder/texts/manifest.json" ] || "$haav" textdb --out "$folder/texts" --captions "$dataset" "$@"
    [ -e "$folder/bridge/manifest.json" ] || "$haav" bridge --store "$folder/views" --view patch_regions \
        --dataset "$dataset" --textdb "$folder/texts" --out "$folder/bridge" --epochs 20 --folds 3
    sentences "$set" "${texts[$set]}"
}

# sentences SET VIEWS: what the bridge retrieves for the photos
sentences() {
    "$haav" extract --images "$(tars "$1")" --store "$out/$1/views" --views "$2" \
        --bridge "$out/$1/bridge" --textdb "$out/$1/texts"
}

# unlabelled: photos of COCO's first three tars with sentences from Flickr8k's captions, for semi-supervised training
unlabelled() {
    look coco "$out/unlabelled/views" patches 3
    step "COCO's photos with sentences of Flickr8k"
    "$haav" extract --images "$(tars coco 3)" --store "$out/unlabelled/views" --views text_whole \
        --bridge "$out/flickr8k/bridge" --textdb "$out/flickr8k/texts"
    [ -e "$out/unlabelled/photos.json.gz" ] || python3 - "$data/coco" "$out/unlabelled/photos.json.gz" <<'PY'
import gzip, json, pathlib, sys, tarfile
folder, target = map(pathlib.Path, sys.argv[1:])
names = set()
for path in sorted(folder.glob("images-*.tar"))[:3]:
    with tarfile.open(path) as tar:
        names |= {pathlib.PurePosixPath(name).name for name in tar.getnames()}
images = json.load(gzip.open(folder / "dataset_coco.json.gz"))["images"]
chosen = [image for image in images if image["split"] == "train" and image["filename"] in names]
target.write_bytes(gzip.compress(json.dumps({"images": chosen}).encode()))
PY
}

# more_views SET TABLE: views that only some tables read
more_views() {
    case $2 in
        mask | views | all) look "$1" "$out/$1/views" patch_objects ;;&
        views | all)
            look "$1" "$out/$1/views" dino_patches
            sentences "$1" text_five
            ;;&
        semi | all) [ "$1" = coco ] || unlabelled ;;
    esac
}

# reproduce SET TABLE
reproduce() {
    local set=$1 table=$2 more=() settings=() status=0
    read -d '' -ra settings <<<"${SETTINGS:-${budgets[$set]}}" || true
    local results=$here/paper-$set.tar.xz
    more_views "$set" "$table"
    step "$set: $table"
    if [ ! -e "$out/$set/paper" ] && [ -e "$results" ]; then
        mkdir "$out/$set/paper" && tar -xJf "$results" -C "$out/$set/paper"
    fi
    if [ "$set" = flickr8k ] && [ -e "$out/unlabelled/photos.json.gz" ]; then
        more=(--data.unlabelled "$out/unlabelled/photos.json.gz" --data.unlabelled_store "$out/unlabelled/views")
    fi
    "$haav" reproduce "$table" --out "$out/$set/paper" --data.dataset "$data/$set/dataset_$set.json.gz" \
        --data.store "$out/$set/views" --bridge "$out/$set/bridge" --textdb "$out/$set/texts" \
        --images "$(tars "$set")" --workers "${WORKERS:-2}" --rows "${ROWS:-}" "${more[@]}" "${settings[@]}" || status=$?
    (cd "$out/$set/paper" && find . -name result.json -o -name photos.json -o -name '*study.json' -o -name 'seed-*.json') |
        tar -cJf "$results.part" -C "$out/$set/paper" --sort=name --mtime=@0 --owner=0 --group=0 -T -
    mv "$results.part" "$results"
    [ ! -e "$out/$set/paper/reproduce.svg" ] || cp "$out/$set/paper/reproduce.svg" "$here/paper-$set.svg"
    [ ! -e "$out/$set/paper/reproduce.md" ] ||
        sed "s/(reproduce.svg)/(paper-$set.svg)/" "$out/$set/paper/reproduce.md" >"$here/paper-$set.md"
    return $status
}

mkdir -p "$out/flickr8k" "$out/coco"
look flickr8k "$out/flickr8k/views" "${looks[flickr8k]}"
retrieve flickr8k
for table in "${tables[@]}"; do
    case $table in
        coco:*)
            look coco "$out/coco/views" "${looks[coco]}"
            retrieve coco --text "$data/coco/train_captions_without_images.txt" --limit 60000
            reproduce coco "${table#coco:}"
            ;;
        *) reproduce flickr8k "$table" ;;
    esac
done
