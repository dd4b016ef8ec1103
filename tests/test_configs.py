"""The files of configs/: what the papers say, and models of the size that they say."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.models import build_model
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from rope_fairseq.recipe import CONFIGS, RECIPES, load_recipe
from rope_fairseq.schedule import batch_overrides, read_config
from tests.conftest import TinyTask

# fairseq was written for Hydra 1.0, and Hydra warns of that.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:(?s)\s*(version_base=|.* is validated against ConfigStore schema)"
)

#: Vaswani et al. (sections 5.3, 5.4, 6.1; table 3) and RoFormer (section 4.1), in fairseq's names.
PAPERS = {
    "model.share_all_embeddings": True,
    "model.attention_dropout": 0,
    "model.activation_dropout": 0,
    "criterion._name": "fused_label_smoothed_cross_entropy",
    "criterion.label_smoothing": 0.1,
    "optimizer._name": "adam",
    "optimizer.adam_betas": "(0.9,0.98)",
    "optimizer.adam_eps": 1e-9,
    "lr_scheduler._name": "inverse_sqrt",
    "lr_scheduler.warmup_updates": 4000,
    "lr_scheduler.warmup_init_lr": 1e-7,
    "optimization.lr": [5e-4],
    "optimization.clip_norm": 0,
    "generation.beam": 4,
    "generation.lenpen": 0.6,
    "generation.max_len_a": 1,
    "generation.max_len_b": 50,
    "task.source_lang": "en",
    "task.target_lang": "de",
}
BASE = {
    "model._name": "rope_transformer_wmt_en_de",
    "model.dropout": 0.1,
    "optimization.max_update": 100_000,
    "checkpoint.save_interval_updates": 1500,  # 10 minutes of 0.4 s
    "checkpoint.keep_interval_updates": 5,
}
BIG = {
    "model._name": "rope_transformer_wmt_en_de_big",
    "model.dropout": 0.3,
    "optimization.max_update": 300_000,
    "checkpoint.save_interval_updates": 600,  # 10 minutes of 1.0 s
    "checkpoint.keep_interval_updates": 20,
}


@pytest.mark.parametrize(("name", "own"), [("wmt14_base", BASE), ("wmt14_big", BIG)])
def test_the_values_are_those_of_the_papers(name, own):
    values = read_config(CONFIGS / f"{name}.yaml")
    expected = PAPERS | own
    assert {key: values.get(key) for key in expected} == expected
    # Training ends with its updates, whatever the time.
    assert "optimization.stop_time_hours" not in values
    # Without the scripts, on the hardware that the header states.
    assert 8 * values["dataset.max_tokens"] * values["optimization.update_freq"][0] == 25_000


@pytest.mark.parametrize("name", ["wmt14", "wmt14-sinusoidal", "wmt14-big", "wmt14-big-sinusoidal"])
def test_the_recipes_are_those_of_the_papers(name):
    recipe = load_recipe(name)
    big, sinusoidal = "big" in name, "sinusoidal" in name
    assert (recipe.corpus, recipe.source_lang, recipe.target_lang) == ("wmt14", "en", "de")
    assert (recipe.vocab_size, recipe.tokens_per_update) == (37_000, 25_000)
    assert (recipe.average.last, recipe.average.by) == (20 if big else 5, "update")
    assert recipe.config == ("wmt14_big" if big else "wmt14_base")
    # Rope is the config's; without an override the recipe leaves other encodings to table.sh.
    assert read_config(CONFIGS / f"{recipe.config}.yaml")["model.position_encoding"] == "rope"
    assert recipe.overrides == (("model.position_encoding=sinusoidal",) if sinusoidal else ())


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_on_the_hardware_of_the_header_the_scripts_change_no_batch(path: Path):
    recipe = load_recipe(path.stem)
    values = read_config(CONFIGS / f"{recipe.config}.yaml")
    devices = recipe.tokens_per_update // values["dataset.max_tokens"]
    update_freq = values.get("optimization.update_freq", [1])
    assert batch_overrides(values, recipe.tokens_per_update, devices, None, []) == [
        f"dataset.max_tokens={values['dataset.max_tokens']}",
        f"optimization.update_freq={update_freq}",
    ]


def composed(name: str, *overrides: str) -> Any:
    """The options as fairseq-hydra-train makes them of a config."""
    GlobalHydra.instance().clear()
    hydra_init(name)
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.1"):
        cfg = compose(name, overrides=[f"task.data={os.devnull}", *overrides])
    add_defaults(cfg)
    return cfg


def feed_forward_and_attention(layers: int, width: int, inner: int) -> int:
    """Parameters of encoder and decoder: a decoder layer has twice the attention."""
    norm = 2 * width
    attention = 4 * (width * width + width) + norm
    feed_forward = width * inner + inner + inner * width + width + norm
    return layers * (3 * attention + 2 * feed_forward)


@pytest.mark.parametrize(
    ("name", "width", "inner", "paper"),
    [
        ("wmt14_base", 512, 2048, 65e6),
        ("wmt14_big", 1024, 4096, 213e6),
        ("own", 512, 1024, None),
    ],
)
@pytest.mark.parametrize("encoding", ["rope", "sinusoidal"])
def test_the_model_has_the_size_of_the_paper(name, width, inner, paper, encoding):
    languages = ["task.source_lang=en", "task.target_lang=de"]
    cfg = composed(name, *languages, f"model.position_encoding={encoding}")
    task = TinyTask(37_000 - 4)  # fairseq adds four symbols
    with torch.device("meta"):  # shapes alone
        model = build_model(cfg.model, task)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == feed_forward_and_attention(6, width, inner) + 37_000 * width
    if paper is not None:
        assert count == pytest.approx(paper, rel=0.04)  # it rounds, and its vocabulary is "about"
    assert model.encoder.layers[0].normalize_before is False
    assert (encoding == "rope") == (getattr(model.encoder, "embed_positions", None) is None)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_read_by_fairseq_and_says_what_it_needs(path: Path):
    cfg = composed(path.stem, "task.source_lang=en", "task.target_lang=de")
    assert set(cfg) >= set(FairseqConfig.__dataclass_fields__) - {"_name"}
    header = path.read_text(encoding="utf-8").partition("\ncommon:")[0].lower()
    assert all(word in header for word in ("hardware", "time", "score"))
