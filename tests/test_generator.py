"""The task rope_translation: its search gives what fairseq's own gives."""

import argparse
import functools
import itertools
import math
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils, search
from fairseq.models import build_model
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationConfig, TranslationTask

from rope_fairseq import generator as generator_module
from rope_fairseq.candidates import BLOCK, best_of_beams, top_k
from rope_fairseq.errors import UserError
from rope_fairseq.generator import BeamSearchGenerator
from rope_fairseq.position import ENCODINGS
from rope_fairseq.tasks.rope_translation import RopeTranslationConfig, RopeTranslationTask
from tests.conftest import SMALL, TinyTask
from tests.tiny import python, tiny_work

SYMBOLS = 150
MAX_POSITIONS = 31
# Which of two hypotheses comes first is the processor's choice where scores are as near as this.
# Of models in float64 both searches get the same logits, and add them up in the same float32: only
# equal scores remain.
NEAR = 1e-5


def tasks(symbols=SYMBOLS):
    """fairseq's task and ours, with one dictionary."""
    words = TinyTask(symbols).target_dictionary
    stock = TranslationTask(TranslationConfig(), words, words)
    return stock, RopeTranslationTask(RopeTranslationConfig(), words, words)


@functools.cache
def model(arch="rope_transformer", seed=1, symbols=SYMBOLS, **options):
    """A random model in float64 with opinions: its distributions are far from uniform."""
    torch.manual_seed(seed)
    limits = dict(max_source_positions=MAX_POSITIONS, max_target_positions=MAX_POSITIONS)
    args = argparse.Namespace(_name=arch, share_all_embeddings=True, **SMALL, **limits, **options)
    if arch == "transformer":
        args.arch = arch
        base_architecture(args)
    built = build_model(args, TinyTask(symbols)).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return built


def batch(task, lengths=(9, 3, 7, 9, 5), seed=0):
    numbers = torch.Generator().manual_seed(seed)
    size = len(task.source_dictionary)
    words = [torch.randint(4, size, (n - 1,), generator=numbers) for n in lengths]
    sources = [torch.cat((line, torch.tensor([2]))) for line in words]
    dataset = task.build_dataset_for_inference(sources, list(lengths))
    return dataset.collater([dataset[index] for index in range(len(sources))])


