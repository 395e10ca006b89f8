"""The interface of a mask, the tokens that each token sees, as ranges; and `Order`, of tokens."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MaskRanges(NamedTuple):
    """What the tokens of packed rows see, in columns of their batch row; int32 `[B, T]`.

        visible(q, k) = k_start[q] <= k < k_end[q] and q_start[k] <= q < q_end[k]

    Attributes:
      k_start, k_end: the keys of each query.
      q_start, q_end: the queries of each key; None: all.
    """

    k_start: Any
    k_end: Any
    q_start: Any = None
    q_end: Any = None


class Mask(abc.ABC):
    """Which keys of its document a query sees.

        visible(q, k) = k_start(q) <= k < k_end(q) and q_start(k) <= q < q_end(k)

    A mask is a frozen pytree. Its kind and its numbers are static, so masks with equal numbers
    share a compiled program. What data decides is arrays `[B, T]`, its only leaves: they are
    sharded and gathered like segment ids, and may be traced. They move with the tokens if these are
    permuted; the columns in them stay those of the batch as packed. A mask never crosses the ends
    of documents.
    """

    @property
    @abc.abstractmethod
    def is_causal(self) -> bool:
        """Whether no query sees keys after its own."""

    @property
    def has_arrays(self) -> bool:
        """Whether data decides what is visible: arrays `[B, T]`."""
        return False

    @property
    def kind(self) -> Any:
        """What a plan has of the mask beside ranges of rows: itself; with arrays, a `MaskKind`."""
        return self

    @property
    def has_query_ranges(self) -> bool:
        """Whether keys have ranges of queries."""
        return False

    @abc.abstractmethod
    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        """Returns what tokens see, in columns of their batch row; of NumPy arrays by NumPy.

        The values for padding have no meaning.

        Args:
          column: of each token, `[B, T]`, or what broadcasts to it.
          start: the first column of its document, `[B, T]`.
          end: one past the last.
        """

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        """Returns what the arrays of tokens in these documents have to be, as in `ranges`.

        Each rule is booleans `[B, T]`, and what a false one means. Padding may break them. They
        find a mask that was made of other columns than those of its tokens.
        """
        return []

    def num_keys(self, length: Any) -> Any:
        """Bounds the keys that a query of a document of `length` tokens sees."""
        return length

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The most keys before, and after, its own that a query sees; None: to the document's end.

        No document or array makes a query see keys farther away.
        """
        return None, None

    def clipped(self, num_tokens: int) -> Mask:
        """Returns the same mask for documents of at most `num_tokens` tokens, with 32-bit sums."""
        return self

    def simplified(self) -> Mask:
        """Returns the simplest equal mask, so that equal masks compare equal."""
        return self


def maximum(x: Any, y: Any) -> Any:
    """Returns the larger elements; of NumPy arrays by NumPy."""
    return (jnp if is_traced(x, y) else np).maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    return (jnp if is_traced(x, y) else np).minimum(x, y)


def is_traced(*arrays: Any) -> bool:
    """Whether one of these is an array of JAX."""
    return any(isinstance(x, jax.Array) for x in arrays)


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


def check_made_packed(op: str, order: Order) -> None:
    """Requires packed order of what is constructed, also by `dataclasses.replace`."""
    if order != PACKED:
        raise ValueError(
            f"{op}: this is dataclasses.replace of one in {order}, but it is made in packed order. "
            "Replace fields of the packed one, and put that in this order again."
        )


def zigzag_order(num_ranks: int) -> Order:
    """Returns zigzag order; over one rank, tokens stay in packed order."""
    return Order("zigzag", num_ranks) if num_ranks > 1 else PACKED
