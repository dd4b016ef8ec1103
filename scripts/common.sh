# shellcheck shell=bash
# Sourced by the scripts beside it: interpreter, arguments, work folder, steps that know whether
# they are done.
#
#   source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
#   start_script "$@"         # prepare.sh RECIPE [--work DIR] […]
#   run_step NAME --input PATH… --option K=V… --output PATH… -- command args…

set -euo pipefail
unset CDPATH  # with it, cd prints

# Without links, as manifests name files.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

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
sys.exit(not all(map(importlib.util.find_spec, ["fairseq", "sacremoses", "sentencepiece", "subword_nmt", "yaml"])))
' 2>/dev/null) || die "the interpreter $PYTHON lacks fairseq or another package; type 'make venv' or set PYTHON"
export PYTHON PATH=$python_bin:$PATH PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

# tool MODULE args…: python -m rope_fairseq.MODULE, without the seconds that importing fairseq takes.
tool() {
    "$PYTHON" "$ROOT/scripts/tool.py" "$@"
}

# usage: the comment at the head of the running script.
usage() {
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "$0"
}

ENCODINGS=sinusoidal,learned,rope,shaw,transformer-xl,t5,tupe,deberta,alibi,none

# take_options "NAME …" "$@": for scripts that train several models. --NAME VALUE and --NAME=VALUE set the
# variable NAME; OTHERS is all else, in its order.
take_options() {
    local names=" $1 " option
    OTHERS=()
    shift
    while (($#)); do
        option=${1%%=*}
        if [[ $1 == -h || $1 == --help ]]; then
            usage
            exit 0
        elif [[ $option != --* || $names != *" ${option#--} "* ]]; then
            OTHERS+=("$1")
            shift
            continue
        fi
        [[ $1 == "$option" ]] || set -- "$option" "${1#*=}" "${@:2}"
        [[ ${2:-} && $2 != -* ]] || die "$1 needs a value"
        printf -v "${option#--}" %s "$2"
        shift 2
    done
}

# no_others: refuse what take_options did not know.
no_others() {
    ((${#OTHERS[@]} == 0)) || die "unknown argument ${OTHERS[0]}; usage: $(usage | head -n 1)"
}

# check_run UPDATES SEED ENCODINGS: the values of such options; sets NAMES.
check_run() {
    [[ $1 =~ ^[1-9][0-9]{0,8}$ ]] || die "--updates $1: must be a whole number above 0"
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "--seed $2: must be a whole number"
    check_encodings "$3"
}

# check_encodings ENCODINGS: sets NAMES.
check_encodings() {
    local name
    IFS=, read -ra NAMES <<<"$1"
    ((${#NAMES[@]})) || die "--encodings $1: names none; choose from ${ENCODINGS//,/, }"
    for name in "${NAMES[@]}"; do
        [[ $name && $name != *,* && ,$ENCODINGS, == *,"$name",* ]] ||
            die "--encodings $1: there is no '$name'; choose from ${ENCODINGS//,/, }"
    done
}

# make_results DIR: the folder where results are kept.
make_results() {
    mkdir -p "$1" 2>/dev/null || die "--results $1: cannot be made; name another folder"
}

# start_script RECIPE [options of all scripts] [other arguments]: what read_arguments does; then makes
# and locks the work folder, unless --dry-run (DRY_RUN=1) is given: then nothing is written at all.
start_script() {
    read_arguments "$@"
    if [[ ${DRY_RUN:-} ]]; then
        WORK=$(realpath -m "$WORK")
        check_path
    else
        open_work "$WORK"
    fi
}

# read_arguments RECIPE [options of all scripts] [other arguments]: sets RECIPE_* (see
# rope_fairseq/recipe.py), WORK and arrays of arguments: RECIPE_ARGS change the recipe, DATA_ARGS go to
# data-prep/CORPUS/get.sh, ARGS are all others. DOWNLOADS is where the corpus keeps archives,
# which changes no result.
# shellcheck disable=SC2034  # the scripts use them
read_arguments() {
    ARGS=() RECIPE_ARGS=() DATA_ARGS=() DOWNLOADS=()
    WORK=
    local recipe=
    while (($#)); do
        case $1 in
            -h | --help) usage; exit 0 ;;
            --dry-run) export DRY_RUN=1 ;;
            --work) [[ ${2:-} && $2 != -* ]] || die "--work needs a folder"; WORK=$2; shift ;;
            --work=*) WORK=${1#--work=}; [[ $WORK ]] || die "--work needs a folder" ;;
            --vocab-size=* | --merges=* | --source-lang=* | --target-lang=* | --tokens-per-update=* | --max-update=*)
                set -- x "${1%%=*}" "${1#*=}" "${@:2}" ;;
            --vocab-size | --merges | --source-lang | --target-lang | --tokens-per-update | --max-update)
                (($# > 1)) || die "$1 needs a value"
                RECIPE_ARGS+=("$1" "$2"); shift ;;
            --downloads=* | --mirror=* | --held-out=* | --classes=*)
                set -- x "${1%%=*}" "${1#*=}" "${@:2}" ;;
            --downloads)
                (($# > 1)) || die "$1 needs a folder"
                DOWNLOADS=("$1" "$2"); shift ;;
            --mirror | --held-out | --classes)
                (($# > 1)) || die "$1 needs a value"
                DATA_ARGS+=("$1" "$2"); shift ;;
            --devices | --max-tokens | --nodes | --node-rank | --master)  # of train.sh
                (($# > 1)) || die "$1 needs a value"
                ARGS+=("$1" "$2"); shift ;;
            --train | --valid | --test)
                (($# > 2)) || die "$1 needs two files, source and target"
                DATA_ARGS+=("$1" "$2" "$3"); shift 2 ;;
            -*) ARGS+=("$1") ;;
            *) if [[ -z $recipe ]]; then recipe=$1; else ARGS+=("$1"); fi ;;
        esac
        shift
    done
    [[ $recipe ]] || die "no recipe given; usage: $(usage | head -n 1)"
    local assignments
    assignments=$(tool recipe "$recipe" "${RECIPE_ARGS[@]}") || exit 2
    # The values are quoted for the shell by recipe.py.
    eval "$assignments"
    WORK=${WORK:-$ROOT/exp/$RECIPE_NAME}
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
    WORK=$(realpath -m "$1")
    check_path
    reason=$(mkdir -p "$1/logs" "$1/manifests" 2>&1 && touch "$1/.lock" 2>&1) ||
        die "work folder $1 cannot be written to (${reason##*: }); choose another with --work DIR"
    WORK=$(cd "$1" && pwd)
    [[ ${ROPE_LOCKED_WORK:-} == "$WORK" ]] && return
    # A node that only joins a run on a shared folder: the first node holds the lock.
    [[ ${JOINS_RUN:-} ]] && return
    exec {ROPE_LOCK_FD}>"$WORK/.lock"
    flock --nonblock "$ROPE_LOCK_FD" || die "another script is at work in $WORK; wait for it to end"
    export ROPE_LOCKED_WORK=$WORK
}

# check_path: fairseq and Hydra read some characters of a path as syntax.
check_path() {
    [[ $WORK$ROOT != *[:\'\$]* ]] || die "path $WORK or $ROOT: must hold none of : ' \$; use another folder"
}

# run CMD args…: runs it, or with DRY_RUN prints it as one can type it in the project's folder.
run() {
    if [[ -z ${DRY_RUN:-} ]]; then
        "$@"
        return
    fi
    [[ $1 != tool ]] || set -- python -m "rope_fairseq.$2" "${@:3}"
    [[ $1 != "$PYTHON" ]] || set -- python "${@:2}"
    local words
    printf -v words '%q ' "$@"
    words=${words% }
    printf '%s\n' "${words//"$ROOT/"/}"
}

# run_step NAME --input PATH… --option K=V… --output PATH… -- command args…
# Runs the command unless the step is done (rope_fairseq/manifest.py). Its output goes to the
# terminal and to logs/NAME.log. The command may be a function that calls `run`.
run_step() {
    local name=$1 file=$WORK/manifests/$1.json log=$WORK/logs/$1.log
    local guard=() reason status=0
    shift
    while (($#)) && [[ $1 != -- ]]; do
        guard+=("$1")
        shift
    done
    shift
    if [[ ${DRY_RUN:-} ]]; then
        printf '\n# %s\n' "$name"
        if [[ $1 != tool && $(type -t "$1") == function ]]; then "$@"; else run "$@"; fi
        return
    fi
    reason=$(tool manifest check --file "$file" "${guard[@]}") || status=$?
    case $status in
        0) echo "$name: up to date"; return ;;
        1) echo "$name: running ($reason)" ;;
        *) exit "$status" ;;
    esac
    # A run that goes on keeps what it has logged; whether a training does, it knows itself.
    [[ $reason == interrupted* || ${KEEPS_LOG:-} ]] || : >"$log"
    local errors=$WORK/logs/.$name.errors
    : >"$errors"
    # Standard output and standard error each keep their way and are both copied to the log.
    # The command runs under set -e even where it is a function.
    set +e
    {
        {
            (set -e; "$@") 2>&3 3>&- | tee -a "$log" >&4
        } 3>&1 | tee -a "$log" "$errors" >&2
    } 4>&1
    status=${PIPESTATUS[0]}
    set -e
    if ((status)); then
        grep -q '^error: ' "$errors" ||
            echo "error: step $name failed with status $status; its output is in $log" >&2
        rm "$errors"
        exit "$status"
    fi
    rm "$errors"
    tool manifest write --file "$file" "${guard[@]}"
}
