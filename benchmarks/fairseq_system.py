"""fairseq's trainer and search on a random batch: stock models, and the plugin's by their options.

Everything is built from command-line options, in the way of fairseq-train and fairseq-generate. The
plugin is loaded by ``--user-dir`` alone, so that a process without it measures fairseq as it is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from benchmarks import shapes
from benchmarks.shapes import BEAM, Shape, Size, pair

LANGUAGES = ("en", "de")


def write_dictionaries(size: Size, folder: Path) -> None:
    """Dictionaries of ``size.vocabulary`` symbols, fairseq's own four included."""
    lines = "".join(f"w{number} 1\n" for number in range(size.vocabulary - 4))
    for lang in LANGUAGES:
        (folder / f"dict.{lang}.txt").write_text(lines, encoding="utf-8")


def model_options(shape: Shape) -> list[str]:
    """The sizes, for ``transformer`` and ``rope_transformer`` alike."""
    size, words = shape.size, ["--share-all-embeddings"]
    for side in ("encoder", "decoder"):
        words += [f"--{side}-embed-dim={size.embed_dim}", f"--{side}-ffn-embed-dim={size.ffn_dim}"]
        words += [f"--{side}-layers={size.layers}", f"--{side}-attention-heads={size.heads}"]
    return [
        *words,
        *(f"--dropout={shapes.DROPOUT}", f"--attention-dropout={shape.attention_dropout}"),
        # Absolute positions need a row for each token of a sentence.
        *(f"--max-{side}-positions={max(1024, 2 * shape.length)}" for side in ("source", "target")),
    ]


def configuration(
    shape: Shape, device: str, folder: Path, words: Sequence[str], user_dir: str | None
) -> Any:
    """fairseq's configuration.

    Args:
        folder: gets the dictionaries.
        words: options beside those of the size and the optimizer.
        user_dir: the plugin's folder, or None for fairseq as it is.
    """
    # Before the parser is made: fairseq itself looks for --user-dir in sys.argv alone.
    utils.import_user_module(argparse.Namespace(user_dir=user_dir))
    write_dictionaries(shape.size, folder)
    given = [
        *(str(folder), "-s", LANGUAGES[0], "-t", LANGUAGES[1], "--disable-validation"),
        f"--save-dir={folder}",
        *("--optimizer=adam", f"--adam-betas={shapes.ADAM_BETAS}", f"--lr={shapes.LEARNING_RATE}"),
        *(f"--label-smoothing={shapes.LABEL_SMOOTHING}", f"--clip-norm={shapes.CLIP_NORM}"),
        *(f"--max-tokens={shape.tokens}", *model_options(shape), *words),
        *(["--cpu"] if device == "cpu" else []),
    ]
    parser = options.get_training_parser()
    namespace: argparse.Namespace = options.parse_args_and_arch(parser, given)
    return convert_namespace_to_omegaconf(namespace)


def build(*arguments: Any) -> tuple[Any, Any, Any]:
    """The configuration that :func:`configuration` makes of the arguments, its task, and a model
    with random parameters, the same each time."""
    cfg = configuration(*arguments)
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    return cfg, task, task.build_model(cfg.model)


def batch(shape: Shape) -> dict[str, Any]:
    """A batch as fairseq's data sets make it."""
    source, target, shifted = pair(shape)
    return {
        "id": torch.arange(shape.sentences),
        "nsentences": shape.sentences,
        "ntokens": shape.tokens,
        "target": target,
        "net_input": {
            "src_tokens": source,
            "src_lengths": torch.full((shape.sentences,), shape.length),
            "prev_output_tokens": shifted,
        },
    }


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class Training:
    """One call is one update: forward, loss, backward, clipping, Adam.

    Args:
        folder, options, user_dir: see :func:`configuration`.
    """

    def __init__(
        self,
        shape: Shape,
        device: str,
        folder: Path,
        options: Sequence[str],
        user_dir: str | None = None,
    ) -> None:
        cfg, task, model = build(shape, device, folder, options, user_dir)
        self.trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
        self.parameters = count(model)
        self.batch = batch(shape)

    def run(self) -> None:
        self._update(self.batch)

    def run_small(self, shape: Shape) -> None:
        """An update on a batch of another shape."""
        self._update(batch(shape))

    def _update(self, sample: dict[str, Any]) -> None:
        if self.trainer.train_step([sample]) is None:
            raise RuntimeError("fairseq's trainer skipped the update")


class Decoding:
    """One call translates a batch by beam search to sentences of ``shape.length`` tokens and the
    end of sentence, no shorter and no longer, so that all systems take as many steps.

    Args:
        folder, options, user_dir: see :func:`configuration`; ``--task`` chooses the search.
    """

    def __init__(
        self,
        shape: Shape,
        device: str,
        folder: Path,
        options: Sequence[str],
        user_dir: str | None = None,
    ) -> None:
        cfg, self.task, model = build(shape, device, folder, options, user_dir)
        self.parameters = count(model)
        self.model, self.sample = model.eval(), batch(shape)
        if device == "cuda":
            self.model, self.sample = model.cuda(), utils.move_to_cuda(self.sample)
        cfg.generation.beam, cfg.generation.nbest = BEAM, 1
        cfg.generation.max_len_a, cfg.generation.max_len_b = 0, shape.length
        cfg.generation.min_len = shape.length
        self.models, self.steps = [self.model], shape.length + 1
        self.cfg = cfg
        self._generator: Any = None

    def export(self, folder: Path) -> None:
        """Write the model for CTranslate2: ``folder/float32`` and ``folder/int8``."""
        from rope_fairseq.ctranslate2_spec import build_spec, quantize

        for quantization in ("float32", "int8"):
            spec = build_spec(self.model, self.task.source_dictionary, self.task.target_dictionary)
            quantize(spec, quantization)
            (folder / quantization).mkdir(parents=True)
            spec.save(str(folder / quantization))

    def run(self) -> None:
        if self._generator is None:  # like fairseq-generate, which prepares a model for good
            self.model.prepare_for_inference_(self.cfg)
            self._generator = self.task.build_generator(self.models, self.cfg.generation)
        found = self.task.inference_step(self._generator, self.models, self.sample)
        lengths = {len(hypotheses[0]["tokens"]) for hypotheses in found}
        if lengths != {self.steps}:
            raise RuntimeError(f"hypotheses of {lengths} tokens instead of {self.steps}")
