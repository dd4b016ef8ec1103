"""rope_fairseq.recipe: recipes are checked before anything runs."""

import subprocess
from pathlib import Path

import pytest
import yaml

from rope_fairseq.errors import UserError
from rope_fairseq.recipe import RECIPES, check_save_schedule, kept_by_schedule, load_recipe

GOOD = {
    "corpus": "demo",
    "source_lang": "en",
    "target_lang": "de",
    "vocab_size": 4000,
    "config": "demo",
    "average": {"last": 5, "by": "update"},
    "expected": {"sacrebleu": 15.5},
}


def write_recipe(folder: Path, values: object, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid_and_its_files_exist(path: Path) -> None:
    recipe = load_recipe(path.stem)
    root = RECIPES.parent.parent
    assert (root / "data-prep" / recipe.corpus / "get.sh").is_file()
    assert (root / "configs" / f"{recipe.config}.yaml").is_file()


def test_a_shell_reads_back_every_value(tmp_path: Path) -> None:
    write_recipe(tmp_path, GOOD)
    script = load_recipe("mine", tmp_path).shell() + (
        "\necho $RECIPE_NAME $RECIPE_CORPUS $RECIPE_SOURCE_LANG $RECIPE_TARGET_LANG "
        "$RECIPE_VOCAB_SIZE $RECIPE_CONFIG $RECIPE_AVERAGE_LAST $RECIPE_AVERAGE_BY "
        "$RECIPE_EXPECTED_SACREBLEU"
    )
    result = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == "mine demo en de 4000 demo 5 update 15.5".split()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 1}, "unknown key 'vocabulary'"),
        ({"vocab_size": None}, "key 'vocab_size' is None, not a whole number"),
        ({"vocab_size": "4k"}, "key 'vocab_size' is '4k', not a whole number"),
        ({"vocab_size": True}, "key 'vocab_size' is True, not a whole number"),
        ({"vocab_size": 0}, "key 'vocab_size' is 0; at least 1"),
        # YAML 1.1 reads an unquoted no as false.
        ({"target_lang": False}, "key 'target_lang' is False, not a text"),
        ({"target_lang": "en"}, "'source_lang' and 'target_lang' are the same"),
        ({"corpus": "../demo"}, "key 'corpus' is '../demo', not a plain name"),
        ({"corpus": "a; rm -rf b"}, "not a plain name"),
        ({"average": 5}, "key 'average' is 5, not a mapping"),
        ({"average": {"last": 5}}, "key 'average.by' is missing"),
        ({"average": {"last": 5, "by": "step"}}, "key 'average.by' is 'step', not update or epoch"),
        ({"average": {"last": 0, "by": "epoch"}}, "key 'average.last' is 0; at least 1"),
        ({"average": {"last": 5, "by": "epoch", "n": 1}}, "unknown key 'average.n'"),
        ({"expected": {"sacrebleu": "15"}}, "key 'expected.sacrebleu' is '15', not a number"),
        ({"expected": {"a b": 1.0}}, "key 'expected.a b' is not a plain name"),
    ],
)
def test_a_wrong_value_is_refused_with_file_and_key(
    changes: dict, message: str, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path, GOOD | changes)
    with pytest.raises(UserError, match=message) as error:
        load_recipe("mine", tmp_path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_refused(key: str, tmp_path: Path) -> None:
    write_recipe(tmp_path, {name: value for name, value in GOOD.items() if name != key})
    with pytest.raises(UserError, match=f"key '{key}' is missing"):
        load_recipe("mine", tmp_path)


@pytest.mark.parametrize("content", ["a: [1", "- corpus", ""])
def test_a_file_that_holds_no_recipe_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(UserError, match=r"mine\.yaml: (not a YAML file|expected a mapping)"):
        load_recipe("mine", tmp_path)


@pytest.mark.parametrize("name", ["yours", "../mine", ""])
def test_an_unknown_recipe_is_refused_and_those_that_exist_are_listed(
    name: str, tmp_path: Path
) -> None:
    write_recipe(tmp_path, GOOD, "mine")
    write_recipe(tmp_path, GOOD, "another")
    with pytest.raises(UserError, match="recipes that exist: another, mine"):
        load_recipe(name, tmp_path)


@pytest.mark.parametrize(
    ("options", "by", "kept"),
    [
        ({"save_interval_updates": 10, "keep_interval_updates": 3}, "update", 3),
        ({"save_interval_updates": 10, "keep_interval_updates": -1}, "update", None),
        ({"save_interval_updates": 0, "keep_interval_updates": 3}, "update", 0),
        ({"keep_last_epochs": 4}, "epoch", 4),
        ({}, "epoch", None),
        ({"no_epoch_checkpoints": True}, "epoch", 0),
        ({"no_save": True}, "epoch", 0),
    ],
)
def test_the_number_that_a_save_schedule_keeps(options, by, kept):
    assert kept_by_schedule(options, by) == kept


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_keeps_the_checkpoints_that_it_averages(path: Path) -> None:
    recipe = load_recipe(path.stem)
    check_save_schedule(recipe, [])
    with pytest.raises(UserError, match=f"keeps 1 checkpoints .* averages {recipe.average.last}"):
        check_save_schedule(
            recipe, ["checkpoint.keep_interval_updates=1", "checkpoint.keep_last_epochs=1"]
        )
