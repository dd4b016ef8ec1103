#!/usr/bin/env bash
# train.sh RECIPE [--work DIR] [overrides of the config, such as optimization.max_update=5000]
#
# Trains the recipe's model with fairseq-hydra-train and the recipe's file of configs/, into
# checkpoints/. Overrides are those of Hydra: KEY=VALUE for a key of the file, +KEY=VALUE for one that it
# does not have. A run that was interrupted goes on from its last checkpoint; one with other data or
# other options starts anew.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
for override in "${ARGS[@]}"; do
    [[ $override == *=* ]] || die "unknown argument $override; an override is KEY=VALUE; usage: $(usage | head -n 1)"
done

[[ -d $WORK/data-bin ]] || die "$WORK/data-bin: no such folder; run prepare.sh $RECIPE_NAME first"
config=$ROOT/configs/$RECIPE_CONFIG.yaml
tool recipe "$RECIPE_NAME" --check-save-schedule "${ARGS[@]}"

train() {
    ((STEP_CONTINUES)) || rm -rf "$WORK/checkpoints"
    # Hydra and torch warn about what fairseq does, on every start and in many lines.
    PYTHONWARNINGS=ignore fairseq-hydra-train \
        --config-dir "$ROOT/configs" --config-name "$RECIPE_CONFIG" \
        "common.user_dir='$ROOT/rope_fairseq'" "task.data='$WORK/data-bin'" \
        "checkpoint.save_dir='$WORK/checkpoints'" \
        "hydra.run.dir='$WORK'" hydra.output_subdir=null hydra/job_logging=stdout "${ARGS[@]}"
}

run_step train --input "$WORK/data-bin" "$config" ${ARGS:+--option "${ARGS[@]}"} \
    --output "$WORK/checkpoints" -- train
