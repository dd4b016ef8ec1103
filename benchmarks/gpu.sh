#!/usr/bin/env bash
# Time and memory on a CUDA machine, in one run of a few minutes; needs a Python 3.11 or 3.12 that
# has torch, and pip's package index for the rest.
#
#   [PYTHON=python3] [DEVICE=cuda] [OUTPUT=FILE] benchmarks/gpu.sh [options of benchmarks.bench]
#
# Writes results/bench-gpu.json and the tables of docs/speed.md; to another OUTPUT, prints the
# tables. DEVICE=cpu OUTPUT=/tmp/try.json benchmarks/gpu.sh --quick tries the same without a GPU.
# torch stays as it is: everything else goes into build/gpu, an environment of its own on top of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
recorded=results/bench-gpu.json
OUTPUT=${OUTPUT:-$recorded}
venv=build/gpu

die() {
    echo "error: $*" >&2
    exit 2
}

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null ||
    die "PYTHON=$PYTHON is not a Python 3.11 or 3.12"
torch=$("$PYTHON" -c 'import torch; print(torch.__version__)' 2>/dev/null) ||
    die "PYTHON=$PYTHON has no torch"
"$PYTHON" -c "import sys, torch; sys.exit('$DEVICE' == 'cuda' and not torch.cuda.is_available())" ||
    die "torch $torch of $PYTHON finds no GPU"

"$PYTHON" -m venv --clear --system-site-packages "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Where PYTHON is itself of a virtual environment, its packages are not the system's.
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch.pth"
echo "torch==$torch" >"$venv/constraint.txt"
echo "gpu.sh: installing what is missing beside torch $torch"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    --constraint "$venv/constraint.txt" --editable '.[test]'

page=()
if [[ "$OUTPUT" == "$recorded" ]]; then page=(--page docs/speed.md); fi
exec "$venv/bin/python" -m benchmarks.bench --device "$DEVICE" --output "$OUTPUT" "${page[@]}" "$@"
