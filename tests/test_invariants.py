"""What must hold for the whole model, whatever the encoding."""

import copy

import pytest
import torch

from rope_fairseq.position import ENCODINGS

PAD, EOS = 1, 2
VARIANTS = [
    {"position_encoding": "rope"},
    {"position_encoding": "rope", "rope_layout": "half"},
    {"position_encoding": "rope", "rope_fraction": 0.5, "rope_base": 100.0},
    *({"position_encoding": name} for name in ENCODINGS if name != "rope"),
]
IDS = [" ".join(map(str, variant.values())) for variant in VARIANTS]
every_encoding = pytest.mark.parametrize("options", VARIANTS, ids=IDS)


def sentences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 36, (n,), generator=generator) for n in lengths]


def collate(rows, left=False, width=None):
    width = width or max(map(len, rows))
    batch = torch.full((len(rows), width), PAD)
    for row, tokens in zip(batch, rows, strict=True):
        (row[width - len(tokens) :] if left else row[: len(tokens)]).copy_(tokens)
    return batch


def log_probs(model, source, target, src_left=False, tgt_left=False, width=None):
    """Log-probabilities [tgt_len, vocab] of each sentence, padding cut off."""
    src = collate(source, src_left, width)
    prev = collate(target, tgt_left, width)
    lengths = torch.tensor([len(s) for s in source])
    out, _ = model(src, lengths, prev)
    out = out.log_softmax(-1)
    return [
        row[len(row) - len(t) :] if tgt_left else row[: len(t)]
        for row, t in zip(out, target, strict=True)
    ]


def assert_equal(actual, expected, tolerance=1e-5):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=tolerance, rtol=0)


@every_encoding
@pytest.mark.parametrize("pre_norm", [False, True])
def test_left_right_and_no_padding_agree(small, options, pre_norm):
    model = small(**options, encoder_normalize_before=pre_norm, decoder_normalize_before=pre_norm)
    source, target = sentences([9, 4, 1]), sentences([7, 8, 2], seed=1)
    alone = [log_probs(model, [s], [t])[0] for s, t in zip(source, target, strict=True)]
    for src_left in (False, True):
        for tgt_left in (False, True):
            for width in (None, 15):
                batched = log_probs(model, source, target, src_left, tgt_left, width)
                assert_equal(batched, alone)


@every_encoding
def test_incremental_decoding_equals_full_decoding_under_reordering(small, options):
    model = small(**options)
    # Two sentences of two beams each.
    source, beams = collate(sentences([9, 4]), left=True), torch.tensor([0, 0, 1, 1])
    encoder_out = model.encoder(source, torch.tensor([9, 4]))
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, beams)
    target = collate(sentences([12] * 4, seed=1))
    # What beam search does: both beams continue one, beams change places, a sentence ends.
    reorder = {3: [1, 1, 2, 3], 6: [1, 0, 3, 2], 8: [2, 3]}
    state: dict = {}
    prefix = target[:, :1]
    for step in range(12):
        logits, _ = model.decoder(prefix, encoder_out=encoder_out, incremental_state=state)
        full, _ = model.decoder(prefix, encoder_out=encoder_out)
        torch.testing.assert_close(
            logits[:, -1].log_softmax(-1), full[:, -1].log_softmax(-1), atol=1e-5, rtol=0
        )
        if step in reorder:
            order = torch.tensor(reorder[step])
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            prefix, target = prefix[order], target[order]
        prefix = torch.cat((prefix, target[:, step + 1 : step + 2]), dim=1)


@every_encoding
def test_no_output_sees_a_later_input(small, options):
    model = small(**options)
    embedded = []
    model.decoder.embed_tokens.register_forward_hook(
        lambda module, args, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
    )
    src, prev = collate(sentences([6])), collate(sentences([7], seed=1))
    logits, _ = model(src, torch.tensor([6]), prev)
    decoder_input = embedded[-1]
    for t in range(7):
        (gradient,) = torch.autograd.grad(
            logits[0, t].log_softmax(-1)[5], decoder_input, retain_graph=True
        )
        assert gradient[0, t + 1 :].eq(0).all()
        assert gradient[0, : t + 1].abs().sum(-1).gt(0).all()