def near_ties(near, step, lprobs, scores, tokens):
    """[sentences], True where two candidates of a step (fairseq's arguments) are nearly equal."""
    sentences, beam, vocabulary = lprobs.shape
    sums = lprobs[:, :1] if step == 0 else lprobs + scores[:, :, step - 1, None]
    values, best = sums.flatten(1).topk(min(2 * beam + 1, sums[0].numel()))
    before = tokens.view(sentences, beam, -1)[torch.arange(sentences)[:, None], best // vocabulary]
    texts = torch.cat((before, (best % vocabulary)[..., None]), dim=-1)
    ties = values[:, :-1] - values[:, 1:] < near
    return (ties & (texts[:, :-1] != texts[:, 1:]).any(-1)).any(1)


def both(models, sample=None, prefix=None, symbols=SYMBOLS, near=NEAR, **options):
    """The hypotheses of fairseq's search and of ours; None where nearly equal scores decided."""
    stock, ours = tasks(symbols)
    args = argparse.Namespace(**{"beam": 4, "max_len_b": 12, **options})
    sample = batch(stock) if sample is None else sample
    results, undecided = [], set()
    for task, kind in ((stock, SequenceGenerator), (ours, BeamSearchGenerator)):
        built = task.build_generator(models, args)
        assert type(built) is kind
        if kind is SequenceGenerator:
            step = built.search.step

            def watched(*given, step=step):
                undecided.update(given[-1][near_ties(near, *given[:-1])].tolist())
                return step(*given)

            built.search.step = watched
        given = None if prefix is None else prefix.clone()
        results.append(task.inference_step(built, models, sample, prefix_tokens=given))
    for number, name in enumerate(sample["id"].tolist()):
        order = itertools.pairwise(results[0][number])
        if name in undecided or any(
            one["score"] - other["score"] < near and not torch.equal(one["tokens"], other["tokens"])
            for one, other in order
        ):
            results[0][number] = results[1][number] = None
    return results


def assert_same(expected, found):
    pairs = [pair for pair in zip(expected, found, strict=True) if None not in pair]
    assert len(pairs) >= len(expected) // 2
    for of_stock, of_ours in pairs:
        assert [h["tokens"].tolist() for h in of_stock] == [h["tokens"].tolist() for h in of_ours]
        for one, other in zip(of_stock, of_ours, strict=True):
            for name in ("score", "positional_scores"):
                torch.testing.assert_close(other[name], one[name], atol=1e-4, rtol=1e-4)
            assert other["alignment"].numel() == one["alignment"].numel() == 0


OPTIONS = [
    {},
    {"beam": 1},
    {"beam": 7, "min_len": 3},
    {"min_len": 0},
    {"min_len": 12},
    {"lenpen": 0.6},
    {"lenpen": 1.7},
    {"unnormalized": True},
    {"unkpen": 2.0},
    {"unkpen": -8.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"no_repeat_ngram_size": 2},
    {"max_len_a": 1, "max_len_b": 0},
    {"max_len_b": 200},  # more than the model's positions: some sentences never end by themselves
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("arch", ["rope_transformer", "transformer"])
def test_every_option_gives_the_hypotheses_and_scores_of_fairseq(arch, options):
    one, other = model(arch, 1), model(arch, 2)
    assert_same(*both([one], **options))
    assert_same(*both([one, other], **options))


# Lengths on both sides of the original one; a target is scaled from 5 source tokens on.
DYNAMIC = {"rope_scaling": "dynamic", "rope_original_max_positions": 7, "rope_target_extra": 3}


@pytest.mark.parametrize(
    "encoding",
    [{"position_encoding": name} for name in ENCODINGS if name != "rope"]
    + [DYNAMIC, {"attention_kind": "linear"}],
    ids=lambda encoding: "-".join(map(str, encoding.values())),
)
@pytest.mark.parametrize("options", [{}, {"beam": 1}, {"beam": 7, "min_len": 3}], ids=str)
def test_every_encoding_is_searched_as_by_fairseq(encoding, options):
    one, other = model(seed=1, **encoding), model(seed=2)
    assert_same(*both([one], **options))
    assert_same(*both([one, other], **options))
    prefix = torch.randint(4, SYMBOLS, (5, 3), generator=torch.Generator().manual_seed(9))
    assert_same(*both([one], prefix=prefix, **options))


@pytest.mark.parametrize("seed", range(3, 8))
def test_prefixes_short_ones_and_ended_ones(seed):
    prefix = torch.randint(4, SYMBOLS, (5, 3), generator=torch.Generator().manual_seed(seed))
    prefix[0, 2] = 2  # the end of sentence
    prefix[1, 1:] = 1  # padding
    prefix[2, 1:] = torch.tensor([2, 1])
    for options in ({}, {"min_len": 6}, {"beam": 2, "max_len_b": 3}):
        assert_same(*both([model(seed=seed)], prefix=prefix, **options))


def test_one_sentence_and_many_lengths():
    stock, _ = tasks()
    for lengths in ((1,), (8,), (2, 30, 11, 4, 19, 3, 25, 7, 13)):
        assert_same(*both([model()], batch(stock, lengths), max_len_a=1, max_len_b=10))


def test_a_vocabulary_smaller_than_the_candidates():
    small = model(symbols=3)
    stock, _ = tasks(3)
    for beam in (3, 20):
        assert_same(*both([small], batch(stock), symbols=3, beam=beam, max_len_b=5))


def test_chunks_of_sentences_change_nothing(monkeypatch):
    whole = both([model()])[1]
    monkeypatch.setattr(generator_module, "CHUNK", 1)
    assert_same(whole, both([model()])[1])


def test_models_prepared_for_inference():
    prepared = model.__wrapped__("rope_transformer", 4)
    before = both([prepared])
    prepared.make_generation_fast_(beamable_mm_beam_size=4)
    after = both([prepared])
    assert_same(*after)
    assert_same(before[0], after[1])
    assert_same(*both([prepared], beam=3))  # another beam than the one it was prepared for


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alignments_are_the_same_where_beams_share_keys(kind):
    args = argparse.Namespace(beam=3, max_len_b=8, print_alignment=kind)
    built = model.__wrapped__("rope_transformer", 9)
    task, results = tasks()[1], []
    for prepare in (False, True):
        if prepare:
            built.make_generation_fast_(need_attn=kind, beamable_mm_beam_size=3)
        results.append(
            task.inference_step(task.build_generator([built], args), [built], batch(task))
        )
    for one, other in zip(*results, strict=True):
        for before, after in zip(one, other, strict=True):
            torch.testing.assert_close(before["attention"], after["attention"])
            assert len(before["alignment"]) == len(after["alignment"]) > 0
            if kind == "hard":
                assert before["alignment"] == after["alignment"]


def test_a_search_leaves_the_models_as_they_were():
    one = model.__wrapped__("transformer", 5)
    first, _ = both([one])
    again, _ = both([one], beam=4)
    assert_same(first, again)


def test_ties_have_equal_scores():
    flat = model.__wrapped__("rope_transformer", 6)
    with torch.no_grad():
        flat.decoder.embed_tokens.weight.zero_()
    stock, ours = both([flat], near=0, min_len=3, max_len_b=5)
    for one, other in zip(stock, ours, strict=True):
        scores = [torch.stack([h["score"] for h in hypotheses]) for hypotheses in (one, other)]
        torch.testing.assert_close(*scores)


def test_a_model_that_gives_no_numbers_is_one_line():
    broken = model.__wrapped__("rope_transformer", 7)
    with torch.no_grad():
        broken.decoder.layer_norm = None
        broken.decoder.layers[0].fc1.weight.fill_(math.nan)
    task = tasks()[1]
    built = task.build_generator([broken], argparse.Namespace(beam=2, max_len_b=4))
    with pytest.raises(UserError, match="no hypothesis has a finite score"):
        task.inference_step(built, [broken], batch(task))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "--beam 0: must be at least 1"),
        ({"temperature": 0.0}, "--temperature 0.0: must be greater than 0"),
        ({"min_len": 9, "max_len_b": 8}, "--min-len 9: more than the longest"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    task = tasks()[1]
    with pytest.raises(UserError, match=message):
        built = task.build_generator([model()], argparse.Namespace(**options))
        task.inference_step(built, [model()], batch(task))


def test_constraints_need_their_option():
    task = tasks()[1]
    built = task.build_generator([model()], argparse.Namespace(beam=2))
    with pytest.raises(UserError, match="constraints: not served"):
        task.inference_step(built, [model()], batch(task), constraints=torch.zeros(5, 1))


@pytest.mark.parametrize(
    ("options", "kind", "strategy"),
    [
        ({"sampling": True, "sampling_topk": 3}, SequenceGenerator, search.Sampling),
        ({"diverse_beam_groups": 2}, SequenceGenerator, search.DiverseBeamSearch),
        ({"diversity_rate": 0.5}, SequenceGenerator, search.DiverseSiblingsSearch),
        ({"match_source_len": True}, SequenceGenerator, search.LengthConstrainedBeamSearch),
        ({"constraints": "ordered"}, SequenceGenerator, search.LexicallyConstrainedBeamSearch),
        ({"retain_dropout": True}, SequenceGenerator, search.BeamSearch),
        ({"print_alignment": "hard"}, SequenceGeneratorWithAlignment, search.BeamSearch),
        ({"score_reference": True}, SequenceScorer, None),
    ],
)
def test_other_searches_are_those_of_fairseq(options, kind, strategy):
    task = tasks()[1]
    built = task.build_generator([model()], argparse.Namespace(**options))
    assert type(built) is kind
    if strategy is not None:
        assert type(built.search) is strategy


def test_what_a_caller_hands_over_is_used():
    task = tasks()[1]
    args = argparse.Namespace()
    for settings in (
        dict(extra_gen_cls_kwargs={"lm_model": model(seed=2), "lm_weight": 0.5}),
        dict(extra_gen_cls_kwargs={"max_len": 7}),
        dict(prefix_allowed_tokens_fn=lambda number, tokens: [4]),
    ):
        built = task.build_generator([model()], args, **settings)
        assert isinstance(built, SequenceGenerator)
    given = task.build_generator([model()], args, seq_gen_cls=mock.Mock(return_value="given"))
    assert given == "given"
    none = {"lm_model": None, "lm_weight": 1.0}  # as fairseq-generate calls it
    built = task.build_generator([model()], args, extra_gen_cls_kwargs=none)
    assert type(built) is BeamSearchGenerator


def test_only_models_whose_decoding_is_known_are_searched():
    class Derived(type(model())):
        pass

    other = model.__wrapped__("rope_transformer", 8)
    other.__class__ = Derived
    built = tasks()[1].build_generator([model(), other], argparse.Namespace())
    assert isinstance(built, SequenceGenerator)


@pytest.mark.parametrize("width", [7, 2 * 5 * BLOCK - 1, 2 * 5 * BLOCK, 11 * BLOCK + 3])
def test_top_k_is_that_of_torch(width):
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    x[1] = -math.inf
    x[2, : width // 2] = -math.inf
    x[3, -5:] = 9.0 + torch.arange(5)  # behind the last whole block
    values, indices = top_k(x, 5)
    assert torch.equal(values, x.topk(5).values)
    assert torch.equal(x.gather(1, indices), values)
    assert all(len(set(row)) == 5 for row in indices.tolist())


def test_best_of_beams_chooses_among_all_beams_of_a_sentence():
    values = torch.tensor([[[3.0, 1.0], [4.0, 2.0]], [[8.0, 7.0], [6.0, 5.0]]])
    tokens = torch.tensor([[[10, 11], [12, 13]], [[14, 15], [16, 17]]])
    scores, chosen, beams = best_of_beams(values, tokens, 3)
    assert scores.tolist() == [[4.0, 3.0, 2.0], [8.0, 7.0, 6.0]]
    assert chosen.tolist() == [[12, 10, 13], [14, 15, 16]]
    assert beams.tolist() == [[1, 0, 1], [0, 0, 1]]


def test_a_trained_model_on_the_command_line_translates_as_with_fairseqs_task():
    """The checkpoint's own task is ``translation``."""
    work = tiny_work()
    outputs = []
    for task in ("translation", "rope_translation"):
        result = python(
            *("fairseq_cli.generate", work / "data-bin", "--user-dir", "rope_fairseq"),
            *("--task", task, "--path", work / "model" / "averaged.pt", "--beam", "4"),
            *("--nbest", "3", "--lenpen", "0.6", "--max-len-a", "1", "--no-progress-bar"),
        )
        assert result.returncode == 0, result.stderr
        sentences = {}
        for line in result.stdout.split("\n"):
            if line[:2] in ("H-", "P-"):
                sentences.setdefault(line[2:].split()[0], []).append(
                    [number(word) for word in line.split()]
                )
        assert [len(lines) for lines in sentences.values()] == [2 * 3] * 20
        outputs.append(sentences)
    stock, ours = outputs
    # One sentence may be a near tie, which the processor decides.
    assert sum(alike(stock[name], ours[name]) for name in stock) >= len(stock) - 1


def alike(stock, ours):
    """Are the words of all lines the same, and the numbers nearly?"""
    return all(
        [w for w in one if isinstance(w, str)] == [w for w in other if isinstance(w, str)]
        and [w for w in one if isinstance(w, float)]
        == pytest.approx([w for w in other if isinstance(w, float)], abs=2e-4)
        for one, other in zip(stock, ours, strict=True)
    )


def number(word):
    try:
        return float(word)
    except ValueError:
        return word


def test_the_task_overrides_the_generator_alone():
    assert TASK_REGISTRY["rope_translation"] is RopeTranslationTask
    own = {name for name, value in vars(RopeTranslationTask).items() if callable(value)}
    assert {name for name in own if not name.endswith("__dataclass")} == {"build_generator"}


def test_eval_bleu_uses_the_search_and_counts_the_same():
    work = tiny_work()
    state = checkpoint_utils.load_checkpoint_to_cpu(str(work / "model" / "averaged.pt"))
    counts = []
    for kind, config in (
        (TranslationTask, TranslationConfig),
        (RopeTranslationTask, RopeTranslationConfig),
    ):
        task = kind.setup_task(
            config(
                data=str(work / "data-bin"),
                eval_bleu=True,
                eval_bleu_args='{"beam": 2}',
                train_subset="train",
                dataset_impl=None,
                required_seq_len_multiple=1,
            )
        )
        task.load_dataset("valid")
        trained = task.build_model(state["cfg"]["model"])
        trained.load_state_dict(state["model"])
        dataset = task.dataset("valid")
        sample = dataset.collater([dataset[index] for index in range(20)])
        bleu = task._inference_with_bleu(task.sequence_generator, sample, trained.eval())
        counts.append((bleu.counts, bleu.totals, bleu.sys_len))
    assert counts[0] == counts[1]
    assert type(task.sequence_generator) is BeamSearchGenerator
