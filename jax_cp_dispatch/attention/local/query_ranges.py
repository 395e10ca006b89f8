"""The queries that may see each key row, in blocks: for masks whose keys have ranges of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch.attention.local.local_options import PassOptions
from jax_cp_dispatch.attention.local.rows import BlockIndex, block_of, to_rows

_LAST = 2**31 - 1


class KeyQueries(NamedTuple):
    """The queries whose index is in [start, end) may see a key row, if it is among their keys.

    Attributes:
      index: of each query; any numbers that increase within a document.
      start, end: of each key row; empty for rows that no query sees.
    """

    index: Int32[Array, "B T"]  # pyright: ignore[reportIncompatibleMethodOverride]
    start: Int32[Array, "B S"]
    end: Int32[Array, "B S"]


class QueryRanges(NamedTuple):
    """`KeyQueries` in blocks, and the smallest and largest numbers of each block."""

    index: Array  # [B*K, nq, G*block_q]  # pyright: ignore[reportIncompatibleMethodOverride]
    indices: Array  # [B*K, nq, 2], of queries that see keys
    start: Array  # [B*K, nk, block_kv]
    starts: Array  # [B*K, nk, 2]
    end: Array  # [B*K, nk, block_kv]
    ends: Array  # [B*K, nk, 2]

    def of_queries(self, index: BlockIndex) -> QueryRanges:
        """Returns the numbers of one block of queries, with those of all keys."""
        return self._replace(
            index=block_of(self.index, index), indices=block_of(self.indices, index)
        )

    def of_keys(self, index: BlockIndex) -> QueryRanges:
        """Likewise of one block of keys."""
        names = ("start", "starts", "end", "ends")
        return self._replace(**{name: block_of(getattr(self, name), index) for name in names})

    def visible_blocks(
        self, index: BlockIndex, first: Int32[Array, ""], last: Int32[Array, ""]
    ) -> tuple[Int32[Array, " nk"], Int32[Array, ""]]:
        """Returns the key blocks in [first, last) that one block of queries may see, and how many.

        The smallest start and the largest end of a block of keys decide.
        """
        starts, ends = (
            lax.dynamic_slice_in_dim(x, index.matrix, index.num_matrices)
            for x in (self.starts[..., 0], self.ends[..., 1])
        )
        block = jnp.arange(ends.shape[1], dtype=jnp.int32)
        is_visible = (block >= first) & (block < last)
        is_visible &= jnp.min(starts, 0) <= jnp.max(self.indices[:, 1])
        is_visible &= jnp.max(ends, 0) > jnp.min(self.indices[:, 0])
        count = jnp.cumsum(is_visible, dtype=jnp.int32)
        place = jnp.where(is_visible, count - 1, block.size)
        return jnp.zeros_like(place).at[place].set(block + 0 * place, mode="drop"), count[-1]

    # ---- Of one block of queries and one of keys.

    def hide_none(self) -> Bool[Array, ""]:
        """Whether all queries may see all keys."""
        are_early = jnp.max(self.indices[:, 1]) < jnp.min(self.ends[:, 0])
        return are_early & (jnp.min(self.indices[:, 0]) >= jnp.max(self.starts[:, 1]))

    def allow(self) -> Bool[Array, "matrices rows block_kv"]:
        """Whether a query may see a key."""
        index = self.index[..., None]
        return (index >= self.start[:, None]) & (index < self.end[:, None])


def each_key_block(
    index: BlockIndex, bounds: tuple[Array, Array, QueryRanges | None], body: Callable, carry: Any
) -> Any:
    """Runs `carry = body(j, carry)` over the key blocks that a block of queries may see.

    `bounds`: its first key block, one past its last, and its `QueryRanges.of_queries`.
    """
    first, last, queries = bounds
    if queries is None:
        return lax.fori_loop(first, last, body, carry)
    blocks, count = queries.visible_blocks(index, first, last)
    return lax.fori_loop(0, count, lambda i, carry: body(blocks[i], carry), carry)


def cut_query_ranges(
    options: PassOptions, queries: KeyQueries, used: Bool[Array, "B T"], q_shape, num_groups: int
) -> QueryRanges:
    """Cuts the numbers of queries `[B, T, N, H]` and of key rows; `used`: queries with keys."""

    def of_queries(x, fill):
        x = jnp.broadcast_to(x[:, :, None, None], (*x.shape, q_shape[2], 1))
        return to_rows(x, num_groups, options.block_q, fill)[..., 0]

    def of_keys(x, fill):
        x = jnp.broadcast_to(x[:, :, None, None], (*x.shape, num_groups, 1))
        return to_rows(x, num_groups, options.block_kv, fill)[..., 0]

    first = of_queries(jnp.where(used, queries.index, _LAST), _LAST)
    last = of_queries(jnp.where(used, queries.index, -1), -1)
    start, end = of_keys(queries.start, _LAST), of_keys(queries.end, 0)
    extremes = lambda x: jnp.stack([x.min(-1), x.max(-1)], -1)
    return QueryRanges(
        index=of_queries(queries.index, 0),
        indices=jnp.stack([first.min(-1), last.max(-1)], -1),
        start=start,
        starts=extremes(start),
        end=end,
        ends=extremes(end),
    )
