"""The keys that a rank may need inside `jit`: a bound of the mask, which the assignment keeps.

A block of queries needs whole blocks of keys, from the one with the first key that a query of it
sees to the one with the last. Where a mask has a reach, these are at most `_keys_of_block`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arrays import divided
from jax_cp_dispatch._scans import running_maxima, sum_by_key, sums_before
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.planning.block_grid import BlockGrid, places


def kv_bound(grid: BlockGrid, mask: Mask) -> int:
    """Returns rows of keys that suffice for every rank, whatever the documents.

    As many as the blocks of one rank need if no two of them share a key; at most all keys. `assign`
    keeps the bound, because a rank's own queries always do: in each batch row they need its own
    keys, and what is beyond those of its first and its last block, no more than these alone need.
    """
    everything = grid.world_size * grid.rows
    before, after = mask.reach
    if before is None or after is None:
        return everything
    of_block = grid.block + _in_blocks(grid, before) + _in_blocks(grid, after)
    return min(grid.batch * grid.per_piece * of_block, everything)


def _in_blocks(grid: BlockGrid, reach: int) -> int:
    """Returns the most rows of the blocks with the `reach` keys beside a block."""
    if grid.columns % grid.block == 0:
        return -(-reach // grid.block) * grid.block
    return reach + grid.block - 1 if reach else 0  # blocks of unequal length


class KeyLimit(NamedTuple):
    """The keys of each block in global order, [G], in rows of the batch; and the limit.

    Neither begin nor end of the keys decreases. Padding needs none.
    """

    begin: Int32[Array, " G"]
    end: Int32[Array, " G"]
    is_used: Bool[Array, " G"]
    piece: Int32[Array, " G"]  # which rank's part of which batch row the block is of
    limit: int

    @classmethod
    def of(
        cls, grid: BlockGrid, mask: Mask, first: Int32[Array, "B W J"], last: Any
    ) -> KeyLimit | None:
        """Returns those of blocks with these keys; None if no assignment exceeds the limit.

        `first`: the first column that each block sees, -1 if it has no queries; `last`: one past
        the last; None: up to its own.
        """
        limit = kv_bound(grid, mask)
        if limit >= grid.world_size * grid.rows:
            return None
        block = jnp.arange(grid.num_blocks, dtype=jnp.int32)
        ends = block if last is None else grid.block_of(jnp.maximum(last - 1, 0)).reshape(-1)
        begin, _ = _rows(grid.block_of(jnp.maximum(first, 0)).reshape(-1), grid)
        _, end = _rows(ends, grid)
        piece, _ = divided(block, grid.per_piece)
        return cls(begin, end, first.reshape(-1) >= 0, piece, limit)

    @property
    def alone(self) -> Int32[Array, " G"]:
        """Returns the keys of each block if it shares none."""
        return jnp.where(self.is_used, self.end - self.begin, 0)

    def taken(
        self, given: Bool[Array, " G"], receiver: Int32[Array, " G"], num_ranks: int
    ) -> tuple[Bool[Array, " G"], Int32[Array, " W"]]:
        """Returns which given blocks their receivers take, and the keys that ranks then need.

        Beside the keys of all queries that were theirs, whether these stay or not. Receivers never
        decrease, so the blocks of one are adjacent; it takes the first ones.
        """
        _, home = divided(self.piece, num_ranks)
        (held,) = sum_by_key([self._added(self.is_used, self.piece)], home, num_ranks)
        added = self._added(given, receiver)
        key = jnp.where(given, receiver, num_ranks)
        (before,) = sums_before([added], key, num_ranks)
        taken = given & (before + added <= self.limit - jnp.append(held, 0)[key])
        return taken, held + sum_by_key([jnp.where(taken, added, 0)], key, num_ranks)[0]

    def _added(self, counts: Bool[Array, " G"], owner: Int32[Array, " G"]) -> Int32[Array, " G"]:
        """Returns the keys of each block that the one before of the same owner does not need.

        Of the blocks that count, whose owners never decrease.
        """
        seen = [jnp.where(counts, x, -1) for x in (self.end, owner)]
        end, before = (jnp.pad(x[:-1], (1, 0), constant_values=-1) for x in running_maxima(seen))
        begin = jnp.where(before == owner, jnp.maximum(self.begin, end), self.begin)
        return jnp.where(counts, self.end - begin, 0)


def _rows(block: Int32[Array, " G"], grid: BlockGrid) -> tuple[jax.Array, jax.Array]:
    """Returns the first row of blocks in the batch, and one past the last."""
    batch, home, start, length = places(block, grid)
    row = (batch * grid.world_size + home) * grid.columns + start
    return row, row + length
