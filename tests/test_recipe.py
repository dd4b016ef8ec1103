"""rope_fairseq.recipe: recipes are checked before anything runs."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rope_fairseq import recipe as recipe_module
from rope_fairseq.errors import UserError
from rope_fairseq.recipe import RECIPES, changed, load_recipe, main
from rope_fairseq.recipe_values import Recipe
from tests.tiny import call

GOOD = {
    "corpus": "demo",
    "source_lang": "en",
    "target_lang": "de",
    "vocab_size": 4000,
    "config": "demo",
    "tokens_per_update": 1024,
    "clean": {
        "max_tokens": 200,
        "max_ratio": 2.5,
        "drop_duplicates": False,
        "drop_test_overlap": True,
    },
    "average": {"last": 5, "by": "update"},
    "expected": {"sacrebleu": 15.5},
}
CLEAN: Any = GOOD["clean"]


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


def in_bash(recipe: Recipe, expression: str, changes: list[str] | None = None) -> list[str]:
    """The words that bash makes of an expression after the recipe's assignments."""
    script = f"{recipe.shell(changes or [])}\nprintf '%s\\n' {expression}"
    command = ["bash", "-euc", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_shell_reads_back_every_value(tmp_path: Path) -> None:
    write_recipe(tmp_path, GOOD | {"overrides": ["model.dropout=0.1", "+model.x='a b'"]})
    recipe = load_recipe("mine", tmp_path)
    values = (
        "$RECIPE_NAME $RECIPE_CORPUS $RECIPE_SOURCE_LANG $RECIPE_TARGET_LANG "
        "$RECIPE_VOCAB_SIZE $RECIPE_CONFIG $RECIPE_TOKENS_PER_UPDATE $RECIPE_AVERAGE_LAST "
        "$RECIPE_AVERAGE_BY"
    )
    assert in_bash(recipe, values) == "mine demo en de 4000 demo 1024 5 update".split()
    assert in_bash(recipe, '"${RECIPE_OVERRIDES[@]}"') == ["model.dropout=0.1", "+model.x='a b'"]
    assert in_bash(recipe, "${#RECIPE_CHANGES[@]}") == ["0"]
    differences = ["vocab_size=500 (recipe: 4000)", "a `b` $c"]
    assert in_bash(recipe, '"${RECIPE_CHANGES[@]}"', differences) == differences


@pytest.mark.parametrize(
    ("clean", "words"),
    [
        ({}, "--max-tokens 200 --max-ratio 2.5 --keep-duplicates --drop-test-overlap"),
        ({"max_ratio": None, "drop_duplicates": True}, "--max-tokens 200 --drop-test-overlap"),
        (
            {"max_ratio": 9, "drop_test_overlap": False},
            "--max-tokens 200 --max-ratio 9 --keep-duplicates",
        ),
    ],
)
def test_cleaning_becomes_options_of_its_command(clean, words, tmp_path: Path) -> None:
    write_recipe(tmp_path, GOOD | {"clean": CLEAN | clean})
    recipe = load_recipe("mine", tmp_path)
    assert in_bash(recipe, '"${RECIPE_CLEAN[@]}"') == words.split()


@pytest.mark.parametrize(
    ("changes", "clean", "parts", "scored"),
    [
        ({}, "", "train valid test", "raw"),
        ({"text": {"normalize": False}}, "--no-normalize", "train valid test", "raw"),
        (
            {"text": {"lowercase": True, "normalize": True, "escape": True}},
            *("--lowercase --escape", "train valid test", "prepared"),
        ),
        (
            {"text": {"lowercase_tokens": True}, "clean": CLEAN | {"valid_every": 23}},
            *("--valid-every 23 --lowercase-tokens", "train test", "prepared"),
        ),
        (
            {"text": {"tokenized": True}, "vocab_size": None, "merges": 10_000},
            *("--tokenized --bpe subword_nmt", "train valid test raw.test", "distributed"),
        ),
    ],
)
def test_text_options_and_merges_reach_the_shell(
    changes: dict, clean: str, parts: str, scored: str, tmp_path: Path
) -> None:
    values = {key: value for key, value in (GOOD | changes).items() if value is not None}
    write_recipe(tmp_path, values)
    recipe = load_recipe("mine", tmp_path)
    given = "--max-tokens 200 --max-ratio 2.5 --keep-duplicates --drop-test-overlap"
    assert in_bash(recipe, '"${RECIPE_CLEAN[@]}"') == f"{given} {clean}".split()
    assert in_bash(recipe, '"${RECIPE_DATA[@]}"') == parts.split()
    assert in_bash(recipe, '"$RECIPE_SCORED"') == [scored]
    merges = recipe.merges is not None
    expected = ["10000", "", "bpecodes"] if merges else ["", "4000", "sentencepiece.bpe.model"]
    values = '"$RECIPE_MERGES" "$RECIPE_VOCAB_SIZE" "$RECIPE_BPE_MODEL"'
    assert in_bash(recipe, values) == expected


def test_a_size_of_the_other_kind_of_bpe_is_refused() -> None:
    result, differences = changed(load_recipe("multi30k"), {"merges": 500})
    assert (result.merges, differences) == (500, ["merges=500 (recipe: 10000)"])
    with pytest.raises(UserError, match="--vocab-size 9: recipe multi30k has BPE of another kind"):
        changed(load_recipe("multi30k"), {"vocab_size": 9})
    with pytest.raises(UserError, match="--merges 9: recipe demo .* kind; give --vocab-size"):
        changed(load_recipe("demo"), {"merges": 9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": 9}, "one of the keys 'vocab_size' .* and 'merges' .* is needed, and not both"),
        ({"text": {"lower": True}}, "unknown key 'text.lower'"),
        ({"text": {"lowercase": "yes"}}, "key 'text.lowercase' is 'yes', not true or false"),
        ({"text": True}, "key 'text' is True, not a mapping"),
        ({"clean": CLEAN | {"valid_every": 1}}, "key 'clean.valid_every' is 1; at least 2"),
        ({"clean": CLEAN | {"valid_every": 2.5}}, "key 'clean.valid_every' is 2.5, not a whole"),
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
        ({"tokens_per_update": 0}, "key 'tokens_per_update' is 0; at least 1"),
        ({"tokens_per_update": 4096.0}, "key 'tokens_per_update' is 4096.0, not a whole number"),
        ({"clean": CLEAN | {"max_tokens": 0}}, "key 'clean.max_tokens' is 0; at least 1"),
        ({"clean": CLEAN | {"max_tokens": None}}, "key 'clean.max_tokens' is None, not a whole"),
        ({"clean": CLEAN | {"max_ratio": "2"}}, "key 'clean.max_ratio' is '2', not a number"),
        ({"clean": CLEAN | {"max_ratio": 0.5}}, "key 'clean.max_ratio' is 0.5; at least 1"),
        ({"clean": CLEAN | {"max_ratio": float("nan")}}, "key 'clean.max_ratio' is nan; at least"),
        ({"clean": CLEAN | {"drop_duplicates": 1}}, "'clean.drop_duplicates' is 1, not true or"),
        ({"clean": {"max_tokens": 5}}, "key 'clean.max_ratio' is missing"),
        ({"overrides": "a.b=1"}, "key 'overrides' is 'a.b=1', not a list"),
        ({"overrides": ["dropout"]}, "key 'overrides' has 'dropout', not a text KEY=VALUE"),
        ({"overrides": [3]}, "key 'overrides' has 3, not a text KEY=VALUE"),
        ({"overrides": ["dataset.max_tokens=1"]}, "the batch follows from 'tokens_per_update'"),
        ({"average": 5}, "key 'average' is 5, not a mapping"),
        ({"average": {"last": 5}}, "key 'average.by' is missing"),
        ({"average": {"last": 5, "by": "step"}}, "key 'average.by' is 'step', not update or epoch"),
        ({"average": {"last": 0, "by": "epoch"}}, "key 'average.last' is 0; at least 1"),
        ({"average": {"last": 5, "by": "epoch", "n": 1}}, "unknown key 'average.n'"),
        ({"expected": {"sacrebleu": "15"}}, "key 'expected.sacrebleu' is '15', not a number"),
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
    message = "one of the keys 'vocab_size'" if key == "vocab_size" else f"key '{key}' is missing"
    with pytest.raises(UserError, match=message):
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


def test_changes_are_made_and_named() -> None:
    recipe = load_recipe("demo")
    options = {
        "vocab_size": 500,
        "target_lang": "fr",
        "source_lang": "en",
        "tokens_per_update": None,
    }
    result, differences = changed(recipe, options)
    assert (result.vocab_size, result.target_lang, result.tokens_per_update) == (500, "fr", 1024)
    assert differences == ["vocab_size=500 (recipe: 2000)", "target_lang=fr (recipe: de)"]
    assert changed(recipe, {}) == (recipe, [])


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert call(main, *arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_the_command_prints_the_recipe_and_its_changes(capsys) -> None:
    plain = printed(capsys, "demo")
    assert "RECIPE_CHANGES=()" in plain and "RECIPE_MAX_UPDATE_OVERRIDES=()" in plain
    lines = printed(capsys, "wmt14", "--vocab-size=500", "--max-update", "22")
    assert "RECIPE_VOCAB_SIZE=500" in lines
    overrides = "optimization.max_update=22 checkpoint.save_interval_updates=4"
    assert f"RECIPE_MAX_UPDATE_OVERRIDES=({overrides})" in lines
    assert lines[-1] == (
        "RECIPE_CHANGES=('vocab_size=500 (recipe: 37000)' "
        "'optimization.max_update=22 (config: 100000)' "
        "'checkpoint.save_interval_updates=4 (config: 1500)')"
    )


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["demo"], ["dataset.max_tokens=1024", "optimization.update_freq=[1]"]),
        (["wmt14", "--devices", "8"], ["dataset.max_tokens=3125", "optimization.update_freq=[1]"]),
        (
            ["wmt14", "--devices", "2", "--max-tokens", "2000", "--tokens-per-update", "8192"],
            ["dataset.max_tokens=1365", "optimization.update_freq=[3]"],
        ),
        (
            ["wmt14", "--devices", "1", "model.dropout=0", "+task.x=1"],
            ["dataset.max_tokens=3125", "optimization.update_freq=[8]"],
        ),
    ],
)
def test_the_command_prints_the_batch(arguments, overrides, capsys) -> None:
    assert printed(capsys, arguments[0], "--batch", *arguments[1:]) == overrides


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "0"], "--vocab-size 0: must be a whole number above 0"),
        (["--vocab-size", "many"], "--vocab-size many: must be a whole number above 0"),
        (["--tokens-per-update", "-5"], "--tokens-per-update -5: must be a whole number above 0"),
        (["--max-update", "1e3"], "--max-update 1e3: must be a whole number above 0"),
        (["--max-update", "4"], "--max-update 4: must be at least 5"),
        (["--source-lang", "de"], "--source-lang de: is the target language too"),
        (["--target-lang", "../de"], "--target-lang '../de': must be a language code"),
        (["--batch", "--devices", "0"], "--devices 0: must be a whole number above 0"),
        (["--batch", "--max-tokens", ""], "--max-tokens : must be a whole number above 0"),
        (["--batch", "dataset.max_tokens=9"], "override dataset.max_tokens=9: is computed"),
        (["model.dropout=1"], "unknown argument model.dropout=1; overrides go with --batch"),
        (["--check-save-schedule", "checkpoint.keep_interval_updates=1"], "keeps 1 checkpoints"),
    ],
)
def test_bad_options_are_one_line(arguments, message, capsys) -> None:
    assert call(main, "demo", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and message in captured.err


def test_a_config_that_does_not_exist_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(recipe_module, "CONFIGS", tmp_path)
    assert call(main, "demo") == 2
    assert capsys.readouterr().err == f"error: config {tmp_path}/demo.yaml: no such file\n"
