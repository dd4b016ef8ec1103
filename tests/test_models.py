"""Registration with fairseq: every architecture through every front end gives the same model."""

import argparse
import itertools
import logging
import re

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, build_model
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer.transformer_legacy import (
    base_architecture,
    transformer_iwslt_de_en,
    transformer_wmt_en_de,
    transformer_wmt_en_de_big,
)
from omegaconf import OmegaConf

from rope_fairseq.errors import UserError
from rope_fairseq.models.config import OWN_FIELDS, SIZES
from rope_fairseq.models.rope_transformer import RopeTransformerModel
from rope_fairseq.position import ENCODINGS
from tests.conftest import SMALL, TinyTask

ARCHITECTURES = list(SIZES)


def describe(model):
    """What must be equal: shapes, the rotation's base, and dropout rates."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    spec = model.encoder.layers[0].self_attn.position.spec
    decoder_spec = model.decoder.layers[0].self_attn.position.spec
    assert spec == decoder_spec
    rates = {
        (type(m).__name__, m.p) for m in model.modules() if type(m).__name__ == "FairseqDropout"
    }
    return shapes, spec, rates


def from_command_line(arch, *extra):
    """The model of fairseq-train --arch ARCH …, and the configuration that a checkpoint keeps."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(
        parser, ["data-bin", "--arch", arch, "--optimizer", "adam", *extra]
    )
    cfg = convert_namespace_to_omegaconf(args)
    return build_model(cfg.model, TinyTask()), cfg


def from_yaml(model_section):
    """The model of fairseq-hydra-train with ``model: {…}`` in its YAML."""
    cfg = OmegaConf.create({"model": model_section})
    OmegaConf.set_struct(cfg, True)
    return build_model(cfg.model, TinyTask()), cfg


def reload(cfg):
    """The model that a checkpoint's configuration builds again."""
    stored = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    return build_model(stored.model, TinyTask(), from_checkpoint=True)


def flags(settings):
    return [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("overrides", [{}, {"encoder_layers": 3, "rope_base": 5.0}])
def test_command_line_yaml_and_reload_build_the_same_model(arch, overrides):
    with torch.device("meta"):  # shapes without the cost of the big ones' parameters
        built, cfg = from_command_line(arch, *flags(overrides))
        from_file, file_cfg = from_yaml({"_name": arch, **overrides})
        again = [reload(cfg), reload(file_cfg)]
    expected = describe(built)
    for model in (from_file, *again):
        assert describe(model) == expected
    # What was asked for is what was built, and what the checkpoint states.
    sizes = {**SIZES["rope_transformer"], **SIZES[arch], **overrides}
    assert len(built.encoder.layers) == sizes["encoder_layers"]
    assert built.encoder.embed_tokens.embedding_dim == sizes["encoder_embed_dim"]
    assert expected[1].base == sizes.get("rope_base", 10000.0)
    for configuration in (cfg, file_cfg):
        for name, value in {**sizes, "position_encoding": "rope"}.items():
            assert configuration.model[name] == value, name


@pytest.mark.parametrize(
    "arch, stock",
    [
        ("rope_transformer", base_architecture),
        ("rope_transformer_iwslt_de_en", transformer_iwslt_de_en),
        ("rope_transformer_wmt_en_de", transformer_wmt_en_de),
        ("rope_transformer_wmt_en_de_big", transformer_wmt_en_de_big),
    ],
)
def test_sizes_are_those_of_the_stock_architecture(arch, stock):
    args = argparse.Namespace()
    stock(args)
    with torch.device("meta"):
        _, cfg = from_yaml({"_name": arch})
    for name in (*SIZES["rope_transformer"], "decoder_embed_dim", "decoder_ffn_embed_dim"):
        assert cfg.model[name] == getattr(args, name), name


def test_multi30k_is_the_published_tiny_transformer():
    with torch.device("meta"):
        model, cfg = from_yaml({"_name": "rope_transformer_multi30k"})
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (4, 4)
    layer = model.decoder.layers[0]
    assert (layer.embed_dim, layer.fc1.out_features, layer.nh) == (128, 256, 4)
    assert cfg.model.dropout == 0.3


def test_all_five_are_registered_for_one_class():
    assert len(ARCHITECTURES) == 5
    assert {ARCH_MODEL_REGISTRY[a] for a in ARCHITECTURES} == {RopeTransformerModel}


def test_every_option_has_help_that_states_its_range(capsys):
    parser = argparse.ArgumentParser()
    RopeTransformerModel.add_args(parser)
    text = " ".join(parser.format_help().split())
    for words in ("rope, sinusoidal, learned, shaw", "interleaved, half", "above 0, at most 1"):
        assert words in text
    names = {name for name, *_ in OWN_FIELDS}
    own = [action for action in parser._actions if action.dest in names]
    assert len(own) == len(OWN_FIELDS) and all(action.help for action in own)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"position_encoding": "ropes"}, "--position-encoding ropes: choose from rope, sinus"),
        ({"rope_layout": "pairs"}, "--rope-layout pairs: choose from interleaved, half"),
        ({"rope_scaling": "magic"}, "--rope-scaling magic: choose from none"),
        ({"rope_base": 0.0}, "--rope-base 0.0: must be positive"),
        ({"rope_base": -5.0}, "--rope-base -5.0"),
        ({"rope_base": float("nan")}, "--rope-base nan"),
        ({"rope_fraction": 0.0}, "--rope-fraction 0.0: must be above 0"),
        ({"rope_fraction": 1.5}, "--rope-fraction 1.5"),
        ({"rope_fraction": 0.3}, "rotates 2.4 channels"),
        ({"encoder_embed_dim": 28}, "head dimension 7 .* even number"),
        ({"encoder_embed_dim": 30}, "--encoder-embed-dim 30: must be a multiple of .*heads 4"),
        ({"decoder_attention_heads": 5}, "--decoder-embed-dim 32: must be a multiple"),
        ({"encoder_learned_pos": True}, "--encoder-learned-pos: say it with --position-enc"),
        ({"decoder_learned_pos": True}, "--decoder-learned-pos"),
        ({"no_token_positional_embeddings": True}, "--no-token-positional-embeddings"),
        ({"encoder_xformers_att_config": "{}"}, "xformers"),
        ({"decoder_xformers_att_config": "{}"}, "xformers"),
        ({"cross_self_attention": True}, "--cross-self-attention: not served"),
        ({"enoder_layers": 3}, "model option enoder_layers: not an option of rope_transformer_"),
        ({"encoder_layers": "many"}, "encoder_layers: Value 'many'"),
    ],
)
def test_options_outside_their_range_are_refused_in_one_line(settings, message):
    with pytest.raises(UserError, match=message) as refused:
        from_yaml({"_name": "rope_transformer_multi30k", **SMALL, **settings})
    assert "\n" not in str(refused.value)


