"""Draw the long-term decay of RoPE: figure 2 of the RoFormer paper, from this package's rotary.py.

    python docs/decay.py        writes docs/decay.png

Needs matplotlib, which the package's extra ``figures`` brings.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

# The package's modules without its __init__.py, unless that is loaded already, as in the tests:
# it imports fairseq, which takes seconds and makes matplotlib log every font it looks at.
package = ModuleType("rope_fairseq")
package.__path__ = [str(Path(__file__).resolve().parent.parent / "rope_fairseq")]
sys.modules.setdefault("rope_fairseq", package)

from rope_fairseq.errors import run_main  # noqa: E402
from rope_fairseq.files import replacing  # noqa: E402
from rope_fairseq.rotary import RotarySpec, inverse_frequencies  # noqa: E402

SPEC = RotarySpec(128)
LONGEST = 256
BLUE = "#0072B2"  # of Okabe and Ito's palette for all kinds of colour vision


def relative_upper_bound(spec: RotarySpec, distance: Tensor) -> Tensor:
    """How large attention scores can be at a relative distance, up to a factor of q and k alone.

    Source: Su et al., RoFormer, arXiv 2104.09864, section 3.4.3. By Abel summation the score
    Re Σ_i h_i·exp(1j·m·theta_i) is at most max_i |h_{i+1} − h_i| · Σ_i |S_i| (equations 35 to 37),
    where h_i is the complex product of the i-th pairs of q and k and S_i the sum of the first i
    of the d/2 factors exp(1j·m·theta_j). This is the second factor, divided by d/2.

    Args:
        spec: the rotation, with d = ``spec.dim``.
        distance: [n], relative distances m, of any real dtype.

    Returns:
        Tensor [n], float64: the mean of |S_1|, …, |S_{d/2}|, which is (d/2 + 1)/2 at distance 0.
    """
    angle = torch.outer(distance.double(), inverse_frequencies(spec))  # [n, dim/2]
    partial_sums = torch.polar(torch.ones_like(angle), angle).cumsum(dim=-1)  # [n, dim/2]
    return partial_sums.abs().mean(dim=-1)


def draw(output: Path) -> None:
    """Write the curve for distances 0..256 as a PNG, 1200 pixels wide: sharp at 600."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    distance = torch.arange(LONGEST + 1)
    bound = relative_upper_bound(SPEC, distance)

    figure = Figure(figsize=(6, 3.2), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.plot(distance.tolist(), bound.tolist(), color=BLUE, linewidth=1.8)
    axes.set_xlim(0, LONGEST)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(0, LONGEST + 1, 32))
    axes.set_xlabel("relative distance $m$ (tokens)")
    axes.set_ylabel(r"mean of $|S_i|$, $i = 1, …, d/2$")
    axes.set_title(f"Relative upper bound of the score, $d = {SPEC.dim}$", fontsize=11)
    axes.grid(color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # 64 colours are enough for one line and its text, and make the file a third of the size.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64)
    with replacing(output) as file:
        image.save(file, format="png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the relative upper bound of attention scores over distance.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("decay.png"),
        metavar="FILE",
        help="PNG to write (default: decay.png beside this script)",
    )
    draw(parser.parse_args().output)


if __name__ == "__main__":
    run_main(main)
