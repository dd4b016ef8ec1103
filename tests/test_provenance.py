"""rope_fairseq.provenance: what is said of a model's making is what its files say."""

import copy
import json
from typing import Any

import pytest

from rope_fairseq.errors import UserError
from rope_fairseq.provenance import about
from rope_fairseq.recipe import load_recipe

DATA: dict[str, Any] = {
    "signature": "corpus:wmt14|…",
    "corpus": "wmt14",
    "languages": ["en", "de"],
    "vocabulary": {"pieces": 37000},
    "cleaning": {
        "options": {
            "max_tokens": 250,
            "max_ratio": 0.0,
            "keep_duplicates": True,
            "drop_test_overlap": False,
        }
    },
}
OPTIONS = {
    "tokens_per_update": "25000",
    "task.source_lang": "'en'",
    "task.target_lang": "'de'",
    "model.position_encoding": "sinusoidal",
}
RECIPE = "wmt14-sinusoidal"


def told(folder, data: Any, options: dict[str, str], recipe: str = RECIPE) -> dict[str, str]:
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "train.json").write_text(json.dumps({"options": options}))
    return about(load_recipe(recipe), folder)


def test_a_model_as_the_recipe_says_has_no_changes(tmp_path):
    assert told(tmp_path, DATA, OPTIONS) == {
        "recipe": RECIPE,
        "data": "corpus:wmt14|…",
        "changes": "none",
    }


def test_every_change_is_told(tmp_path):
    data = copy.deepcopy(DATA)
    data["vocabulary"]["pieces"] = 500
    data["cleaning"]["options"] |= {"max_ratio": 1.5, "keep_duplicates": False}
    options = OPTIONS | {"tokens_per_update": "1000", "optimization.max_update": "20"}
    assert told(tmp_path, data, options)["changes"] == (
        "vocab_size=500 (recipe: 37000); clean.max_ratio=1.5 (recipe: None); "
        "clean.drop_duplicates=True (recipe: False); tokens_per_update=1000 (recipe: 25000); "
        "optimization.max_update=20"
    )


def test_the_score_to_expect_is_told_where_nothing_was_changed(tmp_path):
    data = copy.deepcopy(DATA) | {"corpus": "demo", "vocabulary": {"pieces": 2000}}
    data["cleaning"]["options"]["keep_duplicates"] = False
    options = {"tokens_per_update": "1024"}
    assert told(tmp_path, data, options, "demo")["expected"] == "sacrebleu 22.9"
    assert "expected" not in told(tmp_path, data, {"tokens_per_update": "9"}, "demo")


MULTI30K = DATA | {
    "corpus": "multi30k",
    "vocabulary": {"merges": 10_000, "fairseq_dictionary": 9712},
    "text": {"normalize": True, "escape": True, "lowercase": True, "bpe": "subword_nmt"},
    "cleaning": {"options": DATA["cleaning"]["options"] | {"tokenized": True}},
}


def test_merges_and_text_options_are_compared_too(tmp_path):
    options = {"tokens_per_update": "8192", "model.position_encoding": "sinusoidal"}
    told_of = told(tmp_path, MULTI30K, options, "multi30k")
    assert told_of["changes"] == "model.position_encoding=sinusoidal"
    data = copy.deepcopy(MULTI30K)
    data["vocabulary"]["merges"] = 500
    data["text"] |= {"lowercase": False, "escape": False}
    del data["cleaning"]["options"]["tokenized"]
    data["cleaning"]["options"]["valid_every"] = 23
    assert told(tmp_path, data, options, "multi30k")["changes"] == (
        "merges=500 (recipe: 10000); text.lowercase=False (recipe: True); "
        "text.escape=False (recipe: True); text.tokenized=False (recipe: True); "
        "clean.valid_every=23 (recipe: None); model.position_encoding=sinusoidal"
    )


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            DATA | {"corpus": "own"},
            OPTIONS,
            "its corpus is wmt14, but the model was trained on own",
        ),
        (
            DATA,
            OPTIONS | {"model.position_encoding": "rope"},
            "has model.position_encoding=sinusoidal, but the model was trained without it",
        ),
        (DATA, {"model.position_encoding": "sinusoidal"}, "are not those of average.sh"),
        ({}, OPTIONS, "are not those of average.sh"),
        ([], OPTIONS, "expected a JSON object"),
    ],
)
def test_a_model_of_something_else_is_refused(tmp_path, data, options, message):
    with pytest.raises(UserError, match=message):
        told(tmp_path, data, options)
