"""What is known about a translation: what it was made with, its scores, BLEU by length.

As JSON: ``{"about": {NAME: VALUE}, "scores": […], "buckets": […]}``, every number to all digits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation.buckets import Bucket
from rope_fairseq.evaluation.metrics import Score
from rope_fairseq.files import replacing


@dataclass(frozen=True)
class Report:
    """Scores with what is needed to tell them from others."""

    scores: Sequence[Score]
    buckets: Sequence[Bucket] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """For the screen, without a line end after the last line."""
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        lines += [str(score) for score in self.scores]
        if self.buckets:
            lines.append(f"sacreBLEU by the number of words of the {self.buckets[0].by}")
        for bucket in self.buckets:
            value = "–" if bucket.value is None else f"{bucket.value:.2f}"
            lines.append(f"  {bucket.words:<18}{value:>7}  {bucket.sentences:,} sentences")
        return "\n".join(lines)


def parse_about(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` pairs as a mapping.

    Raises:
        UserError: one has no name or no ``=``, holds a line end, or a name is there twice.
    """
    about: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name.strip() and equals) or "\n" in pair:
            raise UserError(f"--about {pair}: must be NAME=VALUE, in one line")
        if name in about:
            raise UserError(f"--about {pair}: {name} is there twice")
        about[name] = value
    return about


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON; the file is there whole or not at all."""
    content = {
        "about": dict(report.about),
        "scores": [asdict(score) for score in report.scores],
        "buckets": [asdict(bucket) for bucket in report.buckets],
    }
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_report(path: Path) -> Report:
    """A report that :func:`write_report` has written, or the plain list of scores that version
    0.1.0 wrote.

    Raises:
        UserError: the file is neither.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, list):
            content = {"scores": content}
        return Report(
            [Score(**score) for score in content["scores"]],
            [Bucket(**bucket) for bucket in content.get("buckets", [])],
            {str(name): str(value) for name, value in content.get("about", {}).items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a file of scores ({error})") from error
