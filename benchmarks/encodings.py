"""The position encodings that are compared, in the order of the README's table; their papers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where an encoding was published."""

    authors: str
    arxiv: str
    variant: str = ""

    def __str__(self) -> str:
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.authors}, [{self.arxiv}](https://arxiv.org/abs/{self.arxiv}){variant}"


SINUSOIDAL = "sinusoidal"

SOURCES = {
    SINUSOIDAL: Source("Vaswani et al. 2017", "1706.03762"),
    "learned": Source("Gehring et al. 2017", "1705.03122"),
    "rope": Source("Su et al. 2021", "2104.09864"),
    "shaw": Source("Shaw et al. 2018", "1803.02155"),
    "transformer-xl": Source("Dai et al. 2019", "1901.02860"),
    "t5": Source("Raffel et al. 2020", "1910.10683"),
    "tupe": Source("Ke et al. 2021", "2006.15595", "TUPE-R"),
    "deberta": Source("He et al. 2021", "2006.03654"),
    "alibi": Source("Press et al. 2022", "2108.12409"),
    "none": Source("Haviv et al. 2022", "2203.16634"),
}
