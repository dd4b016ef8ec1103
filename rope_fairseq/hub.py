"""The hub interface: a trained model as a Python object that translates raw text.

    from rope_fairseq.models.rope_transformer import RopeTransformerModel
    model = RopeTransformerModel.from_pretrained("exp/demo/model")
    model.translate("Open the file.")

What translate.sh and this interface share stands here too: how to search, and what is checked
before fairseq loads a model.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairseq import hub_utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from torch import Tensor

from rope_fairseq.checkpoint import load_checkpoint, options
from rope_fairseq.errors import UserError
from rope_fairseq.position import BOUNDED
from rope_fairseq.tasks.rope_translation import RopeTranslationTask
from rope_fairseq.text import OPTIONS_FILE, Text

# How this project translates (Vaswani et al., 2017, section 6.1): the score of a hypothesis is
# divided by ``(step + 1) ** lenpen``, and it has at most ``max_len_a * source + max_len_b`` tokens.
GENERATION: dict[str, Any] = {"beam": 4, "lenpen": 0.6, "max_len_a": 1, "max_len_b": 50}

# Model families that translate.sh and hub load.
FAMILIES = ("rope_transformer", "transformer")
# What they were trained as; they differ in their search alone, and ours is used for both.
TASKS = ("translation", "rope_translation")

# fairseq-generate's own batches, so that hub and translate.sh compute the same.
MAX_TOKENS = 12000
BATCH_SIZE_MULTIPLE = 8
# What a model takes that was trained without a limit of its own, in tokens.
FAIRSEQ_LIMIT = 1024


class RopeHubInterface(hub_utils.GeneratorHubInterface):
    """fairseq's hub interface, with this project's generation options and text handling.

    :meth:`translate` gives what ``scripts/translate.sh`` gives for the same lines.
    """

    def translate(
        self,
        sentences: str | Sequence[str],
        beam: int = GENERATION["beam"],
        verbose: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Translate a sentence to a sentence, or a list of them to a list.

        Args:
            sentences: raw text; one without any text is translated to "".
            beam: hypotheses that the search keeps.
            verbose: log sources, hypotheses and scores.
            **kwargs: generation options of fairseq, such as ``lenpen=1.0``.

        Raises:
            UserError: a sentence has more tokens than the model takes; the message has its index.
        """
        return self.sample(sentences, beam, verbose, **kwargs)

    def sample(
        self,
        sentences: str | Sequence[str],
        beam: int = 1,
        verbose: bool = False,
        **kwargs: Any,
    ) -> Any:
        """:meth:`translate` with fairseq's own default for ``beam``."""
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **kwargs)[0]
        encoded = [self.encode(sentence) for sentence in sentences]
        self._check_lengths(encoded)
        # A sentence without text is the end-of-sentence token alone; a model would invent a
        # translation for it.
        indices = [index for index, tokens in enumerate(encoded) if tokens.numel() > 1]
        translations = [""] * len(encoded)
        if indices:
            batched = self.generate([encoded[i] for i in indices], beam, verbose, **kwargs)
            for index, hypotheses in zip(indices, batched, strict=True):
                translations[index] = self.decode(hypotheses[0]["tokens"])
        return translations

    def _check_lengths(self, encoded: Sequence[Tensor]) -> None:
        """Refuse sources, token ids [src_len] each, that are longer than the model takes."""
        limit = self.max_positions[0]
        for index, tokens in enumerate(encoded):
            if tokens.numel() > limit:
                raise UserError(
                    f"sentence {index}: {tokens.numel():,} tokens, more than the model's "
                    f"{limit} source positions; nothing was translated"
                )

    def _build_batches(
        self, tokens: Sequence[Tensor], skip_invalid_size_inputs: bool
    ) -> Iterator[dict[str, Any]]:
        """The batches that fairseq-generate makes; fairseq's own hub shuffles equal lengths."""
        dataset = self.task.build_dataset_for_inference(tokens, [t.numel() for t in tokens])
        dataset.shuffle = False
        return self.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=self.cfg.dataset.max_tokens,
            max_sentences=self.cfg.dataset.batch_size,
            max_positions=self.max_positions,
            ignore_invalid_inputs=skip_invalid_size_inputs,
            required_batch_size_multiple=BATCH_SIZE_MULTIPLE,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)


