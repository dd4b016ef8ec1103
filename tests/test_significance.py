"""Significance tests: sacreBLEU's own numbers, the same on every run, and equals never differ."""

import json
import lzma
import os
import random
import sys
from pathlib import Path

import pytest

from rope_fairseq.evaluation.compare import compare_files, format_test, main
from rope_fairseq.evaluation.significance import METHODS, of_text, paired_tests
from rope_fairseq.text import Text
from tests.tiny import ROOT, call, run

TRIALS = 200


def spoil(lines: list[str], share: float, seed: int) -> list[str]:
    """Lines in which a ``share`` of the words is missing."""
    rng = random.Random(seed)
    return [" ".join(word for word in line.split(" ") if rng.random() >= share) for line in lines]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def references() -> list[str]:
    packed = (ROOT / "data-prep" / "demo" / "test.de.xz").read_bytes()
    return lzma.decompress(packed).decode().split("\n")[:100]


@pytest.fixture(scope="module")
def files(references, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("systems")
    texts = {
        "ref": references,
        "base": spoil(references, 0.2, 1),
        "like": spoil(references, 0.2, 2),
        "worse": spoil(references, 0.4, 3),
    }
    return {name: write(folder / name, lines) for name, lines in texts.items()}


# sacreBLEU's command; with numpy 2 it cannot write chrF2's float32 as JSON by itself.
SACREBLEU = """
import functools, json
from sacrebleu.sacrebleu import main
json.dumps = functools.partial(json.dumps, default=float)
main()
"""


def sacrebleu(files: dict[str, Path], metric: str, *options: str, seed: int) -> list[dict]:
    """What sacreBLEU's command says of like and worse against base."""
    systems = [files[name] for name in ("base", "like", "worse")]
    command = (sys.executable, "-c", SACREBLEU, files["ref"], "-i", *systems, "-m", metric)
    settings = {"env": {"SACREBLEU_SEED": str(seed)}}
    done = run(*command, *options, "--width", "17", "--format", "json", **settings)
    assert done.returncode == 0, done.stderr
    return [
        entry[next(key for key in entry if key != "system")] for entry in json.loads(done.stdout)
    ]


@pytest.mark.parametrize("seed", [12345, 7])
@pytest.mark.parametrize(
    ("method", "option"), [("bootstrap", "--paired-bs"), ("randomization", "--paired-ar")]
)
def test_scores_intervals_and_p_values_are_those_of_sacrebleus_command(files, method, option, seed):
    tests = compare_files(
        files["base"],
        [files["like"], files["worse"]],
        files["ref"],
        "de",
        methods=[method],
        trials=TRIALS,
        seed=seed,
    )
    assert [test.metric for test in tests] == ["sacreBLEU", "chrF2"]
    for test, metric in zip(tests, ("bleu", "chrf"), strict=True):
        said = sacrebleu(files, metric, option, f"{option}-n", str(TRIALS), seed=seed)
        for system, theirs in zip(test.systems, said, strict=True):
            assert system.score == theirs["score"]
            assert system.p_value == theirs["p_value"]
            assert (system.mean, system.interval) == (theirs["mean"], theirs["ci"])
        assert (system.mean is None) == (method == "randomization")
        assert test.systems[0].p_value is None
        assert test.systems[1].p_value > 0.05 > test.systems[2].p_value
        for part in (f"seed:{seed}", f"{METHODS[method][0]}:{TRIALS}", "version:"):
            assert part in test.signature


def test_nothing_depends_on_the_environments_seed_and_it_is_left_as_it_was(
    files, references, monkeypatch
):
    found = set()
    for stated in ("1", "none", None):
        if stated is None:
            monkeypatch.delenv("SACREBLEU_SEED", raising=False)
        else:
            monkeypatch.setenv("SACREBLEU_SEED", stated)
        for method in METHODS:
            systems = [("a", spoil(references, 0.2, 1)), ("b", spoil(references, 0.25, 2))]
            found.add(str(paired_tests(of_text(systems, references, "de"), method, TRIALS)))
        assert os.environ.get("SACREBLEU_SEED") == stated
    assert len(found) == 2  # one a method
    other = paired_tests(of_text(systems, references, "de"), method, TRIALS, seed=2)
    assert str(other) not in found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trials", [1, 20, TRIALS])
def test_equal_translations_never_come_out_different(references, method, trials):
    base = spoil(references, 0.3, 1)
    spaced = [f"  {line.replace(' ', '  ')} " for line in base]
    systems = [("base", base), ("itself", base), ("copy", list(base)), ("spaced", spaced)]
    for test in paired_tests(of_text(systems, references, "de"), method, trials):
        assert [system.p_value for system in test.systems] == [None, 1.0, 1.0, 1.0]
        assert len({system.score for system in test.systems}) == 1
    nothing = [("a", [""] * len(references)), ("b", [""] * len(references))]
    for test in paired_tests(of_text(nothing, references, "de"), method, trials):
        assert (test.systems[1].p_value, test.systems[1].score) == (1.0, 0.0)


@pytest.mark.parametrize(("changed", "likely"), [(1, 1.0), (2, 0.5)])
def test_few_changed_sentences_are_no_evidence(references, changed, likely):
    """Randomization by hand: with one changed sentence every shuffle has the observed difference,
    with two that both get worse it is half of them. sacreBLEU counts none of these."""
    base = list(references)
    worse = ["nichts davon"] * changed + base[changed:]
    compared = of_text([("a", base), ("b", worse)], references, "de")
    for test in paired_tests(compared, "randomization", 1000):
        assert test.systems[1].p_value == pytest.approx(likely, abs=0.06)


def test_the_command_prints_and_writes_all_tests(files, tmp_path, capsys):
    output = tmp_path / "tests.json"
    command = ("--baseline", files["base"], "--hyp", files["like"], files["worse"])
    command += ("--ref", files["ref"], "--target-lang", "de", "--trials", str(TRIALS))
    assert call(main, *command, "--seed", "3", "--json", output) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    tests = compare_files(
        files["base"], [files["like"], files["worse"]], files["ref"], "de", trials=TRIALS, seed=3
    )
    assert printed.out == "".join(f"{format_test(test)}\n" for test in tests)
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["about"] == {"reference": str(files["ref"]), "target_lang": "de"}
    assert [(test["metric"], test["method"]) for test in stored["tests"]] == [
        ("sacreBLEU", "bootstrap"),
        ("chrF2", "bootstrap"),
        ("sacreBLEU", "randomization"),
        ("chrF2", "randomization"),
    ]
    for test, computed in zip(stored["tests"], tests, strict=True):
        assert (test["trials"], test["seed"]) == (TRIALS, 3)
        names = [system["name"] for system in test["systems"]]
        assert names == [str(files[name]) for name in ("base", "like", "worse")]
        values = [(s["score"], s["mean"], s["interval"], s["p_value"]) for s in test["systems"]]
        assert values == [(s.score, s.mean, s.interval, s.p_value) for s in computed.systems]
        worse = test["systems"][2]
        difference = worse["score"] - test["systems"][0]["score"]
        assert f"  {difference:+.2f}  p = {worse['p_value']:.4f}  {worse['name']}" in printed.out
        assert test["signature"] in printed.out

    assert call(main, *command, "--method", "randomization", "--seed", "3") == 0
    assert capsys.readouterr().out == "".join(f"{format_test(test)}\n" for test in tests[2:])


def test_tokens_are_compared_as_they_are_and_their_text_without_case(references, tmp_path, capsys):
    text = Text("en", "de", escape=True, lowercase=True)
    text.save_options(tmp_path)
    tokens = [text.tokenize(line, "de") for line in references]
    spoiled = {"base": spoil(tokens, 0.2, 1), "like": spoil(tokens, 0.2, 2)}
    spoiled["worse"] = spoil(tokens, 0.4, 3)
    both: dict[str, dict[str, Path]] = {"tokens": {}, "text": {}}
    for name, lines in (spoiled | {"ref": tokens}).items():
        both["tokens"][name] = write(tmp_path / f"{name}.tok", lines)
        texts = references if name == "ref" else [text.detokenize(line, "de") for line in lines]
        both["text"][name] = write(tmp_path / f"{name}.text", texts)
    files, output = both["tokens"], tmp_path / "tests.json"
    command = ("--baseline", files["base"], "--hyp", files["like"], files["worse"], "--ref")
    command += (files["ref"], "--target-lang", "de", "--method", "bootstrap", "--tokenized")
    raw = ("--raw-ref", both["text"]["ref"], "--text", tmp_path / "text.json")
    settings = ("--trials", str(TRIALS), "--seed", "3", "--json", output)
    assert call(main, *command, *raw, *settings) == 0
    assert "tokenized BLEU, paired bootstrap" in capsys.readouterr().out
    found = {test["metric"]: test for test in json.loads(output.read_text())["tests"]}
    expected = {
        "tokenized BLEU": ("tokens", "bleu", "--tokenize", "none", "--force"),
        "sacreBLEU": ("text", "bleu", "--lowercase"),
        "chrF2": ("text", "chrf", "--chrf-lowercase"),
    }
    assert list(found) == list(expected)
    for name, (form, metric, *options) in expected.items():
        paired = ("--paired-bs", "--paired-bs-n", str(TRIALS), *options)
        said = sacrebleu(both[form], metric, *paired, seed=3)
        for system, theirs in zip(found[name]["systems"], said, strict=True):
            assert (system["score"], system["p_value"]) == (theirs["score"], theirs["p_value"])
    assert "case:lc" in found["sacreBLEU"]["signature"]

    assert call(main, *command, "--trials", "2") == 2
    assert "--tokenized, --raw-ref FILE and --text FILE go together" in capsys.readouterr().err
    write(both["text"]["ref"], references[1:])
    assert call(main, *command, *raw, "--trials", "2") == 2
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path}/ref.text has 99 lines, but {tmp_path}/ref.tok has 100\n"


