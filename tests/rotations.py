"""The rotation of a whole tensor, for comparisons."""

import torch
from torch import Tensor

from rope_fairseq.rotary import RotarySpec, Rotation, dynamic_table, rotate_pairs, rotation_table


def table_of(spec: RotarySpec, seq_len: int, offset: int = 0, length: int | None = None) -> Tensor:
    """cos and sin [seq_len, dim/2, 2] of the positions from ``offset`` on, on the CPU.

    Args:
        length: of the sentence, where the scaling is ``dynamic``.
    """
    if spec.scaling == "dynamic":
        assert length is not None
        return dynamic_table(spec, torch.tensor([length]), seq_len, offset)[0]
    return rotation_table(spec, offset + seq_len, torch.device("cpu"))[offset:]


def rotate(x: Tensor, spec: RotarySpec, offset: int = 0, length: int | None = None) -> Tensor:
    """Rotate queries or keys by their positions.

    Args:
        x: [seq_len, ..., head_dim]; row s stands at position ``offset + s``.
        spec: the rotation.
        offset: position of the first row, at least 0 (the length of the cache in incremental
            decoding).
        length: of the sentence, where the scaling is ``dynamic``.

    Returns:
        Tensor of the shape and dtype of ``x``, where ⟨rotate(q, m), rotate(k, n)⟩ depends on
        m − n only (RoFormer, equation 16). Position 0 is left as it is and norms are preserved,
        but for the scaling ``yarn``, which multiplies both by its attention factor.
    """
    table = table_of(spec, x.size(0), offset, length).to(x.device)
    # table: [seq_len, dim/2, 2] -> [seq_len, 1, …, 1, dim/2, 2]
    table = table.view(x.size(0), *[1] * (x.dim() - 2), *table.shape[1:])
    return rotate_pairs(x, Rotation(table, spec.layout))
