"""translate.sh --engine ctranslate2: the translations of fairseq, one line for one line."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.tasks.translation import TranslationTask

from rope_fairseq import ctranslate2_engine, export, translate
from rope_fairseq.ctranslate2_engine import batches, best_hypotheses, search_arguments
from rope_fairseq.errors import UserError
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from tests.conftest import build_small
from tests.exports import LINES, export_tiny, exported, nearly_all, sharpened, translated, words
from tests.test_translate import AWKWARD
from tests.tiny import ROOT, call, run, tiny_work


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("export") / "ct2")


@pytest.fixture(scope="module")
def hub() -> Any:
    """The same model in PyTorch, searched by fairseq's own generator."""
    loaded = RopeTransformerModel.from_pretrained(str(tiny_work() / "model"))
    task = loaded.task
    loaded.task = TranslationTask(task.cfg, task.source_dictionary, task.target_dictionary)
    return loaded


@pytest.mark.parametrize(
    "options",
    [
        dict(beam=4, lenpen=0.6, max_len_a=1, max_len_b=50),
        dict(beam=1, lenpen=1, max_len_a=1, max_len_b=50),
        # Where a penalty of 0 lets CTranslate2 stop earlier than fairseq.
        dict(beam=4, lenpen=0, max_len_a=1, max_len_b=50),
        dict(beam=3, lenpen=-2, max_len_a=1, max_len_b=50),
        dict(beam=5, lenpen=1, max_len_a=0, max_len_b=40, min_len=0),
        dict(beam=1, lenpen=1, max_len_a=0, max_len_b=3),
    ],
    ids=str,
)
def test_translations_are_those_of_fairseq(folder, hub, options):
    assert nearly_all(translated(folder, LINES, **options), hub.translate(LINES, **options))


@pytest.mark.parametrize(
    "options",
    [
        dict(beam=4, lenpen=1, max_len_a=0, max_len_b=3),
        dict(beam=4, lenpen=0.6, max_len_a=0.5, max_len_b=2),
        dict(beam=5, lenpen=2, max_len_a=0, max_len_b=8),
    ],
    ids=str,
)
def test_searches_that_reach_the_limit_end_as_in_fairseq(folder, hub, options, monkeypatch):
    """Nearly: an open hypothesis that CTranslate2 does not return may have been the best."""
    expected = hub.translate(LINES, **options)

    def same() -> int:
        pairs = zip(translated(folder, LINES, **options), expected, strict=True)
        return sum(found == line for found, line in pairs)

    assert same() >= len(LINES) - 1
    # Without the end of sentence that fairseq adds it is another search.
    monkeypatch.setattr(ctranslate2_engine, "close_hypotheses", lambda *a: list(a[2][0]))
    assert same() < len(LINES) - 5


def test_unnormalized_scores_are_sums(folder, hub):
    model = ctranslate2_engine.load(folder, None, ["--unnormalized", "--max-len-b=40"])
    expected = hub.translate(LINES, beam=5, unnormalized=True, max_len_a=0, max_len_b=40)
    assert nearly_all(translate.translate_lines(model, LINES, "test", []), expected)


def test_the_limit_of_a_line_hangs_on_the_longest_of_its_batch_as_in_fairseq(folder, hub):
    lines = ["text.", "page.", "the text and the new page and the file and the menu."]
    options = dict(beam=2, lenpen=1, max_len_a=0.3, max_len_b=0)
    assert translated(folder, lines, **options) == hub.translate(lines, **options)
    with pytest.raises(UserError, match="--max-len-a 0.3 --max-len-b 0: must leave a source of 3 "):
        translated(folder, lines, **options, batch_size=1)


def test_batches_are_those_of_fairseq(hub):
    rng = np.random.default_rng(3)
    lengths = rng.integers(2, 60, 500).tolist()
    for max_tokens, size in ((1000, None), (12000, 24), (90, None)):
        options = [f"--max-tokens={max_tokens}"] + ([f"--batch-size={size}"] if size else [])
        hub.cfg.dataset.max_tokens, hub.cfg.dataset.batch_size = max_tokens, size
        tokens = [torch.full((length,), 5) for length in lengths]
        expected = [sorted(batch["id"].tolist()) for batch in hub._build_batches(tokens, False)]
        found = batches(lengths, search_arguments(options))
        assert [sorted(batch) for batch in found] == expected
    hub.cfg.dataset.max_tokens, hub.cfg.dataset.batch_size = 12000, None


