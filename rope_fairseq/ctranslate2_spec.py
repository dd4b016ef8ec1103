"""A model as CTranslate2 specifies it: every parameter in its place, or the model is refused.

Source of the format: ``ctranslate2.specs.transformer_spec`` of CTranslate2 4.8, where a
specification names every parameter, and its converter of fairseq's own models.
"""

from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.modules import MultiheadAttention
from numpy.typing import NDArray
from torch import Tensor

from rope_fairseq.ctranslate2_engine import ctranslate2
from rope_fairseq.errors import UserError
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.multihead_linear_attention import LinearSelfAttention
from rope_fairseq.position import PositionOptions

# fairseq's name of an activation function, and that of ``common_spec.Activation``.
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_accurate": "GELUTanh",
    "gelu_fast": "GELUTanh",
    "tanh": "Tanh",
}
# Encodings that CTranslate2 computes as we do. What is added to the embeddings it takes as a table.
ENCODINGS = ("rope", "sinusoidal", "learned", "none")
# Scalings of rope that it computes as we do; ntk is another base.
SCALINGS = ("none", "linear", "ntk")
UNSERVED = ("cross_self_attention", "no_cross_attention", "adaptive_softmax_cutoff")


def check_served(transformer: Any) -> None:
    """Refuse what CTranslate2 would compute differently without a parameter that shows it.

    Parameters that it has no place for are refused by :class:`Parameters`.

    Raises:
        UserError: names the option, or the module where there is none.
    """
    cfg = transformer.cfg
    for option in UNSERVED:
        if getattr(cfg, option):
            raise UserError(f"--{option.replace('_', '-')}: CTranslate2 has nothing of the kind")
    if cfg.activation_fn not in ACTIVATIONS:
        raise UserError(
            f"--activation-fn {cfg.activation_fn}: CTranslate2 has {', '.join(ACTIVATIONS)}"
        )
    if any(isinstance(module, LinearSelfAttention) for module in transformer.modules()):
        raise UserError("--attention-kind linear: CTranslate2 has softmax attention only")
    position = _position(transformer)
    if position is not None and position.encoding not in ENCODINGS:
        raise UserError(
            f"--position-encoding {position.encoding}: CTranslate2 has {', '.join(ENCODINGS)}"
        )
    for side in (transformer.encoder, transformer.decoder):
        for layer in side.layers:
            kind = type(getattr(layer, "self_attn", layer))
            if kind not in (PositionedAttention, MultiheadAttention):
                raise UserError(f"{kind.__name__}: CTranslate2 has no such layer")


def _position(transformer: Any) -> PositionOptions | None:
    """The options of our position encodings; None for fairseq's own model."""
    return getattr(transformer.cfg, "position_options", None)


class Parameters:
    """A model's parameters by name; :meth:`check_all_taken` finds what has been left over."""

    def __init__(self, transformer: Any) -> None:
        self._state: dict[str, Tensor] = transformer.state_dict()
        # Buffers that only mark a version of fairseq, or stand for the size of a table.
        self._taken = {
            f"{side}.{name}"
            for side in ("encoder", "decoder")
            for name in ("version", "embed_positions._float_tensor")
        }

    def take(self, name: str) -> NDArray[np.float32]:
        self._taken.add(name)
        # A copy: quantization changes arrays in place.
        return np.array(self._state[name].numpy())

    def linear(self, spec: Any, *modules: str) -> None:
        """Set ``spec`` to the layer ``modules[0]``, or to several layers of one input as one."""
        spec.weight = np.concatenate([self.take(f"{module}.weight") for module in modules])
        biased = [module for module in modules if f"{module}.bias" in self._state]
        if biased:
            # All or none: fairseq's attention has one switch for its biases.
            spec.bias = np.concatenate([self.take(f"{module}.bias") for module in modules])

    def norm(self, spec: Any, module: str) -> None:
        spec.gamma = self.take(f"{module}.weight")
        spec.beta = self.take(f"{module}.bias")

    def attention(self, spec: Any, module: str, norm: str, own: bool) -> None:
        """Queries, keys and values of one input (``own``) are one product, else two."""
        query, *memory = (f"{module}.{name}_proj" for name in "qkv")
        self.norm(spec.layer_norm, norm)
        if own:
            self.linear(spec.linear[0], query, *memory)
        else:
            self.linear(spec.linear[0], query)
            self.linear(spec.linear[1], *memory)
        self.linear(spec.linear[-1], f"{module}.out_proj")

    def check_all_taken(self) -> None:
        """Refuse a model with parameters that the specification has no place for.

        Adapters, an adaptive softmax, quantization noise and the like: each comes with parameters.
        """
        left = [name for name in self._state if name not in self._taken]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise UserError(f"parameter {left[0]}{more}: CTranslate2 has no place for it")


def build_spec(transformer: Any, source: Dictionary, target: Dictionary) -> Any:
    """CTranslate2's specification of a model, parameters included.

    Encoder and decoder are specified separately: their numbers of layers and heads, their sizes
    and the places of their norms may differ.

    Args:
        transformer: ``rope_transformer`` or fairseq's ``transformer``.
        source, target: the dictionaries.

    Raises:
        UserError: CTranslate2 does not compute what this model does.
    """
    check_served(transformer)
    specs = ctranslate2("specs.transformer_spec")
    parameters = Parameters(transformer)
    cfg, encoder, decoder = transformer.cfg, transformer.encoder, transformer.decoder
    encoder_spec = specs.TransformerEncoderSpec(
        len(encoder.layers), cfg.encoder.attention_heads, **_options(transformer, "encoder")
    )
    decoder_spec = specs.TransformerDecoderSpec(
        len(decoder.layers), cfg.decoder.attention_heads, **_options(transformer, "decoder")
    )
    _fill_side(encoder_spec, encoder_spec.embeddings[0], transformer, "encoder", parameters)
    _fill_side(decoder_spec, decoder_spec.embeddings, transformer, "decoder", parameters)
    parameters.linear(decoder_spec.projection, "decoder.output_projection")
    parameters.check_all_taken()
    spec = specs.TransformerSpec(encoder_spec, decoder_spec)
    spec.register_source_vocabulary(list(source.symbols))
    spec.register_target_vocabulary(list(target.symbols))
    # fairseq ends a source with the end of sentence and starts a target with it.
    spec.config.add_source_eos = True
    spec.config.decoder_start_token = spec.config.eos_token
    # CTranslate2 passes over these; they say how long sentences may be, end of sentence included.
    spec.config.add_attribute("max_source_positions", encoder.max_source_positions)
    spec.config.add_attribute("max_target_positions", decoder.max_target_positions)
    return spec


