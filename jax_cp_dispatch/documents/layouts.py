"""The part of the sequence that each rank holds: contiguous, or in zigzag order."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._arrays import take_in_bounds

LAYOUTS = ("contiguous", "zigzag")


def zigzag_permutation(
    num_tokens: int, num_ranks: int, *, inverse: bool = False
) -> Int[np.ndarray, " num_tokens"]:
    """Returns the order of tokens in which equal contiguous parts are in zigzag layout.

    The sequence is cut into `2 * num_ranks` blocks. Rank r holds blocks r and `2 * num_ranks - 1 -
    r`, so all ranks have equal causal work. Shard `x[:, zigzag_permutation(T, n)]` over the ranks
    in equal contiguous parts; treat segment ids and positions (also for RoPE) alike. A rank with an
    odd number of tokens has the extra one in its first block. Plain NumPy, for the data pipeline.

    Args:
      num_tokens: tokens of the whole sequence; a multiple of `num_ranks`.
      num_ranks: ranks of the sequence axis.
      inverse: return the inverse permutation: `out[:, zigzag_permutation(T, n, inverse=True)]` is
        in order.
    Returns:
      The token at each stored place; if `inverse`, the place of each token.
    Raises:
      ValueError: `num_ranks` is not positive or does not divide `num_tokens`.
    """
    if num_ranks < 1 or num_tokens < 0 or num_tokens % num_ranks:
        raise ValueError(
            f"zigzag_permutation: {num_tokens} tokens cannot be split over {num_ranks} ranks "
            "equally. Pad the sequence; segment 0 is padding."
        )
    layout = zigzag_layout(num_ranks, num_tokens // num_ranks)
    order = np.concatenate([np.arange(a, a + length) for row in layout.blocks for a, length in row])
    return np.argsort(order) if inverse else order


class SequenceLayout(NamedTuple):
    """The blocks of the sequence that each rank holds; static and hashable.

    A rank's rows are its blocks in the order of the sequence, each padded to `block_rows`.
    """

    block_rows: int
    blocks: tuple[tuple[tuple[int, int], ...], ...]  # [rank][block] first token, tokens

    @property
    def num_ranks(self) -> int:
        return len(self.blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of one rank."""
        return len(self.blocks[0])

    @property
    def num_rows(self) -> int:
        """Rows of one rank, including the padding of its blocks."""
        return self.num_blocks * self.block_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return sum(length for row in self.blocks for _, length in row)

    @property
    def starts(self) -> np.ndarray:
        """First token of each block, int32 [rank, block]."""
        return np.array(self.blocks, np.int32)[..., 0]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each block, int32 [rank, block]."""
        return np.array(self.blocks, np.int32)[..., 1]

    def positions(self, rank):
        """Returns the token in each row of a rank, -1 for padding; int32 [num_rows]."""
        row = jnp.arange(self.block_rows, dtype=jnp.int32)[None]
        start, length = take_in_bounds(np.stack([self.starts, self.lengths], 1), rank)
        return jnp.where(row < length[:, None], start[:, None] + row, -1).reshape(-1)


def contiguous_layout(num_ranks: int, num_tokens: int) -> SequenceLayout:
    """Rank r holds tokens [r * num_tokens, (r + 1) * num_tokens)."""
    return SequenceLayout(
        num_tokens, tuple(((rank * num_tokens, num_tokens),) for rank in range(num_ranks))
    )


def zigzag_layout(num_ranks: int, num_tokens: int) -> SequenceLayout:
    """Rank r holds blocks r and 2 n - 1 - r of 2 n; if necessary, the second is shorter by one."""
    front, back = (num_tokens + 1) // 2, num_tokens // 2
    middle = num_ranks * front
    return SequenceLayout(
        front,
        tuple(
            ((rank * front, front), (middle + (num_ranks - 1 - rank) * back, back))
            for rank in range(num_ranks)
        ),
    )


def halves_in_zigzag(num_ranks: int, num_tokens: int) -> SequenceLayout:
    """Zigzag over the halves of contiguous parts; if necessary, odd blocks are shorter by one."""
    even, odd = (num_tokens + 1) // 2, num_tokens // 2
    blocks = [
        (rank * num_tokens + half * even, odd if half else even)
        for rank in range(num_ranks)
        for half in range(2)
    ]
    return SequenceLayout(
        even, tuple(zip(blocks[:num_ranks], blocks[: -num_ranks - 1 : -1], strict=True))
    )


def check_layout(op: str, layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}."
        )
