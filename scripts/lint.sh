#!/usr/bin/env bash
# Check style, shell scripts and types; every check runs, and any finding fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

status=0
check() {
    echo "lint: $*"
    "$@" || status=1
}
shopt -s nullglob
check ruff check --quiet --output-format concise .
check ruff format --check --quiet .
check shellcheck --external-sources --source-path=SCRIPTDIR scripts/*.sh scripts/*.sbatch benchmarks/*.sh data-prep/*/*.sh .ci/run
check mypy --no-error-summary
exit "$status"
