#!/usr/bin/env bash
# Make the virtual environment .venv in the project folder: torch with whatever its build needs,
# everything else exactly as in requirements.lock, and the package itself, editable.
#
#   [PYTHON=python3.11] scripts/venv.sh
#
# A torch of the locked version that is in .venv already (a CPU build, say) is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
    echo "error: $*" >&2
    exit 2
}

# supported PYTHON: true when the command runs and is a Python that the dependencies have wheels for.
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1
}

if [[ -n "${PYTHON:-}" ]]; then
    supported "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 or 3.12" \
        "($("$PYTHON" --version 2>/dev/null || echo 'cannot be run'))"
else
    for PYTHON in python3 python3.11 python3.12 none; do
        if supported "$PYTHON"; then break; fi
    done
    [[ "$PYTHON" != none ]] ||
        die "Python 3.11 or 3.12 is needed, but python3 is" \
            "$(python3 --version 2>/dev/null || echo missing); name one: make venv PYTHON=/path/to/python3.11"
fi
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$PYTHON cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"

# A .venv whose Python has gone, or is of another version, cannot be mended: start afresh.
clear=()
if [[ -e .venv ]] && ! supported .venv/bin/python; then clear=(--clear); fi
echo "venv: $("$PYTHON" --version) in .venv"
"$PYTHON" -m venv "${clear[@]}" .venv

# -qq: errors only. Without build isolation the few source distributions are built by the locked
# setuptools, which comes with torch.
pip_install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$@"
}
echo "venv: installing $(grep '^torch==' requirements.lock) (some minutes where it is a CUDA build)"
pip_install --constraint requirements.lock torch setuptools
echo "venv: installing the other packages of requirements.lock"
pip_install --no-deps --no-build-isolation --use-pep517 --requirement requirements.lock
pip_install --no-deps --no-build-isolation --editable .

# Written last: make takes a .venv without it as unfinished.
touch .venv/.complete
echo "venv: done"
