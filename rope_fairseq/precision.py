"""The precision in which a model computes, whatever the precision of its parameters.

fairseq's ``--bf16`` casts the parameters and, in its trainer, switches to a TPU. Computing under
autocast instead keeps parameters, optimizer and checkpoints in float32. No fairseq here.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

COMPUTE_DTYPES = ("float32", "bfloat16")

BF16_MEANS_TPU = "--bf16: fairseq means a TPU by it; leave it out and say --compute-dtype bfloat16"


def computing_in(compute_dtype: str, x: Tensor) -> AbstractContextManager[object]:
    """The context in which matrix products take their operands in ``compute_dtype``.

    Args:
        compute_dtype: one of :data:`COMPUTE_DTYPES`. ``float32`` changes nothing: an autocast of
            the caller acts as ever.
        x: an operand. Where it is not float32, the model was cast as a whole (``.half()``), and
            nothing is changed either.
    """
    if compute_dtype == "bfloat16" and x.dtype == torch.float32:
        return torch.autocast(x.device.type, torch.bfloat16)
    return nullcontext()
