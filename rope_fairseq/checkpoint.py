"""Checkpoints read without running what they hold, and the options of the model they hold."""

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from rope_fairseq.errors import UserError

_ZIP_MAGIC = b"PK\x03\x04"

# What fairseq stores beside the parameters.
_KINDS: dict[str, type] = {
    "args": Namespace,
    "cfg": Mapping,
    "extra_state": Mapping,
    "optimizer_history": list,
}


def refusal(error: UnpicklingError) -> str:
    """What torch's safe unpickler refused, in one line."""
    wanted = re.search(r"GLOBAL (\S+)|module (\S+) is blocked", str(error))
    reason = f"it calls for {wanted[1] or wanted[2]}" if wanted else "it is no plain data"
    return f"not a checkpoint that can be loaded safely: {reason}; nothing of it was run"


def damage(path: str | os.PathLike[str], error: Exception) -> UserError:
    """What torch raised for a file that is refused, no checkpoint or damaged, in one line."""
    if isinstance(error, UnpicklingError):
        return UserError(f"{path}: {refusal(error)}")
    # What torch raises for damaged files depends on where they break off.
    reason = str(error).strip().split("\n")[0]
    return UserError(f"{path}: not a checkpoint, or a damaged one ({reason})")


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a fairseq checkpoint to the CPU; tensors stay in the file until they are used.

    Only tensors, plain data and what `rope_fairseq.compat` allows (``argparse.Namespace``, NumPy
    arrays of numbers) are rebuilt: a checkpoint that calls anything else is refused and nothing
    of it runs.

    Raises:
        UserError: the file is truncated, no fairseq checkpoint, or more than plain data.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        # Only torch's zip format (the default since 1.6) can be mapped into memory.
        mmap = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (
        *(UnpicklingError, RuntimeError, OSError, EOFError),
        *(ValueError, LookupError, AttributeError),
    ) as error:
        raise damage(path, error) from error
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, Mapping) or not model or not all(map(torch.is_tensor, model.values())):
        raise UserError(f"{path}: not a fairseq checkpoint: it holds no model")
    assert isinstance(state, dict)
    for key, kind in _KINDS.items():
        if state.get(key) is not None and not isinstance(state[key], kind):
            raise UserError(f"{path}: not a fairseq checkpoint: its {key} is no {kind.__name__}")
    return state


def options(state: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The options stored in a checkpoint for ``group`` (``model``, ``task``, ``checkpoint`` …).

    fairseq-train stores the model's options as a namespace with the other groups' among them,
    fairseq-hydra-train as a mapping, and fairseq before 0.10 one namespace for everything.
    """
    if state.get("cfg") is not None:
        stored = state["cfg"].get(group) or {}
    else:
        stored = state.get("args") or {}
    return dict(vars(stored)) if isinstance(stored, Namespace) else dict(stored)


def num_updates(state: Mapping[str, Any]) -> int | None:
    """The update after which a checkpoint was written, None where it does not say."""
    history = state.get("optimizer_history") or [{}]
    return history[-1].get("num_updates")
