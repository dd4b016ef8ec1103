"""Recipes: what a run needs beyond fairseq's own options.

``configs/recipes/NAME.yaml`` names the corpus, how it is cleaned, the vocabulary, the file of
configs/ that holds fairseq's options, the tokens of an update, the checkpoints to average and the
scores to expect.

    python -m rope_fairseq.recipe NAME [--vocab-size N | --merges N] [--source-lang L]
        [--target-lang L] [--tokens-per-update N] [--max-update N]

prints the recipe, so changed, as shell assignments (``RECIPE_CORPUS=demo`` …) for scripts/; with
``--batch --devices N [--max-tokens N]`` instead the overrides, one a line, that keep the tokens of
an update on N devices.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.recipe_values import Average, Clean, Recipe, TextOptions
from rope_fairseq.schedule import (
    MAX_TOKENS,
    UPDATE_FREQ,
    batch_overrides,
    check_save_schedule,
    override_key,
    read_config,
    updates_overrides,
)

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
RECIPES = CONFIGS / "recipes"

# A name becomes part of file names: letters, digits, and - _ . inside it.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


Kinds = Mapping[str, tuple[type, ...]]
KINDS: Kinds = {
    "corpus": (str,),
    "source_lang": (str,),
    "target_lang": (str,),
    "vocab_size": (int,),
    "merges": (int,),
    "text": (dict,),
    "config": (str,),
    "tokens_per_update": (int,),
    "clean": (dict,),
    "average": (dict,),
    "expected": (dict,),
    "overrides": (list,),
}
OPTIONAL = (
    *("vocab_size", "merges", "overrides", "text", "clean.valid_every"),
    *("text.lowercase", "text.lowercase_tokens"),
    *("text.normalize", "text.escape", "text.tokenized"),
)
CLEAN_KINDS: Kinds = {
    "max_tokens": (int,),
    "max_ratio": (float, int, type(None)),
    "drop_duplicates": (bool,),
    "drop_test_overlap": (bool,),
    "valid_every": (int,),
}
TEXT_KINDS: Kinds = dict.fromkeys(
    ("lowercase", "lowercase_tokens", "normalize", "escape", "tokenized"), (bool,)
)
AVERAGE_KINDS: Kinds = {"last": (int,), "by": (str,)}
BY = ("update", "epoch")
KIND_NAMES = {
    str: "a text",
    int: "a whole number",
    dict: "a mapping",
    list: "a list",
    float: "a number",
    bool: "true or false",
}


def _check_keys(path: Path, values: Any, kinds: Kinds, at: str) -> None:
    """Every key there, none unknown, each of its type; ``at`` is the prefix of nested keys."""
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(kinds)}")
    for key in values:
        if key not in kinds:
            raise UserError(f"{path}: unknown key '{at}{key}'; known are {', '.join(kinds)}")
    for key, accepted in kinds.items():
        if key not in values:
            if at + key in OPTIONAL:
                continue
            raise UserError(f"{path}: key '{at}{key}' is missing")
        # type() and not isinstance(): True is an int.
        if type(values[key]) not in accepted:
            raise UserError(
                f"{path}: key '{at}{key}' is {values[key]!r}, not {KIND_NAMES[accepted[0]]}"
            )


def _check_overrides(path: Path, overrides: list[Any]) -> None:
    for override in overrides:
        key = override_key(override) if isinstance(override, str) else None
        if key is None:
            raise UserError(f"{path}: key 'overrides' has {override!r}, not a text KEY=VALUE")
        if key in (MAX_TOKENS, UPDATE_FREQ):
            raise UserError(
                f"{path}: key 'overrides' has {override!r}; the batch follows from "
                "'tokens_per_update'"
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
    if ("vocab_size" in values) == ("merges" in values):
        raise UserError(
            f"{path}: one of the keys 'vocab_size' (sentencepiece) and 'merges' (subword-nmt) is "
            "needed, and not both"
        )
    clean, average, text = values["clean"], values["average"], values.get("text", {})
    _check_keys(path, clean, CLEAN_KINDS, "clean.")
    _check_keys(path, average, AVERAGE_KINDS, "average.")
    _check_keys(path, text, TEXT_KINDS, "text.")
    for key in ("corpus", "source_lang", "target_lang", "config"):
        if not NAME.fullmatch(values[key]):
            raise UserError(f"{path}: key '{key}' is {values[key]!r}, not a plain name")
    if values["source_lang"] == values["target_lang"]:
        raise UserError(f"{path}: keys 'source_lang' and 'target_lang' are the same")
    for key, number in (
        ("vocab_size", values.get("vocab_size", 1)),
        ("merges", values.get("merges", 1)),
        ("tokens_per_update", values["tokens_per_update"]),
        ("clean.max_tokens", clean["max_tokens"]),
        ("average.last", average["last"]),
    ):
        if number < 1:
            raise UserError(f"{path}: key '{key}' is {number}; at least 1 is needed")
    if clean.get("valid_every", 2) < 2:
        raise UserError(
            f"{path}: key 'clean.valid_every' is {clean['valid_every']}; at least 2 is needed"
        )
    if clean["max_ratio"] is not None and not 1 <= clean["max_ratio"] < float("inf"):
        raise UserError(
            f"{path}: key 'clean.max_ratio' is {clean['max_ratio']}; at least 1 is needed, or null"
        )
    if average["by"] not in BY:
        raise UserError(f"{path}: key 'average.by' is {average['by']!r}, not update or epoch")
    _check_overrides(path, values.get("overrides", []))
    expected_kinds = dict.fromkeys(values["expected"], (float, int))
    _check_keys(path, values["expected"], expected_kinds, "expected.")
    nested = {
        "clean": Clean(**clean),
        "average": Average(**average),
        "overrides": tuple(values.get("overrides", [])),
        "text": TextOptions(**text),
    }
    return Recipe(name=name, **{"vocab_size": None} | values | nested)


def changed(recipe: Recipe, options: Mapping[str, str | int | None]) -> tuple[Recipe, list[str]]:
    """The recipe with the fields that ``options`` gives (None: as it is), and the differences in
    words, such as ``vocab_size=500 (recipe: 37000)``.

    Raises:
        UserError: a language that is no plain name or twice the same, or a size of the kind of BPE
            that the recipe does not have.
    """
    given = {key: value for key, value in options.items() if value is not None}
    for key, other in (("vocab_size", "merges"), ("merges", "vocab_size")):
        if key in given and getattr(recipe, key) is None:
            raise UserError(
                f"--{key.replace('_', '-')} {given[key]}: recipe {recipe.name} has BPE of another "
                f"kind; give --{other.replace('_', '-')}"
            )
    for key, value in given.items():
        if isinstance(value, str) and not NAME.fullmatch(value):
            raise UserError(f"--{key.replace('_', '-')} {value!r}: must be a language code")
    result = replace(recipe, **given)  # type: ignore[arg-type]
    if result.source_lang == result.target_lang:
        raise UserError(
            f"--source-lang {result.source_lang}: is the target language too; say both "
            "--source-lang and --target-lang"
        )
    differences = [
        f"{key}={value} (recipe: {getattr(recipe, key)})"
        for key, value in given.items()
        if value != getattr(recipe, key)
    ]
    return result, differences


def positive(option: str, text: str | None) -> int | None:
    """The whole number above 0 that an option was given, or None without it."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise UserError(f"{option} {text}: must be a whole number above 0")
    return int(text)


