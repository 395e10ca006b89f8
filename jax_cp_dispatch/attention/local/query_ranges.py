"""The queries that may see each key row, in blocks: for masks whose keys have ranges of queries."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch.attention.local.options import PassOptions
from jax_cp_dispatch.attention.local.rows import BlockIndex, block_of, to_rows

_LAST = 2**31 - 1


class KeyQueries(NamedTuple):
    """The queries whose index is in [start, end) may see a key row, if it is among their keys.

    Attributes:
      index: of each query; any numbers that increase within a document.
      start, end: of each key row; empty for rows that no query sees.
    """

    index: Int32[Array, "B T"]
    start: Int32[Array, "B S"]
    end: Int32[Array, "B S"]


class QueryRanges(NamedTuple):
    """`KeyQueries` in blocks, and the smallest and largest numbers of each block."""

    index: Array  # [B*K, nq, G*block_q]
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

    # ---- Of one block of queries and one of keys.

    def hide_all(self) -> Bool[Array, ""]:
        """Whether no query may see a key."""
        is_late = jnp.min(self.indices[:, 0]) >= jnp.max(self.ends[:, 1])
        return is_late | (jnp.max(self.indices[:, 1]) < jnp.min(self.starts[:, 0]))

    def hide_none(self) -> Bool[Array, ""]:
        """Whether all queries may see all keys."""
        are_early = jnp.max(self.indices[:, 1]) < jnp.min(self.ends[:, 0])
        return are_early & (jnp.min(self.indices[:, 0]) >= jnp.max(self.starts[:, 1]))

    def allow(self) -> Bool[Array, "matrices rows block_kv"]:
        """Whether a query may see a key."""
        index = self.index[..., None]
        return (index >= self.start[:, None]) & (index < self.end[:, None])


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
