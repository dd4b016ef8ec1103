#!/usr/bin/env bash
# get.sh FOLDER [options]: see get.sh --help.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"
exec "$PYTHON" "$ROOT/data-prep/multi30k/get.py" "$@"
