"""COMET is called as its documentation says, and never without being asked for.

unbabel-comet is no dependency: a module that keeps its contract (``download_model``,
``load_from_checkpoint``, ``predict``) stands in for it here.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rope_fairseq.evaluation.score import main
from tests.tiny import call

TEXTS = {
    "src": ["one", "two two"],
    "hyp": ["eins", "zwo"],
    "ref": ["eins", "zwei"],
}


class Scorer:
    """Scores a sentence 1 if translation and reference are equal, else 0."""

    def predict(
        self, samples: list[dict[str, str]], batch_size: int, gpus: int, progress_bar: bool
    ) -> Any:
        assert [sample.keys() for sample in samples] == [{"src", "mt", "ref"}] * len(samples)
        assert [sample["src"] for sample in samples] == TEXTS["src"]
        assert batch_size > 0 and gpus in (0, 1) and not progress_bar
        scores = [float(sample["mt"] == sample["ref"]) for sample in samples]
        return SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))


@pytest.fixture
def comet(monkeypatch, tmp_path) -> SimpleNamespace:
    """What was downloaded and loaded from a stand-in for unbabel-comet."""
    seen = SimpleNamespace(downloaded=[], loaded=[])
    cached = tmp_path / "cache" / "model.ckpt"
    module = ModuleType("comet")

    def download_model(model: str) -> str:
        seen.downloaded.append(model)
        if model != "Unbabel/wmt22-comet-da":
            raise KeyError(f"Model '{model}' not supported by COMET.")
        return str(cached)

    def load_from_checkpoint(checkpoint_path: str) -> Scorer:
        seen.loaded.append(checkpoint_path)
        if "broken" in checkpoint_path:
            raise Exception("hparams.yaml file is missing from x!")
        return Scorer()

    module.download_model, module.load_from_checkpoint = download_model, load_from_checkpoint
    monkeypatch.setitem(sys.modules, "comet", module)
    version = importlib.metadata.version
    monkeypatch.setattr(
        "rope_fairseq.evaluation.comet_score.version",
        lambda name: "2.2.7" if name == "unbabel-comet" else version(name),
    )
    seen.cached = str(cached)
    return seen


@pytest.fixture
def command(tmp_path) -> list[str | Path]:
    for name, lines in TEXTS.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = [word for name in TEXTS for word in (f"--{name}", tmp_path / name)]
    return [*files, "--target-lang", "de"]


def model_file(folder: Path, name: str = "checkpoints/model.ckpt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_named_model_is_downloaded_and_its_score_printed_and_stored(
    comet, command, tmp_path, capsys
):
    name, output = "Unbabel/wmt22-comet-da", tmp_path / "scores.json"
    assert call(main, *command, "--comet", name, "--json", output) == 0
    assert (comet.downloaded, comet.loaded) == ([name], [comet.cached])
    scores = json.loads(output.read_text())["scores"]
    assert [score["name"] for score in scores][3:] == ["chrF2", "COMET"]
    assert scores[4]["value"] == 0.5
    assert scores[4]["signature"] == "model:Unbabel/wmt22-comet-da|version:2.2.7"
    assert "COMET                0.5000  source, detokenized translation" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["checkpoints/model.ckpt", "."])
def test_a_model_on_this_machine_is_not_downloaded(comet, command, tmp_path, given):
    checkpoint = model_file(tmp_path / "model")
    assert call(main, *command, "--comet", tmp_path / "model" / given) == 0
    assert (comet.downloaded, comet.loaded) == ([], [str(checkpoint)])


def test_nothing_is_loaded_unless_it_is_asked_for(comet, command, capsys):
    assert call(main, *command) == 0
    assert (comet.downloaded, comet.loaded) == ([], [])
    assert "COMET" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("none.ckpt", "none.ckpt: no such file"),
        ("{folder}/none", "{folder}/none: no such file"),
        ("./none", "none: no such file"),
        ("{folder}", "{folder}/checkpoints/model.ckpt: no such file"),
        ("unknown", "neither a checkpoint here nor a model that can be downloaded"),
        ("{folder}/broken.ckpt", "{folder}/broken.ckpt does not load (hparams.yaml file is"),
    ],
)
def test_a_wrong_model_is_one_line_and_nothing_is_written(
    comet, command, tmp_path, capsys, model, says
):
    model_file(tmp_path, "broken.ckpt")
    model = model.format(folder=tmp_path)
    output = tmp_path / "scores.json"
    assert call(main, *command, "--comet", model, "--json", output) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --comet {model}: {says.format(folder=tmp_path)}")
    assert error.count("\n") == 1 and not output.exists()
    assert comet.downloaded == (["unknown"] if model == "unknown" else [])


def test_without_comet_one_line_says_how_to_get_it(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "comet", None)  # as if it were not installed
    output = tmp_path / "scores.json"
    assert call(main, *command, "--comet", "Unbabel/wmt22-comet-da", "--json", output) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --comet Unbabel/wmt22-comet-da: COMET cannot be imported (")
    assert 'pip install unbabel-comet "setuptools<81"' in error
    assert error.count("\n") == 1 and not output.exists()
