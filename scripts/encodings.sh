#!/usr/bin/env bash
# encodings.sh [--encodings A,B,…] [--updates N] [--seed N] [--work DIR] [--results DIR]
#
# A short training of the demo with each position encoding, for the table in README.md: everything from
# raw text to scores by reproduce.sh, in DIR/NAME (default exp/short), and then what came out as
# results/short-NAME-seedN.json. Default: all encodings, 1,500 updates, seed 1; other seeds are in
# DIR/NAME-seedN. Killed and started again it goes on. Afterwards:
#   python -m benchmarks.encodings_table README.md

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

encodings=$ENCODINGS updates=1500 seed=1 work=$ROOT/exp/short results=$ROOT/results
take_options "encodings updates seed work results" "$@"
no_others
check_run "$updates" "$seed" "$encodings"
make_results "$results"

# The config's own seed is 1; said again it would be another change of the recipe.
suffix='' overrides=()
if ((seed != 1)); then
    suffix=-seed$seed overrides=("common.seed=$seed")
fi
for name in "${NAMES[@]}"; do
    folder=$work/$name$suffix
    echo "encodings: $name, seed $seed"
    "$ROOT/scripts/reproduce.sh" demo --work "$folder" --max-update "$updates" \
        optimization.stop_time_hours=0 "${overrides[@]}" "model.position_encoding=$name"
    tool evaluation.run_record --work "$folder" --output "$results/short-$name-seed$seed.json"
done
