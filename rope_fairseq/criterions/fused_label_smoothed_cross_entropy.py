"""Criterion ``fused_label_smoothed_cross_entropy``: fairseq's ``label_smoothed_cross_entropy``,
value and gradient, without the logits and log-probabilities of a whole batch."""

import inspect
from dataclasses import dataclass, field
from typing import Any

from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import ARCH_MODEL_REGISTRY, FairseqDecoder
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.nan_detector import NanDetector
from omegaconf import DictConfig
from torch import Tensor, nn

from rope_fairseq.errors import UserError
from rope_fairseq.fused_loss import CHUNK_SIZE, Losses, fused_label_smoothed_cross_entropy
from rope_fairseq.precision import computing_in
from rope_fairseq.projection import is_plain_linear
from rope_fairseq.ready_linear import ReadyLinear

NAME = "fused_label_smoothed_cross_entropy"

#: Values of ``--ddp-backend`` under which the whole model is in each process and may be called with
#: ``features_only``; each name and its older one.
DDP_BACKENDS = ("pytorch_ddp", "c10d", "legacy_ddp", "no_c10d")


@dataclass
class FusedLabelSmoothedCrossEntropyConfig(LabelSmoothedCrossEntropyCriterionConfig):
    fused_chunk_size: int = field(
        default=CHUNK_SIZE,
        metadata={
            "help": "target tokens whose logits are held at once, at least 1; it changes time and "
            "memory, not results"
        },
    )


@register_criterion(NAME, dataclass=FusedLabelSmoothedCrossEntropyConfig)
class FusedLabelSmoothedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """fairseq's criterion on the decoder's features, for Transformers of an encoder and a decoder.

    The loss is worked out while the model's ``forward`` runs, by a hook that turns the features
    which it returns into losses: so the projection's weight is among what the wrapper of several
    processes (DistributedDataParallel) finds behind the output, tied to the embeddings or not.

    Raises:
        UserError: an option or model that it cannot serve. Options and the kind of the model are
            checked when the criterion is built; the rest of the model when it is called.
    """

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        fused_chunk_size: int = CHUNK_SIZE,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        if fused_chunk_size < 1:
            raise UserError(f"--fused-chunk-size {fused_chunk_size}: must be at least 1")
        self.chunk_size = fused_chunk_size

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> "FusedLabelSmoothedCrossEntropy":
        run = cfg._get_parent() if isinstance(cfg, DictConfig) else None
        if isinstance(run, DictConfig):
            _refuse_options(run)
        return super().build_criterion(cfg, task)

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int | Tensor, dict[str, Any]]:
        """As in fairseq: the loss (the sum over tokens), the sample size, and what to log."""

        def losses(inner: Any, _: Any, net_output: tuple[Tensor, Any]) -> tuple[Tensor | None, ...]:
            return self._losses(inner, net_output, sample, reduce)

        inner = _innermost(model)
        _refuse_model(inner)
        hook = inner.register_forward_hook(losses)
        try:
            result = model(**sample["net_input"], features_only=True)
        finally:
            hook.remove()
        loss, nll_loss, n_correct, total = result
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "nll_loss": nll_loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            logging_output["n_correct"] = utils.item(n_correct)
            logging_output["total"] = utils.item(total)
        return loss, sample_size, logging_output

    def _losses(
        self, model: Any, net_output: tuple[Tensor, Any], sample: dict[str, Any], reduce: bool
    ) -> Losses:
        features = net_output[0][:, self.ignore_prefix_size :]  # [batch, tgt_len, embed_dim]
        target = model.get_targets(sample, net_output)[:, self.ignore_prefix_size :]
        projection = model.decoder.output_projection
        with computing_in(getattr(model, "compute_dtype", "float32"), features):
            return fused_label_smoothed_cross_entropy(
                features.reshape(-1, features.size(-1)),
                projection.weight,
                target.reshape(-1),
                bias=projection.bias,
                epsilon=self.eps,
                ignore_index=self.padding_idx,
                reduce=reduce,
                chunk_size=self.chunk_size,
                count_correct=self.report_accuracy,
            )


def _refuse(reason: str) -> UserError:
    return UserError(f"--criterion {NAME}: {reason}; use label_smoothed_cross_entropy")


def _refuse_options(run: DictConfig) -> None:
    """What a run's complete configuration shows, before anything is trained."""
    backend = run.distributed_training.ddp_backend
    if backend not in DDP_BACKENDS:
        raise _refuse(f"--ddp-backend {backend} is not served, only {', '.join(DDP_BACKENDS)}")
    options = run.model
    if getattr(options, "adaptive_softmax_cutoff", None) is not None:
        raise _refuse("--adaptive-softmax-cutoff: there is no one projection to the vocabulary")
    if getattr(options, "quant_noise_scalar", 0):
        raise _refuse("--quant-noise-scalar would not act on the projection to the vocabulary")
    name = getattr(options, "_name", None) or getattr(options, "arch", None)
    if name in ARCH_MODEL_REGISTRY:
        _refuse_class(ARCH_MODEL_REGISTRY[name], f"--arch {name}")


def _refuse_class(kind: Any, name: str) -> None:
    if "features_only" not in inspect.signature(kind.forward).parameters:
        raise _refuse(f"{name}: its model cannot give the decoder's features (features_only)")


def _refuse_model(model: Any) -> None:
    """Anything but a decoder whose logits are one plain product of features and a weight."""
    _refuse_class(type(model), type(model).__name__)
    decoder = getattr(model, "decoder", None)
    name = type(decoder).__name__
    if not isinstance(decoder, TransformerDecoderBase):
        raise _refuse(f"{type(model).__name__}: its decoder is no Transformer ({name})")
    if decoder.adaptive_softmax is not None:
        raise _refuse(f"{name}: an adaptive softmax has no one projection to the vocabulary")
    stock = (TransformerDecoderBase.output_layer, FairseqDecoder.get_normalized_probs)
    if (type(decoder).output_layer, type(decoder).get_normalized_probs) != stock:
        raise _refuse(f"{name}: it does more to its features than one projection and a softmax")
    projection = decoder.output_projection
    # fairseq's trainer watches all modules with hooks when it looks for what made gradients NaN.
    hooks = projection._forward_hooks.values()
    watched = any(isinstance(getattr(hook, "__self__", None), NanDetector) for hook in hooks)
    ready = isinstance(projection, ReadyLinear) and not hooks
    if not (is_plain_linear(projection) or ready or watched):
        kind = type(projection).__name__
        raise _refuse(
            f"{name}: its output_projection ({kind}) must be an nn.Linear without hooks, such as "
            "those of quantization noise"
        )


def _innermost(model: Any) -> Any:
    """The model itself, which wrappers of several processes hold as ``module``."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model
