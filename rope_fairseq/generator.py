"""Beam search: the results of fairseq's ``SequenceGenerator`` with ``BeamSearch``, sooner.

What is saved: copies of the encoder's output for each beam and of everything at each step, equal
hypotheses at the first step, several passes over the log-probabilities of the whole vocabulary,
and a selection that copies all of them. The rules are fairseq's own, also where they are odd;
scores are computed by the same operations, so that they are equal to the last bit for equal
logits. Only between equal scores the choice may differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.ngram_repeat_block import NGramRepeatBlock
from torch import Tensor, nn

from rope_fairseq.candidates import best_of_beams, top_k
from rope_fairseq.errors import UserError

Hypothesis = dict[str, Tensor]

#: How many log-probabilities are worked on at a time on a CPU: they stay in its cache.
CHUNK = 2**19


@dataclass(frozen=True)
class SearchOptions:
    """fairseq's generation options of the same names; ``normalize`` is not ``unnormalized``."""

    beam: int = 5
    max_len_a: float = 0
    max_len_b: int = 200
    min_len: int = 1
    normalize: bool = True
    lenpen: float = 1
    unkpen: float = 0
    temperature: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise UserError(f"--beam {self.beam}: must be at least 1")
        if not self.temperature > 0:
            raise UserError(f"--temperature {self.temperature}: must be greater than 0")


@dataclass
class _Beams:
    """The sentences that are still searched. A sentence has ``beam`` rows in succession."""

    number: Tensor
    """[sentences], their places in the batch."""
    tokens: Tensor
    """[sentences·beam, max_len + 2]: what starts a sentence, and the tokens so far."""
    scores: Tensor
    """[sentences·beam, max_len + 1], float32: sums of log-probabilities up to each token."""
    ended: Tensor
    """[sentences, beam], True where a row only fills the place of a finished hypothesis."""
    prefix: Tensor | None
    """[sentences, prefix_len], tokens that a sentence must start with, padded on the right."""

    def keep(self, sentences: Tensor, beam: int) -> None:
        """Drop all but ``sentences`` [kept], numbers among those that were left."""
        rows = (sentences[:, None] * beam + torch.arange(beam, device=sentences.device)).flatten()
        self.number = self.number[sentences]
        self.tokens, self.scores = self.tokens[rows], self.scores[rows]
        self.ended = self.ended[sentences]
        self.prefix = None if self.prefix is None else self.prefix[sentences]