def test_supervised_alignment_is_refused(small):
    task = TinyTask()
    task.cfg.load_alignments = True
    with pytest.raises(UserError, match="--load-alignments"):
        build_model(argparse.Namespace(_name="rope_transformer", **SMALL), task)


def test_the_training_log_states_the_encoding(small, caplog):
    with caplog.at_level(logging.INFO):
        small(rope_base=500.0, rope_layout="half")
    assert (
        "position encoding: rope (base 500, layout half, fraction 1, scaling none)" in caplog.text
    )


@pytest.mark.parametrize(
    "encoding, kind",
    [
        ("rope", None),
        ("none", None),
        ("sinusoidal", "SinusoidalPositionalEmbedding"),
        ("learned", "LearnedPositionalEmbedding"),
    ],
)
def test_each_encoding_has_its_own_embeddings_and_no_other(small, encoding, kind):
    model = small(position_encoding=encoding)
    for side in (model.encoder, model.decoder):
        assert (side.embed_positions and type(side.embed_positions).__name__) == kind
        position = side.layers[0].self_attn.position
        assert (type(position).__name__ == "RotaryPositionEncoding") == (encoding == "rope")


def stock_model(**extra):
    torch.manual_seed(7)
    args = argparse.Namespace(**SMALL, **extra)
    base_architecture(args)
    return TransformerModel.build_model(args, TinyTask()).eval()


@pytest.mark.parametrize(
    "encoding, extra",
    [
        ("sinusoidal", {}),
        ("learned", {"encoder_learned_pos": True, "decoder_learned_pos": True}),
        ("none", {"no_token_positional_embeddings": True}),
    ],
)
def test_stock_weights_give_stock_outputs(small, encoding, extra):
    stock = stock_model(**extra)
    model = small(position_encoding=encoding)
    model.load_state_dict(stock.state_dict(), strict=True, model_cfg=model.cfg)
    src, prev = torch.randint(4, 36, (2, 9)), torch.randint(4, 36, (2, 7))
    src[1, :4] = 1  # left-padded, as fairseq pads sources
    expected, _ = stock(src, torch.tensor([9, 5]), prev)
    actual, _ = model(src, torch.tensor([9, 5]), prev)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_a_stock_checkpoint_starts_a_rope_model_and_its_positions_are_dropped(small, caplog):
    stock = stock_model(encoder_learned_pos=True, decoder_learned_pos=True)
    model = small()
    with caplog.at_level(logging.INFO):
        model.load_state_dict(stock.state_dict(), strict=True, model_cfg=model.cfg)
    assert "dropping encoder.embed_positions.weight" in caplog.text
    assert "dropping decoder.embed_positions.weight" in caplog.text
    torch.testing.assert_close(
        model.decoder.layers[1].fc1.weight, stock.decoder.layers[1].fc1.weight
    )


