"""A trained model's self-attention: its own weights, of any position encoding, on given sentences.

Also serves fairseq's stock ``transformer``.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from torch import Tensor, nn

from rope_fairseq.analysis.distances import ByDistance
from rope_fairseq.checkpoint import load_checkpoint, options
from rope_fairseq.errors import UserError
from rope_fairseq.fairseq_engine import load_model
from rope_fairseq.hub import from_pretrained
from rope_fairseq.lines import progress, read_lines
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.text import Text

# Of a batch, padding included: few, as the weights of all layers and heads are held at a time.
TOKENS = 2000


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode and what it takes to read raw text.

    Attributes:
        dictionaries: source and target.
        limits: most tokens of a source and of a target, end of sentence included.
    """

    model: Any
    text: Text
    dictionaries: tuple[Dictionary, Dictionary]
    limits: tuple[int, int]


def load(path: Path) -> Loaded:
    """Load a model's folder, or a checkpoint in it, safely and as translate.sh does.

    Raises:
        UserError: a file is missing, is not safe to load or does not belong to the checkpoint, or
            the attention has no weights.
    """
    found = load_model(path, None, "{}")
    kind = options(load_checkpoint(found.checkpoint), "model").get("attention_kind")
    if kind == "linear":
        raise UserError(
            f"{found.checkpoint}: its attention is linear, which has no weights to show"
        )
    hub = from_pretrained(str(found.folder), found.checkpoint.name)
    task = hub.task
    dictionaries = (task.source_dictionary, task.target_dictionary)
    # The hub has put the model into evaluation mode.
    return Loaded(hub.models[0], found.text, dictionaries, tuple(hub.max_positions))


def read_sentences(
    loaded: Loaded, source: Path, reference: Path | None
) -> tuple[list[list[Tensor]], int]:
    """Raw text as the model was trained on it.

    Args:
        source: the source's file.
        reference: the target's, line by line, or None.

    Returns:
        The sentences of each file, token ids [length] with the end of sentence; and the number of
        lines that were left out because one of them has no text.

    Raises:
        UserError: the files have different numbers of lines, a sentence is longer than the model
            takes, or there is none.
    """
    files = [source] if reference is None else [source, reference]
    columns = [list(read_lines(file)) for file in files]
    if reference is not None and len(columns[0]) != len(columns[1]):
        raise UserError(
            f"{source} has {len(columns[0]):,} lines and {reference} {len(columns[1]):,} lines"
        )
    languages = (loaded.text.source_lang, loaded.text.target_lang)
    encoded: list[list[Tensor]] = []
    for side, (file, lines) in enumerate(zip(files, columns, strict=True)):
        encoded.append([])
        for number, line in enumerate(lines, start=1):
            pieces = loaded.text.encode(line, languages[side])
            dictionary, limit = loaded.dictionaries[side], loaded.limits[side]
            tokens = dictionary.encode_line(pieces, add_if_not_exist=False).long()
            if len(tokens) > limit:
                raise UserError(
                    f"{file} line {number}: {len(tokens):,} tokens, more than the model's {limit} "
                    "positions"
                )
            encoded[side].append(tokens)
    # A sentence without text is the end-of-sentence token alone.
    kept = [row for row in zip(*encoded, strict=True) if all(len(tokens) > 1 for tokens in row)]
    if not kept:
        raise UserError(f"{source}: no line with text")
    return [list(column) for column in zip(*kept, strict=True)], len(columns[0]) - len(kept)


def measure(
    model: Any,
    side: str,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    pad: int,
    tokens: int = TOKENS,
) -> ByDistance:
    """Attention by distance in all layers of the encoder, or of the decoder under teacher forcing.

    Positions are those of the tokens that attention sees: in the encoder the source and its end of
    sentence, in the decoder the end of sentence that it starts with and the target.

    Args:
        model: ours or fairseq's Transformer, in evaluation mode.
        side: ``encoder`` or ``decoder``.
        sources, targets: token ids [length] each, with the end of sentence; targets are for the
            decoder.
        pad: the token that is padding.
        tokens: most tokens of a batch, padding included.

    Raises:
        UserError: the side has no layers.
    """
    measured = sources if targets is None else targets
    modules = [layer.self_attn for layer in getattr(model, side).layers]
    if not modules:
        raise UserError(f"the model's {side} has no layers")
    reach = max(map(len, measured)) - 1
    found = ByDistance(len(modules), modules[0].num_heads, reach, causal=side == "decoder")
    lengths = [
        max(len(sentences[i]) for sentences in (sources, measured)) for i in range(len(sources))
    ]
    batches = progress(_batches(lengths, tokens), len(sources), "attention", size=len)
    with torch.no_grad(), recorded_weights(modules) as record:
        for batch in batches:
            chosen = [sources[i] for i in batch]
            source = collate_tokens(chosen, pad, left_pad=True)  # as fairseq's task does
            encoded = model.encoder(source, torch.tensor([len(one) for one in chosen]))
            seen = source
            if targets is not None:
                # fairseq's teacher forcing: the end of sentence comes first.
                seen = collate_tokens([targets[i].roll(1) for i in batch], pad)
                model.decoder(seen, encoder_out=encoded, features_only=True)
            found.add(record.take(), seen.ne(pad))
    return found


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of sentences, the longest first, of at most ``tokens`` together with padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    yield batch


class Record:
    """The weights that modules computed since the last :meth:`take`."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []

    def keep(self, module: nn.Module, arguments: Any, output: tuple[Tensor, Tensor]) -> None:
        self._weights.append(output[1])

    def take(self) -> list[Tensor]:
        """Those of each layer [heads, batch, tgt_len, src_len], in the order of the layers."""
        weights, self._weights = self._weights, []
        return weights


@contextmanager
def recorded_weights(modules: Sequence[Any]) -> Iterator[Record]:
    """Ask attention modules for the weights of each head, which are recorded while the block runs.

    Their layers drop what they did not ask for, so the model computes what it always does.
    """
    record = Record()

    def ask(module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
        return arguments, options | {"need_weights": True, "need_head_weights": True}

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(ask, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(record.keep))
            if not isinstance(module, PositionedAttention):
                # fairseq's has two code paths, and that of torch only gives the mean over heads;
                # this, which otherwise skips a check of sizes, chooses the other.
                stack.callback(setattr, module, "skip_embed_dim_check", module.skip_embed_dim_check)
                module.skip_embed_dim_check = True
        yield record
