#!/usr/bin/env bash
# reproduce.sh RECIPE [--work DIR] [--dry-run] [options of prepare.sh and train.sh] [overrides as for train.sh]
#
# Everything from raw text to scores: prepare, train, average, translate the test set, score it; then
# the scores, sample translations, the model's path and the time each script took. What is done
# already is not done again. --dry-run prints the commands and writes nothing. Options that change
# the recipe: --vocab-size N or --merges N, --tokens-per-update N, --max-update N, --source-lang L, --target-lang L; all
# changes are shown with the scores.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"

times=
run_script() {
    local begin=$SECONDS
    "$ROOT/scripts/$1.sh" "$RECIPE_NAME" --work "$WORK" "${RECIPE_ARGS[@]}" "${@:2}"
    times+="${times:+, }$1 $((SECONDS - begin)) s"
}
# A mistyped option of training should not wait for the data.
[[ ${DRY_RUN:-} ]] || DRY_RUN=1 run_script train "${ARGS[@]}" >/dev/null
for change in "${RECIPE_CHANGES[@]}"; do
    echo "differs from the recipe $RECIPE_NAME: $change"
done
times=
run_script prepare "${DATA_ARGS[@]}" "${DOWNLOADS[@]}"
run_script train "${ARGS[@]}"
run_script average
run_script score
[[ -z ${DRY_RUN:-} ]] || exit 0

# Like beside like: where tokens are translated, the source and the reference are tokens too.
test=$WORK/data/test
[[ $RECIPE_SCORED != prepared ]] || test=$WORK/tok/test
printf '\nSample translations, of all in %s\n' "$WORK/test.hyp.$RECIPE_TARGET_LANG"
tool evaluation.samples --src "$test.$RECIPE_SOURCE_LANG" \
    --ref "$test.$RECIPE_TARGET_LANG" --hyp "$WORK/test.hyp.$RECIPE_TARGET_LANG"
printf '\nAveraged checkpoint  %s\n' "$WORK/model/averaged.pt"
printf 'Time of this run     %s\n' "$times"
printf 'Translate more       scripts/translate.sh %s FILE\n' "$WORK/model"