@every_encoding
def test_a_copy_and_a_reloaded_model_are_the_same_model(small, options):
    model = small(**options)
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    expected = log_probs(model, source, target)
    other = small(**options, seed=9)
    other.load_state_dict(model.state_dict())
    assert_equal(log_probs(copy.deepcopy(model), source, target), expected, 0)
    assert_equal(log_probs(other, source, target), expected, 0)


@every_encoding
def test_activation_checkpointing_gives_the_same_gradients(small, options):
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    gradients = []
    for checkpointing in (False, True):
        model = small(**options, checkpoint_activations=checkpointing).train()
        sum(out[:, 7].sum() for out in log_probs(model, source, target)).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@every_encoding
def test_every_parameter_gets_a_gradient(small, options):
    model = small(**options).train()
    source, target = sentences([5, 3]), sentences([4, 6], seed=1)
    sum(out[:, 7].sum() for out in log_probs(model, source, target)).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # A constant added to all keys of a query changes no softmax: k_proj.bias has none by nature,
    # except under rope, where it is rotated to a different vector at each position.
    assert [n for n in missing if not n.endswith("k_proj.bias")] == []


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_scores_are_the_same_when_all_positions_are_shifted(small, monkeypatch, layout):
    model = small(position_encoding="rope", rope_layout=layout)
    source, target = sentences([9, 4]), sentences([7, 8], seed=1)
    expected = log_probs(model, source, target)
    position = type(model.encoder.layers[0].self_attn.position)
    original = position.rotation
    seen = []

    def shifted(self, seq_len, offset, device, lengths):
        seen.append(offset)
        return original(self, seq_len, offset + 1000, device, lengths)

    monkeypatch.setattr(position, "rotation", shifted)
    assert_equal(log_probs(model, source, target), expected, 1e-4)
    assert len(seen) == 4  # two encoder layers, two decoder layers


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if e != "none"])
def test_the_order_of_the_words_matters(small, encoding):
    model = small(position_encoding=encoding)
    source, target = sentences([6]), sentences([4], seed=1)
    expected = log_probs(model, source, target)[0]
    swapped = log_probs(model, [source[0].flip(0)], target)[0]
    assert (swapped - expected).abs().max() > 1e-3


def test_without_an_encoding_the_encoder_sees_a_bag_of_words(small):
    model = small(position_encoding="none")
    source, target = sentences([6]), sentences([4], seed=1)
    expected = log_probs(model, source, target)
    assert_equal(log_probs(model, [source[0].flip(0)], target), expected)


@every_encoding
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_precision(small, options, dtype):
    source, target = sentences([40]), sentences([40], seed=1)
    model = small(**options)
    expected = log_probs(model, source, target)
    actual = log_probs(model.to(dtype), source, target)
    assert_equal([a.float() for a in actual], expected, 0.15 if dtype == torch.bfloat16 else 0.03)


@every_encoding
def test_autocast_trains(small, options):
    model = small(**options).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = log_probs(model, sentences([5, 3]), sentences([4, 6], seed=1))
    sum(o[:, 7].float().sum() for o in out).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attention_weights_are_computed_for_a_reader_only(small):
    model = small()
    src, prev = collate(sentences([5])), collate(sentences([4], seed=1))
    lengths = torch.tensor([5])
    assert model.train()(src, lengths, prev)[1]["attn"] == [None]
    assert model(src, lengths, prev, alignment_layer=0)[1]["attn"][0].shape == (1, 4, 5)
    assert model.eval()(src, lengths, prev)[1]["attn"][0].shape == (1, 4, 5)
    model.make_generation_fast_(need_attn=False)
    assert model(src, lengths, prev)[1]["attn"] == [None]
    model = small()
    model.make_generation_fast_(need_attn=True)
    torch.testing.assert_close(model(src, lengths, prev)[1]["attn"][0].sum(-1), torch.ones(1, 4))
