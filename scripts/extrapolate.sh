#!/usr/bin/env bash
# extrapolate.sh --train SOURCE TARGET [--valid SOURCE TARGET] [--encodings A,B,…] [--updates N] [--seed N] [other options]
#
# Which position encoding translates sentences longer than any that it was trained on: the recipe
# extrapolate with each encoding (default: rope, sinusoidal, alibi and t5), everything from raw text to
# scores by reproduce.sh, in DIR/NAME; then rope's model once more with each scaling of rope at test
# time, into DIR/rope/test.hyp.rope-SCALING.LANG. What came out, BLEU by source tokens among it, is
# results/extrapolate-NAME[-SCALING].json. Killed and started again it goes on. Afterwards:
#   python -m benchmarks.extrapolation_table README.md
#   python -m benchmarks.extrapolation_figure
#
# Other options: --work DIR (default exp/extrapolate), --results DIR, --source-lang L, --target-lang L,
# and those of data-prep/lengths: --held-out N, --classes N,N,…. Without --updates the recipe's are
# made; seeds other than 1 are in DIR/NAME-seedN and in the names of the results.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

encodings=rope,sinusoidal,alibi,t5 updates='' seed=1 work=$ROOT/exp/extrapolate results=$ROOT/results
take_options "encodings updates seed work results" "$@"
set -- "${OTHERS[@]}"
train=() valid=() classes=() languages=()
while (($#)); do
    case $1 in
        --source-lang=* | --target-lang=* | --held-out=* | --classes=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        --source-lang | --target-lang | --held-out | --classes)
            [[ ${2:-} && $2 != -* ]] || die "$1 needs a value" ;;
        --train | --valid)
            [[ ${2:-} && $2 != -* && ${3:-} && $3 != -* ]] || die "$1 needs two files, source and target" ;;
        *) die "unknown argument $1; usage: $(usage | head -n 1)" ;;
    esac
    case $1 in
        --source-lang | --target-lang) languages+=("$1" "$2") ;;
        --held-out | --classes) classes+=("$1" "$2") ;;
        --train) train=("$1" "$2" "$3"); shift ;;
        --valid) valid=("$1" "$2" "$3"); shift ;;
    esac
    shift 2
done
((${#train[@]})) || die "--train SOURCE TARGET is needed; usage: $(usage | head -n 1)"
check_run "${updates:-1}" "$seed" "$encodings"
make_results "$results"

# The options of scaling, for sentences of up to 4 times the 32 tokens of the training. Dynamic takes
# a translation to be rope_target_extra tokens longer than its source: with the default 50 it would
# scale the decoder's positions in every sentence, also in those as short as the training's.
declare -A scalings=(
    [linear]="'rope_scaling_factor': 4.0"
    [ntk]="'rope_scaling_factor': 4.0"
    [dynamic]="'rope_scaling_factor': 1.0, 'rope_original_max_positions': 32, 'rope_target_extra': 8"
    [yarn]="'rope_scaling_factor': 4.0, 'rope_original_max_positions': 32"
)

# translate_scaled FOLDER SCALING: a step of its own, in a subshell that holds the folder's lock.
translate_scaled() (
    scaling=$2
    start_script extrapolate --work "$1" "${languages[@]}"
    source_text=$WORK/data/test.$RECIPE_SOURCE_LANG
    translation=$WORK/test.hyp.rope-$scaling.$RECIPE_TARGET_LANG
    config=$ROOT/configs/$RECIPE_CONFIG.yaml
    overrides="{'model': {'rope_scaling': '$scaling', ${scalings[$scaling]}}}"
    run_step "translate-$scaling" --input "$WORK/model" "$source_text" "$config" \
        --option "model_overrides=$overrides" --output "$translation" \
        -- "$PYTHON" -m rope_fairseq.translate "$WORK/model" "$source_text" -o "$translation" \
        --config "$config" --model-overrides "$overrides"
)

# What the recipe says already would be another change of it if said again.
suffix='' changes=()
((seed == 1)) || suffix=-seed$seed changes=("common.seed=$seed")
[[ ! $updates ]] || changes+=(--max-update "$updates")
for name in "${NAMES[@]}"; do
    folder=$work/$name$suffix
    echo "extrapolate: $name, seed $seed"
    "$ROOT/scripts/reproduce.sh" extrapolate --work "$folder" "${train[@]}" "${valid[@]}" \
        "${classes[@]}" "${languages[@]}" "${changes[@]}" "model.position_encoding=$name"
    scaled=()
    if [[ $name == rope ]]; then
        for scaling in linear ntk dynamic yarn; do
            translate_scaled "$folder" "$scaling"
        done
        scaled=(--scaling linear ntk dynamic yarn)
    fi
    tool evaluation.lengths --work "$folder" --results "$results" "${scaled[@]}"
done
