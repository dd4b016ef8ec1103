#!/usr/bin/env bash
# table.sh RECIPE [--encodings A,B,…] [--seeds N,N,…] [--work DIR] [--results DIR] [--force] [options of reproduce.sh] [overrides]
#
# Trains a recipe with several position encodings and seeds: for each seed all encodings, by reproduce.sh
# in DIR/ENCODING-seedN (default exp/RECIPE-table), with the overrides model.position_encoding and
# common.seed. What came out is results/RECIPE-ENCODING-seedN.json. Default: rope and sinusoidal, seeds
# 1, 2 and 3. The corpus is prepared once, in DIR/data; each run gets a copy. Killed and started again
# it goes on. Last, all results of the recipe make results/RECIPE.md, the table, and the figures
# RECIPE-curves.png and RECIPE-lengths.png.
#
# Results add up over machines and days: a run whose result is there is not made again, also where its
# work folder is gone. A result of another run (other recipe, data, config or overrides, other batches on
# other devices) is an error before anything is trained; with --force such a run is made anew, and no other.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

encodings=rope,sinusoidal seeds=1,2,3 work='' results=$ROOT/results force='' others=()
take_options "encodings seeds work results" "$@"
for argument in "${OTHERS[@]}"; do
    case $argument in
        --force) force=1 ;;
        # With other batches runs could not stand in one table.
        --dry-run | --max-tokens* | --nodes* | --node-rank* | --master*)
            die "unknown argument $argument; usage: $(usage | head -n 1)" ;;
        *model.position_encoding=*) die "override $argument: say --encodings NAME" ;;
        *common.seed=*) die "override $argument: say --seeds N" ;;
        *) others+=("$argument") ;;
    esac
done
number='(0|[1-9][0-9]{0,8})'
[[ $seeds =~ ^$number(,$number)*$ ]] || die "--seeds $seeds: must be whole numbers with commas between them"
IFS=, read -ra seeds <<<"$seeds"
check_encodings "$encodings"
read_arguments "${others[@]}"
recipe=$RECIPE_NAME
for override in "${RECIPE_OVERRIDES[@]}"; do
    [[ $override != model.position_encoding=* && $override != common.seed=* ]] ||
        die "recipe $recipe: has $override itself; choose one that leaves it open"
done
work=${work:-$ROOT/exp/$recipe-table}
data=$work/data

# What train.sh tells the training: devices and their batches are not among it.
options=("tokens_per_update=$RECIPE_TOKENS_PER_UPDATE"
    "task.source_lang='$RECIPE_SOURCE_LANG'" "task.target_lang='$RECIPE_TARGET_LANG'"
    "${RECIPE_OVERRIDES[@]}" "${RECIPE_MAX_UPDATE_OVERRIDES[@]}")
for ((index = 0; index < ${#ARGS[@]}; index++)); do
    case ${ARGS[index]} in
        --*=*) ;;
        --*) index=$((index + 1)) ;;
        *) options+=("${ARGS[index]}") ;;
    esac
done

# A mistyped option should not wait for the data.
planned=$(DRY_RUN=1 "$ROOT/scripts/train.sh" "${others[@]}" --work "$work/${NAMES[0]}-seed${seeds[0]}" \
    "model.position_encoding=${NAMES[0]}" "common.seed=${seeds[0]}")
# What a device takes at once follows from how many there are.
[[ $planned =~ dataset\.max_tokens=([0-9]+) ]]
max_tokens=${BASH_REMATCH[1]}
make_results "$results"

runs=()
for seed in "${seeds[@]}"; do
    for name in "${NAMES[@]}"; do
        runs+=("$name-seed$seed")
    done
done
# known_runs [--data JSON]: those that are kept. A result that cannot stay should not show after the data
# are made, let alone after days of training.
known_runs() {
    tool evaluation.known_run "$recipe" --results "$results" --runs "${runs[@]}" ${force:+--force} \
        --config "$ROOT/configs/$RECIPE_CONFIG.yaml" --max-tokens "$max_tokens" --option "${options[@]}" \
        --average "last=$RECIPE_AVERAGE_LAST" "by=$RECIPE_AVERAGE_BY" "$@"
}
known_runs

# copy_data FOLDER: what prepare.sh has made, manifests last, so that it is up to date there. Copies, because
# a step that runs again in one folder must not change another's files.
copy_data() (
    open_work "$1"
    cmp -s "$data/manifests/sign.json" "$WORK/manifests/sign.json" && return
    rm -f "$WORK/manifests/sign.json"
    for path in "$data"/*; do
        name=${path##*/}
        [[ $name != logs && $name != manifests ]] || continue
        rm -rf "${WORK:?}/$name"
        cp -r --reflink=auto "$path" "$WORK/$name"
    done
    # sign.json, the last step's, is the last copied.
    for path in "$data"/manifests/*.json; do
        [[ ${path##*/} == sign.json ]] || cp "$path" "$WORK/manifests/"
    done
    cp "$data/manifests/sign.json" "$WORK/manifests/sign.json.tmp"
    mv "$WORK/manifests/sign.json.tmp" "$WORK/manifests/sign.json"
)

"$ROOT/scripts/prepare.sh" "$recipe" --work "$data" "${RECIPE_ARGS[@]}" "${DATA_ARGS[@]}" "${DOWNLOADS[@]}"

found=$(known_runs --data "$data/data.json")
declare -A known=()
for name in $found; do
    known[$name]=1
done
for seed in "${seeds[@]}"; do
    for name in "${NAMES[@]}"; do
        result=$results/$recipe-$name-seed$seed.json
        if [[ ${known[$name-seed$seed]:-} ]]; then
            echo "table: $name, seed $seed: up to date ($result)"
            continue
        fi
        echo "table: $name, seed $seed"
        folder=$work/$name-seed$seed
        # The command that train.sh began it with.
        began=$(cat "$folder/logs/train.launch" 2>/dev/null) || began=
        [[ ! $began =~ dataset\.max_tokens=([0-9]+) || ${BASH_REMATCH[1]} == "$max_tokens" ]] ||
            die "$folder: was begun with at most ${BASH_REMATCH[1]} tokens a device, is $max_tokens; say --devices as then, or remove it"
        copy_data "$folder"
        "$ROOT/scripts/reproduce.sh" "${others[@]}" --work "$folder" \
            "model.position_encoding=$name" "common.seed=$seed"
        tool evaluation.run_record --work "$folder" --output "$result"
    done
done
"$PYTHON" -m benchmarks.seeds_table "$recipe" --results "$results" --output "$results/$recipe.md"
cat "$results/$recipe.md"
"$PYTHON" -m benchmarks.seeds_figure "$recipe" --results "$results"
