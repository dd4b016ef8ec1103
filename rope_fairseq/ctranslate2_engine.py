"""Translate with CTranslate2: the search of fairseq-generate, on a model that export.py has made.

Both searches extend ``beam`` hypotheses by the best of 2·beam candidates, set aside those that end,
and stop at ``beam`` of them. What CTranslate2 does otherwise unless it is told:

* it divides a score by the length without the end of sentence, fairseq with it;
* with a length penalty of 0 it stops when the best hypothesis ends;
* it cuts sources at 1,024 tokens, and breaks hypotheses off at 256. fairseq's limit depends on the
  longest source of a batch, so the batches are fairseq's, and at the limit fairseq closes the open
  hypotheses with an end of sentence, which is counted: see :func:`close_hypotheses`.

What stays different: where a token must not come CTranslate2 gives its probability to the others,
and fairseq just passes over it. So only the default ``--min-len`` is served (the end of sentence is
not the first token, which shifts all scores of a sentence alike) and ``--min-len 0``.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import data_utils

from rope_fairseq.errors import Parser, UserError
from rope_fairseq.hub import BATCH_SIZE_MULTIPLE, MAX_TOKENS
from rope_fairseq.text import Text

WEIGHTS_FILE = "model.bin"
CONFIG_FILE = "config.json"
BOS, EOS = "<s>", "</s>"
# Of source sentences computed at once: more is not faster on a CPU, and takes more memory.
SENTENCES = 32
# Anything but 0, at which CTranslate2 stops early; its powers of a length are 1 all the same.
NO_PENALTY = 1e-30
# Options of fairseq-generate at whose default nothing is done, and which are refused otherwise.
NEUTRAL: dict[str, float] = {"unkpen": 0, "temperature": 1, "no_repeat_ngram_size": 0}


def ctranslate2(module: str = "") -> Any:
    """CTranslate2, or one of its modules; it is an optional dependency.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(f"ctranslate2.{module}" if module else "ctranslate2")
    except ModuleNotFoundError:
        raise UserError(
            "CTranslate2 is not installed: pip install ctranslate2, or this package as "
            "rope_fairseq[export]"
        ) from None


