"""Registration of ``rope_transformer`` and its architectures with fairseq."""

import argparse
import logging
from dataclasses import fields
from typing import Any

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.dataclass.utils import (
    convert_namespace_to_omegaconf,
    eval_str_list,
    gen_parser_from_dataclass,
)
from fairseq.models import MODEL_REGISTRY, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from rope_fairseq.attention_kind import AttentionKind
from rope_fairseq.errors import UserError
from rope_fairseq.models.config import SIZES, RopeTransformerConfig, fill_sizes
from rope_fairseq.models.layers import RopeDecoder, RopeEncoder
from rope_fairseq.models.loading import match_parts
from rope_fairseq.position import ABSOLUTE, PositionOptions
from rope_fairseq.precision import (
    BF16_MEANS_TPU,
    COMPUTE_DTYPES,
    MATMUL_PRECISIONS,
    train_no_more,
    train_with,
)

logger = logging.getLogger(__name__)


# register_model would silently give back the older class of this name.
if "rope_transformer" in MODEL_REGISTRY:
    raise UserError(
        "the model name rope_transformer is already registered by "
        f"{MODEL_REGISTRY['rope_transformer'].__module__}: load one copy of the plugin only"
    )


@register_model("rope_transformer", dataclass=RopeTransformerConfig)
class RopeTransformerModel(TransformerModelBase):
    """fairseq's Transformer with rotary position embeddings in encoder and decoder self-attention
    (Su et al., arXiv 2104.09864), or with another of our position encodings."""

    #: Set by ``--train-matmul-precision``.
    train_matmul_precision: str | None = None

    def train(self, mode: bool = True) -> "RopeTransformerModel":
        """As in torch; the precision of products, which torch has for the whole process, is that
        of the option while the model trains, and then what it was before."""
        if self.train_matmul_precision is not None:
            if mode:
                train_with(self.train_matmul_precision)
            else:
                train_no_more()
        return super().train(mode)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        gen_parser_from_dataclass(parser, RopeTransformerConfig())

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "RopeTransformerModel":
        """Build from the flat options of any of the architectures.

        Raises:
            UserError: an option is outside its range, unknown, or not served by this model.
        """
        options = _resolve(cfg)
        names = [option.name for option in fields(PositionOptions) if option.name != "encoding"]
        position = PositionOptions(
            options.position_encoding, **{name: getattr(options, name) for name in names}
        )
        kind = AttentionKind(
            options.attention_kind, options.linear_feature_map, options.linear_features
        )
        kind.check_carries(position)
        _refuse_unserved(options, task)
        _check_precision(options, cfg._get_parent() if isinstance(cfg, DictConfig) else None)
        nested = TransformerConfig.from_namespace(argparse.Namespace(**vars(options)))
        # fairseq's own switches for absolute positions follow the encoding.
        nested.no_token_positional_embeddings = position.encoding not in ABSOLUTE
        nested.encoder.learned_pos = nested.decoder.learned_pos = position.encoding == "learned"
        nested.position_options = position
        nested.attention_kind = kind
        nested.compute_dtype = options.compute_dtype
        model = super().build_model(nested, task)
        # The criterion fused_label_smoothed_cross_entropy computes in it too.
        model.compute_dtype = options.compute_dtype
        model.train_matmul_precision = options.train_matmul_precision
        logger.info("position encoding: %s", position.describe())
        logger.info("attention kind: %s", kind.describe())
        return model

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: Any) -> RopeEncoder:
        return RopeEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> RopeDecoder:
        return RopeDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def load_state_dict(
        self,
        state_dict: dict[str, Tensor],
        strict: bool = True,
        model_cfg: Any = None,
        args: argparse.Namespace | None = None,
    ) -> Any:
        """As in fairseq; the checkpoint may be of a model with another position encoding or kind
        of attention. That is seen to last, when the layers that are kept
        (``--encoder-layers-to-keep``) have their numbers."""
        if model_cfg is None and args is not None:
            model_cfg = convert_namespace_to_omegaconf(args).model
        self.upgrade_state_dict(state_dict)
        state = prune_state_dict(state_dict, model_cfg)
        match_parts(self, state)
        return nn.Module.load_state_dict(self, state, strict)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "averaged.pt",
        data_name_or_path: str = ".",
        **kwargs: Any,
    ) -> Any:
        """A model for translation: see :func:`rope_fairseq.hub.from_pretrained`."""
        from rope_fairseq import hub  # not at the top: hub is not needed to train

        return hub.from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)


