#!/usr/bin/env bash
# Write requirements.lock anew: what pip makes of setup.py's bounds today, in a throwaway environment.
#
#   [PYTHON=python3.11] scripts/lock.sh [torch==VERSION]
#
# Left out: torchaudio, which ve-fairseq declares and translation never imports, and the libraries
# that belong to a CUDA build of torch, which scripts/venv.sh installs where they are needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -qq --upgrade pip
"$work/venv/bin/python" -m pip install -qq "${1:-torch}" ".[test,lint,figures]"
{
    echo "# Exact versions for Python 3.11, written by scripts/lock.sh; installed by make venv."
    # setuptools: torch needs it, and pip freeze leaves it out by default.
    "$work/venv/bin/python" -m pip freeze --all |
        grep -vE '^(pip|wheel|rope[-_]fairseq|torchaudio|triton|nvidia-|cuda-)\b' |
        sed -E 's/^(torch==[0-9.]+)\+.*/\1/'
} >"$work/lock"
mv "$work/lock" requirements.lock
echo "lock: $(grep -c == requirements.lock) packages in requirements.lock"
