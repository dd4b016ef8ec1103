"""Export to CTranslate2: the same scores, clear refusals, whole folders."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rope_fairseq import ctranslate2_spec, export
from rope_fairseq.errors import UserError
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from rope_fairseq.position import ENCODINGS
from rope_fairseq.rotary import SCALINGS
from rope_fairseq.text import Text
from tests.conftest import build_small
from tests.exports import LINES, export_tiny, exported, nearly_all, sharpened, translated, words
from tests.tiny import call, tiny_work

SOURCES = [[5, 9, 6], [17, 4, 30, 8, 8, 12, 25, 6, 31, 7, 20, 14, 5], [11]]
TARGETS = [[8, 4, 30, 22, 9, 9, 10, 31, 6], [7, 13], [21, 5, 5, 29]]


def scores(translator: Any, model: Any) -> np.ndarray:
    """CTranslate2's log-probabilities of all target tokens and ends of sentence, one batch."""
    found = translator.score_batch(
        words(model.encoder.dictionary, SOURCES), words(model.decoder.dictionary, TARGETS)
    )
    return np.concatenate([result.log_probs for result in found])


def expected_scores(model: Any) -> np.ndarray:
    """The same by PyTorch, each sentence alone."""
    found = []
    eos = model.decoder.dictionary.eos()
    for source, target in zip(SOURCES, TARGETS, strict=True):
        tokens = torch.tensor([[*source, eos]])
        output, _ = model(tokens, torch.tensor([tokens.numel()]), torch.tensor([[eos, *target]]))
        log_probs = torch.log_softmax(output[0], dim=-1)
        found += [float(log_probs[i, token]) for i, token in enumerate([*target, eos])]
    return np.array(found)


def check_scores(tmp_path: Path, **options: Any) -> None:
    model = sharpened(build_small(**options))
    found, expected = scores(exported(model, tmp_path / "ct2"), model), expected_scores(model)
    assert np.ptp(expected) > 1  # no even distribution, which any error would hit
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        dict(position_encoding="rope"),
        dict(rope_layout="half"),
        dict(rope_base=100.0),
        dict(rope_base=100.0, rope_layout="half"),
        dict(rope_fraction=0.5),
        dict(rope_fraction=0.5, rope_layout="half"),
        dict(position_encoding="sinusoidal"),
        dict(position_encoding="learned"),
        dict(position_encoding="none"),
        dict(arch="transformer"),
        dict(arch="transformer", encoder_learned_pos=True),
        dict(arch="transformer", no_token_positional_embeddings=True),
    ],
    ids=str,
)
def test_scores_of_every_encoding_are_those_of_pytorch(tmp_path, options, pre_norm):
    check_scores(
        tmp_path,
        encoder_normalize_before=pre_norm,
        decoder_normalize_before=pre_norm,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        dict(encoder_layers=3, decoder_layers=1),
        dict(encoder_ffn_embed_dim=24, decoder_ffn_embed_dim=80),
        dict(encoder_attention_heads=2, decoder_attention_heads=8),
        dict(decoder_embed_dim=24, decoder_output_dim=24, decoder_input_dim=24),
        dict(encoder_normalize_before=True),
        dict(decoder_normalize_before=True, no_decoder_final_norm=True),
        dict(share_all_embeddings=True),
        dict(share_decoder_input_output_embed=True),
        dict(layernorm_embedding=True, no_scale_embedding=True),
        dict(encoder_layerdrop=0.5, decoder_layerdrop=0.5, checkpoint_activations=True),
        *(dict(activation_fn=name) for name in ctranslate2_spec.ACTIVATIONS),
    ],
    ids=str,
)
def test_scores_of_every_shape_are_those_of_pytorch(tmp_path, options):
    check_scores(tmp_path, **options)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(
    "options",
    [
        dict(rope_scaling="linear", rope_scaling_factor=4.0),
        dict(rope_scaling="linear", rope_scaling_factor=1.5, rope_base=100.0),
        dict(rope_scaling="linear", rope_scaling_factor=4.0, rope_fraction=0.5),
        dict(rope_scaling="ntk", rope_scaling_factor=4.0),
        dict(rope_scaling="ntk", rope_scaling_factor=1.5, rope_base=100.0),
        dict(rope_scaling="ntk", rope_scaling_factor=4.0, rope_fraction=0.5),
        dict(rope_scaling="ntk", rope_scaling_factor=4.0, encoder_attention_heads=2),
    ],
    ids=str,
)
def test_scores_of_scaled_rotations_are_those_of_pytorch(tmp_path, options, layout):
    check_scores(tmp_path, rope_layout=layout, **options)


