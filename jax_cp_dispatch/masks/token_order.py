"""`Order`: in which order the tokens of a batch are on the ranks."""

from __future__ import annotations

from typing import NamedTuple


class Order(NamedTuple):
    """The order of tokens; static.

    Attributes:
      name: "packed": one document after another. "zigzag": see `zigzag_permutation`. "placed": as
        `place_tokens` has placed them.
      num_ranks: of zigzag order; else 0.
    """

    name: str
    num_ranks: int = 0

    @property
    def layout(self) -> str:
        """Of tokens that are not placed: "zigzag" or "contiguous"."""
        return "zigzag" if self.name == "zigzag" else "contiguous"

    def __str__(self) -> str:
        if self.name == "zigzag":
            return f"zigzag order of {self.num_ranks} ranks"
        return f"{self.name} order"


PACKED, PLACED = Order("packed"), Order("placed")


def zigzag_order(num_ranks: int) -> Order:
    """Returns zigzag order; over one rank, tokens stay in packed order."""
    return Order("zigzag", num_ranks) if num_ranks > 1 else PACKED
