# shellcheck shell=bash
# Sourced by the scripts beside it: interpreter, arguments, work folder, steps that know whether
# they are done.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#   start_script "$@"         # prepare.sh RECIPE [--work DIR] […]
#   run_step NAME --input PATH… --option K=V… --output PATH… -- command args…

set -euo pipefail
unset CDPATH  # with it, cd prints

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# die MESSAGE: one line on standard error, exit status 2.
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $ROOT/.venv/bin/python ]] && PYTHON=$ROOT/.venv/bin/python
fi
# The fairseq-* commands come from the interpreter's environment, this package from this folder.
python_bin=$("$PYTHON" -c '
import importlib.util, os, sys
print(os.path.dirname(sys.executable))
sys.exit(not all(map(importlib.util.find_spec, ["fairseq", "sacremoses", "sentencepiece", "yaml"])))
' 2>/dev/null) || die "the interpreter $PYTHON lacks fairseq or another package; type 'make venv' or set PYTHON"
export PYTHON PATH=$python_bin:$PATH PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

# tool MODULE args…: python -m rope_fairseq.MODULE, without the seconds that importing fairseq takes.
tool() {
    "$PYTHON" "$ROOT/scripts/tool.py" "$@"
}

# usage: the comment at the head of the running script.
usage() {
    sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$0"
}

# start_script RECIPE [--work DIR] [other arguments]: sets RECIPE_* (see rope_fairseq/recipe.py),
# WORK and the array ARGS of the other arguments; makes and locks the work folder.
start_script() {
    ARGS=()
    WORK=
    local recipe=
    while (($#)); do
        case $1 in
            -h | --help) usage; exit 0 ;;
            --work) (($# > 1)) || die "--work needs a folder"; WORK=$2; shift ;;
            --work=*) WORK=${1#--work=}; [[ $WORK ]] || die "--work needs a folder" ;;
            -*) ARGS+=("$1") ;;
            *) if [[ -z $recipe ]]; then recipe=$1; else ARGS+=("$1"); fi ;;
        esac
        shift
    done
    [[ $recipe ]] || die "no recipe given; usage: $(usage | head -n 1)"
    local assignments
    assignments=$(tool recipe "$recipe") || exit 2
    # The values are quoted for the shell by recipe.py.
    eval "$assignments"
    open_work "${WORK:-$ROOT/exp/$RECIPE_NAME}"
}

# no_more_arguments: refuse what start_script did not know.
no_more_arguments() {
    ((${#ARGS[@]} == 0)) || die "unknown argument ${ARGS[0]}; usage: $(usage | head -n 1)"
}

# overrides_only: refuse arguments that are no overrides for Hydra.
overrides_only() {
    local argument
    for argument in "${ARGS[@]}"; do
        [[ $argument == [!-]*=* ]] ||
            die "unknown argument $argument; an override is KEY=VALUE; usage: $(usage | head -n 1)"
    done
}

# open_work DIR: sets WORK to its absolute path; one script at a time may work in it. A script
# called by another one on the same folder works under the caller's lock.
open_work() {
    local reason
    reason=$(mkdir -p "$1/logs" "$1/manifests" 2>&1 && touch "$1/.lock" 2>&1) ||
        die "work folder $1 cannot be written to (${reason##*: }); choose another with --work DIR"
    WORK=$(cd "$1" && pwd)
    # fairseq and Hydra read these characters as syntax.
    [[ $WORK$ROOT != *[:\'\$]* ]] || die "path $WORK or $ROOT: must hold none of : ' \$; use another folder"
    [[ ${ROPE_LOCKED_WORK:-} == "$WORK" ]] && return
    exec {ROPE_LOCK_FD}>"$WORK/.lock"
    flock --nonblock "$ROPE_LOCK_FD" || die "another script is at work in $WORK; wait for it to end"
    export ROPE_LOCKED_WORK=$WORK
}

# run_step NAME --input PATH… --option K=V… --output PATH… -- command args…
# Runs the command unless the step is done (rope_fairseq/manifest.py). Its output goes to the
# terminal and to logs/NAME.log.
run_step() {
    local name=$1 file=$WORK/manifests/$1.json log=$WORK/logs/$1.log
    local guard=() reason status=0
    shift
    while (($#)) && [[ $1 != -- ]]; do
        guard+=("$1")
        shift
    done
    shift
    reason=$(tool manifest check --file "$file" "${guard[@]}") || status=$?
    case $status in
        0) echo "$name: up to date"; return ;;
        1) echo "$name: running ($reason)" ;;
        *) exit "$status" ;;
    esac
    # A run that goes on keeps what it has logged.
    [[ $reason == interrupted* ]] || : >"$log"
    # Standard output and standard error each keep their way and are both copied to the log.
    # The command runs under set -e even where it is a function.
    set +e
    {
        {
            (set -e; "$@") 2>&3 3>&- | tee -a "$log" >&4
        } 3>&1 | tee -a "$log" >&2
    } 4>&1
    status=${PIPESTATUS[0]}
    set -e
    if ((status)); then
        grep -q '^error: ' "$log" ||
            echo "error: step $name failed with status $status; its output is in $log" >&2
        exit "$status"
    fi
    tool manifest write --file "$file" "${guard[@]}"
}