def test_a_source_over_1024_tokens_is_not_cut(tmp_path):
    model = sharpened(build_small(max_source_positions=1500, max_target_positions=1500))
    translator = exported(model, tmp_path / "ct2")
    rng = np.random.default_rng(5)
    source = rng.integers(4, 36, 1400).tolist()
    search = search_arguments(["--beam=1"])
    both = [source, source[:1024]]
    found = best_hypotheses(translator, words(model.encoder.dictionary, both), search, 300)
    assert found[0] != found[1]
    assert len(found[0]) == 300  # not 256


def test_a_file_is_translated_line_for_line(folder, hub, tmp_path):
    source, output = tmp_path / "source.en", tmp_path / "out.de"
    source.write_bytes("".join(f"{line}\n" for line in AWKWARD).encode())
    script = ROOT / "scripts" / "translate.sh"
    done = run(script, folder, source, "-o", output, "--engine", "ctranslate2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "translate: 100%" in done.stderr
    lines = output.read_bytes().decode().removesuffix("\n").split("\n")
    assert lines == hub.translate(AWKWARD)


def test_lines_that_are_too_long_are_named(folder, tmp_path, capsys):
    long = tmp_path / "long.en"
    long.write_text("text\n" + "text " * 1024 + "\n")
    options = ("--engine", "ctranslate2")
    assert call(translate.main, folder, long, *options) == 2
    assert f"error: {long} line 2: 1,025 tokens, more than --max" in capsys.readouterr().err
    long.write_text("text text text\n")
    assert call(translate.main, folder, long, *options, "--max-source-positions=3") == 2
    assert "line 1: 4 tokens, more than --max-source-positions 3" in capsys.readouterr().err
    assert call(translate.main, folder, long, *options, "--max-source-positions=1025") == 2
    assert "was exported for 2 to 1024; export it again with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--sampling", "--sampling: not served"),
        ("--diverse-beam-groups=2", "--diverse-beam-groups=2: not served"),
        ("--unkpen=1", "--unkpen: not served"),
        ("--no-repeat-ngram-size=3", "--no-repeat-ngram-size: not served"),
        ("--temperature=0.5", "--temperature: not served"),
        ("--min-len=2", "--min-len 2: --engine ctranslate2 serves 0 and 1"),
        ("--beam=0", "--beam 0: must be at least 1"),
        ("--beam=x", "argument --beam: invalid int value: 'x'"),
        ("--max-tokens=10", "--max-tokens 10: less than a source of 1024 tokens"),
        ("--model-overrides={'dropout': 0}", "give it to rope_fairseq.export"),
    ],
)
def test_options_that_are_not_served_are_refused_in_one_line(folder, capsys, option, says):
    assert call(translate.main, folder, "/dev/null", "--engine=ctranslate2", option) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_options_at_their_defaults_are_none(folder):
    neutral = ["--unkpen", "0", "--temperature", "1.0", "--no-repeat-ngram-size", "0"]
    assert ctranslate2_engine.load(folder, None, neutral).search.beam == 5


def test_what_is_no_exported_model_is_refused_with_the_remedy(folder, tmp_path, capsys):
    model = tiny_work() / "model"
    options = ("/dev/null", "--engine", "ctranslate2")
    assert call(translate.main, model, *options) == 2
    error = capsys.readouterr().err
    assert f"{model}: no exported model; make one: python -m rope_fairseq.export {model} " in error
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text('{"unk_token": "<unk>"}')
    assert call(translate.main, copy, *options) == 2
    assert "config.json: not of rope_fairseq.export" in capsys.readouterr().err
    shutil.copy(folder / "config.json", copy)
    weights = (copy / "model.bin").read_bytes()
    (copy / "model.bin").write_bytes(weights[: len(weights) // 2])
    assert call(translate.main, copy, *options) == 2
    error = capsys.readouterr().err
    assert f"error: {copy}: CTranslate2 does not load it: " in error and error.count("\n") == 1


def test_without_ctranslate2_both_tools_say_what_to_install(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert call(export.main, tiny_work() / "model", "--output", tmp_path / "ct2") == 2
    assert call(translate.main, folder, "/dev/null", "--engine", "ctranslate2") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all("CTranslate2 is not installed: pip install ctranslate2" in line for line in said)
    assert call(translate.main, tiny_work() / "model", "/dev/null") == 0
