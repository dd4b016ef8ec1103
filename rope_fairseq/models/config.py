"""Options of the RoPE Transformer, and the sizes that its architectures fill in."""

from dataclasses import field, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import (
    DecoderConfig,
    EncDecBaseConfig,
    QuantNoiseConfig,
)

from rope_fairseq.attention_kind import KINDS, LINEAR_ENCODINGS, AttentionKind
from rope_fairseq.position import ENCODINGS, PositionOptions
from rope_fairseq.position.options import BUCKETED, MAX_DISTANCES
from rope_fairseq.precision import COMPUTE_DTYPES, MATMUL_PRECISIONS
from rope_fairseq.rotary import LAYOUTS, SCALINGS

_DEFAULT = PositionOptions()

#: Options of ours: name, type, default, help.
OWN_FIELDS: tuple[tuple[str, Any, Any, str], ...] = (
    (
        "position_encoding",
        str,
        _DEFAULT.encoding,
        f"how self-attention knows positions; one of {', '.join(ENCODINGS)}",
    ),
    (
        "rope_base",
        float,
        _DEFAULT.rope_base,
        "base of the rotary frequencies base^(-2(i-1)/d); above 0",
    ),
    (
        "rope_layout",
        str,
        _DEFAULT.rope_layout,
        f"which channels rotary embedding pairs; one of {', '.join(LAYOUTS)}: interleaved is the "
        "paper's (x1,x2),(x3,x4),…; half is LLaMA's x_i with x_{i+d/2}",
    ),
    (
        "rope_fraction",
        float,
        _DEFAULT.rope_fraction,
        "fraction of each head's channels that is rotated; above 0, at most 1, and an even number "
        "of channels",
    ),
    (
        "rope_scaling",
        str,
        _DEFAULT.rope_scaling,
        f"change of the rotary frequencies for longer sentences; one of {', '.join(SCALINGS)}",
    ),
    (
        "rope_scaling_factor",
        Optional[float],  # noqa: UP045 (fairseq reads no "| None")
        _DEFAULT.rope_scaling_factor,
        "how many times longer sentences become; at least 1; linear, ntk and yarn need it, dynamic "
        "takes 1 without it",
    ),
    (
        "rope_original_max_positions",
        Optional[int],  # noqa: UP045
        _DEFAULT.rope_original_max_positions,
        "length that the model was trained with, in tokens; dynamic and yarn need it",
    ),
    (
        "rope_target_extra",
        int,
        _DEFAULT.rope_target_extra,
        "dynamic scaling takes the length of a translation to be that of its source plus this; at "
        "least 0",
    ),
    (
        "relative_max_distance",
        Optional[int],  # noqa: UP045
        _DEFAULT.relative_max_distance,
        "distance from which on all are alike; at least 1; default "
        + ", ".join(f"{distance} with {name}" for name, distance in MAX_DISTANCES.items()),
    ),
    (
        "relative_buckets",
        int,
        _DEFAULT.relative_buckets,
        f"buckets of distances with {' and '.join(BUCKETED)}; even, at least 4",
    ),
    (
        "attention_kind",
        str,
        AttentionKind.kind,
        f"how self-attention is computed; one of {', '.join(KINDS)}: the time and memory of linear "
        f"attention grow with the length, not its square; it carries {', '.join(LINEAR_ENCODINGS)}",
    ),
    (
        "linear_feature_map",
        str,
        AttentionKind.feature_map,
        "features of queries and keys in linear attention; elu: elu(x) + 1; softmax: softmax of a "
        "query's channels, exp of a key's; favor: Performer's positive random features",
    ),
    (
        "linear_features",
        Optional[int],  # noqa: UP045
        AttentionKind.features,
        "number of random features of a head with favor; default d·ln d for heads of d channels",
    ),
    (
        "compute_dtype",
        str,
        COMPUTE_DTYPES[0],
        f"precision of matrix products; one of {', '.join(COMPUTE_DTYPES)}: parameters, optimizer "
        "and checkpoints stay in float32",
    ),
    (
        "train_matmul_precision",
        Optional[str],  # noqa: UP045
        None,
        "torch.set_float32_matmul_precision while the model trains; one of "
        f"{', '.join(MATMUL_PRECISIONS)}; default: what the process has. On a CPU with AMX or "
        "AVX512-BF16, medium multiplies in bfloat16, but in the fused attention kernel",
    ),
)

