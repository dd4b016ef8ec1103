"""How well a run translates sentences longer than those it was trained on, as a file to keep.

    python -m rope_fairseq.evaluation.lengths --work DIR --results DIR [--scaling NAME …]

The work folder is one of ``scripts/extrapolate.sh``. ``extrapolate-ENCODING.json`` in the folder of
results is what :mod:`~rope_fairseq.evaluation.run_record` writes and BLEU by the number of source
tokens: with N for the longest source of the training, the buckets are 1 to N, N + 1 to 2 N, up to
3 N and up to 4 N. Longer sentences are counted and left out. For each scaling the same is made, as
``extrapolate-ENCODING-NAME.json``, of the translation of the step ``translate-NAME``: by the same
model with other options (``model_overrides``) at test time. Seeds other than 1 are in the name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rope_fairseq.checkpoint import load_checkpoint, options
from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.evaluation import run_record
from rope_fairseq.evaluation.buckets import bleu_by_lengths
from rope_fairseq.evaluation.metrics import all_scores
from rope_fairseq.evaluation.read import read_beside, read_references, read_translation
from rope_fairseq.files import replacing
from rope_fairseq.hardware import describe
from rope_fairseq.manifest import check_current, describe_file
from rope_fairseq.text import Text

#: The longest bucket ends at so many times the longest source of the training.
TIMES = 4
BUCKET = ("shortest", "longest", "sentences", "value", "length_ratio", "signature")


def source_tokens(text: Text, lines: Sequence[str]) -> list[int]:
    """What translate.sh and the model count in each line: its pieces and the end of sentence."""
    return [len(text.encode(line, text.source_lang).split()) + 1 for line in lines]


def scaled_translation(work: Path, scaling: str, name: str) -> str:
    """The ``model_overrides`` with which a file was translated.

    Args:
        work: the work folder.
        scaling: which step ``translate-SCALING``.
        name: the file that it writes, in ``work``.

    Raises:
        UserError: the step is unfinished, or what it read or wrote has changed since.
    """
    manifest = work / "manifests" / f"translate-{scaling}.json"
    check_current(manifest)
    step = read_record(manifest)
    if not (work / name).is_file() or describe_file(work / name) != step["outputs"].get(name):
        raise UserError(
            f"{work / name}: not what the step translate-{scaling} wrote; run its script again"
        )
    return step["options"]["model_overrides"]


def make(work: Path, run: Mapping[str, Any], scaling: str | None = None) -> dict[str, Any]:
    """The record of a finished run, or of its model with a scaling at test time.

    ``hardware`` is the training's, or where its log does not say, that of the machine that writes
    the record.

    Args:
        work: the work folder.
        run: what :func:`rope_fairseq.evaluation.run_record.make` says of it.

    Raises:
        UserError: the translation is unfinished, or a file of it is not what a run writes.
    """
    record = dict(run) | {"scaling": scaling, "model_overrides": None}
    text = Text.load(work / "model")
    language = text.target_lang
    name = f"test.hyp.{language}"
    if scaling is not None:
        name = f"test.hyp.{record['position_encoding']}-{scaling}.{language}"
        record["name"] += f", {scaling}"
        record["model_overrides"] = scaled_translation(work, scaling, name)
    reference = work / "data" / f"test.{language}"
    references = read_references(reference)
    sources = read_beside(work / "data" / f"test.{text.source_lang}", reference, len(references))
    hypotheses = read_translation(work / name, reference, len(references))
    if scaling is not None:  # those of the step score are of the model as it was trained
        scores = all_scores(hypotheses, references, language)
        record["scores"] = [
            {name: getattr(score, name) for name in run_record.SCORE} for score in scores
        ]
    task = options(load_checkpoint(work / "model" / "averaged.pt"), "task")
    longest = task.get("max_source_positions")
    if longest is None:
        raise UserError(f"{work}: its model does not say on which lengths it was trained")
    bounds = [times * longest for times in range(1, TIMES + 1)]
    lengths = source_tokens(text, sources)
    *buckets, longer = (
        asdict(bucket)
        for bucket in bleu_by_lengths(
            hypotheses, references, language, lengths, "source tokens", bounds
        )
    )
    buckets[0]["shortest"] = 1  # the end of sentence
    return record | {
        "trained_source_tokens": longest,
        "buckets": [{name: bucket[name] for name in BUCKET} for bucket in buckets],
        "longer_left_out": longer["sentences"],
        "hardware": run.get("hardware") or run_record.hardware_line(json.dumps(describe())),
    }


def file_name(record: Mapping[str, Any]) -> str:
    """``extrapolate-rope-ntk.json``, with ``-seedN`` where the seed is not 1."""
    words = ["extrapolate", record["position_encoding"], record["scaling"]]
    words += [f"seed{record['seed']}" if record["seed"] != 1 else None]
    return "-".join(word for word in words if word) + ".json"


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.evaluation.lengths", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="work folder of extrapolate.sh")
    parser.add_argument("--results", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--scaling", nargs="+", default=[], metavar="NAME", help="of steps translate-NAME"
    )
    arguments = parser.parse_args()
    for option in ("work", "results"):
        if not getattr(arguments, option).is_dir():
            raise UserError(f"--{option} {getattr(arguments, option)}: no such folder")
    run = run_record.make(arguments.work)
    for scaling in (None, *arguments.scaling):
        record = make(arguments.work, run, scaling)
        output = arguments.results / file_name(record)
        with replacing(output) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"{output}: {record['name']}, seed {record['seed']}, by source tokens:")
        for bucket in record["buckets"]:
            value = "–" if bucket["value"] is None else f"{bucket['value']:.2f}"
            span = f"{bucket['shortest']}–{bucket['longest']}"
            print(f"  {span:<10}{value:>7}  {bucket['sentences']:,} sentences")


if __name__ == "__main__":
    run_main(main)
