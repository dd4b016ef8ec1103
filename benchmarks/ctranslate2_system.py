"""CTranslate2 on the plugin's export, on the same random batch."""

import ctranslate2

from benchmarks.shapes import BEAM, UNK, Shape, sentences


class Decoding:
    """One call translates a batch by beam search, with as many steps as the other systems.

    Args:
        model: folder with an export in each of these types.
        compute_type: ``float32`` or ``int8``, how it is stored and computed.
        threads: cores to use.
    """

    def __init__(
        self, shape: Shape, device: str, model: str, compute_type: str, threads: int
    ) -> None:
        self.translator = ctranslate2.Translator(
            f"{model}/{compute_type}",
            device=device,
            compute_type=compute_type,
            intra_threads=threads,
        )
        self.steps = shape.length + 1
        # Without the end of sentence, which the model's configuration adds.
        rows = sentences(shape, 1)[:, :-1].tolist()
        self.source = [[f"w{token - UNK - 1}" for token in row] for row in rows]

    def run(self) -> None:
        found = self.translator.translate_batch(
            self.source,
            beam_size=BEAM,
            min_decoding_length=self.steps,
            max_decoding_length=self.steps,
            max_input_length=0,
        )
        lengths = {len(result.hypotheses[0]) for result in found}
        if lengths != {self.steps}:
            raise RuntimeError(f"hypotheses of {lengths} tokens instead of {self.steps}")
