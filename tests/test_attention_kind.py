"""--attention-kind linear in a whole model: options, checkpoints, training of all feature maps."""

import logging

import pytest
import torch

from rope_fairseq.errors import UserError
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.multihead_linear_attention import LinearSelfAttention

LINEAR = {"attention_kind": "linear"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_kind": "square"}, "--attention-kind square: choose from softmax, linear"),
        ({"linear_feature_map": "favor"}, "favor: has no effect with --attention-kind softmax"),
        ({"linear_features": 8}, "8: has an effect with --linear-feature-map favor only"),
        ({**LINEAR, "linear_features": 8}, "8: has an effect with --linear-feature-map favor only"),
        (
            {**LINEAR, "linear_feature_map": "relu"},
            "--linear-feature-map relu: choose from elu, softmax, favor",
        ),
        (
            {**LINEAR, "linear_feature_map": "favor", "linear_features": 0},
            "--linear-features 0: must be at least 1",
        ),
        (
            {**LINEAR, "linear_feature_map": "favor", "linear_features": 9},
            "--linear-features 9 with --rope-fraction 1.0 rotates 9 channels: .*"
            "change --linear-features or the fraction",
        ),
        *(
            (
                {**LINEAR, "position_encoding": name},
                f"--position-encoding {name}: changes scores, which --attention-kind linear does "
                "not have; choose from rope, sinusoidal, learned, none",
            )
            for name in ("shaw", "transformer-xl", "t5", "tupe", "deberta", "alibi")
        ),
        (
            {
                **LINEAR,
                "rope_scaling": "yarn",
                "rope_scaling_factor": 2.0,
                "rope_original_max_positions": 8,
            },
            "--rope-scaling yarn: has a temperature of the softmax",
        ),
    ],
)
def test_refused_in_one_line(small, options, message):
    with pytest.raises(UserError, match=message) as refused:
        small(**options)
    assert "\n" not in str(refused.value)


def test_self_attention_is_linear_and_cross_attention_is_not(small):
    model = small(**LINEAR)
    layers = [*model.encoder.layers, *model.decoder.layers]
    assert {type(layer.self_attn) for layer in layers} == {LinearSelfAttention}
    assert {type(layer.encoder_attn) for layer in model.decoder.layers} == {PositionedAttention}
    assert {type(layer.self_attn) for layer in small().encoder.layers} == {PositionedAttention}


def test_the_training_log_states_the_kind(small, caplog):
    with caplog.at_level(logging.INFO):
        small()
        small(**LINEAR, linear_feature_map="favor", linear_features=8)
    assert "attention kind: softmax" in caplog.text
    assert "attention kind: linear (favor, 8 features)" in caplog.text


def output(model):
    tokens = torch.arange(4, 13).view(1, -1)
    return model(tokens, torch.tensor([9]), tokens)[0]


def test_weights_of_a_softmax_model_begin_a_linear_one(small, caplog):
    """Parameters are the same; Performer's random features begin as they were drawn."""
    softmax, model = small(), small(**LINEAR, linear_feature_map="favor", seed=2)
    drawn = model.encoder.layers[0].self_attn.feature_map.projection.clone()
    with caplog.at_level(logging.INFO):
        model.load_state_dict(softmax.state_dict(), model_cfg=model.cfg)
    name = "encoder.layers.0.self_attn.feature_map.projection"
    assert f"{name} is not in the checkpoint: begins with its initial value" in caplog.text
    assert torch.equal(model.encoder.layers[0].self_attn.feature_map.projection, drawn)
    assert torch.equal(model.encoder.layers[0].fc1.weight, softmax.encoder.layers[0].fc1.weight)
    with caplog.at_level(logging.INFO):
        softmax.load_state_dict(model.state_dict(), model_cfg=softmax.cfg)
    assert f"dropping {name} of the checkpoint: not of this kind of attention" in caplog.text


def test_another_number_of_random_features_is_refused_in_one_line(small):
    favor = {**LINEAR, "linear_feature_map": "favor"}
    model = small(**favor, linear_features=8)
    message = "--linear-features 16: the checkpoint's .* has 8 random features a head; say .* 8$"
    with pytest.raises(UserError, match=message):
        small(**favor, linear_features=16).load_state_dict(model.state_dict())


def test_half_of_the_random_features_are_a_damaged_checkpoint(small):
    model = small(**LINEAR, linear_feature_map="favor")
    state = model.state_dict()
    del state["encoder.layers.1.self_attn.feature_map.projection"]
    with pytest.raises(RuntimeError, match="feature_map.projection"):
        small(**LINEAR, linear_feature_map="favor").load_state_dict(state, model_cfg=model.cfg)


def test_feature_maps_and_kinds_differ(small):
    models = [small()]
    models += [small(**LINEAR, linear_feature_map=name) for name in ("elu", "softmax", "favor")]
    for model in models:  # Performer's random features are drawn aside
        assert torch.equal(
            model.decoder.layers[1].fc1.weight, models[0].decoder.layers[1].fc1.weight
        )
    outputs = list(map(output, models))
    for number, one in enumerate(outputs):
        assert all((one - other).abs().max() > 1e-3 for other in outputs[:number])


def test_random_features_approach_softmax_attention(small):
    """Without rotation and with many features Performer's attention estimates softmax attention;
    with few it does worse."""
    expected = output(small(position_encoding="sinusoidal"))
    errors = []
    for features in (8, 4096):
        favor = dict(linear_feature_map="favor", linear_features=features)
        model = small(**LINEAR, position_encoding="sinusoidal", **favor)
        model.load_state_dict(small(position_encoding="sinusoidal").state_dict())
        errors.append((output(model) - expected).abs().max().item())
    assert errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_no_mask_of_the_future_grows_with_the_square_of_the_length(small, kind):
    model = small(attention_kind=kind)
    given = []
    for layer in model.decoder.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, options: given.append(options["attn_mask"]), with_kwargs=True
        )
    output(model)
    assert [mask.numel() for mask in given] == [0, 0]
    assert model.decoder._future_mask.numel() == 0


@pytest.mark.parametrize("name", ["elu", "softmax", "favor"])
def test_it_learns_to_look_back(small, name):
    """Two words take turns: which comes next says only self-attention, as the source is always the
    same and the word before is the other one."""
    model = small(**LINEAR, linear_feature_map=name, seed=3).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(0)
    source = torch.arange(4, 8).expand(32, -1)
    for _ in range(60):
        words = torch.rand(32, 8, generator=numbers).argsort(1)[:, :2] + 12  # two of eight
        target = words.repeat(1, 3)
        previous = torch.cat((torch.full((32, 1), 2), target[:, :-1]), dim=1)
        logits = model(source, torch.full((32,), 4), previous)[0][:, 2:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.0  # without self-attention ln 7 = 1.95: one of the seven other words
