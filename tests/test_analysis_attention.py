"""Attention by distance: sums over pairs of real tokens, of a model's own weights."""

import csv
import logging
from pathlib import Path

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch.testing import assert_close

from rope_fairseq.analysis.__main__ import main
from rope_fairseq.analysis.distances import ByDistance
from rope_fairseq.analysis.model import measure, recorded_weights
from rope_fairseq.multihead_attention import PositionedAttention
from rope_fairseq.position import ENCODINGS
from tests.exports import sharpened
from tests.tiny import call, python, sentences, tiny_work

LENGTHS = [5, 9, 1, 9, 3]  # end of sentence included


def random_sentences(lengths: list[int], seed: int) -> list[torch.Tensor]:
    """Token ids of the dictionary of tests.conftest.TinyTask, which end with its end (2)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.cat((torch.randint(4, 36, (n - 1,), generator=generator), torch.tensor([2])))
        for n in lengths
    ]


def weights_of(model, side: str, source: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """The weights of each layer [heads, seq_len, seq_len] for one sentence alone, without padding
    and without our hooks: computed by the modules again from what they are given."""
    given: list[tuple] = []
    modules = [layer.self_attn for layer in getattr(model, side).layers]

    def keep(module, args, kwargs):
        given.append((module, args, kwargs))

    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    with torch.no_grad():
        encoded = model.encoder(source[None], torch.tensor([len(source)]))
        if side == "decoder":
            previous = torch.cat((target[-1:], target[:-1]))
            model.decoder(previous[None], encoder_out=encoded)
        for handle in handles:
            handle.remove()
        found = []
        for module, args, kwargs in given:
            if not isinstance(module, PositionedAttention):
                module.skip_embed_dim_check = True  # else fairseq's weights are means over heads
            again = kwargs | {"need_weights": True, "need_head_weights": True}
            found.append(module(*args, **again)[1][:, 0])
    return found


def by_loops(model, side, sources, targets) -> tuple[list, dict[int, int], int]:
    """Sums by layer, head and distance; pairs by distance; queries."""
    sums: list[list[dict[int, float]]] = []
    pairs: dict[int, int] = {}
    queries = 0
    for source, target in zip(sources, targets, strict=True):
        layers = weights_of(model, side, source, target)
        sums = sums or [[{} for _ in layer] for layer in layers]
        seq_len = layers[0].size(-1)
        for query in range(seq_len):
            queries += 1
            for key in range(seq_len if side == "encoder" else query + 1):
                pairs[key - query] = pairs.get(key - query, 0) + 1
                for layer, weights in enumerate(layers):
                    for head in range(len(weights)):
                        by_head = sums[layer][head]
                        weight = weights[head, query, key].item()
                        by_head[key - query] = by_head.get(key - query, 0) + weight
    return sums, pairs, queries


CASES = {
    **{encoding: {"position_encoding": encoding} for encoding in ENCODINGS},
    "dynamic": {"rope_scaling": "dynamic", "rope_original_max_positions": 4},
    "stock": {"arch": "transformer"},
}


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", CASES)
def test_measured_attention_is_that_of_loops_over_pairs(small, name, side):
    model = sharpened(small(**CASES[name]))
    sources, targets = random_sentences(LENGTHS, 1), random_sentences(LENGTHS[::-1], 2)
    # Batches of 20 tokens: sentences of 9 and 5 are padded together.
    found = measure(model, side, sources, targets if side == "decoder" else None, pad=1, tokens=20)
    sums, pairs, queries = by_loops(model, side, sources, targets)
    assert found.queries == queries == sum(LENGTHS)
    distances = found.distances.tolist()
    assert distances == sorted(pairs) == list(range(-8, 9 if side == "encoder" else 1))
    assert found.pairs.tolist() == [pairs[distance] for distance in distances]
    expected = [
        [[head[distance] / pairs[distance] for distance in distances] for head in layer]
        for layer in sums
    ]
    assert_close(found.mean(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)
    share = found.share()
    assert_close(share.sum(-1), torch.ones(2, 4, dtype=torch.float64), rtol=0, atol=1e-6)
    mean = [
        [sum(abs(d) * weight for d, weight in head.items()) / queries for head in layer]
        for layer in sums
    ]
    expected_mean = torch.tensor(mean, dtype=torch.float64)
    assert_close(found.mean_distance(), expected_mean, rtol=0, atol=1e-5)


def test_uneven_weights_are_found_where_they_are():
    """Two sentences of 3 and 2 tokens, by hand: head 0 looks one to the left (the first token at
    itself), head 1 evenly."""
    left = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    weights = torch.zeros(2, 2, 3, 3)
    weights[0] = left
    weights[1, 0] = 1 / 3
    weights[1, 1, :, :2] = 1 / 2
    weights[:, 1, 2] = 7  # a padded query: must not count
    found = ByDistance(layers=1, heads=2, reach=2)
    found.add([weights], torch.tensor([[True, True, True], [True, True, False]]))
    assert found.pairs.tolist() == [1, 3, 5, 3, 1] and found.queries == 5
    assert found.mean()[0, 0].tolist() == [0, 1, 2 / 5, 0, 0]
    assert found.share()[0, 0].tolist() == [0, 3 / 5, 2 / 5, 0, 0]
    expected = [1 / 3, (2 / 3 + 1 / 2) / 3, (3 / 3 + 2 / 2) / 5, (2 / 3 + 1 / 2) / 3, 1 / 3]
    assert found.mean()[0, 1].tolist() == pytest.approx(expected)
    assert found.at(-1).tolist() == [[3 / 5, pytest.approx(7 / 30)]]
    assert found.at(5).tolist() == [[0, 0]]
    assert found.mean_distance()[0, 0].item() == 3 / 5


@pytest.mark.parametrize("arch", ["rope_transformer", "transformer"])
def test_recording_leaves_model_and_output_as_they_were(small, arch):
    model = small(arch)
    source = random_sentences([6], 3)[0][None]
    modules = [layer.self_attn for layer in model.encoder.layers]
    before = [dict(vars(module)) for module in modules]
    with torch.no_grad():
        plain = model.encoder(source, torch.tensor([6]))["encoder_out"][0]
        with recorded_weights(modules) as record:
            recorded = model.encoder(source, torch.tensor([6]))["encoder_out"][0]
        weights = record.take()
    assert_close(recorded, plain, rtol=0, atol=1e-5)
    assert [tuple(layer.shape) for layer in weights] == [(4, 1, 6, 6)] * 2
    assert_close(torch.stack(weights).sum(-1), torch.ones(2, 4, 1, 6))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    for module, attributes in zip(modules, before, strict=True):
        if type(module) is MultiheadAttention:
            assert module.skip_embed_dim_check == attributes["skip_embed_dim_check"]


@pytest.fixture
def text(tmp_path) -> tuple[Path, Path]:
    """Source and reference of the tiny model's language, with a line without text in each."""
    files = tmp_path / "text.en", tmp_path / "text.de"
    pairs = sentences(12, 5)
    for side, file in enumerate(files):
        lines = [pair[side] for pair in pairs]
        lines[3 + side] = " "
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def table(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_encoder_of_a_checkpoint(tmp_path, text, capsys):
    model = tiny_work() / "model"
    values = tmp_path / "values.tsv"
    assert call(main, "attention", model, text[0], "--values", values, "--longest", "4") == 0
    rows = table(values)
    assert [(row["layer"], row["head"]) for row in rows] == [("0", "0")] * 9 + [("0", "1")] * 9
    assert [int(row["distance"]) for row in rows[:9]] == list(range(-4, 5))
    for row in rows:
        queries = int(row["queries"])
        assert float(row["share"]) == pytest.approx(
            float(row["mean_weight"]) * int(row["pairs"]) / queries
        )
    printed = capsys.readouterr().out.splitlines()
    assert "11 sentences" in printed[0] and f"{rows[0]['queries']} tokens" in printed[0]
    assert len(printed) == 4  # a line about the text, a header, two heads
    cells = [float(cell) for cell in printed[2].split()]
    shares = [float(row["share"]) for row in rows[:9]]
    assert cells[:2] == [0, 0]
    assert cells[3:] == [pytest.approx(share, abs=6e-4) for share in shares[3:6]] + [
        pytest.approx(1 - sum(shares), abs=6e-4)
    ]


def test_decoder_of_a_checkpoint_by_the_command(tmp_path, text):
    pytest.importorskip("matplotlib")
    model = tiny_work() / "model" / "averaged.pt"
    figure, values = tmp_path / "figure.png", tmp_path / "values.tsv"
    result = python(
        *("rope_fairseq.analysis", "attention", model, text[0], "--side", "decoder"),
        *("--reference", text[1], "--output", figure, "--values", values),
    )
    assert result.returncode == 0, result.stderr
    assert "10 sentences" in result.stdout and "2 without text" in result.stdout
    content = figure.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) < 80 * 1024
    by_head: dict[str, float] = {}
    for row in table(values):
        assert int(row["distance"]) <= 0
        by_head[row["head"]] = by_head.get(row["head"], 0) + float(row["share"])
    # All of a toy sentence is within 20 tokens, or nearly so.
    assert by_head == {"0": pytest.approx(1, abs=0.02), "1": pytest.approx(1, abs=0.02)}


