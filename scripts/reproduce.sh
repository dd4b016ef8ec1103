#!/usr/bin/env bash
# reproduce.sh RECIPE [--work DIR] [overrides of the config, as for train.sh]
#
# Everything from raw text to scores: prepare, train, average, translate the test set, score it; then
# the scores, sample translations, the model's path and the time each script took. What is done
# already is not done again.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
overrides_only

times=
run_script() {
    local begin=$SECONDS
    "$ROOT/scripts/$1.sh" "$RECIPE_NAME" --work "$WORK" "${@:2}"
    times+="${times:+, }$1 $((SECONDS - begin)) s"
}
run_script prepare
run_script train "${ARGS[@]}"
run_script average
run_script score

printf '\nSample translations, of all in %s\n' "$WORK/test.hyp.$RECIPE_TARGET_LANG"
tool evaluation.samples --src "$WORK/data/test.$RECIPE_SOURCE_LANG" \
    --ref "$WORK/data/test.$RECIPE_TARGET_LANG" --hyp "$WORK/test.hyp.$RECIPE_TARGET_LANG"
printf '\nAveraged checkpoint  %s\n' "$WORK/model/averaged.pt"
printf 'Time of this run     %s\n' "$times"
printf 'Translate more       scripts/translate.sh %s FILE\n' "$WORK/model"
