"""The rotation of a whole tensor, for comparisons."""

from torch import Tensor

from rope_fairseq.rotary import RotarySpec, Rotation, rotate_pairs, rotation_table


def rotate(x: Tensor, spec: RotarySpec, offset: int = 0) -> Tensor:
    """Rotate queries or keys by their positions.

    Args:
        x: [seq_len, ..., head_dim]; row s stands at position ``offset + s``.
        spec: the rotation.
        offset: position of the first row, at least 0 (the length of the cache in incremental
            decoding).

    Returns:
        Tensor of the shape and dtype of ``x``. Position 0 is left as it is, norms are preserved,
        and ⟨rotate(q, m), rotate(k, n)⟩ depends on m − n only (equation 16).
    """
    seq_len = x.size(0)
    table = rotation_table(spec, offset + seq_len, x.device)[offset:]
    # table: [seq_len, dim/2, 2] -> [seq_len, 1, …, 1, dim/2, 2]
    table = table.view(seq_len, *[1] * (x.dim() - 2), *table.shape[1:])
    return rotate_pairs(x, Rotation(table, spec.layout))
