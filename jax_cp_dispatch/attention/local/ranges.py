"""Cuts local attention into blocks: the common layout of its two passes.

A block is a matrix `[rows, features]` of one batch row and one KV head. A pass computes blocks of
several KV heads together: they fit the caches, and give work to several threads. The rows of a
query block contain the G query heads of its KV head in turn, so K and V are never repeated, and all
seven products (two forward, five backward) are matmuls. Blocked arrays have axes [B*K, blocks,
rows, ...]: q, k and v in their own dtype, which a pass widens if necessary, and all others in the
accumulator's. Unused rows are zero, because 0 * NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arguments import clip_to_int32, is_on_host
from jax_cp_dispatch._arrays import are_covered, divided, sum_dtype
from jax_cp_dispatch.attention.local.options import CAUSAL, FULL, PassOptions
from jax_cp_dispatch.documents.documents import check_document_mask
from jax_cp_dispatch.documents.layouts import PackedMask, attended_tokens
from jax_cp_dispatch.documents.segment_ids import check_documents, read_documents
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks import Causal, Full, MaskRanges
from jax_cp_dispatch.masks.read import check_mask_arrays, read_mask

# ---- Rows in blocks: the layout `[B*K, blocks, rows, ...]`, and access to single blocks.


def to_rows(x, num_groups, block, fill: int | float = 0):
    """`[B, L, K*G, F] -> [B*K, num_blocks, G*block, F]`; pads the last block with `fill`."""
    B, L, N, F = x.shape
    num_blocks = -(-L // block)
    x = with_rows(x, num_blocks * block, 1, fill)
    x = x.reshape(B, num_blocks, block, num_groups, N // num_groups, F)
    x = jnp.transpose(x, (0, 3, 1, 4, 2, 5))
    return x.reshape(B * num_groups, num_blocks, -1, F)


def tile_tokens(x, block, fill):
    """`[B, L] -> [B, num_blocks, block]`; pads the last block with `fill`."""
    num_blocks = -(-x.shape[1] // block)
    return with_rows(x, num_blocks * block, 1, fill).reshape(x.shape[0], num_blocks, block)


def from_rows(x, shape, num_groups):
    """The inverse: `[B*K, num_blocks, G*block, F] -> [B, L, K*G, F]`, with F of `x`."""
    B, L, N, _ = shape
    _, num_blocks, rows, F = x.shape
    heads = N // num_groups
    x = x.reshape(B, num_groups, num_blocks, heads, rows // heads, F)
    return jnp.transpose(x, (0, 2, 4, 1, 3, 5)).reshape(B, -1, N, F)[:, :L]


def with_rows(x, num_rows: int, axis: int, fill: int | float = 0):
    """Pads the end of an axis; JAX would compile a padding of nothing too."""
    missing = num_rows - x.shape[axis]
    if not missing:
        return x
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


class BlockIndex(NamedTuple):
    """The index of one block in several matrices, which are computed together."""

    matrix: Array  # the first one
    num_matrices: int
    block: Array

    def at(self, block) -> BlockIndex:
        """Returns another block of the same matrices."""
        return self._replace(block=block)


def block_of(x, index: BlockIndex):
    """Returns `x[matrices, block]`, `[matrices, ...]`."""
    sizes = (index.num_matrices, 1, *x.shape[2:])
    x = lax.dynamic_slice(x, _corner(x, index), sizes, allow_negative_indices=False)
    return x.reshape(-1, *x.shape[2:])


def set_block(x, index: BlockIndex, block):
    """Returns `x` with `block` at `index`."""
    block = block.reshape(index.num_matrices, 1, *block.shape[1:])
    return lax.dynamic_update_slice(x, block, _corner(x, index), allow_negative_indices=False)


def _corner(x, index: BlockIndex):
    return [jnp.int32(corner) for corner in (index.matrix, index.block, *[0] * (x.ndim - 2))]


# ---- The queries that may see each key row, in blocks: for masks whose keys have ranges of
# queries.

_LAST_INDEX = 2**31 - 1


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


def tile_query_ranges(
    options: PassOptions, queries: KeyQueries, used: Bool[Array, "B T"], q_shape, num_groups: int
) -> QueryRanges:
    """Cuts the numbers of queries `[B, T, N, H]` and of key rows; `used`: queries with keys."""

    def of_queries(x, fill):
        x = jnp.broadcast_to(x[:, :, None, None], (*x.shape, q_shape[2], 1))
        return to_rows(x, num_groups, options.block_q, fill)[..., 0]

    def of_keys(x, fill):
        x = jnp.broadcast_to(x[:, :, None, None], (*x.shape, num_groups, 1))
        return to_rows(x, num_groups, options.block_kv, fill)[..., 0]

    first = of_queries(jnp.where(used, queries.index, _LAST_INDEX), _LAST_INDEX)
    last = of_queries(jnp.where(used, queries.index, -1), -1)
    start, end = of_keys(queries.start, _LAST_INDEX), of_keys(queries.end, 0)
    extremes = lambda x: jnp.stack([x.min(-1), x.max(-1)], -1)
    return QueryRanges(
        index=of_queries(queries.index, 0),
        indices=jnp.stack([first.min(-1), last.max(-1)], -1),
        start=start,
        starts=extremes(start),
        end=end,
        ends=extremes(end),
    )


_LAST = 2**31 - 1


class KeyRanges(NamedTuple):
    """The key rows of each query, which the G heads of a group share."""

    rows: Array  # [B*K, nq, 2, block_q]: start and end
    queries: QueryRanges | None = None  # that may see each key row; None: all

    def of_heads(self, num_rows: int) -> Array:
        """Returns start and end of the `num_rows` rows of each block, `[..., 2, G*block_q]`."""
        *lead, block_q = self.rows.shape
        heads = jnp.broadcast_to(self.rows[..., None, :], (*lead, num_rows // block_q, block_q))
        return heads.reshape(*lead, num_rows)

    def of_queries(self, index: BlockIndex) -> KeyRanges:
        """Returns the ranges of one block of queries, with `rows` `[matrices, 2, block_q]`."""
        queries = self.queries and self.queries.of_queries(index)
        return KeyRanges(block_of(self.rows, index), queries)

    def key_blocks(self, options: PassOptions) -> KeyBlocks:
        """Returns the key blocks of one block of queries: as one pass that compiles once."""
        start, end = self.rows[:, 0], self.rows[:, 1]
        before = lambda x: divided(x, options.block_kv)[0]
        after = lambda x: before(x + (options.block_kv - 1))
        bounds = before(start), after(end), after(start), before(end)
        extremes, fills = (lax.min, lax.max, lax.max, lax.min), (_LAST, 0, 0, _LAST)
        combined = lambda xs, ys: [f(x, y) for f, x, y in zip(extremes, xs, ys, strict=True)]
        return KeyBlocks(*lax.reduce(bounds, tuple(map(np.int32, fills)), combined, (0, 1)))


class KeyBlocks(NamedTuple):
    """The key blocks that a block of queries visits, and those that all its queries see whole."""

    first: Array
    last: Array  # one past it
    first_whole: Array
    last_whole: Array  # likewise


class RowRanges(NamedTuple):
    """The key rows [kv_start, kv_end) of each query, `[B, T]`, and who may see each key row."""

    kv_start: Array
    kv_end: Array
    queries: KeyQueries | None = None


class BlockedOperands(NamedTuple):
    """The blocks of one call of local attention."""

    q: Array  # [B*K, nq, G*block_q, H]
    k: Array  # [B*K, nk, block_kv, H]
    v: Array  # [B*K, nk, block_kv, Hv]
    ranges: KeyRanges
    used: Array  # [B, T] queries with a non-empty range


def tile_operands(options: PassOptions, q, k, v, ranges: RowRanges) -> BlockedOperands:
    """Cuts checked operands of `local_attention` into blocks."""
    kv_start, kv_end, queries = ranges
    S, K = k.shape[1:3]
    # Constant ranges are common, and XLA takes seconds to fold the code that depends on them.
    kv_start, kv_end = lax.optimization_barrier((kv_start, kv_end))
    start, end = (jnp.clip(clip_to_int32(x), 0, S) for x in (kv_start, kv_end))
    used = start < end
    attended = are_covered(start, end, S)
    if queries is not None:
        attended &= queries.start < queries.end
    k, v = (jnp.where(attended[:, :, None, None], x, 0) for x in (k, v))
    return BlockedOperands(
        q=tile_queries(options, q, used, K),
        k=to_rows(k, K, options.block_kv),
        v=to_rows(v, K, options.block_kv),
        ranges=tile_ranges(options, RowRanges(start, end, queries), q.shape, K, S),
        used=used,
    )


def tile_ranges(
    options: PassOptions, ranges: RowRanges, q_shape, num_groups: int, num_keys: int
) -> KeyRanges:
    """Cuts ranges in `[0, num_keys]`, for queries `[B, T, N, H]`."""
    kv_start, kv_end, queries = ranges
    used = kv_start < kv_end
    start, end = jnp.where(used, kv_start, num_keys), jnp.where(used, kv_end, 0)
    blocks = [tile_tokens(start, options.block_q, num_keys), tile_tokens(end, options.block_q, 0)]
    rows = jnp.stack(blocks, axis=2)
    rows = jnp.broadcast_to(rows[:, None], (rows.shape[0], num_groups, *rows.shape[1:]))
    rows = rows.reshape(-1, *rows.shape[2:])
    if queries is None:
        return KeyRanges(rows)
    return KeyRanges(rows, tile_query_ranges(options, queries, used, q_shape, num_groups))


def tile_queries(options: PassOptions, q, used, num_groups):
    """Returns query blocks; rows outside `used`, `[B, T]`, are zero."""
    return to_rows(jnp.where(used[:, :, None, None], q, 0), num_groups, options.block_q)


def each_query_block(options: PassOptions, one_block, carry, q):
    """Runs `carry = one_block(carry, index)` over the blocks of q, of all matrices.

    The carry is written in place without a copy; results of a `lax.scan` would be copied.
    """
    num_matrices, num_blocks = q.shape[:2]
    together = options.block_heads

    def body(number, carry):
        matrices, block = divided(number, num_blocks)
        return one_block(carry, BlockIndex(matrices * together, together, block))

    return lax.fori_loop(0, num_matrices // together * num_blocks, body, carry)


def positions(options: PassOptions, j):
    """Returns the key rows of block j."""
    return j * options.block_kv + jnp.arange(options.block_kv, dtype=jnp.int32)


def soft_capped(options: PassOptions, logits):
    """Returns soft-capped logits, and their derivative with respect to the given ones."""
    cap = options.logit_soft_cap
    if cap is None:
        return logits, 1
    ratio = jnp.tanh(logits / cap)
    return cap * ratio, 1 - ratio * ratio


def matmul(x, y, contract):
    """Multiplies per matrix at highest precision; `contract`: axis of x, axis of y."""
    dimensions = ((contract[:1], contract[1:]), ((0,), (0,)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


def widen(x):
    """Converts `x` to the accumulator's dtype: on CPU, GEMMs in narrower types are slower."""
    return x.astype(accumulator(x))


