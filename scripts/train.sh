#!/usr/bin/env bash
# train.sh RECIPE [--work DIR] [--devices N] [--max-tokens N] [overrides, such as model.rope_base=20000]
#
# Trains the recipe's model with fairseq-hydra-train and the recipe's file of configs/, into
# checkpoints/. Overrides are those of Hydra: KEY=VALUE for a key of the file, +KEY=VALUE for one
# that it does not have. A run that was interrupted goes on from its last checkpoint; one with other
# data or options starts anew, and the old checkpoints are moved to checkpoints.old, from where they come
# back when their options do.
#
# --devices N (default: the GPUs of this machine, 1 without) processes train together, started by
# torchrun. The tokens of an update stay the recipe's, or --tokens-per-update N: each device takes
# as many batches an update as needed, of at most --max-tokens N each (default: the config's; fairseq
# leaves out a longer sentence). A run may go on with other numbers, at the same place in the epoch, to a
# batch a device; with batches of another size the place is approximate.
#
# Several machines with one shared folder, see scripts/slurm.sbatch: on each of them
#   train.sh RECIPE --nodes N --node-rank R --master HOST:PORT [all else the same on each]
# with R from 0 to N - 1 and HOST the machine of rank 0, which alone keeps logs and manifests; the
# others wait for it for JOIN_TIMEOUT seconds (default 600). --dry-run prints the command.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

devices='' max_tokens='' nodes='' node_rank=0 master='' others=()
while (($#)); do
    case $1 in
        --devices=* | --max-tokens=* | --nodes=* | --node-rank=* | --master=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    (($# > 1)) || [[ ! $1 =~ ^--(devices|max-tokens|nodes|node-rank|master)$ ]] || die "$1 needs a value"
    case $1 in
        --devices) devices=$2; shift ;;
        --max-tokens) max_tokens=$2; shift ;;
        --nodes) nodes=$2; shift ;;
        --node-rank) node_rank=$2; shift ;;
        --master) master=$2; shift ;;
        *) others+=("$1") ;;
    esac
    shift
done
[[ $nodes || ! $master ]] || die "--master $master: says where the other --nodes N are; give both"
nodes=${nodes:-1}
number='^[1-9][0-9]{0,5}$'
[[ ! $devices || $devices =~ $number ]] || die "--devices $devices: must be a whole number above 0"
[[ $nodes =~ $number ]] || die "--nodes $nodes: must be a whole number above 0"
[[ $node_rank =~ ^(0|[1-9][0-9]{0,5})$ && $node_rank -lt $nodes ]] ||
    die "--node-rank $node_rank: must be a whole number from 0 to $((nodes - 1)), below --nodes"
if ((nodes > 1)); then
    [[ $master =~ ^[^:]+:[0-9]+$ ]] || die "--master '$master': must be HOST:PORT, the machine of rank 0"
fi

# The first node has the lock of a shared work folder.
((node_rank == 0)) || export JOINS_RUN=1
start_script "${others[@]}"
overrides_only

pair=$RECIPE_SOURCE_LANG-$RECIPE_TARGET_LANG
[[ ${DRY_RUN:-} || -f $WORK/manifests/sign.json ]] ||
    die "$WORK: holds no data that is ready; run prepare.sh $RECIPE_NAME first"
[[ ${DRY_RUN:-} || -f $WORK/data-bin/train.$pair.$RECIPE_SOURCE_LANG.idx ]] ||
    die "$WORK/data-bin: is not $pair; give --source-lang and --target-lang as to prepare.sh"
