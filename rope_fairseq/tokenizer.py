"""``--tokenizer rope_text``: the text handling of :mod:`rope_fairseq.text` inside fairseq.

With ``--bpe sentencepiece --sentencepiece-model FOLDER/sentencepiece.bpe.model`` beside it, or
``--bpe subword_nmt --bpe-codes FOLDER/bpecodes``, as text.json says, ``fairseq-interactive`` and
hub see the same pieces as the training data.
"""

from dataclasses import dataclass, field

from fairseq.data.encoders import register_tokenizer
from fairseq.dataclass import FairseqDataclass

from rope_fairseq.errors import UserError
from rope_fairseq.text import Text


@dataclass
class RopeTextConfig(FairseqDataclass):
    """Options of ``--tokenizer rope_text``."""

    text_options: str = field(
        default="", metadata={"help": "path of the text.json of the training data (rope_text)"}
    )


@register_tokenizer("rope_text", dataclass=RopeTextConfig)
class RopeTextTokenizer:
    """Normalise and tokenize source text; detokenize target text."""

    def __init__(self, cfg: RopeTextConfig) -> None:
        if not cfg.text_options:
            raise UserError("--tokenizer rope_text needs --text-options, the path of a text.json")
        self.text = Text.load(cfg.text_options)

    def encode(self, x: str) -> str:
        """Raw source line → tokens; fairseq's BPE encoder comes next."""
        return self.text.tokenize(x, self.text.source_lang)

    def decode(self, x: str) -> str:
        """Target tokens, BPE already undone → raw line."""
        return self.text.detokenize(x, self.text.target_lang)