#: Sizes that differ between architectures: None until the architecture fills them in.
SIZES: dict[str, dict[str, Any]] = {
    "rope_transformer": {
        "encoder_embed_dim": 512,
        "encoder_ffn_embed_dim": 2048,
        "encoder_layers": 6,
        "encoder_attention_heads": 8,
        "decoder_layers": 6,
        "decoder_attention_heads": 8,
        "dropout": 0.1,
        "attention_dropout": 0.0,
    },
    "rope_transformer_iwslt_de_en": {
        "encoder_ffn_embed_dim": 1024,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    "rope_transformer_wmt_en_de": {},
    "rope_transformer_wmt_en_de_big": {
        "encoder_embed_dim": 1024,
        "encoder_ffn_embed_dim": 4096,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "dropout": 0.3,
        "attention_dropout": 0.1,
    },
    "rope_transformer_multi30k": {
        "encoder_embed_dim": 128,
        "encoder_ffn_embed_dim": 256,
        "encoder_layers": 4,
        "encoder_attention_heads": 4,
        "decoder_layers": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.3,
    },
}

#: Sizes that follow another one unless they are given.
_FOLLOWS = {
    "decoder_embed_dim": "encoder_embed_dim",
    "decoder_ffn_embed_dim": "encoder_ffn_embed_dim",
    "decoder_input_dim": "decoder_embed_dim",
    "decoder_output_dim": "decoder_embed_dim",
}

_SUBCONFIGS = {
    "encoder": EncDecBaseConfig,
    "decoder": DecoderConfig,
    "quant_noise": QuantNoiseConfig,
}


def _stock_fields() -> list[tuple[str, Any, Any]]:
    """Every option of fairseq's ``transformer``, with the flat name that it has on the command
    line (``encoder.layers`` is ``encoder_layers``)."""
    sized = {*SIZES["rope_transformer"], *_FOLLOWS}
    flat = []
    for outer in fields(TransformerConfig):
        if outer.name.startswith("_"):
            continue
        prefix, inner = "", [outer]
        if outer.name in _SUBCONFIGS:
            prefix = f"{outer.name}_"
            inner = [f for f in fields(_SUBCONFIGS[outer.name]) if not f.name.startswith("_")]
        for option in inner:
            name, kind, default = prefix + option.name, option.type, option.default
            if name in sized:
                kind, default = Optional[kind], None  # noqa: UP045 (fairseq reads no "| None")
            elif option.name == "layers_to_keep":
                # fairseq reads this one as "0,2,4", whatever its own annotation says.
                kind = Optional[str]  # noqa: UP045
            flat.append((name, kind, field(default=default, metadata=dict(option.metadata))))
    return flat


def _own_fields() -> list[tuple[str, Any, Any]]:
    return [
        (name, kind, field(default=default, metadata={"help": text}))
        for name, kind, default, text in OWN_FIELDS
    ]


# A flat dataclass, because fairseq builds its command line and its YAML from one: a nested
# TransformerConfig as the registered dataclass ignores --encoder-layers. It is generated, so that
# it has the options of the installed fairseq and says nothing twice.
RopeTransformerConfig: Any = make_dataclass(
    "RopeTransformerConfig", _stock_fields() + _own_fields(), bases=(FairseqDataclass,)
)
RopeTransformerConfig.__module__ = __name__
RopeTransformerConfig.__doc__ = "Options of ``rope_transformer``; sizes are None until filled in."


def fill_sizes(cfg: Any, arch: str) -> None:
    """Give every size that is missing or None in ``cfg`` (a Namespace or an open DictConfig) the
    value of the architecture ``arch``; sizes that the user gave stay."""
    for name, value in {**SIZES["rope_transformer"], **SIZES[arch]}.items():
        if getattr(cfg, name, None) is None:
            setattr(cfg, name, value)
    for name, source in _FOLLOWS.items():
        if getattr(cfg, name, None) is None:
            setattr(cfg, name, getattr(cfg, source))