class BeamSearchGenerator(nn.Module):
    """Translates batches with one Transformer or an ensemble.

    Args:
        models: encoder-decoders of fairseq's ``transformer`` or of ours, without adaptive softmax.
        dictionary: of the target language.
        options: how to search.
    """

    def __init__(
        self, models: Sequence[Any], dictionary: Dictionary, options: SearchOptions
    ) -> None:
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self.options = options
        self.pad, self.unk, self.eos = dictionary.pad(), dictionary.unk(), dictionary.eos()
        self.symbols_to_strip_from_output = {self.eos}  # fairseq-generate asks for it
        self.vocabulary = len(dictionary)
        self.beam = min(options.beam, self.vocabulary - 1)  # padding is never selected
        self.longest = min(int(model.max_decoder_positions()) for model in models)
        self.repeated = None
        if options.no_repeat_ngram_size > 0:
            self.repeated = NGramRepeatBlock(options.no_repeat_ngram_size)
        self.models.eval()

    def generate(
        self,
        models: Sequence[nn.Module],
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> list[list[Hypothesis]]:
        """Translate a batch.

        Args:
            models: not read, as in fairseq: the models are those of the constructor.
            sample: a batch of a ``LanguagePairDataset``.
            prefix_tokens: [batch, prefix_len], tokens that hypotheses must start with.
            bos_token: what the decoder starts with, by default the end of sentence.

        Returns:
            For each sentence up to ``beam`` hypotheses, best first: ``tokens`` [tgt_len] with the
            end of sentence, ``score``, ``positional_scores`` [tgt_len]; ``attention`` and
            ``alignment`` are empty.

        Raises:
            UserError: constraints were given, the shortest length is above the longest, or the
                model gives no finite score.
        """
        if constraints is not None:
            raise UserError("constraints: not served by this search; give --constraints with them")
        decoders = [model.decoder for model in self.models]
        before = [getattr(decoder, "_beam_size", 1) for decoder in decoders]
        try:
            with torch.no_grad():
                return self._search(sample["net_input"], prefix_tokens, bos_token)
        finally:  # another generator may use the models
            for decoder, beam in zip(decoders, before, strict=True):
                decoder.set_beam_size(beam)

    def _search(
        self, net_input: dict[str, Tensor], prefix: Tensor | None, bos: int | None
    ) -> list[list[Hypothesis]]:
        beam, options = self.beam, self.options
        batch, src_len = net_input["src_tokens"].shape
        device = net_input["src_tokens"].device
        max_len = min(int(options.max_len_a * src_len + options.max_len_b), self.longest - 1)
        if options.min_len > max_len:
            raise UserError(
                f"--min-len {options.min_len}: more than the longest translation allowed, "
                f"{max_len} tokens (--max-len-a, --max-len-b, --max-target-positions)"
            )
        encoded = [model.encoder.forward_torchscript(net_input) for model in self.models]
        states: list[dict[str, Any]] = [{} for _ in self.models]
        # All hypotheses of a sentence are equal at first: one row is enough for them.
        self._set_beam_size(1)

        left = _Beams(
            number=torch.arange(batch, device=device),
            tokens=torch.full((batch * beam, max_len + 2), self.pad, device=device),
            scores=torch.zeros(batch * beam, max_len + 1, device=device),
            ended=torch.zeros(batch, beam, dtype=torch.bool, device=device),
            prefix=prefix,
        )
        left.tokens[:, 0] = self.eos if bos is None else bos
        finished: list[list[Hypothesis]] = [[] for _ in range(batch)]
        for step in range(max_len + 1):  # one more for the end of sentence
            rows = left.tokens[:: beam if step == 0 else 1, : step + 1]
            logits = [
                model.decoder(rows, encoder_out=out, incremental_state=state)[0][:, -1]
                for model, out, state in zip(self.models, encoded, states, strict=True)
            ]
            scores, tokens, beams = self._candidates(logits, left, step, max_len)
            # An end counts among the first ``beam`` candidates alone.
            ends = tokens.eq(self.eos) & scores.ne(-math.inf)
            ends[:, :beam] &= ~left.ended
            sentence, place = ends[:, :beam].nonzero(as_tuple=True)
            parents = beams + torch.arange(len(beams), device=device)[:, None] * beam
            done: set[int] = set()
            if len(sentence):
                done = self._finish(
                    left,
                    parents[sentence, place],
                    sentence,
                    scores[sentence, place],
                    step,
                    finished,
                )
            if len(done) == len(scores):
                break
            if step == max_len:  # all had to end here
                raise UserError(
                    "no hypothesis has a finite score: the model's parameters may be NaN, or "
                    "--prefix-size takes in the end of an empty target"
                )
            if done:
                kept = torch.tensor([s for s in range(len(scores)) if s not in done], device=device)
                left.keep(kept, beam)
                scores, tokens, beams, ends = scores[kept], tokens[kept], beams[kept], ends[kept]
                parents = parents[kept]
            order = self._advance(left, scores, tokens, beams, ends, step)
            # The rows of the models' caches: before the first end of a step, all of them.
            sources = parents.gather(1, order).flatten()
            if step == 0:
                sources = sources.div(beam, rounding_mode="floor")
                self._set_beam_size(beam)
            for model, out, state in zip(self.models, encoded, states, strict=True):
                model.decoder.reorder_incremental_state_scripting(state, sources)
                # Dynamic scaling reads from it how long each row's source is.
                mask = out["encoder_padding_mask"][0]
                out["encoder_padding_mask"] = [mask.index_select(0, sources)]
        return [self._best_first(hypotheses) for hypotheses in finished]

    def _set_beam_size(self, beam: int) -> None:
        """How many rows in succession share the keys and values of their source sentence."""
        for model in self.models:
            model.decoder.set_beam_size(beam)

    def _candidates(
        self, logits: list[Tensor], left: _Beams, step: int, max_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations: twice as many as beams, since half of them may be ends.

        Args:
            logits: of each model, [rows, vocabulary].

        Returns:
            Summed scores (descending), tokens and beams, all [sentences, candidates].
        """
        sentences = len(left.number)
        beams = len(logits[0]) // sentences
        count = min(2 * self.beam, beams * self.vocabulary - 1)
        size = sentences
        if logits[0].device.type == "cpu":
            size = max(1, CHUNK // (beams * self.vocabulary))
        parts = []
        for first in range(0, sentences, size):
            here = slice(first, min(first + size, sentences))
            rows = slice(here.start * beams, here.stop * beams)
            lprobs = self._log_probs([of_model[rows] for of_model in logits])
            # The first step has one row a sentence, the first of its beams.
            of_beams = slice(here.start * self.beam, here.stop * self.beam, self.beam // beams)
            tokens, scores = left.tokens[of_beams], left.scores[of_beams]
            prefix = None if left.prefix is None else left.prefix[here]
            self._restrict(lprobs, tokens, scores, prefix, step, max_len)
            values, best = top_k(lprobs, min(count, self.vocabulary))
            if step > 0:
                values += scores[:, step - 1, None]
            shape = (here.stop - here.start, beams, -1)
            parts.append(best_of_beams(values.view(shape), best.view(shape), count))
        scores, tokens, from_beams = (torch.cat(part) for part in zip(*parts, strict=True))
        return scores, tokens, from_beams

    def _log_probs(self, logits: list[Tensor]) -> Tensor:
        """Log-probabilities [rows, vocabulary] in float32, those of an ensemble averaged."""
        of_models = [
            F.log_softmax(
                of_model / self.options.temperature if self.options.temperature != 1 else of_model,
                dim=-1,
                dtype=torch.float32,
            )
            for of_model in logits
        ]
        lprobs = of_models[0]
        if len(of_models) > 1:
            lprobs = torch.logsumexp(torch.stack(of_models), dim=0) - math.log(len(of_models))
        # One logit that is no number makes the row's log-probabilities no numbers.
        broken = lprobs[:, :1].isnan()
        return lprobs.masked_fill_(broken, -math.inf) if bool(broken.any()) else lprobs

    def _restrict(
        self,
        lprobs: Tensor,
        tokens: Tensor,
        scores: Tensor,
        prefix: Tensor | None,
        step: int,
        max_len: int,
    ) -> None:
        """Change the log-probabilities [rows, vocabulary] in place as the options say.

        Where a prefix contains the end of sentence, ``tokens`` and ``scores`` of its sentence are
        changed too: all its rows become the first.
        """
        lprobs[:, self.pad] = -math.inf
        if self.options.unkpen:
            lprobs[:, self.unk] -= self.options.unkpen
        if step >= max_len:
            end = lprobs[:, self.eos].clone()
            lprobs.fill_(-math.inf)
            lprobs[:, self.eos] = end
        if prefix is not None and step < prefix.size(1) and step < max_len:
            self._force(lprobs, tokens, scores, prefix[:, step])
        elif step < self.options.min_len:
            lprobs[:, self.eos] = -math.inf
        if self.repeated is not None:
            rows = len(lprobs)
            self.repeated(tokens, lprobs, rows, 1, step)

    def _force(self, lprobs: Tensor, tokens: Tensor, scores: Tensor, wanted: Tensor) -> None:
        """Leave one token possible where ``wanted`` [sentences] is not padding."""
        beams = len(lprobs) // len(wanted)
        of_rows = wanted.repeat_interleave(beams)
        forced = of_rows.ne(self.pad).nonzero().flatten()
        chosen = lprobs[forced, of_rows[forced]]
        lprobs[forced] = -math.inf
        lprobs[forced, of_rows[forced]] = chosen
        ends = wanted.eq(self.eos)
        if ends.any():
            for x in (tokens, scores, lprobs):
                of_sentences = x.view(len(wanted), beams, -1)
                of_sentences[ends] = of_sentences[ends][:, :1]

    def _advance(
        self,
        left: _Beams,
        scores: Tensor,
        tokens: Tensor,
        beams: Tensor,
        ends: Tensor,
        step: int,
    ) -> Tensor:
        """Continue each sentence with its best candidates that do not end.

        Returns:
            Which candidates these are, [sentences, beam].
        """
        beam, count = self.beam, tokens.size(1)
        ends[:, :beam] |= left.ended
        # Candidates that end come behind all others.
        rank = ends * (2 * beam) + torch.arange(count, device=ends.device)
        ranks, order = rank.topk(beam, dim=1, largest=False)
        left.ended = ranks >= 2 * beam
        assert bool((~left.ended).any(dim=1).all()), "a sentence has no hypothesis to continue"
        first = torch.arange(len(order), device=order.device)[:, None] * beam
        rows = (beams.gather(1, order) + first).flatten()
        left.tokens[:, : step + 1] = left.tokens[rows, : step + 1]
        left.tokens[:, step + 1] = tokens.gather(1, order).flatten()
        left.scores[:, :step] = left.scores[rows, :step]
        left.scores[:, step] = scores.gather(1, order).flatten()
        return order

    def _finish(
        self,
        left: _Beams,
        rows: Tensor,
        sentence: Tensor,
        scores: Tensor,
        step: int,
        finished: list[list[Hypothesis]],
    ) -> set[int]:
        """Store hypotheses that end.

        Args:
            rows, sentence, scores: [ends], of each its row, its sentence and its summed score.

        Returns:
            The sentences, numbers among those left, that have ``beam`` hypotheses or are as long
            as allowed.
        """
        tokens = left.tokens[rows, 1 : step + 2]
        tokens[:, step] = self.eos
        positional = left.scores[rows, : step + 1]
        positional[:, step] = scores
        positional[:, 1:] = positional[:, 1:] - positional[:, :-1]
        if self.options.normalize:
            scores = scores / (step + 1) ** self.options.lenpen
        done = set()
        numbers = left.number[sentence].tolist()
        for index, (place, number) in enumerate(zip(sentence.tolist(), numbers, strict=True)):
            hypotheses = finished[number]
            if len(hypotheses) < self.beam:
                hypotheses.append(
                    {
                        "tokens": tokens[index],
                        "score": scores[index],
                        "attention": torch.empty(0),
                        "alignment": torch.empty(0),
                        "positional_scores": positional[index],
                    }
                )
            if len(hypotheses) == self.beam or step == left.tokens.size(1) - 2:
                done.add(place)
        return done

    @staticmethod
    def _best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        scores = torch.stack([hypothesis["score"] for hypothesis in hypotheses])
        return [hypotheses[index] for index in scores.sort(descending=True).indices.tolist()]
