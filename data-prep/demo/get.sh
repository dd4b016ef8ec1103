#!/usr/bin/env bash
# get.sh FOLDER: unpack the demo corpus into FOLDER, checked against SHA256SUMS; get.sh --help.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/unpack.py" "$@"
