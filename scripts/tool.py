"""Run a module of rope_fairseq that needs neither fairseq nor torch, without importing them.

    tool.py MODULE args…      is      python -m rope_fairseq.MODULE args…

``python -m rope_fairseq.MODULE`` imports the package first, which registers the models and so
imports fairseq: several seconds for each of the many small calls in scripts/.
"""

import runpy
import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("rope_fairseq")
package.__path__ = [str(Path(__file__).resolve().parent.parent / "rope_fairseq")]
sys.modules["rope_fairseq"] = package
del sys.argv[0]
runpy.run_module(f"rope_fairseq.{sys.argv[0]}", run_name="__main__", alter_sys=True)