config=$ROOT/configs/$RECIPE_CONFIG.yaml
if [[ ! $devices ]]; then
    devices=1
    # Asking torch takes seconds; without one of these (NVIDIA, AMD, WSL) there is nothing to count.
    [[ ! -e /dev/nvidiactl && ! -e /dev/kfd && ! -e /dev/dxg ]] ||
        devices=$("$PYTHON" -W ignore -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
batch=$(tool recipe "$RECIPE_NAME" "${RECIPE_ARGS[@]}" --batch --devices $((devices * nodes)) \
    ${max_tokens:+--max-tokens "$max_tokens"} "${ARGS[@]}")
mapfile -t batch <<<"$batch"
# Later ones win. The recipe's make the run what it is; how many devices share the work does not.
recipe=("task.source_lang='$RECIPE_SOURCE_LANG'" "task.target_lang='$RECIPE_TARGET_LANG'"
    "${RECIPE_OVERRIDES[@]}" "${RECIPE_MAX_UPDATE_OVERRIDES[@]}")
overrides=("${recipe[@]}" "${batch[@]}" "${ARGS[@]}")
tool recipe "$RECIPE_NAME" --check-save-schedule "${overrides[@]}"

arguments=(
    --config-dir "$ROOT/configs" --config-name "$RECIPE_CONFIG"
    "common.user_dir='$ROOT/rope_fairseq'" "task.data='$WORK/data-bin'"
    "checkpoint.save_dir='$WORK/checkpoints'"
    "hydra.run.dir='$WORK'" hydra.job.chdir=false hydra.output_subdir=null hydra/job_logging=stdout
    "${overrides[@]}"
)
if ((devices * nodes == 1)); then
    # fairseq alone would take all GPUs that it sees.
    launcher=(fairseq-hydra-train)
    arguments+=(distributed_training.distributed_world_size=1)
else
    launcher=(torchrun --nproc-per-node "$devices")
    if ((nodes == 1)); then
        launcher+=(--standalone)  # at a free port
    else
        launcher+=(--nnodes "$nodes" --node-rank "$node_rank"
            --master-addr "${master%:*}" --master-port "${master##*:}")
    fi
    launcher+=("$(command -v fairseq-hydra-train)")
    # torchrun's own default, about which it prints a warning.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

# Hydra and torch warn about what fairseq does, on every start and in many lines.
start_training() {
    PYTHONWARNINGS=ignore run "${launcher[@]}" "${arguments[@]}"
}

# checkpoints/.start says from which data and options its run began. A run goes on only from
# checkpoints that began as it does; others are moved away, once the options are known to be right, and
# come back when their options do. What was logged of them goes with them as train.log.
choose_checkpoints() {
    local checkpoints=$WORK/checkpoints old=$WORK/checkpoints.old other=$WORK/checkpoints.other
    local log=$WORK/logs/train.log moved='' start reason
    touch "$log"
    # Killed while two were exchanged.
    [[ ! -e $other || -e $old ]] || mv "$other" "$old"
    start=$(sha256sum <"$WORK/manifests/train.json.started")
    if began_as "$checkpoints"; then
        bring_log
        return
    fi
    reason=$(PYTHONWARNINGS=ignore fairseq-hydra-train "${arguments[@]}" --cfg job 2>&1 >/dev/null) ||
        die "overrides ${ARGS[*]}: $(grep -E "Could not|mismatched|viable|Error|To append" <<<"$reason" | paste -sd' ')"
    if began_as "$old" && [[ -e $old/train.log ]]; then
        move_away "$other"
        mv "$old" "$checkpoints"
        [[ ! -e $other ]] || mv "$other" "$old"
        bring_log
        echo "train: goes on from the checkpoints that were in checkpoints.old"
        return
    fi
    move_away "$old"
    mkdir "$checkpoints"
    : >"$log"
    [[ ! $moved ]] || echo "train: the checkpoints of a run with other data or options are in checkpoints.old"
    echo "$start" >"$checkpoints/.start"
}

began_as() {
    [[ $(cat "$1/.start" 2>/dev/null) == "$start" ]]
}

# Copied and not moved: run_step has the log open.
bring_log() {
    [[ -e $checkpoints/train.log ]] || return 0
    cat "$checkpoints/train.log" >"$log"
    rm "$checkpoints/train.log"
}

# move_away FOLDER: what is worth keeping.
move_away() {
    if compgen -G "$checkpoints/*.pt" >/dev/null; then
        cp "$log" "$checkpoints/train.log"
        rm -rf "$1"
        mv "$checkpoints" "$1"
        moved=1
    fi
    rm -rf "$checkpoints"
}

# logs/train.launch says what the first node trains, for the others to compare.
launch="$nodes nodes, $devices devices each, job ${SLURM_JOB_ID:-} ${SLURM_RESTART_COUNT:-}: ${overrides[*]}"

# origin_lines: for the log, from which code a process trains, +changes where it is not the commit's,
# and on what. New results, and pages with their tables, are no code.
origin_lines() {
    local commit=unknown
    if [[ -e $ROOT/.git ]] && commit=$(git -C "$ROOT" rev-parse --short HEAD 2>/dev/null); then
        git -C "$ROOT" diff --quiet HEAD -- . ':!results' ':!*.md' || commit+=+changes
    else
        commit=unknown
    fi
    echo "commit: $commit"
    echo "hardware: $(tool hardware)"
}

train() {
    if [[ -z ${DRY_RUN:-} ]]; then
        choose_checkpoints
        origin_lines
        echo "$launch" >"$WORK/logs/train.launch"
    fi
    start_training
}

join_training() {
    local end=$((SECONDS + ${JOIN_TIMEOUT:-600})) found=
    until [[ $found == "$launch" ]]; do
        ((SECONDS < end)) ||
            die "node $node_rank would train '$launch', the first node: '${found:-nothing yet}'; start all nodes alike"
        sleep 1
        found=$(cat "$WORK/logs/train.launch" 2>/dev/null) || found=
        [[ $found != "done: $launch" ]] || exit 0
    done
    start_training
}

if ((node_rank > 0)) && [[ -z ${DRY_RUN:-} ]]; then
    join_training
    exit
fi
[[ ${DRY_RUN:-} ]] || rm -f "$WORK/logs/train.launch"
KEEPS_LOG=1 run_step train --input "$WORK/data-bin" "$config" \
    --option "tokens_per_update=$RECIPE_TOKENS_PER_UPDATE" "${recipe[@]}" "${ARGS[@]}" \
    --output "$WORK/checkpoints" -- train
# For machines that come when there is nothing left to do.
((nodes == 1)) || [[ ${DRY_RUN:-} ]] || echo "done: $launch" >"$WORK/logs/train.launch"
