"""The task ``rope_translation``: fairseq's ``translation`` with a faster search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fairseq.models.transformer import TransformerModel
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import nn

from rope_fairseq.generator import BeamSearchGenerator, SearchOptions
from rope_fairseq.models.rope_transformer import RopeTransformerModel


@dataclass
class RopeTranslationConfig(TranslationConfig):
    """The options of ``translation``."""


@register_task("rope_translation", dataclass=RopeTranslationConfig)
class RopeTranslationTask(TranslationTask):
    """Trains as ``translation`` does, on the same data, and loads its checkpoints.

    Only the search differs, not its results: see :class:`BeamSearchGenerator`. Another kind of
    search than plain beam search, and another model than a Transformer, gets fairseq's generator.
    """

    def build_generator(
        self,
        models: Sequence[nn.Module],
        args: Any,
        seq_gen_cls: Any = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn: Any = None,
    ) -> Any:
        """The generator for ``args``, a ``GenerationConfig`` or what ``--eval-bleu-args`` says."""
        asked = seq_gen_cls is not None or prefix_allowed_tokens_fn is not None
        more = extra_gen_cls_kwargs or {}
        if (
            asked
            or more.get("lm_model") is not None
            or set(more) - {"lm_model", "lm_weight"}
            or wants_another_search(args)
            or not all(map(is_served, models))
        ):
            return super().build_generator(
                models, args, seq_gen_cls, extra_gen_cls_kwargs, prefix_allowed_tokens_fn
            )
        return BeamSearchGenerator(
            models,
            self.target_dictionary,
            SearchOptions(
                beam=getattr(args, "beam", 5),
                max_len_a=getattr(args, "max_len_a", 0),
                max_len_b=getattr(args, "max_len_b", 200),
                min_len=getattr(args, "min_len", 1),
                normalize=not getattr(args, "unnormalized", False),
                lenpen=getattr(args, "lenpen", 1),
                unkpen=getattr(args, "unkpen", 0),
                temperature=getattr(args, "temperature", 1.0),
                no_repeat_ngram_size=getattr(args, "no_repeat_ngram_size", 0),
            ),
        )


def wants_another_search(args: Any) -> bool:
    """Whether generation options ask for more than plain beam search."""
    return (
        any(
            getattr(args, name, None)
            for name in (
                *("score_reference", "sampling", "match_source_len", "constraints"),
                *("print_alignment", "retain_dropout", "prefix_allowed_tokens_fn"),
            )
        )
        or getattr(args, "diverse_beam_groups", -1) > 0
        or getattr(args, "diversity_rate", -1) > -1
        # fairseq refuses these without --sampling.
        or getattr(args, "sampling_topk", -1) >= 0
        or getattr(args, "sampling_topp", -1.0) >= 0
    )


def is_served(model: nn.Module) -> bool:
    """Whether the search knows how a model decodes: fairseq's Transformer and ours, no other
    model derived from them."""
    if type(model) not in (TransformerModel, RopeTransformerModel):
        return False
    decoder: Any = model.decoder
    return decoder.adaptive_softmax is None and not decoder.cross_self_attention
