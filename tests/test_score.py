"""Scores equal sacreBLEU's own command, and files that do not belong together are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sacremoses import MosesTokenizer

from rope_fairseq.errors import UserError
from rope_fairseq.evaluation import samples
from rope_fairseq.evaluation.score import main, read_generate_output, score_files
from tests.tiny import ROOT, call, run, tiny_work

REFERENCE = [
    'Klicken Sie auf "OK" & warten Sie.',
    "Das Drop-down-Menü, das sich öffnet, hat 3 Einträge.",
    "Ein Satz mit\u2028einem Zeilentrenner und\x0cmehr.",
    "Die Datei ist's nicht; das <Menü> auch nicht.",
]
HYPOTHESIS = [
    'Klicken Sie auf "OK" und warten Sie.',
    "Das Drop-down-Menü, das öffnet, hat drei Einträge.",
    "Ein Satz mit\u2028einem Zeilentrenner und mehr.",
    "",
]


def write(path: Path, lines: list[str]) -> Path:
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


@pytest.fixture
def hypothesis(tmp_path: Path) -> Path:
    return write(tmp_path / "hyp.de", HYPOTHESIS)


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write(tmp_path / "ref.de", REFERENCE)


def sacrebleu(reference: list[str], hypothesis: list[str], folder: Path, *options: str) -> dict:
    """What sacreBLEU's command says. Its own reader splits at U+2028 and \\x0c, so these are
    replaced by spaces, which no metric tells apart."""
    paths = []
    for name, lines in (("r", reference), ("h", hypothesis)):
        plain = [line.replace("\u2028", " ").replace("\x0c", " ") for line in lines]
        paths.append(write(folder / f"plain.{name}", plain))
    command = [sys.executable, "-m", "sacrebleu", str(paths[0]), "-i", str(paths[1]), *options]
    done = subprocess.run([*command, "-w", "12"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_sacrebleu_and_chrf2_equal_sacrebleus_command(hypothesis, reference, tmp_path):
    bleu, _, chrf = score_files(hypothesis, reference, "de")
    for score, metric in ((bleu, "bleu"), (chrf, "chrf")):
        said = sacrebleu(REFERENCE, HYPOTHESIS, tmp_path, "-m", metric)
        assert round(score.value, 12) == said["score"]
        assert score.signature == said["signature"]
    assert 0 < bleu.value < 100 and "tok:13a" in bleu.signature


def test_tokenized_bleu_equals_sacrebleus_command_on_moses_tokens(hypothesis, reference, tmp_path):
    tokenized = score_files(hypothesis, reference, "de")[1]
    moses = MosesTokenizer("de")
    sides = [[moses.tokenize(x, return_str=True) for x in t] for t in (REFERENCE, HYPOTHESIS)]
    said = sacrebleu(*sides, tmp_path, "--tokenize", "none", "--force")
    assert round(tokenized.value, 12) == said["score"]
    assert tokenized.signature == said["signature"]
    assert "sacremoses" in tokenized.kind and "language de" in tokenized.kind


def test_tokenized_bleu_follows_the_rules_of_the_target_language(tmp_path):
    # French: l' homme; others: l 'homme.
    hypothesis = write(tmp_path / "h", ["c'est homme qui dort bien"])
    reference = write(tmp_path / "r", ["c'est l'homme qui dort bien"])
    french, english = (score_files(hypothesis, reference, lang)[1] for lang in ("fr", "en"))
    assert french.value > english.value


def test_a_text_against_itself_scores_100(reference):
    assert [round(s.value, 6) for s in score_files(reference, reference, "de")] == [100, 100, 100]


def test_the_command_prints_every_score_with_kind_and_signature_and_writes_json(
    hypothesis, reference, tmp_path, capsys
):
    output = tmp_path / "scores.json"
    files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
    assert call(main, *files, "--json", output) == 0
    printed = capsys.readouterr().out
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert [score["name"] for score in stored] == ["sacreBLEU", "tokenized BLEU", "chrF2"]
    for score, computed in zip(stored, score_files(hypothesis, reference, "de"), strict=True):
        assert score["value"] == computed.value
        for part in (score["name"], f"{score['value']:.2f}", score["kind"], score["signature"]):
            assert part in printed
    assert call(main, "--show", output) == 0
    assert capsys.readouterr().out == printed


def generate_output(path: Path, lines: list[tuple[int, str]]) -> Path:
    """What fairseq-generate prints, log lines and all."""
    text = ["2026-01-01 | INFO | fairseq.tasks | loaded"]
    for number, line in lines:
        text += [f"S-{number}\tx", f"H-{number}\t-0.5\t▁pieces ▁x", f"D-{number}\t-0.5\t{line}"]
    return write(path, [*text, "Generate test with beam=4: BLEU4 = 1.00"])


def test_fairseq_generates_output_is_scored_in_the_order_of_its_ids(reference, tmp_path):
    plain = write(tmp_path / "hyp", HYPOTHESIS)
    shuffled = [(number, HYPOTHESIS[number]) for number in (2, 0, 3, 1)]
    generated = generate_output(tmp_path / "generate-test.txt", shuffled)
    assert score_files(generated, reference, "de", generate_output=True) == score_files(
        plain, reference, "de"
    )


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((0, 1, 3), "1 of 4 sentences have no translation (no line D-ID), the first is id 2"),
        ((0, 1, 2, 2, 3), "id 2 is there twice; generate with --nbest 1"),
        ((0, 1, 2, 3, 4), "id 4, but the reference has only 4 lines"),
        ((), "4 of 4 sentences have no translation"),
    ],
)
def test_missing_repeated_and_surplus_ids_are_refused(tmp_path, ids, says):
    path = generate_output(tmp_path / "out", [(number, "ein Satz") for number in ids])
    with pytest.raises(UserError) as error:
        read_generate_output(path, 4)
    assert str(error.value).startswith(f"{path}: {says}")


@pytest.mark.parametrize("line", ["▁Das ▁ist", "D@@ as ist"])
def test_subword_pieces_are_not_scored_as_text(tmp_path, line):
    path = generate_output(tmp_path / "out", [(0, line), (1, line)])
    with pytest.raises(UserError, match="subword pieces, not text"):
        read_generate_output(path, 2)


def test_files_that_do_not_belong_together_are_refused_in_one_line(reference, tmp_path, capsys):
    output = tmp_path / "scores.json"
    empty = write(tmp_path / "empty", [])
    short = write(tmp_path / "short", HYPOTHESIS[:-1])
    latin = tmp_path / "latin"
    latin.write_bytes("a\nMen\u00fc\n".encode("latin-1"))
    missing = tmp_path / "missing"
    for hyp, ref, says in (
        (short, reference, f"{short} has 3 lines, but {reference} has 4"),
        (empty, reference, f"{empty}: empty, there is nothing to score"),
        (reference, empty, f"{empty}: empty, there is nothing to score"),
        (latin, reference, f"{latin}:2: not UTF-8"),
        (missing, reference, f"{missing}: No such file or directory"),
    ):
        files = ("--hyp", hyp, "--ref", ref, "--target-lang", "de")
        assert call(main, *files, "--json", output) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {says}") and error.count("\n") == 1
        assert not output.exists()


def test_scores_that_cannot_be_written_are_an_error(hypothesis, reference, capsys):
    files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
    assert call(main, *files, "--json", reference / "scores.json") == 2
    assert capsys.readouterr().err == f"error: {reference}/scores.json: Not a directory\n"


def test_missing_options_and_foreign_score_files_are_refused(hypothesis, capsys):
    assert call(main, "--hyp", hypothesis) == 2
    assert "--hyp, --ref and --target-lang are needed" in capsys.readouterr().err
    assert call(main, "--show", hypothesis) == 2
    assert f"error: {hypothesis}: not a file of scores" in capsys.readouterr().err


def test_scoring_needs_neither_fairseq_nor_torch():
    code = (
        "import sys, types; package = types.ModuleType('rope_fairseq'); "
        f"package.__path__ = [{str(ROOT / 'rope_fairseq')!r}]; "
        "sys.modules['rope_fairseq'] = package; "
        "import rope_fairseq.evaluation.score, rope_fairseq.evaluation.samples; "
        "assert not {'fairseq', 'torch'} & sys.modules.keys()"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_score_sh_scores_any_two_files(hypothesis, reference):
    files = ("--hyp", hypothesis, "--ref", reference, "--target-lang", "de")
    done = run(ROOT / "scripts" / "score.sh", *files)
    assert done.returncode == 0
    assert done.stdout == "".join(
        f"{score}\n" for score in score_files(hypothesis, reference, "de")
    )


def test_score_sh_translates_and_scores_the_test_set_of_a_recipe(tmp_path):
    work = tmp_path / "work"
    for name in ("data", "model"):
        shutil.copytree(tiny_work() / name, work / name)
    script = (ROOT / "scripts" / "score.sh", "demo", "--work", work)
    done = run(*script)
    assert done.returncode == 0, done.stderr
    files = (work / "test.hyp.de", work / "data" / "test.de")
    printed = "".join(f"{score}\n" for score in score_files(*files, "de"))
    assert done.stdout.endswith(printed)
    assert run(*script).stdout == f"translate: up to date\nscore: up to date\n{printed}"


def test_samples_are_taken_at_even_distances_and_shown_with_source_and_reference(
    hypothesis, reference, capsys
):
    assert samples.sample_numbers(500, 5) == [50, 150, 250, 350, 450]
    assert samples.sample_numbers(3, 5) == [0, 1, 2]
    files = ("--src", reference, "--ref", reference, "--hyp", hypothesis)
    assert call(samples.main, *files, "--number", "2") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"line 2\n  source       {REFERENCE[1]}\n  reference    ")
    assert f"  translation  {HYPOTHESIS[1]}\nline 4\n" in printed


def test_samples_of_unequal_or_empty_files_are_refused(reference, tmp_path, capsys):
    short = write(tmp_path / "short", REFERENCE[:2])
    empty = write(tmp_path / "empty", [])
    for hyp, says in ((short, "has 2 lines, but"), (empty, "empty")):
        files = ("--src", reference, "--ref", reference, "--hyp", hyp)
        assert call(samples.main, *files) == 2
        assert says in capsys.readouterr().err
