#!/usr/bin/env bash
# score.sh RECIPE [--work DIR] [--dry-run]
# score.sh --hyp FILE --ref FILE --target-lang LANG [other options of rope_fairseq.evaluation.score]
#
# Translates a recipe's test set with its averaged model (step translate, test.hyp.LANG) and scores
# it against the raw reference (step score, scores.json); or scores any translation.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [[ " $* " =~ " --hyp"[=\ ] || " $* " =~ " --show"[=\ ] ]]; then
    tool evaluation.score "$@"
    exit
fi
start_script "$@"
no_more_arguments

[[ ${DRY_RUN:-} ]] || tool manifest current --file "$WORK/manifests/average.json"
source_text=$WORK/data/test.$RECIPE_SOURCE_LANG
reference=$WORK/data/test.$RECIPE_TARGET_LANG
translation=$WORK/test.hyp.$RECIPE_TARGET_LANG
config=$ROOT/configs/$RECIPE_CONFIG.yaml

translate() {
    run "$PYTHON" -m rope_fairseq.translate "$WORK/model" "$source_text" -o "$translation" --config "$config"
    # Which is, on the encoded text:
    [[ -z ${DRY_RUN:-} ]] || "$PYTHON" -m rope_fairseq.translate "$WORK/model" "$source_text" \
        --config "$config" --show-command "$RECIPE_SOURCE_LANG" "$RECIPE_TARGET_LANG" |
        sed "s|$ROOT/||g"
}
run_step translate --input "$WORK/model" "$source_text" "$config" --output "$translation" -- translate

# What the scores rest on goes with them: from the model, not from this command's options.
if [[ ${DRY_RUN:-} ]]; then
    about=("recipe=$RECIPE_NAME")
else
    told=$(tool provenance "$RECIPE_NAME" "$WORK/model")
    mapfile -t about <<<"$told"
fi

# It prints the scores, which are shown below whether the step runs or is up to date.
run_step score --input "$translation" "$reference" "$source_text" \
    --option "target_lang=$RECIPE_TARGET_LANG" "${about[@]}" --output "$WORK/scores.json" \
    -- tool evaluation.score --hyp "$translation" --ref "$reference" --src "$source_text" \
    --target-lang "$RECIPE_TARGET_LANG" --json "$WORK/scores.json" --quiet --about "${about[@]}"
[[ ${DRY_RUN:-} ]] || tool evaluation.score --show "$WORK/scores.json"
