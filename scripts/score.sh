#!/usr/bin/env bash
# score.sh RECIPE [--work DIR]
# score.sh --hyp FILE --ref FILE --target-lang LANG [--generate-output] [--json FILE]
#
# Translates a recipe's test set with its averaged model (step translate, test.hyp.LANG) and scores
# it against the raw reference (step score, scores.json); or scores any translation.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [[ " $* " =~ " --hyp"[=\ ] ]]; then
    tool evaluation.score "$@"
    exit
fi
start_script "$@"
no_more_arguments

[[ -d $WORK/model ]] || die "$WORK/model: no such folder; run average.sh $RECIPE_NAME first"
source_text=$WORK/data/test.$RECIPE_SOURCE_LANG
reference=$WORK/data/test.$RECIPE_TARGET_LANG
translation=$WORK/test.hyp.$RECIPE_TARGET_LANG
config=$ROOT/configs/$RECIPE_CONFIG.yaml

run_step translate --input "$WORK/model" "$source_text" "$config" --output "$translation" \
    -- "$PYTHON" -m rope_fairseq.translate "$WORK/model" "$source_text" -o "$translation" \
    --config "$config"

# Printed below, whether the step runs or is up to date.
compute_scores() {
    tool evaluation.score --hyp "$translation" --ref "$reference" \
        --target-lang "$RECIPE_TARGET_LANG" --json "$WORK/scores.json" >/dev/null
}
run_step score --input "$translation" "$reference" \
    --option "target_lang=$RECIPE_TARGET_LANG" --output "$WORK/scores.json" -- compute_scores
tool evaluation.score --show "$WORK/scores.json"
