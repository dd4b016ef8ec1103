"""Hugging Face's Marian, a Transformer of the same sizes, on the same random batch.

Its loss is torch's cross entropy with label smoothing, which spreads the smoothing over all symbols
and not over all but one, as fairseq does; the work is the same. Optimizer and clipping are
fairseq's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.optim.adam import Adam
from transformers import MarianConfig, MarianMTModel

from benchmarks import shapes
from benchmarks.shapes import BEAM, BOS, EOS, PAD, Shape, pair


def build(shape: Shape, device: str) -> Any:
    size = shape.size
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            *(("layers", size.layers), ("ffn_dim", size.ffn_dim)),
            ("attention_heads", size.heads),
        )
    }
    config = MarianConfig(
        vocab_size=size.vocabulary,
        d_model=size.embed_dim,
        max_position_embeddings=max(1024, 2 * shape.length),
        activation_function="relu",
        dropout=shapes.DROPOUT,
        attention_dropout=shape.attention_dropout,
        activation_dropout=0.0,
        scale_embedding=True,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        forced_eos_token_id=None,
        decoder_start_token_id=EOS,
        **sides,
    )
    torch.manual_seed(1)
    return MarianMTModel(config).to(device)


def count(model: Any) -> int:
    """Parameters that are trained; the table of sinusoids is not."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Training:
    """One call is one update: forward, loss, backward, clipping, Adam."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.device, self.shape = device, shape
        self.model = build(shape, device).train()
        self.parameters = count(self.model)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = Adam(self.trained, lr=shapes.LEARNING_RATE, betas=shapes.ADAM_BETAS)

    def run(self) -> None:
        self.run_small(self.shape)

    def run_small(self, shape: Shape) -> None:
        """An update on a batch of another shape."""
        source, target, shifted = (tokens.to(self.device) for tokens in pair(shape))
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(input_ids=source, decoder_input_ids=shifted, use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=PAD,
            label_smoothing=shapes.LABEL_SMOOTHING,
        )
        loss.backward()
        utils.clip_grad_norm_(self.trained, shapes.CLIP_NORM)
        self.optimizer.step()


class Decoding:
    """One call translates a batch by beam search, with as many steps as the other systems."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.model = build(shape, device).eval()
        self.parameters = count(self.model)
        self.source = pair(shape)[0].to(device)
        self.steps = shape.length + 1

    @torch.inference_mode()
    def run(self) -> None:
        found = self.model.generate(
            self.source,
            attention_mask=torch.ones_like(self.source),
            num_beams=BEAM,
            do_sample=False,
            min_new_tokens=self.steps,
            max_new_tokens=self.steps,
        )
        if found.size(1) != 1 + self.steps:  # the start is among them
            raise RuntimeError(f"hypotheses of {found.size(1) - 1} tokens, not {self.steps}")
