#!/usr/bin/env bash
# train.sh RECIPE [--work DIR] [overrides of the config, such as optimization.max_update=5000]
#
# Trains the recipe's model with fairseq-hydra-train and the recipe's file of configs/, into
# checkpoints/. Overrides are those of Hydra: KEY=VALUE for a key of the file, +KEY=VALUE for one
# that it does not have. A run that was interrupted goes on from its last checkpoint; one with other
# data or options starts anew, and the old checkpoints are moved to checkpoints.old.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
overrides_only

[[ -d $WORK/data-bin ]] || die "$WORK/data-bin: no such folder; run prepare.sh $RECIPE_NAME first"
config=$ROOT/configs/$RECIPE_CONFIG.yaml
tool recipe "$RECIPE_NAME" --check-save-schedule "${ARGS[@]}"

# Hydra and torch warn about what fairseq does, on every start and in many lines.
hydra_train() {
    PYTHONWARNINGS=ignore fairseq-hydra-train \
        --config-dir "$ROOT/configs" --config-name "$RECIPE_CONFIG" \
        "common.user_dir='$ROOT/rope_fairseq'" "task.data='$WORK/data-bin'" \
        "checkpoint.save_dir='$WORK/checkpoints'" \
        "hydra.run.dir='$WORK'" hydra.output_subdir=null hydra/job_logging=stdout "${ARGS[@]}" "$@"
}

# checkpoints/.start says from which data and options its run began. A run goes on only from
# checkpoints that began as it does; others are moved away, once the options are known to be right.
train() {
    local start reason
    start=$(sha256sum <"$WORK/manifests/train.json.started")
    if [[ $(cat "$WORK/checkpoints/.start" 2>/dev/null) != "$start" ]]; then
        reason=$(hydra_train --cfg job 2>&1 >/dev/null) ||
            die "overrides ${ARGS[*]}: $(grep -m 1 -E "Could not|mismatched|viable|Error" <<<"$reason")"
        if compgen -G "$WORK/checkpoints/*.pt" >/dev/null; then
            rm -rf "$WORK/checkpoints.old"
            mv "$WORK/checkpoints" "$WORK/checkpoints.old"
            echo "train: the checkpoints of a run with other data or options are in checkpoints.old"
        fi
        rm -rf "$WORK/checkpoints"
        mkdir "$WORK/checkpoints"
        echo "$start" >"$WORK/checkpoints/.start"
    fi
    hydra_train
}

run_step train --input "$WORK/data-bin" "$config" ${ARGS:+--option "${ARGS[@]}"} \
    --output "$WORK/checkpoints" -- train