def from_pretrained(
    model_name_or_path: str,
    checkpoint_file: str = "averaged.pt",
    data_name_or_path: str = ".",
    **kwargs: Any,
) -> RopeHubInterface:
    """Load a model, or an ensemble, for translation.

    Args:
        model_name_or_path: folder with the checkpoints, ``text.json`` and the model of BPE.
        checkpoint_file: name in that folder; several, joined by ``:``, make an ensemble.
        data_name_or_path: folder with the dictionaries; one that starts with "." is relative to
            the model's folder.
        **kwargs: stored options to override; ``max_source_positions`` may be more than the model
            was trained with unless its positions are learned; ``generation_args`` is a dict of
            generation options.

    Raises:
        UserError: a file is missing, is not safe to load, or does not belong to the checkpoint.
    """
    folder = Path(model_name_or_path)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; a downloaded model must be unpacked first")
    text = Text.load(folder) if (folder / OPTIONS_FILE).is_file() else None
    if text is not None:
        of_text = {
            "tokenizer": "rope_text",
            "text_options": str(folder / OPTIONS_FILE),
            "bpe": text.bpe,  # fairseq finds its model by the file's name
            # Not stored where fairseq-train found them in the names of the data.
            "source_lang": text.source_lang,
            "target_lang": text.target_lang,
        }
        kwargs = of_text | kwargs
    wanted = kwargs.pop("max_source_positions", None)
    # fairseq's own loader fails on a bad file with a traceback, or later.
    for name in checkpoint_file.split(os.pathsep):
        path = folder / name
        state = load_checkpoint(path)
        check_family(path, state)
        if wanted is not None:
            kwargs = raised_limits(path, state, wanted) | kwargs
        if text is not None:
            data = Path(data_name_or_path)
            relative = data_name_or_path.startswith(".")
            check_dictionaries(path, state, folder / data if relative else data, text)
    kwargs.setdefault("max_tokens", max(MAX_TOKENS, wanted or 0))
    kwargs.setdefault("batch_size", None)
    kwargs["generation_args"] = GENERATION | (kwargs.get("generation_args") or {})
    loaded = hub_utils.from_pretrained(
        str(folder), checkpoint_file, str(data_name_or_path), **kwargs
    )
    trained: Any = loaded["task"]
    task = RopeTranslationTask(trained.cfg, trained.source_dictionary, trained.target_dictionary)
    hub = RopeHubInterface(loaded["args"], task, loaded["models"])
    if wanted is not None:
        hub.max_positions = (wanted, hub.max_positions[1])
    return hub


def check_family(checkpoint: Path, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another kind of model than fairseq's Transformer and ours.

    Other families of fairseq run option strings of the checkpoint as Python code (``eval``), and a
    checkpoint may come from anywhere.
    """
    for group, known in (
        ("model", lambda name: ARCH_MODEL_NAME_REGISTRY.get(name) in FAMILIES),
        ("task", lambda name: name in TASKS),
    ):
        stored = options(state, group)
        name = stored.get("_name") or stored.get("arch" if group == "model" else "task")
        if not known(name):
            raise UserError(
                f"{checkpoint}: its {group} is {name!r}; only translation models of the families "
                f"{' and '.join(FAMILIES)} are loaded"
            )


def check_dictionaries(
    checkpoint: Path, state: Mapping[str, Any], folder: Path, text: Text
) -> None:
    """Refuse dictionaries of another size than the ones a model was trained with.

    Args:
        checkpoint: the checkpoint's file, for messages.
        state: what is in it.
        folder: where ``dict.LANG.txt`` are.
        text: names the languages.
    """
    for side, lang in (("encoder", text.source_lang), ("decoder", text.target_lang)):
        path = folder / f"dict.{lang}.txt"
        if not path.is_file():
            raise UserError(f"{path}: no such file, the model's dictionary for {lang}")
        types = len(Dictionary.load(str(path)))
        embedding = state["model"].get(f"{side}.embed_tokens.weight")
        if embedding is not None and len(embedding) != types:
            raise UserError(
                f"{path}: {types} types, but the {side} of {checkpoint} was trained with "
                f"{len(embedding)}: not this model's dictionary"
            )


def trained_limits(state: Mapping[str, Any]) -> dict[str, int]:
    """The longest source and target, in tokens with the end of sentence, of a model's training."""
    model = options(state, "model")
    names = ("max_source_positions", "max_target_positions")
    return {name: model.get(name) or FAIRSEQ_LIMIT for name in names}


def raised_limits(checkpoint: Path, state: Mapping[str, Any], wanted: int) -> dict[str, int]:
    """Options of a model that change for it to take sources of ``wanted`` tokens.

    With the source's limit the target's is raised, or a long translation would be cut off.

    Args:
        checkpoint: the checkpoint's file, for messages.
        state: what is in it.
        wanted: the longest source to serve, end of sentence included.

    Raises:
        UserError: ``wanted`` is less than 2, or more positions than the model has learned.
    """
    trained, model = trained_limits(state), options(state, "model")
    if wanted < 2:
        raise UserError(f"--max-source-positions {wanted}: must be at least 2")
    if wanted <= trained["max_source_positions"]:
        return {}
    if model.get("position_encoding") in BOUNDED or model.get("encoder_learned_pos"):
        raise UserError(
            f"--max-source-positions {wanted}: {checkpoint} has learned its positions, "
            f"{trained['max_source_positions']} of them"
        )
    limits = {"max_source_positions": wanted}
    if not model.get("decoder_learned_pos"):
        target = max(trained["max_target_positions"], wanted + GENERATION["max_len_b"] + 1)
        limits["max_target_positions"] = target
    return limits