def test_generate_output_is_compared_as_the_text_it_holds(files, tmp_path):
    generated = {}
    for name in ("base", "like"):
        lines = files[name].read_text(encoding="utf-8").split("\n")[:-1]
        numbered = [f"D-{number}\t-0.1\t{line}" for number, line in enumerate(lines)]
        generated[name] = write(tmp_path / name, numbered[::-1])
    options = dict(methods=["randomization"], trials=TRIALS)
    plain = compare_files(files["base"], [files["like"]], files["ref"], "de", **options)
    other = compare_files(
        generated["base"], [generated["like"]], files["ref"], "de", generate_output=True, **options
    )
    for one, two in zip(plain, other, strict=True):
        results = [[(s.score, s.p_value) for s in test.systems] for test in (one, two)]
        assert results[0] == results[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trials", "0"), "--trials 0: must be at least 1"),
        (("--trials", "2000000"), "--trials 2000000: at most 1000000 for 100 sentences"),
        (("--seed", "0"), "--seed 0: must be at least 1"),
        (("--hyp", "{folder}/short"), "{folder}/short has 99 lines, but {folder}/ref has 100"),
        (("--baseline", "{folder}/short"), "{folder}/short has 99 lines, but"),
        (("--hyp", "{folder}/base", "{folder}/none"), "{folder}/none: No such file or directory"),
        (("--ref", "{folder}/empty"), "{folder}/empty: empty, there is nothing to score"),
        (("--generate-output",), "{folder}/base: 100 of 100 sentences have no translation"),
        (("--json", "{folder}/none/x.json"), "{folder}/none/x.json: No such file or directory"),
    ],
)
def test_bad_input_is_refused_in_one_line(files, options, says, capsys):
    folder = files["ref"].parent
    write(folder / "short", ["x"] * 99)
    write(folder / "empty", [])
    before = sorted(folder.iterdir())
    command = dict(zip(("--baseline", "--hyp", "--ref"), ("base", "like", "ref"), strict=True))
    words = [word for name, file in command.items() for word in (name, folder / file)]
    words += ["--target-lang", "de"]
    if "--trials" not in options:
        words += ["--trials", "2"]
    assert call(main, *words, *(word.format(folder=folder) for word in options)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says.format(folder=folder)}") and error.count("\n") == 1
    assert sorted(folder.iterdir()) == before
