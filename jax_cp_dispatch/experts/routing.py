"""`Routing`: the plan of one layer of experts, as data."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jax_cp_dispatch._arrays import divided, take_in_bounds
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._text import describe_routing
from jax_cp_dispatch.metadata import Metadata

# An array; or anything that a transformation maps over the leaves (specs, shapes, axes).
Leaf: TypeAlias = Any
Overflow: TypeAlias = Literal["error", "drop"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """Where the tokens of a rank go: from `route`, for `dispatch_tokens` and `combine_tokens`.

    A pytree. The shapes below are those of one rank. On global arrays each has W times the rows,
    rank by rank, so `P(axis_name)` shards all of them, in and out of `jax.shard_map`.

    Attributes:
      dst_rank: i32 `[T, k]`; the rank that gets the token for this choice; -1 if none does, or if
        an earlier choice of the token already sends it there.
      dst_offset: i32 `[T, k]`; the token's row among those that this rank receives.
      row: i32 `[T, k]`; rank * capacity + the row of this choice in the buffer of the expert's
        rank; -1 if it has none.
      num_recv_tokens: i32 `[1, W + 1]`; the tokens that this rank receives from each rank, and
        their sum.
      num_send_tokens: i32 `[1, W]`; the tokens that this rank sends to each.
      first_row: i32 `[1, W]`; where they begin among those that each rank receives.
      group_sizes: i32 `[L]`; the rows of each of this rank's L experts, as `jax.lax.ragged_dot`
        and `grouped_gemm` take them. Their sum is at most `capacity`.
      rows_of_ranks: i32 `[1, W]`; the rows in use of each rank, which all ranks know.
      num_recv_rows: i32 `[1, W]`; those of them whose tokens come from each rank.
      num_rows: i32 `[1]`; the rows that this rank needs, before any are dropped.
      num_dropped: i32 `[1]`; how many of this rank's choices were dropped.
      is_valid: bool `[1]`; whether the rows of every rank fit its capacity, and every index is that
        of an expert with a place, or -1.
      capacity: rows of the buffer of each rank, for all its experts (static).
      overflow: what happens to rows beyond it (static).
      options: the ranks and the options of the exchanges (static).
    """

    dst_rank: Leaf
    dst_offset: Leaf
    row: Leaf
    num_recv_tokens: Leaf
    num_send_tokens: Leaf
    first_row: Leaf
    group_sizes: Leaf
    rows_of_ranks: Leaf
    num_recv_rows: Leaf
    num_rows: Leaf
    num_dropped: Leaf
    is_valid: Leaf
    capacity: int = dataclasses.field(metadata={"static": True})
    overflow: Overflow = dataclasses.field(metadata={"static": True})
    options: CollectiveOptions = dataclasses.field(metadata={"static": True})

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self.num_recv_tokens.shape[-1] - 1

    @property
    def imbalance(self) -> Float32[Array, ""]:
        """Most rows of a rank divided by the mean; 1 is perfect, and the value without rows.

        Every rank knows it, and nothing moves. May be traced.
        """
        rows = jnp.asarray(self.rows_of_ranks)[0]
        mean = rows.mean()
        return jnp.where(mean > 0, rows.max() / jnp.where(mean > 0, mean, 1), 1).astype(jnp.float32)

    def describe(self) -> str:
        """Returns a text for people: the load of ranks and experts, what was dropped and moves.

        Call on the host, with the routing of all ranks.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's part.
        """
        return describe_routing("Routing.describe", self)

    @property
    def by_choice(self) -> Metadata:
        """This rank's view of the plan that sends each token to the rows of its choices."""
        is_wrong = (self.dst_rank < -1) | (self.dst_rank >= self.world_size)
        rank, row = divided(jnp.maximum(self.row, 0), self.capacity)
        return self._plan(
            jnp.where(is_wrong, self.dst_rank, jnp.where(self.row < 0, -1, rank)),
            row,
            np.ones(len(self.row), np.int32),
            jnp.append(self.num_recv_rows[0], self.num_recv_rows[0].sum(dtype=jnp.int32)),
        )

    @property
    def by_rank(self) -> Metadata:
        """This rank's view of the plan that sends each token once to each of its ranks.

        Of tokens in the order of `send_row`: one piece for each rank.
        """
        is_wrong = (self.dst_rank < -1) | (self.dst_rank >= self.world_size)
        # The error names one wrong choice, also if nothing else is sent.
        wrong = jnp.where(is_wrong, self.dst_rank, np.iinfo(np.int32).max).min(initial=2**31 - 1)
        to = jnp.where(is_wrong.any(), wrong, np.arange(self.world_size, dtype=np.int32))
        num_tokens = jnp.maximum(self.num_send_tokens[0], is_wrong.any().astype(jnp.int32))
        received = self.num_recv_tokens[0]
        if self.overflow == "error":  # the rows that this rank needs, if it has too few
            need = self.num_rows[0]
            received = received.at[-1].set(jnp.where(need > self.capacity, need, received[-1]))
        return self._plan(to, self.first_row[0], num_tokens, received)

    def _plan(self, dst_rank: Any, dst_offset: Any, num_tokens: Any, received: Any) -> Metadata:
        return Metadata(
            dst_rank=dst_rank,
            dst_offset=dst_offset,
            seq_len=num_tokens,
            num_recv_tokens=received,
            num_seqs=np.int32(len(num_tokens)),
            num_total_recv_tokens=received[-1],
            world_size=self.world_size,
        )

    @property
    def send_row(self) -> Any:
        """i32 `[T, k]`: the row of a sent token, with those for one rank together; -1 if none."""
        num_sent = self.num_send_tokens[0]
        first = jnp.cumsum(num_sent, dtype=jnp.int32) - num_sent - self.first_row[0]
        is_sent = (self.dst_rank >= 0) & (self.dst_rank < self.world_size)
        row = take_in_bounds(first, jnp.where(is_sent, self.dst_rank, 0)) + self.dst_offset
        return jnp.where(is_sent, row, -1)
