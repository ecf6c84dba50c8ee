#!/usr/bin/env bash
# The shipped model, from photos to a packed model: views, text database, bridge, cross-entropy, self-critical
# training, calibration, scores. Run it again after an interruption: it goes on where it was cut off.
#
#   docs/experiments/best.sh DATA OUT [PHOTOS [SETTING VALUE …]]
#
# DATA: a folder with coco/ and coco-vinvl/, each with photos in images-*.tar and captions in Karpathy's JSON
# OUT: a folder for views, runs and the model
# PHOTOS: train on the first so many photos of each data set, and select on a tenth as many (default: all)
# SETTING VALUE: settings of all training runs, e.g. --model.d_model 32
set -euo pipefail
data=$1 out=$2 photos=${3:-0}
shift $(($# < 3 ? $# : 3))
settings=("$@")
sentences=60000
[ "$photos" -eq 0 ] || sentences=$((10 * photos))
haav=${HAAV:-haav}
# Large buffers are kept by the allocator instead of being given back to the kernel after each product.
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000
mkdir -p "$out"
# Two processes with a thread each train faster than one process with two threads. A run is resumed with as many.
[ -e "$out/processes.txt" ] || nproc > "$out/processes.txt"
torchrun=$(dirname "$(command -v "$haav")")/torchrun
launch=(env OMP_NUM_THREADS=1 "$torchrun" --nproc_per_node "$(cat "$out/processes.txt")" -m haav)
step() { printf '\n== %s\n' "$*" >&2; }

step "data sets"
[ -e "$out/tars.txt" ] || python3 "$(dirname "$0")/best_data.py" "$data" "$out" "$photos"
images=$(paste -sd, "$out/tars.txt")
coco=$out/coco.json.gz vinvl=$out/coco-vinvl.json.gz more=$out/coco-machine.jsonl
store=$out/views texts=$out/texts bridge=$out/bridge

step "what CLIP sees of every photo"
"$haav" extract --images "$images" --store "$store" --views patches
"$haav" extract --images "$images" --store "$store" --views patch_regions

step "text database and bridge: captions by people only, each with the photos it belongs to"
[ -e "$texts/manifest.json" ] || "$haav" textdb --out "$texts" --captions "$coco,$vinvl" \
    --text "$data/coco/train_captions_without_images.txt" --limit $sentences
[ -e "$bridge/manifest.json" ] || "$haav" bridge --store "$store" --view patch_regions --dataset "$coco" \
    --textdb "$texts" --out "$bridge" --epochs 20 --folds 3
"$haav" extract --images "$images" --store "$store" --views text_whole --bridge "$bridge" --textdb "$texts"

# train RECIPE FOLDER DATASET [--init MODEL]
train() {
    local recipe=$1 run=$out/$2 dataset=$3
    shift 3
    if [ -e "$run/config.yaml" ]; then
        [ -e "$run/done" ] || "${launch[@]}" train --resume "$run"
    else
        rm -rf "$run"
        "${launch[@]}" train "$recipe" --out "$run" --data.dataset "$dataset" --data.store "$store" "$@" "${settings[@]}"
    fi
    touch "$run/done"
}

step "cross-entropy, captions by people and by VinVL"
train best-xe xe "$coco,$vinvl,$vinvl:machine:0.5,$more:machine:0.5"

step "self-critical training, captions by people"
train best-scst scst "$coco" --init "$out/xe/best"

step "packing and calibration: the packed model can look at pictures that show nothing, too"
"$haav" pack "$out/scst/best" --bridge "$bridge" --textdb "$texts" --out "$out/best"
"$haav" calibrate "$out/best" --store "$store" --dataset "$coco"

step "scores on val"
for stage in xe scst; do
    "$haav" predict --model "$out/$stage/best" --store "$store" --dataset "$coco" --out "$out/$stage.json"
    "$haav" evaluate --predictions "$out/$stage.json" --references "$coco" --split val --json > "$out/$stage-scores.json"
done
"$haav" evaluate --predictions "$out/scst.json" --references "$coco" --split val
