"""Options of fairseq-generate that a user of translate.sh gives, or that a config gives for him."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.errors import UserError
from rope_fairseq.hub import GENERATION

# Options of fairseq-generate that would break one line for one line, or that are set here.
RESERVED = {
    *("--path", "--data", "--gen-subset", "--dataset-impl", "--user-dir", "--task"),
    *("--source-lang", "-s", "--target-lang", "-t", "--bpe", "--tokenizer"),
    *("--post-process", "--remove-bpe", "--quiet", "--results-path", "--nbest"),
    *("--prefix-size", "--score-reference", "--skip-invalid-size-inputs-valid-test"),
}


def search_options(config: Path | None) -> list[str]:
    """fairseq-generate's options for the search, the project's or those of a config.

    Args:
        config: a file for fairseq-hydra-train; its group ``generation`` is used.
    """
    generation: Any = GENERATION
    if config is not None:
        try:
            generation = yaml.safe_load(config.read_text(encoding="utf-8"))["generation"]
        except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
            generation = None
        if not isinstance(generation, dict):
            raise UserError(f"{config}: must be a YAML file with the group 'generation'")
    words = []
    for name, value in generation.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value not in (None, False):
            words += [option, str(value)]
    return words


def refuse_reserved(words: Sequence[str]) -> None:
    """Refuse options of ``RESERVED`` on the command line or in a config."""
    for word in words:
        if word.split("=")[0] in RESERVED:
            raise UserError(
                f"{word}: not for translate.sh, which gives one line for one line; "
                "call fairseq-generate for that"
            )
