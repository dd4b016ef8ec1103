"""The hub interface: the same translations as translate.sh, and fairseq's interface otherwise."""

import shutil
from pathlib import Path

import pytest
import torch

from rope_fairseq import translate
from rope_fairseq.errors import UserError
from rope_fairseq.hub import GENERATION, from_pretrained, raised_limits
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from tests.tiny import CallsAFunction, call, sentences, tiny_work


@pytest.fixture(scope="module")
def hub():
    return RopeTransformerModel.from_pretrained(str(tiny_work() / "model"))


@pytest.fixture
def copy(tmp_path) -> Path:
    """A model folder that a test may spoil."""
    shutil.copytree(tiny_work() / "model", tmp_path / "model")
    return tmp_path / "model"


def test_200_lines_with_quotes_ampersands_and_hyphens_are_translated_as_by_translate_sh(
    hub, tmp_path
):
    lines = [source for source, _ in sentences(198, seed=9)]
    lines[10:10] = ["", "it's the \u201cnew\u201d drop-down & <b>file</b> \u2013 R&D."]
    assert all(sum(mark in line for line in lines) > 50 for mark in '"&-')
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert call(translate.main, tiny_work() / "model", source, "-o", output) == 0
    assert hub.translate(lines) == output.read_text(encoding="utf-8").split("\n")[:-1]


def test_a_string_gives_a_string_and_no_text_gives_none(hub):
    assert hub.translate("open the file.") == hub.translate(["open the file."])[0] != ""
    assert hub.translate("") == hub.translate(" \t") == ""
    assert hub.translate([]) == []
    assert hub.translate(["", "open the file.", ""])[::2] == ["", ""]


def test_the_search_options_are_the_projects_unless_given(hub):
    stored = hub.cfg.generation
    assert {name: stored[name] for name in GENERATION} == GENERATION
    other = from_pretrained(
        str(tiny_work() / "model"), generation_args={"lenpen": 2.0, "max_len_b": 1}
    )
    assert (other.cfg.generation.lenpen, other.cfg.generation.max_len_a) == (2.0, 1)
    tokens = hub.encode("open the file.")
    assert len(hub.generate([tokens], beam=3)[0]) == 3


def test_a_sentence_that_is_too_long_is_refused_by_its_index(hub):
    with pytest.raises(UserError, match="sentence 1: 1,025 tokens, more than .* 1024"):
        hub.translate(["text", "text " * 1024, "text " * 2000])
    raised = from_pretrained(str(tiny_work() / "model"), max_source_positions=1100)
    # One token is enough to see that the line is taken.
    assert isinstance(raised.translate("text " * 1099, max_len_a=0, max_len_b=1), str)
    assert raised.max_positions == (1100, 1151)
    lowered = from_pretrained(str(tiny_work() / "model"), max_source_positions=3)
    assert lowered.translate("the text")
    with pytest.raises(UserError, match="sentence 0: 4 tokens, more than .* 3 source positions"):
        lowered.translate("the text and")


def test_an_ensemble_of_a_model_with_itself_translates_like_the_model(hub):
    twice = from_pretrained(str(tiny_work() / "model"), "averaged.pt:averaged.pt")
    assert len(twice.models) == 2
    lines = [source for source, _ in sentences(20, seed=3)]
    assert twice.translate(lines) == hub.translate(lines)


def test_encoding_and_decoding_are_those_of_the_training_data(hub):
    line = 'save the "OK" & re-open the drop-down menu.'
    tokens = hub.encode(line)
    assert tokens.tolist()[-1] == hub.src_dict.eos()
    assert hub.decode(tokens) == line


def test_a_checkpoint_that_calls_a_function_is_refused_and_nothing_runs(copy, tmp_path):
    trace = tmp_path / "it-ran"
    torch.save({"model": {}, "cfg": CallsAFunction(trace)}, copy / "evil.pt")
    for names in ("evil.pt", "averaged.pt:evil.pt"):
        with pytest.raises(UserError, match="evil.pt: not a checkpoint that can be loaded safely"):
            from_pretrained(str(copy), names)
    assert not trace.exists()


def test_a_missing_folder_a_missing_dictionary_and_a_wrong_one_are_refused(copy, tmp_path):
    with pytest.raises(UserError, match="missing: no such folder"):
        from_pretrained(str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="missing.pt"):
        from_pretrained(str(copy), "missing.pt")
    dictionary = copy / "dict.en.txt"
    dictionary.write_text("\n".join(dictionary.read_text(encoding="utf-8").split("\n")[1:]))
    with pytest.raises(UserError, match="dict.en.txt: .* types, but the encoder of"):
        from_pretrained(str(copy))
    dictionary.unlink()
    with pytest.raises(UserError, match="dict.en.txt: no such file"):
        from_pretrained(str(copy))


@pytest.mark.parametrize(
    ("stored", "wanted", "limits"),
    [
        ({}, 1024, {}),
        ({}, 1025, {"max_source_positions": 1025, "max_target_positions": 1076}),
        ({"max_source_positions": 300}, 300, {}),
        ({"max_source_positions": 300}, 100, {}),
        ({"max_source_positions": 300}, 1, None),
        (
            {"max_source_positions": 300, "max_target_positions": 900},
            400,
            {"max_source_positions": 400, "max_target_positions": 900},
        ),
        ({"position_encoding": "learned"}, 1024, {}),
        ({"position_encoding": "learned"}, 1025, None),
        ({"position_encoding": "tupe"}, 1025, None),
        ({"encoder_learned_pos": True}, 1025, None),
        ({"decoder_learned_pos": True}, 2000, {"max_source_positions": 2000}),
    ],
)
def test_positions_are_raised_where_a_model_can_serve_them(stored, wanted, limits):
    state = {"cfg": {"model": stored}, "model": {}}
    if limits is None:
        with pytest.raises(UserError, match=f"--max-source-positions {wanted}: "):
            raised_limits(Path("a.pt"), state, wanted)
    else:
        assert raised_limits(Path("a.pt"), state, wanted) == limits


def test_other_model_families_are_refused_because_fairseq_runs_their_options_as_code(tmp_path):
    target = tmp_path / "executed"
    code = f"__import__('os').mkdir({str(target)!r})"
    for arch in ("fconv", "transformer_lm", "nosuch"):
        state = {
            "args": None,
            "cfg": {
                "model": {"_name": arch, "encoder_layers": code},
                "task": {"_name": "translation"},
            },
            "model": {"weight": torch.zeros(1)},
        }
        torch.save(state, tmp_path / "averaged.pt")
        with pytest.raises(UserError, match=f"its model is '{arch}'; only translation models"):
            from_pretrained(str(tmp_path))
    assert not target.exists()


def test_a_data_folder_without_a_dot_is_relative_to_where_we_are(monkeypatch):
    monkeypatch.chdir(tiny_work())
    hub = from_pretrained("model", data_name_or_path="data-bin")
    assert hub.translate("Open the file.") == from_pretrained("model").translate("Open the file.")