def test_old_checkpoints_with_fused_projections_load(small):
    model = small()
    state = model.state_dict()
    for kind in ("weight", "bias"):
        parts = [f"encoder.layers.0.self_attn.{p}_proj.{kind}" for p in "qkv"]
        state[f"encoder.layers.0.self_attn.in_proj_{kind}"] = torch.cat(
            [state.pop(part) for part in parts]
        )
    other = small(seed=3)
    other.load_state_dict(state, strict=True, model_cfg=model.cfg)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_layers_can_be_pruned_at_load(small):
    model = small(encoder_layers=4)
    pruned, cfg = from_yaml(
        {
            "_name": "rope_transformer",
            **SMALL,
            "encoder_layers": 4,
            "encoder_layers_to_keep": "0,3",
            # fairseq loses the decoder's layers unless they are named too.
            "decoder_layers_to_keep": "0,1",
        }
    )
    pruned.load_state_dict(model.state_dict(), strict=True, model_cfg=cfg.model)
    assert len(pruned.encoder.layers) == 2
    assert torch.equal(pruned.encoder.layers[1].fc1.weight, model.encoder.layers[3].fc1.weight)


def test_the_cutoffs_of_adaptive_softmax_may_be_text(small):
    model = small(adaptive_softmax_cutoff="10,20")
    assert model.decoder.adaptive_softmax.cutoff[:2] == [10, 20]


def test_attention_dropout_has_the_name_that_retain_dropout_modules_knows(small):
    model = small()
    assert model.encoder.layers[0].self_attn.dropout_module.module_name == "MultiheadAttention"


OTHERS = list(itertools.permutations(ENCODINGS, 2))


@pytest.mark.parametrize("before, after", OTHERS, ids=["-".join(pair) for pair in OTHERS])
def test_a_model_goes_on_with_another_encoding(small, before, after):
    """With all of its own parameters but the positions', which begin anew."""
    model = small(position_encoding=after, seed=5)
    fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = small(position_encoding=before).state_dict()
    model.load_state_dict(dict(state))
    for name, tensor in model.state_dict().items():
        is_position = {"embed_positions", "shared_positions", "position"} & set(name.split("."))
        assert torch.equal(tensor, fresh[name] if is_position else state[name]), name


@pytest.mark.parametrize("encoding", ["learned", "shaw", "transformer-xl", "t5", "deberta"])
def test_a_checkpoint_that_lacks_some_positions_is_refused(small, encoding):
    state = small(position_encoding=encoding).state_dict()
    decoders = [n for n in state if n.startswith("decoder.") and "position" in n]
    assert decoders
    for name in decoders:
        del state[name]
    with pytest.raises(RuntimeError, match="Missing key"):
        small(position_encoding=encoding).load_state_dict(state)


@pytest.mark.parametrize("encoding", ["shaw", "transformer-xl", "t5", "tupe", "deberta"])
def test_the_layers_that_are_kept_keep_their_positions(small, encoding):
    whole = small(position_encoding=encoding, encoder_layers=3, decoder_layers=3)
    kept = {"encoder_layers_to_keep": "0,2", "decoder_layers_to_keep": "0,2"}
    sizes = {"position_encoding": encoding, "encoder_layers": 3, "decoder_layers": 3}
    model = small(**sizes, **kept, seed=5)
    cfg = OmegaConf.create({"_name": "rope_transformer", **sizes, **kept})
    model.load_state_dict(whole.state_dict(), model_cfg=cfg)
    state, expected = model.state_dict(), whole.state_dict()
    for name in state:
        source = name.replace(".layers.1.", ".layers.2.")
        assert torch.equal(state[name], expected[source]), name


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"position_encoding": "alibi", "rope_scaling": "linear", "rope_scaling_factor": 2.0},
            "--rope-scaling linear: has no effect with --position-encoding alibi",
        ),
        (
            {"rope_scaling_factor": 2.0},
            "--rope-scaling-factor 2: has no effect without --rope-scaling",
        ),
        ({"relative_buckets": 7}, "--relative-buckets 7: must be even and at least 4"),
        ({"relative_max_distance": 0}, "--relative-max-distance 0: must be at least 1"),
        (
            {"position_encoding": "t5", "relative_max_distance": 16},
            "--relative-max-distance 16: must be above half of --relative-buckets 32",
        ),
    ],
)
def test_options_of_encodings_are_checked(small, settings, message):
    with pytest.raises(UserError, match="^" + re.escape(message)):
        small(**settings)
