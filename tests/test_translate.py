"""translate.sh: one line for one line, whatever the text; bad input in one line, nothing half."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from rope_fairseq import fairseq_engine, translate
from rope_fairseq.errors import UserError
from rope_fairseq.hub import GENERATION
from rope_fairseq.position import BOUNDED
from rope_fairseq.text import Text
from rope_fairseq.translate import main, parse_arguments, search_options
from tests.tiny import ROOT, CallsAFunction, call, python, run, scripts, tiny_work

SCRIPT = ROOT / "scripts" / "translate.sh"

# One line each. None of these characters but the line feed ends a line.
AWKWARD = [
    "open the file.",
    "",
    'save the "OK" & re-open the drop-down menu.',
    " \t\u00a0",
    "open\u2028the\u2029file\x85and\x0cprint\x0bthe\x1cpage\rnew text.",
    "\x00\x01",
    "it's 日本語 ☃ &amp; <b>text</b>.",
    "text " * 300,
    "the last line",
]


@pytest.fixture
def model() -> Path:
    return tiny_work() / "model"


@pytest.fixture
def copy(model, tmp_path) -> Path:
    """A model folder that a test may spoil."""
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source.en"
    path.write_bytes("".join(f"{line}\n" for line in AWKWARD).encode())
    return path


def generate(model: Path, encoded: list[str], folder: Path, *options: str) -> dict[int, str]:
    """The hypotheses of fairseq's own commands, typed by hand on binarized data."""
    (folder / "test.en").write_text("".join(f"{line}\n" for line in encoded), encoding="utf-8")
    languages = ("--source-lang", "en", "--target-lang", "de")
    prepared = python(
        "fairseq_cli.preprocess",
        *languages,
        *("--only-source", "--testpref", folder / "test", "--srcdict", model / "dict.en.txt"),
        *("--tgtdict", model / "dict.de.txt", "--destdir", folder / "bin"),
    )
    assert prepared.returncode == 0, prepared.stderr
    shutil.copy(model / "dict.de.txt", folder / "bin")
    done = python(
        "fairseq_cli.generate",
        *(folder / "bin", "--user-dir", ROOT / "rope_fairseq", "--path", model / "averaged.pt"),
        *languages,
        *("--beam", "4", "--lenpen", "0.6", "--max-len-a", "1", "--max-len-b", "50", *options),
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^H-(\d+)\t[^\t]*\t(.*)$", done.stdout, re.MULTILINE)
    return {int(number): pieces for number, pieces in found}


def test_a_file_is_translated_line_for_line_as_fairseqs_own_commands_do(model, source, tmp_path):
    output = tmp_path / "out.de"
    done = run(SCRIPT, model, source, "-o", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "translate: 100%" in done.stderr
    lines = output.read_bytes().decode().removesuffix("\n").split("\n")
    assert len(lines) == len(AWKWARD)

    text = Text.load(model)
    encoded = [text.encode(line, "en") for line in AWKWARD]
    spoken = [number for number, pieces in enumerate(encoded) if pieces]
    assert spoken == [0, 2, 4, 6, 7, 8]
    hypotheses = generate(model, [encoded[number] for number in spoken], tmp_path)
    expected = [""] * len(AWKWARD)
    for place, number in enumerate(spoken):
        expected[number] = text.decode(hypotheses[place], "de")
    assert lines == expected


def test_standard_input_to_standard_output_with_windows_ends_and_no_last_end(model):
    done = subprocess.run(
        [SCRIPT, model, "--beam", "2"],
        input=b"open the file.\r\n\r\nsave the page.",
        capture_output=True,
        env=os.environ | scripts() | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().split("\n")
    assert len(lines) == 4 and lines[0] and lines[1] == "" and lines[2] and lines[3] == ""
    assert "\r" not in done.stdout.decode()


def test_text_without_a_word_needs_no_generation(model, monkeypatch, capsysbinary):
    for text, out in ((b"", b""), (b"\n \n", b"\n\n"), (b"\n\t", b"\n\n")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        assert call(main, model) == 0
        assert capsysbinary.readouterr().out == out


def test_a_checkpoint_in_the_folder_is_used_in_place_of_the_averaged_one(copy, monkeypatch):
    shutil.copy(copy / "averaged.pt", copy / "other.pt")
    loaded = fairseq_engine.load_model(copy / "other.pt", None, "{}")
    assert loaded.checkpoint == copy / "other.pt"
    assert fairseq_engine.load_model(copy, None, "{}").checkpoint == copy / "averaged.pt"


def test_lines_that_are_too_long_are_named_before_anything_is_translated(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(translate, "generate", lambda *_: pytest.fail("translated"))
    long = tmp_path / "long.en"
    output = tmp_path / "out"
    long.write_text("text\n" + "text " * 1024 + "\n" + "the\n" * 10 + "text " * 1212 + "\n")
    assert call(main, model, long, "-o", output) == 2
    error = capsys.readouterr().err.split("\n")[-2]
    assert error.startswith(
        f"error: {long} line 2: 1,025 tokens, line 13: 1,213 tokens, more than "
        "--max-source-positions 1024"
    )
    long.write_text("text text text\n" * 12)
    assert call(main, model, long, "-o", output, "--max-source-positions", "3") == 2
    error = capsys.readouterr().err.split("\n")[-2]
    assert "line 10: 4 tokens and 2 lines more, more than --max-source-positions 3 " in error
    assert not output.exists()


def test_a_line_of_exactly_the_limit_and_one_over_a_raised_limit_are_translated(model, tmp_path):
    text = tmp_path / "long.en"
    text.write_text("text " * 1023 + "\n" + "text " * 1499 + "\n")
    output = tmp_path / "out.de"
    # One token is enough to see that fairseq-generate took the line.
    options = ("--max-source-positions", "1500", "--max-len-a", "0", "--max-len-b", "1")
    assert call(main, model, text, "-o", output, *options) == 0
    assert output.read_text(encoding="utf-8").count("\n") == 2


@pytest.mark.parametrize("encoding", BOUNDED)
def test_learned_positions_cannot_be_extended(copy, capsys, encoding):
    state = torch.load(copy / "averaged.pt", weights_only=True)
    state["cfg"]["model"]["position_encoding"] = encoding
    torch.save(state, copy / "averaged.pt")
    assert call(main, copy, "/dev/null", "--max-source-positions", "1025") == 2
    assert "averaged.pt has learned its positions, 1024 of them" in capsys.readouterr().err
    assert call(main, copy, "/dev/null", "--max-source-positions", "1000") == 0


@pytest.mark.parametrize("name", ["averaged.pt", "text.json", "sentencepiece.bpe.model"])
def test_a_missing_file_of_the_model_is_named(copy, capsys, name):
    (copy / name).unlink()
    assert call(main, copy, "/dev/null") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {copy / name}: no such file") and error.count("\n") == 1


def test_a_missing_dictionary_and_one_of_another_size_are_refused(copy, capsys):
    dictionary = copy / "dict.de.txt"
    dictionary.write_text(dictionary.read_text(encoding="utf-8") + "more 1\n", encoding="utf-8")
    assert call(main, copy, "/dev/null") == 2
    error = capsys.readouterr().err
    assert re.match(rf"error: {dictionary}: (\d+) types, but the decoder of .* with \d+", error)
    assert error.count("\n") == 1
    dictionary.unlink()
    assert call(main, copy, "/dev/null") == 2
    assert capsys.readouterr().err.startswith(f"error: {dictionary}: no such file")


def test_a_missing_input_and_text_that_is_not_utf_8_are_refused(model, tmp_path, capsys):
    missing, latin, output = tmp_path / "missing", tmp_path / "latin", tmp_path / "out"
    latin.write_bytes("open\nMenü\n".encode("latin-1"))
    assert call(main, model, missing, "-o", output) == 2
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"
    assert call(main, model, latin, "-o", output) == 2
    assert capsys.readouterr().err.startswith(f"error: {latin}:2: not UTF-8")
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_refused_before_translating(
    model, source, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(translate, "translate_lines", lambda *_: pytest.fail("translated"))
    for output, reason in (
        (source / "out.de", "Not a directory"),
        (tmp_path / "no" / "out.de", "No such file or directory"),
        (tmp_path, "is a folder; name a file to write"),
    ):
        assert call(main, model, source, "-o", output) == 2
        assert capsys.readouterr().err == f"error: {output}: {reason}\n"


def test_an_output_is_left_as_it_was_when_translating_fails(model, source, tmp_path, capsys):
    output = tmp_path / "out.de"
    output.write_text("old\n")
    assert call(main, model, source, "-o", output, "--no-such-option", "1") == 2
    assert output.read_text() == "old\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.de", "source.en"]
    error = capsys.readouterr().err.split("\n")[-2]
    assert error.startswith("error: fairseq-generate failed with status 2: ")
    assert error.endswith("unrecognized arguments: --no-such-option 1")


def test_a_checkpoint_that_calls_a_function_is_refused_and_nothing_runs(copy, tmp_path):
    trace = tmp_path / "it-ran"
    torch.save({"model": {}, "cfg": CallsAFunction(trace)}, copy / "averaged.pt")
    done = run(SCRIPT, copy, "/dev/null")
    assert done.returncode == 2 and not trace.exists()
    assert "averaged.pt: not a checkpoint that can be loaded safely" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("H-0\t-1\ta\n", "left 1 of 2 sentences untranslated"),
        ("H-0\t-1\ta\nH-0\t-1\tb\n", "gave sentence 0 twice"),
        ("H-0\t-1\ta\nH-1\t-1\tb\nH-2\t-1\tc\n", "gave sentence 2 twice or unasked"),
        ("", "left 2 of 2 sentences untranslated"),
    ],
)
def test_lost_repeated_and_unasked_hypotheses_are_an_error(model, monkeypatch, said, says):
    loaded = fairseq_engine.load_model(model, None, "{}")
    script = f"import sys; sys.stdout.write({said!r})"
    # fairseq-generate replaced by a program that says what a defective one would.
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: real([sys.executable, "-c", script], **how)
    )
    with pytest.raises(UserError, match=says):
        translate.collect(fairseq_engine.generate(loaded, ["▁the", "▁page"], []), 2)


def test_hypotheses_come_back_in_the_order_of_their_ids(model, monkeypatch):
    loaded = fairseq_engine.load_model(model, None, "{}")
    script = "print('2026 | INFO | H-9'); print('H-1\\t-1\\tb'); print('H-0\\t-1\\ta c')"
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **how: real([sys.executable, "-c", script], **how)
    )
    found = fairseq_engine.generate(loaded, ["▁the", "▁page"], [])
    assert translate.collect(found, 2) == ["a c", "b"]


def test_model_and_input_are_what_stands_before_the_options():
    arguments, extra = parse_arguments(["model", "--beam", "5", "-o", "out", "--cpu"])
    assert (arguments.input, arguments.output) == (None, Path("out"))
    assert extra == ["--beam", "5", "--cpu"]
    arguments, extra = parse_arguments(["model", "-", "--lenpen=-1"])
    assert arguments.input is None and extra == ["--lenpen=-1"]
    assert parse_arguments(["model", "in"])[0].input == Path("in")


@pytest.mark.parametrize("argv", [[], ["--beam", "5"], ["a", "b", "c"], ["a", "-o", "out", "in"]])
def test_other_orders_are_refused_with_the_usage(argv):
    with pytest.raises(UserError, match="usage: translate.sh MODEL"):
        parse_arguments(argv)


@pytest.mark.parametrize("option", ["--nbest=2", "--path", "--quiet", "--results-path", "-s"])
def test_options_that_break_one_line_for_one_line_are_refused(option):
    with pytest.raises(UserError, match=f"{option.split('=')[0]}.*: not for translate.sh"):
        parse_arguments(["model", option, "x"])


@pytest.mark.parametrize("overrides", ["[1]", "{", "x"])
def test_model_overrides_must_be_a_dict(model, overrides):
    with pytest.raises(UserError, match="--model-overrides .*: must be a Python dict"):
        fairseq_engine.load_model(model, None, overrides)


def test_the_search_is_the_papers_or_that_of_a_config(tmp_path):
    expected = "--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50"
    assert " ".join(search_options(None)) == expected
    config = tmp_path / "config.yaml"
    config.write_text("generation: {beam: 5, no_repeat_ngram_size: 3, unnormalized: true}\n")
    assert search_options(config) == "--beam 5 --no-repeat-ngram-size 3 --unnormalized".split()
    for bad in ("task: {}\n", "[", "generation: 5\n"):
        config.write_text(bad)
        with pytest.raises(UserError, match="config.yaml: .*'generation'"):
            search_options(config)


def test_the_demo_config_has_the_projects_search_options():
    config = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    assert config["generation"] == GENERATION


def test_a_config_cannot_bring_such_options_either(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("generation:\n  beam: 2\n  user_dir: /tmp\n")
    assert call(translate.main, tiny_work() / "model", "--config", config) == 2
    assert "--user-dir: not for translate.sh" in capsys.readouterr().err
