"""Imported first, it makes the modules of rope_fairseq that need neither fairseq nor torch
importable without them: for tool.py and the scripts of data-prep/.

The package's own ``__init__`` registers the models and so imports fairseq, which takes seconds.
"""

import sys
from pathlib import Path
from types import ModuleType

if "rope_fairseq" not in sys.modules:
    _package = ModuleType("rope_fairseq")
    _package.__path__ = [str(Path(__file__).resolve().parent.parent / "rope_fairseq")]
    sys.modules["rope_fairseq"] = _package
