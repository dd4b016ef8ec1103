"""Run a module of rope_fairseq that does not need fairseq, without importing it.

tool.py MODULE args…      is      python -m rope_fairseq.MODULE args…
"""

import runpy
import sys

import without_fairseq  # noqa: F401

del sys.argv[0]
runpy.run_module(f"rope_fairseq.{sys.argv[0]}", run_name="__main__", alter_sys=True)
