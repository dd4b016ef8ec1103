"""Position encodings: which module carries which."""

from typing import Any

from torch import nn

from rope_fairseq.errors import UserError
from rope_fairseq.position.alibi import AlibiPositionEncoding
from rope_fairseq.position.base import PositionEncoding, Side
from rope_fairseq.position.deberta import DebertaPositionEncoding, DistanceEmbedding
from rope_fairseq.position.options import ABSOLUTE, BOUNDED, ENCODINGS, PositionOptions
from rope_fairseq.position.rope import RotaryPositionEncoding
from rope_fairseq.position.shaw import ShawPositionEncoding
from rope_fairseq.position.t5 import RelativeBuckets, T5PositionEncoding
from rope_fairseq.position.transformer_xl import TransformerXLBiases, TransformerXLPositionEncoding
from rope_fairseq.position.tupe import TupePositionEncoding, UntiedPositions

__all__ = [
    "ABSOLUTE",
    "BOUNDED",
    "ENCODINGS",
    "PositionEncoding",
    "PositionOptions",
    "RotaryPositionEncoding",
    "Side",
    "build_position_encoding",
    "build_shared",
]


def build_shared(options: PositionOptions, side: Side) -> nn.Module | None:
    """The parameters of an encoding that all layers of an encoder or decoder share, or None."""
    if options.encoding == "transformer-xl":
        return TransformerXLBiases(side)
    if options.encoding == "t5":
        return RelativeBuckets(side, options.relative_buckets, options.max_distance)
    if options.encoding == "tupe":
        return UntiedPositions(side, options.relative_buckets, options.max_distance)
    if options.encoding == "deberta":
        return DistanceEmbedding(side, options.max_distance)
    return None


def build_position_encoding(
    options: PositionOptions, side: Side, shared: Any = None
) -> PositionEncoding:
    """The part of an encoding that acts inside one self-attention module.

    Args:
        shared: what :func:`build_shared` gives for the same arguments.

    Raises:
        UserError: the encoding cannot be had with heads of this size.
    """
    match options.encoding:
        case "rope":
            extra = 0 if side.bidirectional else options.rope_target_extra
            if side.random_features is None:
                spec = options.rotary_spec(side.head_dim)
            else:
                features = "--linear-features"
                spec = options.rotary_spec(side.random_features, features, features)
            return RotaryPositionEncoding(spec, extra)
        case "shaw":
            return ShawPositionEncoding(side, options.max_distance)
        case "transformer-xl":
            if side.embed_dim % 2:
                raise UserError(
                    f"--encoder/--decoder-embed-dim {side.embed_dim}: must be even with "
                    "--position-encoding transformer-xl"
                )
            return TransformerXLPositionEncoding(side, shared)
        case "t5":
            return T5PositionEncoding(shared)
        case "tupe":
            return TupePositionEncoding(shared)
        case "deberta":
            return DebertaPositionEncoding(side, shared)
        case "alibi":
            return AlibiPositionEncoding(side)
    return PositionEncoding()
