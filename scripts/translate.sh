#!/usr/bin/env bash
# translate.sh MODEL [INPUT] [-o OUTPUT] [fairseq-generate options]
#
# Raw text in, raw text out, one line for one line: see rope_fairseq/translate.py. MODEL is a folder
# that average.sh has made, or a checkpoint in it; standard input and output are the default.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "$PYTHON" -m rope_fairseq.translate "$@"