def test_the_comparison_sees_another_rotation(tmp_path):
    model = sharpened(build_small(rope_base=100.0))
    expected = expected_scores(model)
    for other in (
        dict(),
        dict(rope_base=100.0, rope_layout="half"),
        dict(rope_base=100.0, rope_scaling="linear", rope_scaling_factor=4.0),
        dict(rope_base=100.0, rope_scaling="ntk", rope_scaling_factor=4.0),
        dict(position_encoding="none"),
    ):
        wrong = sharpened(build_small(**other))
        assert np.abs(scores(exported(wrong, tmp_path / "ct2"), wrong) - expected).max() > 1e-2


@pytest.mark.parametrize(
    ("quantization", "size", "difference"),
    [("float16", 0.51, 0.01), ("bfloat16", 0.51, 0.1), ("int8", 0.3, 0.5)],
)
def test_quantized_models_are_small_and_close(tmp_path, quantization, size, difference):
    model = sharpened(build_small(encoder_embed_dim=64, encoder_ffn_embed_dim=256))
    exported(model, tmp_path / "full")
    translator = exported(model, tmp_path / "small", quantization)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("small", "full")]
    assert sizes[0] < size * sizes[1]
    error = np.abs(scores(translator, model) - expected_scores(model)).max()
    assert 0 < error < difference


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(arch="transformer", cross_self_attention=True), "--cross-self-attention: "),
        (dict(no_cross_attention=True), "--no-cross-attention: "),
        (dict(adaptive_softmax_cutoff=[10, 20]), "--adaptive-softmax-cutoff: "),
        (dict(activation_fn="linear"), "--activation-fn linear: CTranslate2 has relu,"),
        (dict(attention_kind="linear"), "--attention-kind linear: CTranslate2 has softmax"),
        (dict(quant_noise_pq=0.1), "parameter encoder.quant_noise.weight and 1 more: "),
        (dict(decoder_output_dim=24), "parameter decoder.project_out_dim.weight: "),
        (dict(arch="transformer", scale_heads=True), "parameter .*c_attn"),
    ],
    ids=str,
)
def test_what_ctranslate2_lacks_is_refused(options, says):
    model = build_small(**options)
    with pytest.raises(UserError, match=says):
        ctranslate2_spec.build_spec(model, model.encoder.dictionary, model.decoder.dictionary)


LONGER = dict(rope_scaling_factor=2.0, rope_original_max_positions=512)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(
            (
                dict(position_encoding=name),
                f"--position-encoding {name}: CTranslate2 has rope, sinusoidal, learned, none",
            )
            for name in ENCODINGS
            if name not in ctranslate2_spec.ENCODINGS
        ),
        *(
            (
                dict(rope_scaling=name, **LONGER),
                f"--rope-scaling {name}: CTranslate2 has none, linear, ntk",
            )
            for name in ("dynamic", "yarn")
        ),
    ],
    ids=str,
)
def test_other_encodings_and_scalings_are_refused(options, says):
    """Computed otherwise, and some without a parameter that would show it."""
    model = build_small(**options)
    with pytest.raises(UserError) as caught:
        ctranslate2_spec.build_spec(model, model.encoder.dictionary, model.decoder.dictionary)
    assert str(caught.value) == says


def test_scores_of_every_encoding_and_scaling_are_compared_or_refused():
    served = {"rope", "sinusoidal", "learned", "none"}
    refused = {"shaw", "transformer-xl", "t5", "tupe", "deberta", "alibi"}
    assert (set(ctranslate2_spec.ENCODINGS), set(ENCODINGS)) == (served, served | refused)
    assert set(ctranslate2_spec.SCALINGS) == {"none", "linear", "ntk"}
    assert set(SCALINGS) == {*ctranslate2_spec.SCALINGS, "dynamic", "yarn"}


def test_other_attention_is_refused():
    model = build_small()
    model.encoder.layers[0].self_attn = torch.nn.Identity()
    with pytest.raises(UserError, match="Identity: CTranslate2 has no such layer"):
        ctranslate2_spec.build_spec(model, model.encoder.dictionary, model.decoder.dictionary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("export") / "ct2")


def test_the_folder_needs_nothing_else_and_says_what_it_is_for(folder):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (config["max_source_positions"], config["max_target_positions"]) == (1024, 1024)
    names = {file.name for file in folder.iterdir()}
    assert {"text.json", "sentencepiece.bpe.model", "dict.en.txt", "dict.de.txt"} < names
    assert Text.load(folder).target_lang == "de"
    # One embedding for all three places, stored once.
    parameters = sum(p.numel() for p in hub_parameters())
    assert (folder / "model.bin").stat().st_size < 4.2 * parameters + 10000


