"""Eole with rotary embeddings, a Transformer of the same sizes, on the same random batch.

Eole's model and its own loss with statistics, as its trainer calls them. It lives in an environment
of its own, without fairseq: clipping and Adam are torch's, which are also what Eole takes. Its
layers are pre-norm, and its output projection has a bias.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyonmttok
import torch
from eole.config.run import TrainConfig
from eole.constants import DefaultTokens
from eole.models.model import get_model_class
from eole.utils.loss import LossCompute

from benchmarks import shapes
from benchmarks.shapes import EOS, Shape, Size, pair


def vocabularies(size: Size) -> dict[str, Any]:
    """Eole's vocabularies, with the special symbols where fairseq has them."""
    specials = {
        "bos_token": DefaultTokens.BOS,
        "pad_token": DefaultTokens.PAD,
        "eos_token": DefaultTokens.EOS,
        "unk_token": DefaultTokens.UNK,
    }
    words = Counter({f"w{number}": 1 for number in range(size.vocabulary - len(specials))})
    vocabulary = pyonmttok.build_vocab_from_tokens(words, special_tokens=list(specials.values()))
    if len(vocabulary) != size.vocabulary:
        raise RuntimeError(f"Eole's vocabulary has {len(vocabulary)} symbols")
    return {"src": vocabulary, "tgt": vocabulary, "specials": specials}


def configuration(shape: Shape, device: str, text: Path) -> Any:
    """Eole's configuration; ``text`` is a file, which it wants to see there and never reads."""
    size = shape.size
    text.touch()
    return TrainConfig(
        data={"corpus": {"path_src": str(text), "path_tgt": str(text)}},
        src_vocab=str(text),
        tgt_vocab=str(text),
        share_vocab=True,
        model={
            "architecture": "transformer",
            "layers": size.layers,
            "hidden_size": size.embed_dim,
            "heads": size.heads,
            "transformer_ff": size.ffn_dim,
            "mlp_activation_fn": "relu",
            "share_embeddings": True,
            "share_decoder_embeddings": True,
            "add_qkvbias": True,
            # Given, because Eole's own way of filling these two in fails.
            "add_final_linear_bias": True,
            "rope_config": {"rotary_interleave": True},
            "add_ffnbias": True,
            "embeddings": {
                "word_vec_size": size.embed_dim,
                "position_encoding_type": "Rotary",
            },
        },
        training={
            "compute_dtype": "fp32",
            "dropout": [shapes.DROPOUT],
            "attention_dropout": [shape.attention_dropout],
            "dropout_steps": [0],
            "label_smoothing": shapes.LABEL_SMOOTHING,
            "gpu_ranks": [0] if device == "cuda" else [],
            "world_size": 1,
        },
    )


class Training:
    """One call is one update: forward, loss, backward, clipping, Adam."""

    def __init__(self, shape: Shape, device: str) -> None:
        vocabs = vocabularies(shape.size)
        with tempfile.TemporaryDirectory() as folder:
            config = configuration(shape, device, Path(folder) / "text")
        torch.manual_seed(1)
        model_class = get_model_class(config.model)
        self.model = model_class.for_training(config.model, vocabs, config.training).train()
        self.loss = LossCompute.from_config(config, self.model, vocabs)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=shapes.LEARNING_RATE, betas=shapes.ADAM_BETAS
        )
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.device, self.shape = device, shape

    def run(self) -> None:
        self.run_small(self.shape)

    def run_small(self, shape: Shape) -> None:
        """An update on a batch of another shape."""
        source, target, _ = (tokens.to(self.device) for tokens in pair(shape))
        # Eole's targets have their start.
        start = target.new_full((shape.sentences, 1), EOS)
        batch = {
            "src": source,
            "tgt": torch.cat((start, target), dim=1),
            "srclen": torch.full((shape.sentences,), shape.length, device=self.device),
            "cid": ["corpus"] * shape.sentences,
            "cid_line_number": list(range(shape.sentences)),
        }
        self.optimizer.zero_grad(set_to_none=True)
        output, attention, estimate = self.model(batch["src"], batch["tgt"], batch["srclen"])
        loss, _, _ = self.loss(batch, output, attention, estimate)
        (loss / shape.tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), shapes.CLIP_NORM)
        self.optimizer.step()