def accumulator(x):
    """Returns the dtype of all sums."""
    return sum_dtype(x.dtype)


# ---- Reads the ranges of `local_attention`, given as rows or by a mask.


def read_ranges(
    op: str, shapes: tuple[Any, Any], given: MaskRanges, packed: PackedMask | None
) -> RowRanges:
    """Returns the ranges of rows; of a mask, if none are given and `packed` is.

    Args:
      shapes: of q and of k.
    """
    (B, T), S = shapes[0][:2], shapes[1][1]
    if packed is not None and given.k_start is None and given.k_end is None:
        if given.q_start is not None or given.q_end is not None:
            raise TypeError(
                f"{op}: got q_start or q_end without kv_start and kv_end. Pass all four, or "
                "mask=masks.Ranges(...)."
            )
        return _of_mask(op, (B, T, S), packed)
    if packed is not None and any(x is not None for x in packed):
        raise TypeError(
            f"{op}: got ranges of keys, and a mask or documents. Pass either kv_start and kv_end, "
            "or mask, segment_ids and positions."
        )
    needed = {"kv_start": given.k_start, "kv_end": given.k_end}
    if given.q_start is not None or given.q_end is not None:
        needed |= {"q_start": given.q_start, "q_end": given.q_end}
    for name, x in needed.items():
        if x is None:
            raise TypeError(f"{op}: {name} is missing; a range has a start and an end. Pass it.")
    return ranges_of_rows(given, (B, T))