def altered(folder: Path, **options) -> Path:
    """A copy of the tiny model whose checkpoint names other options."""
    folder.mkdir()
    for file in (tiny_work() / "model").iterdir():
        if file.name != "averaged.pt":
            (folder / file.name).symlink_to(file)
    state = torch.load(tiny_work() / "model" / "averaged.pt", weights_only=True)
    for name, value in options.items():
        if isinstance(state["cfg"]["model"], dict):
            state["cfg"]["model"][name] = value
        else:
            setattr(state["cfg"]["model"], name, value)
    torch.save(state, folder / "averaged.pt")
    return folder


def test_bad_calls_are_one_line(tmp_path, text, capsys, monkeypatch):
    # A handler that another test's call left behind complains that its stream is closed.
    monkeypatch.setattr(logging.root, "handlers", [])
    model = tiny_work() / "model"
    source, reference = text
    short, empty, long = (tmp_path / name for name in ("short", "empty", "long"))
    short.write_text("öffne die Datei.\n", encoding="utf-8")
    empty.write_text("\n \n", encoding="utf-8")
    long.write_text("open the file.\n" + "open " * 1100 + "\n", encoding="utf-8")
    linear = altered(tmp_path / "linear", attention_kind="linear")
    before = sorted(tmp_path.iterdir())
    decoder = ("--side", "decoder")
    outputs = ("--output", tmp_path / "a.png", "--values", tmp_path / "a.tsv")
    missing = tmp_path / "missing"
    for words, named in (
        ((missing, source), "missing"),
        ((source, source), "text.json"),
        ((model, missing), "missing"),
        ((model, source, *decoder), "--reference"),
        ((model, source, "--reference", reference), "--reference"),
        ((model, source, *decoder, "--reference", short), "12 lines"),
        ((model, empty), "no line with text"),
        ((model, long), "line 2"),
        ((model, source, "--longest", "-1"), "--longest -1"),
        ((linear, source), "linear"),
    ):
        assert call(main, "attention", *words, *outputs) == 2, words
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and named in errors[0], captured.err
        assert "Traceback" not in captured.err and captured.out == ""
        assert sorted(tmp_path.iterdir()) == before, words