def _options(transformer: Any, side: str) -> dict[str, Any]:
    """Options of a specification that say what a side of the model computes."""
    position, module = _position(transformer), getattr(transformer, side)
    cfg = transformer.cfg
    side_cfg = getattr(cfg, side)
    activations = ctranslate2("specs.common_spec").Activation
    options = {
        "pre_norm": side_cfg.normalize_before,
        "activation": activations[ACTIVATIONS[cfg.activation_fn]],
        "layernorm_embedding": module.layernorm_embedding is not None,
        "no_final_norm": module.layer_norm is None,
    }
    if position is not None and position.encoding == "rope":
        rotary = position.rotary_spec(side_cfg.embed_dim // side_cfg.attention_heads)
        if rotary.scaling not in SCALINGS:
            raise UserError(
                f"--rope-scaling {rotary.scaling}: CTranslate2 has {', '.join(SCALINGS)}"
            )
        options["rotary_dim"] = rotary.dim
        options["rotary_interleave"] = rotary.layout == "interleaved"
        options["rotary_base"] = rotary.base
        if rotary.scaling == "ntk":
            options["rotary_base"] *= rotary.factor ** (rotary.dim / (rotary.dim - 2))
        elif rotary.scaling == "linear":
            scalings = ctranslate2("specs.attention_spec").RotaryScalingType
            options["rotary_scaling_type"] = scalings.Linear
            options["rotary_scaling_factor"] = rotary.factor
    return options


def _fill_side(
    spec: Any, embeddings: Any, transformer: Any, side: str, parameters: Parameters
) -> None:
    module = getattr(transformer, side)
    embeddings.weight = parameters.take(f"{side}.embed_tokens.weight")
    spec.scale_embeddings = module.embed_scale
    _fill_positions(spec, embeddings.weight.shape[1], transformer, side, parameters)
    if module.layernorm_embedding is not None:
        parameters.norm(spec.layernorm_embedding, f"{side}.layernorm_embedding")
    if module.layer_norm is not None:
        parameters.norm(spec.layer_norm, f"{side}.layer_norm")
    for number, layer in enumerate(spec.layer):
        name = f"{side}.layers.{number}"
        parameters.attention(
            layer.self_attention, f"{name}.self_attn", f"{name}.self_attn_layer_norm", own=True
        )
        if side == "decoder":
            parameters.attention(
                *(layer.attention, f"{name}.encoder_attn", f"{name}.encoder_attn_layer_norm"),
                own=False,
            )
        parameters.norm(layer.ffn.layer_norm, f"{name}.final_layer_norm")
        parameters.linear(layer.ffn.linear_0, f"{name}.fc1")
        parameters.linear(layer.ffn.linear_1, f"{name}.fc2")


def _fill_positions(
    spec: Any, embed_dim: int, transformer: Any, side: str, parameters: Parameters
) -> None:
    """What is added to the embeddings: a table [positions, embed_dim], in float32."""
    module = getattr(transformer, side)
    position = _position(transformer)
    if position is not None and position.encoding == "rope":
        # The decoder's specification leaves the table out by itself, the encoder's does not.
        spec.__dict__.pop("position_encodings", None)
        return
    source = side == "encoder"
    length = module.max_source_positions if source else module.max_target_positions
    if module.embed_positions is None:
        # Without a table CTranslate2 would compute sinusoids.
        table = np.zeros((length, embed_dim), dtype=np.float32)
    else:
        # fairseq counts positions from the padding's index + 1.
        first = module.padding_idx + 1
        if f"{side}.embed_positions.weight" in transformer.state_dict():
            learned = parameters.take(f"{side}.embed_positions.weight")
            table = learned[first : first + length]
        else:
            sinusoidal = module.embed_positions
            weights = sinusoidal.get_embedding(
                first + length, sinusoidal.embedding_dim, sinusoidal.padding_idx
            )
            table = weights.numpy()[first:]
    spec.position_encodings.encodings = np.ascontiguousarray(table)


def quantize(spec: Any, quantization: str) -> None:
    """Store numbers as ``quantization`` says, and 8-bit weights with 7 of their bits.

    Processors without VNNI (AVX2, and AVX-512 before 2019) add two products of 8-bit numbers in 16
    bits, which overflow where weights are large: with one bit less they cannot. That costs a
    rounding error of at most 1/128 of a row's largest weight, where the overflows spoiled scores.
    """
    spec.validate()
    spec.optimize(quantization=quantization)
    variables = spec.variables()
    for name, weight in variables.items():
        # A parameter that occurs twice is stored once; the other is the name of the first.
        if not isinstance(weight, str) and weight.dtype == "int8" and not weight.is_scalar():
            scale = variables[f"{name}_scale"]
            weight.array = np.rint(weight.array / 2).astype(np.int8)
            scale.array = scale.array / np.float32(2)