def ranges_of_rows(given: MaskRanges, shape: tuple[int, ...]) -> RowRanges:
    """Returns the ranges of checked rows; `shape` is B and T."""
    k_start, k_end = clip_to_int32(given.k_start), clip_to_int32(given.k_end)
    if given.q_start is None:
        return RowRanges(k_start, k_end)
    index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    start, end = (jnp.clip(clip_to_int32(x), 0, shape[1]) for x in (given.q_start, given.q_end))
    return RowRanges(k_start, k_end, KeyQueries(index, start, end))


def dense_ranges(shapes: tuple[Any, Any], given: MaskRanges, packed: PackedMask) -> str | None:
    """Returns how ranges that `read_ranges` has checked are dense, if that is known."""
    is_of_mask = all(x is None for x in (*given, packed.segment_ids, packed.positions))
    if not is_of_mask:
        return None
    mask = read_mask("local_attention", packed.mask).simplified()
    if isinstance(mask, Full):
        return FULL
    return CAUSAL if isinstance(mask, Causal) and shapes[0][1] == shapes[1][1] else None


def _of_mask(op: str, sizes: tuple[int, int, int], packed: PackedMask) -> RowRanges:
    B, T, S = sizes
    if T > S:
        raise ValueError(
            f"{op}: got {T} queries and {S} keys; with a mask, queries are the last of the keys' "
            "tokens. Pass kv_start and kv_end."
        )
    mask = read_mask(op, packed.mask)
    check_documents(op, packed.segment_ids, packed.positions, (B, S), "k has B, S =")
    check_mask_arrays(op, mask, (B, S))
    segment_ids, positions = read_documents(op, packed.segment_ids, packed.positions)
    if segment_ids is None and positions is not None:
        segment_ids = np.ones((B, S), np.int32)
    if mask.has_arrays and all(map(is_on_host, jax.tree.leaves((mask, segment_ids, positions)))):
        known = jax.tree.map(np.asarray, mask)
        ids = np.ones((B, S), np.int32) if segment_ids is None else segment_ids
        check_document_mask(op, known, from_segment_ids(op, ids, positions))
    packed = jax.tree.map(jnp.asarray, PackedMask(mask, segment_ids, positions))
    ranges = attended_tokens(packed, (B, S))
    start, end = (x[:, S - T :] for x in ranges[:2])
    if ranges.q_start is None:
        return RowRanges(start, end)
    index = jnp.broadcast_to(jnp.arange(S - T, S, dtype=jnp.int32), (B, T))
    return RowRanges(start, end, KeyQueries(index, ranges.q_start, ranges.q_end))
