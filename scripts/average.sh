#!/usr/bin/env bash
# average.sh RECIPE [--work DIR] [--dry-run]
#
# Averages the last checkpoints as the recipe says and puts the result, with the dictionaries, the text
# options, the data's signature and the training's manifest, into model/: a folder for translate.sh and the hub interface that
# needs nothing else.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
no_more_arguments

[[ ${DRY_RUN:-} ]] || tool manifest current --file "$WORK/manifests/train.json"
shopt -s nullglob
case $RECIPE_AVERAGE_BY in
    update) checkpoints=("$WORK"/checkpoints/checkpoint_*_*.pt) ;;
    epoch) checkpoints=("$WORK"/checkpoints/checkpoint[0-9]*.pt) ;;
esac
files=("$WORK/data.json" "$WORK/manifests/train.json" "$WORK/data-bin/$RECIPE_BPE_MODEL" "$WORK/data-bin/text.json"
    "$WORK/data-bin/dict.$RECIPE_SOURCE_LANG.txt" "$WORK/data-bin/dict.$RECIPE_TARGET_LANG.txt")

make_model() {
    local file
    run mkdir -p "$WORK/model"
    run "$PYTHON" -m rope_fairseq.average --inputs "$WORK/checkpoints" --output "$WORK/model/averaged.pt" \
        --last "$RECIPE_AVERAGE_LAST" --by "$RECIPE_AVERAGE_BY"
    for file in "${files[@]}"; do
        run cp "$file" "$WORK/model/${file##*/}.tmp"
        run mv "$WORK/model/${file##*/}.tmp" "$WORK/model/${file##*/}"
    done
}

run_step average \
    --input "${checkpoints[@]}" "${files[@]}" \
    --option "last=$RECIPE_AVERAGE_LAST" "by=$RECIPE_AVERAGE_BY" \
    --output "$WORK/model/averaged.pt" "${files[@]/#*\//$WORK/model/}" \
    -- make_model
