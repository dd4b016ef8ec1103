#!/usr/bin/env bash
# score.sh RECIPE [--work DIR] [--dry-run]
# score.sh --hyp FILE --ref FILE --target-lang LANG [other options of rope_fairseq.evaluation.score]
#
# Translates a recipe's test set with its averaged model (step translate, test.hyp.LANG) and scores
# it against the raw reference (step score, scores.json); or scores any translation. Of a recipe with
# lower-cased text or a tokenized corpus, it translates tokens to tokens and scores those too.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
if [[ " $* " =~ " --hyp"[=\ ] || " $* " =~ " --show"[=\ ] ]]; then
    tool evaluation.score "$@"
    exit
fi
start_script "$@"
no_more_arguments

[[ ${DRY_RUN:-} ]] || tool manifest current --file "$WORK/manifests/average.json"
case $RECIPE_SCORED in
    raw) test=$WORK/data/test raw=$WORK/data/test ;;
    prepared) test=$WORK/tok/test raw=$WORK/data/test ;;
    distributed) test=$WORK/data/test raw=$WORK/data/raw.test ;;
esac
source_text=$test.$RECIPE_SOURCE_LANG
reference=$test.$RECIPE_TARGET_LANG
raw_source=$raw.$RECIPE_SOURCE_LANG
tokenized=() of_tokens=() token_files=()
if [[ $RECIPE_SCORED != raw ]]; then
    tokenized=(--tokenized)
    token_files=("$raw.$RECIPE_TARGET_LANG" "$WORK/model/text.json")
    of_tokens=(--tokenized --raw-ref "${token_files[0]}" --text "${token_files[1]}")
fi
translation=$WORK/test.hyp.$RECIPE_TARGET_LANG
config=$ROOT/configs/$RECIPE_CONFIG.yaml

translate() {
    run "$PYTHON" -m rope_fairseq.translate "$WORK/model" "$source_text" -o "$translation" --config "$config" \
        "${tokenized[@]}"
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
run_step score --input "$translation" "$reference" "$raw_source" "${token_files[@]}" \
    --option "target_lang=$RECIPE_TARGET_LANG" "${about[@]}" --output "$WORK/scores.json" \
    -- tool evaluation.score --hyp "$translation" --ref "$reference" --src "$raw_source" "${of_tokens[@]}" \
    --target-lang "$RECIPE_TARGET_LANG" --json "$WORK/scores.json" --quiet --about "${about[@]}"
[[ ${DRY_RUN:-} ]] || tool evaluation.score --show "$WORK/scores.json"
