"""What a model's scores rest on: its data, and how its making differs from the recipe.

    python -m rope_fairseq.provenance RECIPE MODEL

prints ``NAME=VALUE`` lines for ``rope_fairseq.evaluation.score --about``. They come from what
average.sh has put beside the model (``data.json``, the signature of the data, and ``train.json``,
the manifest of its training), never from the options of the command that scores it.
"""

from pathlib import Path
from typing import Any

from rope_fairseq.corpus.signature import read_record
from rope_fairseq.errors import Parser, UserError, run_main
from rope_fairseq.recipe import load_recipe
from rope_fairseq.recipe_values import Recipe

# Options of the step train that are no overrides of the config, or say what the data says as well.
LANGUAGES = ("task.source_lang", "task.target_lang")


def changes(recipe: Recipe, data: dict[str, Any], training: dict[str, str]) -> list[str]:
    """Every deviation from the recipe, each in a few words.

    Args:
        data: the signature that ``corpus signature`` wrote.
        training: the options that the step train ran with.

    Raises:
        UserError: the model is of another corpus, or of another recipe's overrides.
    """
    if data["corpus"] != recipe.corpus:
        raise UserError(
            f"recipe {recipe.name}: its corpus is {recipe.corpus}, but the model was trained on "
            f"{data['corpus']}"
        )
    overrides = dict(training)
    tokens_per_update = overrides.pop("tokens_per_update")
    for override in recipe.overrides:
        key, _, value = override.partition("=")
        if overrides.pop(key, None) != value:
            raise UserError(
                f"recipe {recipe.name}: has {override}, but the model was trained without it; name "
                "the recipe that it was trained by"
            )
    limits, text = data["cleaning"]["options"], data.get("text", {})
    facts: list[tuple[str, Any, Any]] = [
        ("source_lang", data["languages"][0], recipe.source_lang),
        ("target_lang", data["languages"][1], recipe.target_lang),
        # A model of subword-nmt has merges and no vocabulary; in a recipe it is one or the other.
        ("vocab_size", data["vocabulary"].get("pieces"), recipe.vocab_size),
        ("merges", _merges(data["vocabulary"]), recipe.merges),
        ("text.lowercase", text.get("lowercase", False), recipe.text.lowercase),
        (
            "text.lowercase_tokens",
            text.get("lowercase_tokens", False),
            recipe.text.lowercase_tokens,
        ),
        ("text.normalize", text.get("normalize", True), recipe.text.normalize),
        ("text.escape", text.get("escape", False), recipe.text.escape),
        ("text.tokenized", limits.get("tokenized", False), recipe.text.tokenized),
        ("clean.max_tokens", limits["max_tokens"], recipe.clean.max_tokens),
        ("clean.max_ratio", limits["max_ratio"] or None, recipe.clean.max_ratio),
        ("clean.drop_duplicates", not limits["keep_duplicates"], recipe.clean.drop_duplicates),
        ("clean.drop_test_overlap", limits["drop_test_overlap"], recipe.clean.drop_test_overlap),
        ("clean.valid_every", limits.get("valid_every"), recipe.clean.valid_every),
        ("tokens_per_update", int(tokens_per_update), recipe.tokens_per_update),
    ]
    found = [f"{name}={is_} (recipe: {was})" for name, is_, was in facts if is_ != was]
    return found + [f"{key}={overrides[key]}" for key in overrides if key not in LANGUAGES]


def _merges(vocabulary: dict[str, int]) -> int | None:
    return None if "pieces" in vocabulary else vocabulary["merges"]


def about(recipe: Recipe, model: Path) -> dict[str, str]:
    """What goes above the scores of a model that average.sh made.

    Raises:
        UserError: see :func:`changes`; or a file beside the model is missing or no such file.
    """
    data, training = (read_record(model / name) for name in ("data.json", "train.json"))
    try:
        differences = changes(recipe, data, training["options"])
        signature = data["signature"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{model}: data.json and train.json are not those of average.sh") from None
    told = {"recipe": recipe.name, "data": signature}
    told["changes"] = "; ".join(differences) or "none"
    if recipe.expected and not differences:
        told["expected"] = ", ".join(f"{kind} {value}" for kind, value in recipe.expected.items())
    return told


def main() -> None:
    parser = Parser(prog="python -m rope_fairseq.provenance")
    parser.add_argument("recipe")
    parser.add_argument("model", type=Path, help="folder that average.sh made")
    arguments = parser.parse_args()
    for name, value in about(load_recipe(arguments.recipe), arguments.model).items():
        print(f"{name}={value}")


if __name__ == "__main__":
    run_main(main)