def _parser() -> Parser:
    parser = Parser(prog="python -m rope_fairseq.recipe")
    parser.add_argument("name", help="a file of configs/recipes/, without .yaml")
    parser.add_argument("overrides", nargs="*", help="the training's other overrides (--batch)")
    for option, text in (
        ("--vocab-size", "pieces of the joint BPE model (sentencepiece)"),
        ("--merges", "merges of the joint BPE (subword-nmt)"),
        ("--source-lang", "language code"),
        ("--target-lang", "language code"),
        ("--tokens-per-update", "tokens in one update of all devices together"),
        ("--max-update", "updates after which training ends"),
    ):
        parser.add_argument(option, help=f"another value: {text}")
    parser.add_argument(
        "--check-save-schedule",
        nargs="*",
        metavar="KEY=VALUE",
        help="instead, check that training with these overrides keeps the checkpoints to average",
    )
    parser.add_argument(
        "--batch", action="store_true", help="instead, print the overrides that set the batch"
    )
    parser.add_argument("--devices", help="with --batch: processes that train together")
    parser.add_argument("--max-tokens", help="with --batch: tokens that one device can hold")
    return parser


def main() -> None:
    arguments = _parser().parse_intermixed_args()
    options = {
        "vocab_size": positive("--vocab-size", arguments.vocab_size),
        "merges": positive("--merges", arguments.merges),
        "source_lang": arguments.source_lang,
        "target_lang": arguments.target_lang,
        "tokens_per_update": positive("--tokens-per-update", arguments.tokens_per_update),
    }
    recipe, changes = changed(load_recipe(arguments.name), options)
    path = CONFIGS / f"{recipe.config}.yaml"
    last, by = recipe.average.last, recipe.average.by
    if arguments.check_save_schedule is not None:
        check_save_schedule(path, last, by, arguments.check_save_schedule)
        return
    values = read_config(path, recipe.overrides)
    if arguments.batch:
        devices = positive("--devices", arguments.devices) or 1
        limit = positive("--max-tokens", arguments.max_tokens)
        tokens = recipe.tokens_per_update
        print("\n".join(batch_overrides(values, tokens, devices, limit, arguments.overrides)))
        return
    if arguments.overrides:
        raise UserError(f"unknown argument {arguments.overrides[0]}; overrides go with --batch")
    update_overrides = []
    max_update = positive("--max-update", arguments.max_update)
    if max_update is not None:
        update_overrides = updates_overrides(values, max_update, last, by)
        for override in update_overrides:
            key, _, value = override.partition("=")
            if str(values.get(key)) != value:
                changes.append(f"{override} (config: {values.get(key)})")
    print(recipe.shell(changes, update_overrides))


if __name__ == "__main__":
    run_main(main)
