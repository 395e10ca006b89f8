"""The part of the sequence that each rank holds: contiguous, or in zigzag order."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from jax_cp_dispatch._arrays import known_inside
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.documents.fingerprint import order_fault
from jax_cp_dispatch.documents.segment_ids import (
    document_ends,
    document_starts,
    follows_rules,
    gather_sequence,
    starts_in_order,
)
from jax_cp_dispatch.masks import MaskRanges

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
        start, length = known_inside(np.stack([self.starts, self.lengths], 1), rank)
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

    def block(number):
        start = number // 2 * num_tokens + number % 2 * even
        return start, odd if number % 2 else even

    pairs = ((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks))
    return SequenceLayout(even, tuple((block(front), block(back)) for front, back in pairs))


def check_layout(op: str, layout: Any) -> None:
    """Requires one of the layouts."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{op}: layout is {layout!r}; it needs to be one of {', '.join(map(repr, LAYOUTS))}."
        )


# ---- `PackedMask`: a mask within documents; the tokens that each token sees by it, as ranges.


class PackedMask(NamedTuple):
    """A mask, and the documents within which it holds; a pytree of arrays `[B, T]`.

    Attributes:
      mask: a `Mask`: which keys of its document a query sees; or with a plan that knows the rest,
        its `MaskKind`.
      segment_ids, positions: the documents; see `context_parallel_attention`. Of whole batch rows,
        or of the columns of a rank.
    """

    mask: Any
    segment_ids: Any = None
    positions: Any = None

    def with_segment_ids(self, shape: tuple[int, int]) -> PackedMask:
        """Returns the same with segment ids; without them, each batch row is one document."""
        if self.segment_ids is not None:
            return self
        return self._replace(segment_ids=np.ones(shape, np.int32))


def attended_tokens(packed: PackedMask, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token sees, in columns of its batch row; empty ranges for padding.

    Args:
      packed: of the whole sequence, in order; without segment ids, each row is one document.
      shape: B and T.
    """
    return attended_in_order(packed, shape, False)[0]


def attended_in_order(
    packed: PackedMask, shape: tuple[int, int], checks_order: bool
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns `attended_tokens`, and the `order_fault` of the tokens if it is asked for."""
    mask, segment_ids, positions = packed
    in_order: Any = True
    if segment_ids is None:
        start, end = jnp.zeros(shape, jnp.int32), jnp.full(shape, shape[1], jnp.int32)
    else:
        if checks_order:
            start, in_order = starts_in_order(segment_ids, positions)
        else:
            start = document_starts(segment_ids, positions)
        end = document_ends(start)
    token = jnp.arange(shape[1], dtype=jnp.int32)
    is_token = start >= 0
    ranges = mask.clipped(shape[1]).ranges(token[None], start, end)
    ranges = jax.tree.map(lambda x: jnp.where(is_token, x, 0), ranges)
    if not checks_order:
        return ranges, None
    return ranges, order_fault(in_order, follows_rules(mask, start, end))


def gathered_ranges(
    exchange: CollectiveOptions,
    packed: PackedMask,
    shape: tuple[int, int],
    *,
    layout: str,
    checks_order: bool,
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns what each token of the sequence sees, from the columns of all ranks.

    Args:
      exchange: options of the call.
      packed: of this rank's columns.
      shape: B and T of this rank.
      layout: of the tokens on the ranks.
      checks_order: whether to return the `order_fault` of arrays that are given; else None.
    """
    num_ranks = jax.lax.axis_size(exchange.axis_name)
    num_tokens = shape[1] * num_ranks
    if packed.positions is not None:
        packed = jax.tree.map(jnp.asarray, packed.with_segment_ids(shape))
    packed = gather_sequence(exchange, packed, num_ranks)
    if layout == "zigzag":
        order = zigzag_permutation(num_tokens, num_ranks, inverse=True)
        packed = jax.tree.map(lambda x: x[:, order], packed)
    checks_order = checks_order and bool(jax.tree.leaves(packed))
    return attended_in_order(packed, (shape[0], num_tokens), checks_order)