def _register_architecture(name: str) -> None:
    @register_model_architecture("rope_transformer", name)
    def fill(cfg: Any) -> None:
        fill_sizes(cfg, name)


for _name in SIZES:
    if _name != "rope_transformer":  # register_model has registered this one
        _register_architecture(_name)


def _resolve(cfg: Any) -> argparse.Namespace:
    """The complete flat options; they are also written back to the run's configuration, so that
    the training log and the checkpoint state every value."""
    given = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(vars(cfg))
    arch = given.get("_name", None) or "rope_transformer"
    cutoff = given.get("adaptive_softmax_cutoff", None)
    if isinstance(cutoff, str):  # "10,20", as argparse of earlier fairseq leaves it
        given = OmegaConf.merge(given, {"adaptive_softmax_cutoff": eval_str_list(cutoff, int)})
    schema = OmegaConf.structured(RopeTransformerConfig)
    unknown = [key for key in given if key not in schema]
    if unknown:
        raise UserError(
            f"model option {', '.join(map(str, unknown))}: not an option of {arch}; see "
            f"fairseq-train --arch {arch} --user-dir … --help"
        )
    try:
        full = OmegaConf.merge(schema, given)
    except OmegaConfBaseException as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model option {getattr(error, 'full_key', '?')}: {reason}") from error
    fill_sizes(full, arch)
    parent = cfg._get_parent() if isinstance(cfg, DictConfig) else None
    if isinstance(parent, DictConfig) and "model" in parent:
        with open_dict(parent):
            parent["model"] = full
    complete: Any = OmegaConf.to_container(full, resolve=True, enum_to_str=True)
    return argparse.Namespace(**complete)


def _check_precision(options: argparse.Namespace, run: Any) -> None:
    """Refuse unknown precisions and ``--bf16``, for which fairseq-train looks for a TPU.

    Args:
        run: the configuration of the whole run, or None.
    """
    if options.compute_dtype not in COMPUTE_DTYPES:
        raise UserError(
            f"--compute-dtype {options.compute_dtype}: choose from {', '.join(COMPUTE_DTYPES)}"
        )
    if options.train_matmul_precision not in (None, *MATMUL_PRECISIONS):
        raise UserError(
            f"--train-matmul-precision {options.train_matmul_precision}: choose from "
            f"{', '.join(MATMUL_PRECISIONS)}"
        )
    common = (None if run is None else run.get("common")) or {}
    if common.get("bf16"):
        raise UserError(BF16_MEANS_TPU)
    if common.get("fp16") and options.compute_dtype != "float32":
        raise UserError(
            f"--fp16: not together with --compute-dtype {options.compute_dtype}; leave one out"
        )


def _refuse_unserved(options: argparse.Namespace, task: Any) -> None:
    """Options of fairseq's Transformer that would be silently wrong here."""
    for name in (
        "no_token_positional_embeddings",
        "encoder_learned_pos",
        "decoder_learned_pos",
    ):
        if getattr(options, name):
            raise UserError(
                f"--{name.replace('_', '-')}: say it with --position-encoding (given: "
                f"{options.position_encoding}); none or learned is what this option stands for"
            )
    for name in ("encoder_xformers_att_config", "decoder_xformers_att_config"):
        if getattr(options, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')}: xformers attention is not served by "
                "rope_transformer; leave it out"
            )
    if options.cross_self_attention:
        raise UserError("--cross-self-attention: not served by rope_transformer; leave it out")
    if getattr(getattr(task, "cfg", None), "load_alignments", False):
        raise UserError(
            "--load-alignments: supervised alignment is not served by rope_transformer; "
            "train without it (--print-alignment works)"
        )
    for side in ("encoder", "decoder"):
        embed_dim = getattr(options, f"{side}_embed_dim")
        heads = getattr(options, f"{side}_attention_heads")
        if embed_dim % heads:
            raise UserError(
                f"--{side}-embed-dim {embed_dim}: must be a multiple of "
                f"--{side}-attention-heads {heads}"
            )