def hub_parameters() -> list[torch.Tensor]:
    model = RopeTransformerModel.from_pretrained(str(tiny_work() / "model")).models[0]
    return list(model.parameters())


def test_limits_and_overrides_are_exported(tmp_path):
    output = tmp_path / "ct2"
    options = ("--max-source-positions", "1500", "--model-overrides", "{'rope_base': 50.0}")
    model = tiny_work() / "model" / "averaged.pt"
    assert call(export.main, model, "--output", output, *options) == 0
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert (config["max_source_positions"], config["max_target_positions"]) == (1500, 1551)
    with_base = RopeTransformerModel.from_pretrained(str(model.parent), rope_base=50.0)
    options = dict(beam=1, max_len_a=1, max_len_b=50)
    expected, plain = (
        hub.translate(LINES[:20], **options)
        for hub in (with_base, RopeTransformerModel.from_pretrained(str(model.parent)))
    )
    assert nearly_all(translated(output, LINES[:20], **options), expected)
    assert not nearly_all(plain, expected)


@pytest.mark.parametrize("scaling", ["linear", "ntk"])
def test_a_scaling_as_override_translates_step_by_step_alike(tmp_path, scaling):
    output, model = tmp_path / "ct2", tiny_work() / "model"
    overrides = dict(rope_scaling=scaling, rope_scaling_factor=2.0)
    command = (model, "--output", output, "--model-overrides", repr(overrides))
    assert call(export.main, *command) == 0
    options = dict(beam=1, max_len_a=1, max_len_b=50)
    scaled, plain = (
        RopeTransformerModel.from_pretrained(str(model), **given).translate(LINES[:20], **options)
        for given in (overrides, {})
    )
    assert nearly_all(translated(output, LINES[:20], **options), scaled)
    assert not nearly_all(plain, scaled)


def test_a_scaling_that_is_refused_leaves_no_folder(tmp_path, capsys):
    output, model = tmp_path / "ct2", tiny_work() / "model"
    overrides = repr(dict(rope_scaling="yarn", **LONGER))
    command = (model, "--output", output, "--model-overrides", overrides)
    assert call(export.main, *command) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: --rope-scaling yarn: CTranslate2 has none, linear, ntk"
    )
    assert not output.exists()


def test_provenance_comes_along(tmp_path):
    shutil.copytree(tiny_work() / "model", tmp_path / "model")
    (tmp_path / "model" / "data.json").write_text("{}")
    assert call(export.main, tmp_path / "model", "--output", tmp_path / "ct2") == 0
    assert (tmp_path / "ct2" / "data.json").read_text() == "{}"


def test_outputs_that_are_there_are_refused_or_replaced_whole(folder, tmp_path, capsys):
    model, output = tiny_work() / "model", tmp_path / "ct2"
    output.mkdir()
    (output / "mine").touch()
    assert call(export.main, model, "--output", output) == 2
    assert capsys.readouterr().err == (
        f"error: --output {output}: exists; name another folder, or say --force\n"
    )
    assert call(export.main, model, "--output", output, "--force") == 2
    assert "no exported model, so --force does not replace it" in capsys.readouterr().err
    assert [file.name for file in output.iterdir()] == ["mine"]
    shutil.rmtree(output)
    shutil.copytree(folder, output)
    (output / "stale").touch()
    assert call(export.main, model, "--output", output, "--force", "--quantization=int8") == 0
    assert {file.name for file in output.iterdir()} == {file.name for file in folder.iterdir()}
    assert call(export.main, model, "--output", tmp_path / "no" / "ct2") == 2
    assert "no/ct2: its parent is no folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["ct2"]


def test_an_export_that_dies_leaves_no_folder_and_the_next_one_cleans_up(tmp_path):
    output = tmp_path / "ct2"
    process = os.fork()
    if not process:
        with export.new_folder(output, False) as folder:
            (folder / "model.bin").touch()
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    assert not output.exists() and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(RuntimeError), export.new_folder(output, False) as folder:
        (folder / "model.bin").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with export.new_folder(output, False) as folder:
        (folder / "model.bin").write_text("new")
    assert [file.name for file in tmp_path.iterdir()] == ["ct2"]
    assert os.listdir(output) == ["model.bin"]


def test_a_full_disk_names_the_output_and_leaves_the_old_model(tmp_path):
    output = tmp_path / "ct2"
    output.mkdir()
    (output / "model.bin").write_text("old")
    with pytest.raises(OSError) as caught, export.new_folder(output, True):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(output)
    assert (output / "model.bin").read_text() == "old"
