"""What the passes of local attention read: options, key ranges, operands tiled into blocks.

A block is a matrix `[rows, features]` of one batch row and one KV head. A pass computes blocks of
several KV heads together: they fit the caches, and give work to several threads. The rows of a
query block contain the G query heads of its KV head in turn, so K and V are never repeated, and all
seven products (two forward, five backward) are matmuls. Blocked arrays have axes [B*K, blocks,
rows, ...]: q, k and v in their own dtype, which a pass widens if necessary, and all others in the
accumulator's. Unused rows are zero, because 0 * NaN is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arguments import clip_to_int32
from jax_cp_dispatch._arrays import are_covered, divided, sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.masks import MaskRanges

# ---- The options of the passes.

CAUSAL, FULL = "causal", "full"
_VECTOR = 8  # rows
# Rows of a block's matrix. On CPU, XLA multiplies 256 x 256 blocks with heads of 64 on one thread
# (65 of 125 GFLOP/s on 2 cores), 512 x 512 on all; larger blocks waste more work.
_BLOCK = 512
# Of the blocks of several heads: larger products and passes wait less often for all threads (2
# cores: 2.3 s without, 1.8 s with 4 heads, 8K tokens forward and backward).
_LOGITS = 4 * _BLOCK * _BLOCK


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """The resolved options of the passes; static."""

    scale: float
    logit_soft_cap: float | None
    block_q: int
    block_kv: int
    block_heads: int  # KV heads of a batch row whose blocks are computed together
    return_max_logits: bool = False
    kv_heads: int = 1  # of a batch row: that many matrices in turn have the same ranges
    # Of calls on whole arrays.
    dense: str | None = None  # all ranges are those of one document: CAUSAL or FULL
    out_dtype: Any = None
    gradient_dtypes: tuple[Any, ...] = ()  # of q, k and v
    # Of queries that have picked their keys.
    pick_block: int = 0  # tokens of a pick; 0: keys are not picked
    value_size: int = 0  # of values that are the first features of the keys; 0: they are not


def pass_options(
    q,
    k,
    *,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    block_heads: int | None = None,
    **others: Any,
) -> PassOptions:
    """Returns checked options; the shapes of q and k select the blocks that are None."""
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    block_q = block_q or even_block(T, max(128, _BLOCK // (N // K)))
    block_kv = block_kv or even_block(S, _BLOCK)
    logits_of_head = N // K * block_q * block_kv
    most_heads = max(1, _LOGITS // logits_of_head)
    together = max(x for x in range(1, min(K, most_heads) + 1) if K % x == 0)
    return PassOptions(
        scale=H**-0.5 if scale is None else float(scale),
        logit_soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
        block_q=block_q,
        block_kv=block_kv,
        block_heads=int(block_heads or together),
        kv_heads=K,
        **others,
    )


def rank_blocks(num_queries, num_keys, num_heads, num_groups, *, rows) -> dict[str, int]:
    """Returns block sizes for ranks that compute at the same time.

    Together they keep all cores busy, so a product need not use several threads. Small blocks of
    one head stay in the caches and follow the ranges closely. `rows` is the row count of a query
    block's matrix.
    """
    block_q = max(64, rows * num_groups // max(1, num_heads))
    return {
        "block_q": even_block(num_queries, block_q),
        "block_kv": even_block(num_keys, 128),
        "block_heads": 1,
    }


def even_block(length: int, block: int) -> int:
    """Returns a size near `block`, in whole vectors, that covers the length with least waste.

    The largest of several candidates; for a short axis its length, rounded up.
    """
    if length <= block * 3 // 2:
        return max(1, -(-length // _VECTOR)) * _VECTOR
    sizes = range(block * 3 // 4 // _VECTOR * _VECTOR, block * 5 // 4 + 1, _VECTOR)
    return min(sizes, key=lambda size: (-length % size, -size))


# ---- Rows in blocks: the layout `[B*K, blocks, rows, ...]`, and access to single blocks.


def to_rows(x, num_groups, block, fill: int | float = 0):
    """`[B, L, K*G, F] -> [B*K, num_blocks, G*block, F]`; pads the last block with `fill`."""
    B, L, N, F = x.shape
    num_blocks = -(-L // block)
    x = with_rows(x, num_blocks * block, 1, fill)
    x = x.reshape(B, num_blocks, block, num_groups, N // num_groups, F)
    x = jnp.transpose(x, (0, 3, 1, 4, 2, 5))
    return x.reshape(B * num_groups, num_blocks, -1, F)


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

    def corner(self, x) -> list[Any]:
        """Returns where the block begins in `x`, `[M, blocks, ...]`; all int32, as JAX requires."""
        return [self.matrix, self.block, *[np.int32(0)] * (x.ndim - 2)]


def block_of(x, index: BlockIndex):
    """Returns `x[matrices, block]`, `[matrices, ...]`."""
    sizes = (index.num_matrices, 1, *x.shape[2:])
    x = lax.dynamic_slice(x, index.corner(x), sizes, allow_negative_indices=False)
    return x.reshape(-1, *x.shape[2:])


def set_block(x, index: BlockIndex, block):
    block = block.reshape(index.num_matrices, 1, *block.shape[1:])
    return lax.dynamic_update_slice(x, block, index.corner(x), allow_negative_indices=False)


# ---- What each query sees, in rows and in blocks: a range of keys, of which some masks hide keys
# from queries outside a range.

LAST_INDEX = 2**31 - 1


class KeyQueries(NamedTuple):
    """The queries whose index is in [start, end) may see a key row, if it is among their keys."""

    # Of each query; any numbers that increase within a document
    index: Int32[Array, "B T"]  # pyright: ignore[reportIncompatibleMethodOverride]
    # Of each key row; empty for rows that no query sees
    start: Int32[Array, "B S"]
    end: Int32[Array, "B S"]


class RowRanges(NamedTuple):
    """The key rows [kv_start, kv_end) of each query, `[B, T]`, and who may see each key row."""

    kv_start: Array
    kv_end: Array
    queries: KeyQueries | None = None  # None: all

    @classmethod
    def of_mask(cls, given: MaskRanges, shape: tuple[int, ...]) -> RowRanges:
        """Returns the ranges of checked rows; `shape` is B and T."""
        k_start, k_end = clip_to_int32(given.k_start), clip_to_int32(given.k_end)
        if given.q_start is None:
            return cls(k_start, k_end)
        index = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        start, end = (jnp.clip(clip_to_int32(x), 0, shape[1]) for x in (given.q_start, given.q_end))
        return cls(k_start, k_end, KeyQueries(index, start, end))


class QueryRanges(NamedTuple):
    """`KeyQueries` in blocks, and the smallest and largest numbers of each block."""

    index: Array  # [B*K, nq, G*block_q]  # pyright: ignore[reportIncompatibleMethodOverride]
    indices: Array  # [B*K, nq, 2], of queries that see keys
    start: Array  # [B*K, nk, block_kv]
    starts: Array  # [B*K, nk, 2]
    end: Array  # [B*K, nk, block_kv]
    ends: Array  # [B*K, nk, 2]

    def of_keys(self, index: BlockIndex) -> QueryRanges:
        """Returns the numbers of one block of keys, of those of one block of queries."""
        names = ("start", "starts", "end", "ends")
        return self._replace(**{name: block_of(getattr(self, name), index) for name in names})

    def allow(self) -> Bool[Array, "matrices rows block_kv"]:
        index = self.index[..., None]
        return (index >= self.start[:, None]) & (index < self.end[:, None])


class KeyRanges(NamedTuple):
    """`RowRanges` in blocks; the G heads of a group share their rows."""

    rows: Array  # [B*K, nq, 2, block_q]: start and end
    queries: QueryRanges | None = None

    def of_heads(self, num_rows: int) -> Array:
        """Returns start and end of the `num_rows` rows of each block, `[..., 2, G*block_q]`."""
        *lead, block_q = self.rows.shape
        heads = jnp.broadcast_to(self.rows[..., None, :], (*lead, num_rows // block_q, block_q))
        return heads.reshape(*lead, num_rows)

    def of_block(self, options: PassOptions, index: BlockIndex, num_rows: int) -> BlockRanges:
        """Returns the ranges of one block of `num_rows` queries."""
        queries = self.queries
        if queries is not None:
            queries = queries._replace(
                index=block_of(queries.index, index), indices=block_of(queries.indices, index)
            )
        own = KeyRanges(block_of(self.rows, index))
        start, end = own.rows[:, 0], own.rows[:, 1]
        before = lambda x: divided(x, options.block_kv)[0]
        after = lambda x: before(x + (options.block_kv - 1))
        bounds = before(start), after(end), after(start), before(end)
        # One pass over all four, which compiles once.
        extremes, fills = (lax.min, lax.max, lax.max, lax.min), (LAST_INDEX, 0, 0, LAST_INDEX)
        combined = lambda xs, ys: [f(x, y) for f, x, y in zip(extremes, xs, ys, strict=True)]
        blocks = lax.reduce(bounds, tuple(map(np.int32, fills)), combined, (0, 1))
        return BlockRanges(index, own.of_heads(num_rows), queries, *blocks)


class BlockRanges(NamedTuple):
    """What one block of queries sees: keys of the blocks [first, last)."""

    index: BlockIndex  # pyright: ignore[reportIncompatibleMethodOverride]
    rows: Array  # [matrices, 2, G*block_q]: start and end
    queries: QueryRanges | None  # its own numbers, with those of all keys
    first: Array
    last: Array
    first_whole: Array  # all its queries see the blocks [first_whole, last_whole) whole
    last_whole: Array

    def each_key_block(self, body: Callable, carry: Any) -> Any:
        """Runs `carry = body(j, carry)` over the blocks of keys that these queries may see."""
        if self.queries is None:
            return lax.fori_loop(self.first, self.last, body, carry)
        matrix, num_matrices, _ = self.index
        starts, ends = (
            lax.dynamic_slice_in_dim(x, matrix, num_matrices)
            for x in (self.queries.starts[..., 0], self.queries.ends[..., 1])
        )
        block = jnp.arange(ends.shape[1], dtype=jnp.int32)
        is_visible = (block >= self.first) & (block < self.last)
        is_visible &= jnp.min(starts, 0) <= jnp.max(self.queries.indices[:, 1])
        is_visible &= jnp.max(ends, 0) > jnp.min(self.queries.indices[:, 0])
        count = jnp.cumsum(is_visible, dtype=jnp.int32)
        place = jnp.where(is_visible, count - 1, block.size)
        blocks = jnp.zeros_like(place).at[place].set(block + 0 * place, mode="drop")
        return lax.fori_loop(0, count[-1], lambda i, carry: body(blocks[i], carry), carry)


def tile_operands(options: PassOptions, q, k, v, ranges: RowRanges):
    """Returns blocks of q, of k and v, and of the ranges; and which queries `[B, T]` see keys."""
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
    q_blocks = to_rows(jnp.where(used[:, :, None, None], q, 0), K, options.block_q)
    kv = tuple(to_rows(x, K, options.block_kv) for x in (k, v))
    return q_blocks, kv, tile_ranges(options, RowRanges(start, end, queries), q.shape, K, S), used


def tile_ranges(
    options: PassOptions, ranges: RowRanges, q_shape, num_groups: int, num_keys: int
) -> KeyRanges:
    """Cuts ranges in `[0, num_keys]`, for queries `[B, T, N, H]`."""
    kv_start, kv_end, queries = ranges
    B, T, N, _ = q_shape
    used = kv_start < kv_end
    num_blocks, blocks = -(-T // options.block_q), []
    for x, fill in ((kv_start, num_keys), (kv_end, 0)):
        x = with_rows(jnp.where(used, x, fill), num_blocks * options.block_q, 1, fill)
        blocks.append(x.reshape(B, num_blocks, options.block_q))
    rows = jnp.stack(blocks, axis=2)
    rows = jnp.broadcast_to(rows[:, None], (B, num_groups, *rows.shape[1:]))
    rows = rows.reshape(-1, *rows.shape[2:])
    if queries is None:
        return KeyRanges(rows)

    def tiled(x, num_heads, block, fill):
        x = jnp.broadcast_to(x[:, :, None, None], (*x.shape, num_heads, 1))
        return to_rows(x, num_groups, block, fill)[..., 0]

    first, last, index = (
        tiled(x, N, options.block_q, fill)
        for x, fill in (
            (jnp.where(used, queries.index, LAST_INDEX), LAST_INDEX),
            (jnp.where(used, queries.index, -1), -1),
            (queries.index, 0),
        )
    )
    start = tiled(queries.start, num_groups, options.block_kv, LAST_INDEX)
    end = tiled(queries.end, num_groups, options.block_kv, 0)
    extremes = lambda x, y: jnp.stack([x.min(-1), y.max(-1)], -1)
    indices, starts, ends = extremes(first, last), extremes(start, start), extremes(end, end)
    return KeyRanges(rows, QueryRanges(index, indices, start, starts, end, ends))


def soft_capped(cap: float | None, logits):
    """Returns soft-capped logits, and their derivative with respect to the given ones."""
    if cap is None:
        return logits, 1
    ratio = jnp.tanh(logits / cap)
    return cap * ratio, 1 - ratio * ratio


# ---- The softmax of query blocks, and its cotangents.


class OnlineSoftmax(NamedTuple):
    """The online softmax of each row of the query blocks, over the keys seen so far."""

    peak: Array  # [B*K, nq, G*block_q] largest logit
    total: Array  # [B*K, nq, G*block_q] sum of exp(logit - peak)
    acc: Array  # [B*K, nq, G*block_q, Hv] likewise, times the values

    @classmethod
    def of_nothing(cls, q, num_features) -> OnlineSoftmax:
        # A finite first peak keeps exp(-inf - peak) = 0 for rows without keys so far.
        dtype = sum_dtype(q.dtype)
        peak = jnp.full(q.shape[:3], jnp.finfo(dtype).min, dtype)
        acc = jnp.zeros((*q.shape[:3], num_features), dtype)
        return cls(*vary_alike((peak, jnp.zeros_like(peak), acc), like=q))

    def result(self, shape, num_groups):
        """Returns `(out, lse)` of `local_attention`, for queries of this shape."""
        empty = self.total == 0
        total = jnp.where(empty, 1, self.total)
        lse = jnp.where(empty, -jnp.inf, self.peak + jnp.log(total))
        out = from_rows(self.acc / total[..., None], shape, num_groups)
        return out, jnp.swapaxes(from_rows(lse[..., None], shape, num_groups)[..., 0], 1, 2)

    def max_logits(self, shape, num_groups):
        """Returns the largest logit of each row, `[B, N, T]`; -inf if it has no keys."""
        peak = jnp.where(self.total == 0, -jnp.inf, self.peak)
        return jnp.swapaxes(from_rows(peak[..., None], shape, num_groups)[..., 0], 1, 2)


class OutputCotangents(NamedTuple):
    """The whole softmax and its cotangents, for each row of the query blocks.

    dL/dlogit_j = p_j (dout . v_j - delta), delta = dout . out - dlse, because dlse/dlogit_j = p_j.
    """

    dout: Array  # [B*K, nq, G*block_q, Hv], in its own dtype
    lse: Array  # [B*K, nq, G*block_q]; inf, hence p = 0, for empty ranges
    delta: Array  # [B*K, nq, G*block_q]


class SoftmaxGradients(NamedTuple):
    """Output and lse of the whole softmax, and their cotangents; None: zero."""

    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]
    dout: Array
    dlse: Array | None = None


def tile_cotangents(options, used, whole: SoftmaxGradients, num_groups) -> OutputCotangents:
    out, lse, dout, dlse = whole
    dtype = sum_dtype(lse.dtype)
    lse = jnp.swapaxes(lse.astype(dtype), 1, 2)
    used = used[:, :, None] & (lse > -jnp.inf)
    delta = jnp.sum(dout.astype(dtype) * out.astype(dtype), axis=-1)
    if dlse is not None:
        delta = delta - jnp.swapaxes(dlse, 1, 2).astype(dtype)
    dout, lse, delta = (
        to_rows(jnp.where(used[..., None], x, fill), num_groups, options.block_q, fill)
        for x, fill in ((dout, 0), (lse[..., None], jnp.inf), (delta[..., None], 0))
    )
    return OutputCotangents(dout, lse[..., 0], delta[..., 0])


# ---- Checks of the doors.

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)


def check_heads(name: str, q: Any, k: Any, v: Any) -> None:
    """Requires queries, keys and values of one dtype, whose heads match."""
    if q.dtype not in _FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"{name}: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}, but must have "
            "the same one: bfloat16, float16, float32 or float64. Cast them."
        )
    (N, H), K = q.shape[2:], k.shape[2]
    if K == 0 or N == 0 or N % K:
        raise ValueError(
            f"{name}: {N} query heads cannot share {K} KV heads; N must be a multiple of K."
        )
    for heads, size in (("q and k", H), ("v", v.shape[3])):
        if size == 0:
            raise ValueError(
                f"{name}: heads of {heads} have size 0; they need at least one feature."
            )


def check_softmax(name: str, scale: Any, logit_soft_cap: Any) -> None:
    for what, value in (("scale", scale), ("logit_soft_cap", logit_soft_cap)):
        is_number = not isinstance(value, bool | np.bool_ | str | bytes)
        try:
            float(0 if value is None or not is_number else value)
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            raise TypeError(
                f"{name}: {what} is {value!r}, but must be a number that is known when the program "
                "is traced, or None."
            )
    if logit_soft_cap is not None and not float(logit_soft_cap) > 0:
        raise ValueError(
            f"{name}: logit_soft_cap is {float(logit_soft_cap)}, but must be > 0, or None."
        )
