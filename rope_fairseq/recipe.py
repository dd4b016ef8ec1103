"""Recipes: what a run needs beyond fairseq's own options.

``configs/recipes/NAME.yaml`` names the corpus, the vocabulary, the file of configs/ that holds
fairseq's options, the checkpoints to average and the scores to expect.

    python -m rope_fairseq.recipe NAME

prints the recipe as shell assignments (``RECIPE_CORPUS=demo`` …) for scripts/.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.errors import UserError, run_main

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
RECIPES = CONFIGS / "recipes"

# A name becomes part of file names: letters, digits, and - _ . inside it.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Average:
    """Which checkpoints are averaged: the last ``last``, one for each update or epoch saved."""

    last: int
    by: str


@dataclass(frozen=True)
class Recipe:
    """One recipe; the fields are the keys of its file.

    Args:
        name: the file's name without ``.yaml``.
        corpus: folder in data-prep/.
        source_lang, target_lang: language codes.
        vocab_size: pieces of the joint BPE model, ``<unk>`` included.
        config: file in configs/, without ``.yaml``.
        average: checkpoints to average.
        expected: kind of score → value; empty while nothing has been measured.
    """

    name: str
    corpus: str
    source_lang: str
    target_lang: str
    vocab_size: int
    config: str
    average: Average
    expected: Mapping[str, float]

    def shell(self) -> str:
        """Shell assignments, one a line, quoted."""
        values = {
            "NAME": self.name,
            "CORPUS": self.corpus,
            "SOURCE_LANG": self.source_lang,
            "TARGET_LANG": self.target_lang,
            "VOCAB_SIZE": self.vocab_size,
            "CONFIG": self.config,
            "AVERAGE_LAST": self.average.last,
            "AVERAGE_BY": self.average.by,
            **{f"EXPECTED_{kind.upper()}": score for kind, score in self.expected.items()},
        }
        return "\n".join(f"RECIPE_{key}={shlex.quote(str(value))}" for key, value in values.items())


KINDS: dict[str, tuple[type, ...]] = {
    "corpus": (str,),
    "source_lang": (str,),
    "target_lang": (str,),
    "vocab_size": (int,),
    "config": (str,),
    "average": (dict,),
    "expected": (dict,),
}
AVERAGE_KINDS: dict[str, tuple[type, ...]] = {"last": (int,), "by": (str,)}
BY = ("update", "epoch")
KIND_NAMES = {str: "a text", int: "a whole number", dict: "a mapping", float: "a number"}


def _check_keys(path: Path, values: Any, kinds: Mapping[str, tuple[type, ...]], at: str) -> None:
    """Every key there, none unknown, each of its type; ``at`` is the prefix of nested keys."""
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(kinds)}")
    for key in values:
        if key not in kinds:
            raise UserError(f"{path}: unknown key '{at}{key}'; known are {', '.join(kinds)}")
    for key, accepted in kinds.items():
        if key not in values:
            raise UserError(f"{path}: key '{at}{key}' is missing")
        # type() and not isinstance(): True is an int.
        if type(values[key]) not in accepted:
            raise UserError(
                f"{path}: key '{at}{key}' is {values[key]!r}, not {KIND_NAMES[accepted[0]]}"
            )


def load_recipe(name: str, folder: Path = RECIPES) -> Recipe:
    """Read and check ``folder/NAME.yaml``.

    Raises:
        UserError: there is no such recipe (the message lists those that exist), or a key is
            unknown, missing, of the wrong type or out of range (it names the file and the key).
    """
    path = folder / f"{name}.yaml"
    if not NAME.fullmatch(name) or not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml"))) or "none"
        raise UserError(f"recipe {name!r}: there is no {path}; recipes that exist: {known}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a YAML file ({error})") from None
    _check_keys(path, values, KINDS, "")
    _check_keys(path, values["average"], AVERAGE_KINDS, "average.")
    for key in ("corpus", "source_lang", "target_lang", "config"):
        if not NAME.fullmatch(values[key]):
            raise UserError(f"{path}: key '{key}' is {values[key]!r}, not a plain name")
    if values["source_lang"] == values["target_lang"]:
        raise UserError(f"{path}: keys 'source_lang' and 'target_lang' are the same")
    for key, number in (
        ("vocab_size", values["vocab_size"]),
        ("average.last", values["average"]["last"]),
    ):
        if number < 1:
            raise UserError(f"{path}: key '{key}' is {number}; at least 1 is needed")
    if values["average"]["by"] not in BY:
        raise UserError(
            f"{path}: key 'average.by' is {values['average']['by']!r}, not update or epoch"
        )
    expected_kinds = dict.fromkeys(values["expected"], (float, int))
    _check_keys(path, values["expected"], expected_kinds, "expected.")
    for kind in values["expected"]:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", str(kind)):
            raise UserError(f"{path}: key 'expected.{kind}' is not a plain name")
    return Recipe(name=name, **values | {"average": Average(**values["average"])})


def kept_by_schedule(checkpoint_options: Mapping[str, Any], by: str) -> int | None:
    """How many checkpoints a run's options keep of the kind averaged ``by`` update or epoch.

    Args:
        checkpoint_options: fairseq's options of the group ``checkpoint``.

    Returns:
        0 if such checkpoints are not written at all, None if all of them stay.
    """
    if by == "update":
        written = checkpoint_options.get("save_interval_updates", 0) > 0
        limit = checkpoint_options.get("keep_interval_updates", -1)
    else:
        written = not checkpoint_options.get("no_epoch_checkpoints", False)
        limit = checkpoint_options.get("keep_last_epochs", -1)
    if checkpoint_options.get("no_save", False) or not written:
        return 0
    return limit if limit >= 0 else None


def check_save_schedule(recipe: Recipe, overrides: Sequence[str], configs: Path = CONFIGS) -> None:
    """Refuse a training that keeps fewer checkpoints than the recipe averages, before it starts.

    Args:
        recipe: says which file of ``configs`` and how many checkpoints.
        overrides: ``KEY=VALUE``, as for fairseq-hydra-train; those of ``checkpoint.`` count.

    Raises:
        UserError: there is no such config, or the schedule keeps too few.
    """
    path = configs / f"{recipe.config}.yaml"
    try:
        options = dict((yaml.safe_load(path.read_text(encoding="utf-8")) or {})["checkpoint"])
    except FileNotFoundError:
        raise UserError(f"recipe {recipe.name}: its config {path} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError, LookupError, TypeError):
        raise UserError(f"{path}: must be a YAML file with the group 'checkpoint'") from None
    for override in overrides:
        key, _, value = override.partition("=")
        if key.startswith("checkpoint."):
            options[key.removeprefix("checkpoint.")] = yaml.safe_load(value)
    kept = kept_by_schedule(options, recipe.average.by)
    if kept is not None and kept < recipe.average.last:
        keys = {
            "update": "checkpoint.save_interval_updates and checkpoint.keep_interval_updates",
            "epoch": "checkpoint.no_epoch_checkpoints and checkpoint.keep_last_epochs",
        }
        raise UserError(
            f"{path}: keeps {kept} checkpoints by {recipe.average.by}, but recipe {recipe.name} "
            f"averages {recipe.average.last}; change {keys[recipe.average.by]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rope_fairseq.recipe", allow_abbrev=False)
    parser.add_argument("name", help="a file of configs/recipes/, without .yaml")
    parser.add_argument(
        "--check-save-schedule",
        nargs="*",
        metavar="KEY=VALUE",
        help="instead, check that training with these overrides keeps the checkpoints to average",
    )
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.name)
    if arguments.check_save_schedule is None:
        print(recipe.shell())
    else:
        check_save_schedule(recipe, arguments.check_save_schedule)


if __name__ == "__main__":
    run_main(main)