@dataclass(frozen=True)
class Exported:
    """An exported model, ready to translate.

    Attributes:
        text: raw text to pieces and back.
        longest_source: in tokens, end of sentence included.
        longest_target: the same.
        translator: ``ctranslate2.Translator``.
        search: options, as :func:`search_arguments` reads them.
    """

    text: Text
    longest_source: int
    longest_target: int
    translator: Any
    search: Any

    def generate(self, sources: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Translate encoded sources, each pieces joined by spaces.

        Yields:
            The number of a source and its best hypothesis, in fairseq-generate's order of batches.
        """
        # fairseq splits a line at white space of all kinds.
        tokens = [source.split() for source in sources]
        for batch in batches([len(source) + 1 for source in tokens], self.search):
            limit = self.limit(max(len(tokens[number]) + 1 for number in batch))
            for start in range(0, len(batch), SENTENCES):
                part = batch[start : start + SENTENCES]
                chosen = [tokens[number] for number in part]
                found = best_hypotheses(self.translator, chosen, self.search, limit)
                for number, hypothesis in zip(part, found, strict=True):
                    # fairseq-generate prints neither.
                    yield number, " ".join(piece for piece in hypothesis if piece not in (BOS, EOS))

    def limit(self, longest: int) -> int:
        """The most tokens of a hypothesis, its end not counted.

        Args:
            longest: tokens of the longest source of the batch, end of sentence included.
        """
        search = self.search
        tokens = int(search.max_len_a * longest + search.max_len_b)
        tokens = min(tokens, self.longest_target - 1)
        if tokens < 1:
            raise UserError(
                f"--max-len-a {search.max_len_a:g} --max-len-b {search.max_len_b}: must leave a "
                f"source of {longest} tokens at least 1"
            )
        return tokens


def load(folder: Path, max_source_positions: int | None, options: Sequence[str]) -> Exported:
    """Load an exported model.

    Args:
        folder: what ``rope_fairseq.export`` has made.
        max_source_positions: refuse longer sources; None for the longest that were exported for.
        options: fairseq-generate's, for the search.

    Raises:
        UserError: no exported model, or an option that is not served.
    """
    library = ctranslate2()
    search = search_arguments(options)
    limits = _limits(folder)
    longest = limits["max_source_positions"]
    if max_source_positions is not None:
        if not 2 <= max_source_positions <= longest:
            raise UserError(
                f"--max-source-positions {max_source_positions}: {folder} was exported for 2 to "
                f"{longest}; export it again with a greater --max-source-positions"
            )
        longest = max_source_positions
    search.max_tokens = search.max_tokens or max(MAX_TOKENS, longest)
    if search.max_tokens < longest:
        raise UserError(f"--max-tokens {search.max_tokens}: less than a source of {longest} tokens")
    on_gpu = library.get_cuda_device_count() > 0 and not search.cpu
    text = Text.load(folder)
    try:
        translator = library.Translator(
            str(folder),
            device="cuda" if on_gpu else "cpu",
            intra_threads=torch.get_num_threads(),
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{folder}: CTranslate2 does not load it: {error}") from None
    return Exported(text, longest, limits["max_target_positions"], translator, search)


def _limits(folder: Path) -> dict[str, int]:
    """The longest source and target that a model was exported for."""
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(
            f"{folder}: no exported model; make one: python -m rope_fairseq.export {folder} "
            "--output DIR, and give DIR in its place"
        )
    names = ("max_source_positions", "max_target_positions")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return {name: int(config[name]) for name in names}
    except (ValueError, LookupError, TypeError):
        raise UserError(
            f"{folder / CONFIG_FILE}: not of rope_fairseq.export, which writes {names[0]} there"
        ) from None


def search_arguments(words: Sequence[str]) -> Any:
    """The search's options, with the names and defaults of fairseq-generate.

    Raises:
        UserError: an option is not served, or its value is out of range.
    """
    parser = Parser(prog="translate.sh --engine ctranslate2", add_help=False)
    for name, kind, default in (
        *(("beam", int, 5), ("lenpen", float, 1.0), ("min-len", int, 1)),
        *(("max-len-a", float, 0.0), ("max-len-b", int, 200), ("max-tokens", int, None)),
        ("required-batch-size-multiple", int, BATCH_SIZE_MULTIPLE),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--batch-size", "--max-sentences", type=int)
    for switch in ("--unnormalized", "--cpu"):
        parser.add_argument(switch, action="store_true")
    for name, neutral in NEUTRAL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=neutral)
    search, unknown = parser.parse_known_args(words)
    refused = [*unknown[:1]]
    refused += [
        f"--{name.replace('_', '-')}"
        for name, neutral in NEUTRAL.items()
        if getattr(search, name) != neutral
    ]
    if refused:
        raise UserError(
            f"{refused[0]}: not served by --engine ctranslate2; leave it out, or "
            "translate with fairseq"
        )
    if search.min_len not in (0, 1):
        raise UserError(f"--min-len {search.min_len}: --engine ctranslate2 serves 0 and 1")
    for name in ("beam", "max_tokens", "batch_size", "required_batch_size_multiple"):
        value = getattr(search, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return search


def batches(lengths: Sequence[int], search: Any) -> list[list[int]]:
    """The batches of fairseq-generate: numbers of sentences, by length.

    Args:
        lengths: of the sources in tokens, end of sentence included.
        search: has ``max_tokens``, ``batch_size`` and ``required_batch_size_multiple``.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(sizes, kind="mergesort")
    made = data_utils.batch_by_size(
        order,
        num_tokens_fn=None,
        num_tokens_vec=sizes[order],
        max_tokens=search.max_tokens,
        max_sentences=search.batch_size,
        required_batch_size_multiple=search.required_batch_size_multiple,
    )
    return [[int(number) for number in batch] for batch in made]


def best_hypotheses(
    translator: Any, sources: Sequence[Sequence[str]], search: Any, limit: int
) -> list[list[str]]:
    """The best hypothesis for each source of a batch, as fairseq chooses it.

    Args:
        translator: ``ctranslate2.Translator``.
        sources: pieces.
        search: options.
        limit: the most tokens of a hypothesis, its end not counted.
    """
    options = {
        "beam_size": search.beam,
        "length_penalty": _penalty(search) or NO_PENALTY,
        "min_decoding_length": search.min_len,
        "max_input_length": 0,
        "return_end_token": True,
    }
    results = translator.translate_batch(
        sources, num_hypotheses=search.beam, max_decoding_length=limit, **options
    )
    best = [result.hypotheses[0] for result in results]
    cut = [
        number for number, result in enumerate(results) if not all(map(_ends, result.hypotheses))
    ]
    if cut:
        chosen = [sources[number] for number in cut]
        # These did not stop before the limit, so more patience changes nothing but that all their
        # hypotheses come back, at most 2·beam − 1. Open ones that took the place of some that ended
        # at the very last token do not; the likely ones come back with one token more.
        options |= {"num_hypotheses": 2 * search.beam, "patience": 2}
        found = [
            translator.translate_batch(chosen, max_decoding_length=length, **options)
            for length in (limit, limit + 1)
        ]
        for number, *results in zip(cut, *found, strict=True):
            hypotheses = [words for result in results for words in result.hypotheses]
            best[number] = close_hypotheses(translator, sources[number], hypotheses, search, limit)
    return best


def close_hypotheses(
    translator: Any,
    source: Sequence[str],
    hypotheses: Sequence[Sequence[str]],
    search: Any,
    limit: int,
) -> list[str]:
    """What fairseq finds best where a search reaches the limit of length.

    It adds the end of sentence to the hypotheses that are open, with its probability.

    Args:
        translator: ``ctranslate2.Translator``.
        source: pieces.
        hypotheses: all that ended, and those that were open after ``limit`` tokens.
        search: options.
        limit: the most tokens of a hypothesis, its end not counted.
    """
    # A dict keeps their order, a set would not.
    texts = dict.fromkeys(tuple(words[:-1]) for words in hypotheses if _ends(words[:limit]))
    if len(texts) < search.beam:
        kept = (tuple(words[:limit]) for words in hypotheses if len(words) >= limit)
        texts |= dict.fromkeys(words for words in kept if not _ends(words))
    candidates = [list(words) for words in texts]
    scores = translator.score_batch(
        [source] * len(candidates), candidates, max_input_length=0, max_batch_size=SENTENCES
    )
    penalty = _penalty(search)
    totals = [sum(score.log_probs) / len(score.log_probs) ** penalty for score in scores]
    return candidates[int(np.argmax(totals))]


def _ends(hypothesis: Sequence[str]) -> bool:
    return bool(hypothesis) and hypothesis[-1] == EOS


def _penalty(search: Any) -> float:
    """The exponent of the length by which a score is divided."""
    return 0.0 if search.unnormalized else float(search.lenpen)
