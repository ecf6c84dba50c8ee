#!/usr/bin/env bash
# What the shipped model is compared with: the same recipes and steps with one thing changed, on the views of best.sh.
# Run it again after an interruption: it goes on where it was cut off.
#
#   docs/experiments/best_rows.sh OUT [ROW …]
#
# OUT: the folder that best.sh was given, after its views and texts are there
# ROW: humans (no captions by VinVL, also self-critical training), patches, text_whole (one view each),
#      concat (all tokens as one view), hierarchical (the paper's decoder); default: all
# Settings of all rows: SETTINGS="--train.precision bf16", for example
set -euo pipefail
out=$1
shift
rows=("$@")
[ ${#rows[@]} -gt 0 ] || rows=(humans patches text_whole concat hierarchical)
haav=${HAAV:-haav}
read -ra settings <<<"${SETTINGS:-}"
export MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000
torchrun=$(dirname "$(command -v "$haav")")/torchrun
launch=(env OMP_NUM_THREADS=1 "$torchrun" --nproc_per_node "$(cat "$out/processes.txt")" -m haav)
coco=$out/coco.json.gz vinvl=$out/coco-vinvl.json.gz
humans=$coco,$vinvl
everyone=$humans,$vinvl:machine:0.5,$out/coco-machine.jsonl:machine:0.5

# train FOLDER RECIPE DATASET [FLAG VALUE …]
train() {
    local run=$1 recipe=$2 dataset=$3
    shift 3
    [ ! -e "$run/done" ] || return 0
    if [ -e "$run/config.yaml" ]; then
        "${launch[@]}" train --resume "$run"
    else
        rm -rf "$run"
        "${launch[@]}" train "$recipe" --out "$run" --data.dataset "$dataset" --data.store "$out/views" "$@" "${settings[@]}"
    fi
    touch "$run/done"
}

# score FOLDER: captions of val by the model of a run, bare and as it is used
score() {
    local flags
    for use in bare used; do
        flags=()
        [ $use = used ] || flags=(--decode.consensus 0)
        [ -e "$1/$use-scores.json" ] || {
            "$haav" predict --model "$1/best" --store "$out/views" --dataset "$coco" --out "$1/$use.json" "${flags[@]}"
            "$haav" evaluate --predictions "$1/$use.json" --references "$coco" --split val --json > "$1/$use-scores.part"
            mv "$1/$use-scores.part" "$1/$use-scores.json"
        }
    done
}

for row in "${rows[@]}"; do
    printf '\n== %s\n' "$row" >&2
    run=$out/rows/$row
    mkdir -p "$run"
    case $row in
        humans) train "$run/xe" best-xe "$humans" ;;
        patches | text_whole) train "$run/xe" best-xe "$everyone" --data.views "$row" ;;
        concat) train "$run/xe" best-xe "$everyone" --model.encoding concat_views --model.aggregator auto ;;
        hierarchical) train "$run/xe" best-xe "$everyone" --model.aggregator hierarchical ;;
        *) echo "unknown row $row" >&2 && exit 2 ;;
    esac
    score "$run/xe"
    if [ "$row" = humans ]; then
        train "$run/scst" best-scst "$coco" --init "$run/xe/best"
        score "$run/scst"
    fi
done
