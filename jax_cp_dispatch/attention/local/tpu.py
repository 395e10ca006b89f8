"""The passes of local attention for TPUs: Pallas kernels over blocks of 128 queries and 128 keys.

Larger blocks waste more pairs: a document rarely ends at the end of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from jax_cp_dispatch.attention.local.ranges import (
    LAST_INDEX,
    KeyRanges,
    OnlineSoftmax,
    OutputCotangents,
    PassOptions,
    soft_capped,
    with_rows,
)

# ---- Blocks of 128 queries and keys, the lanes of a TPU, and the pairs of them that meet.
#
# A walk goes over consecutive blocks of keys; that of a block of keys, over blocks of queries. Only
# its ends are stored: those of 64K tokens fit into 16 KB of scalar memory, whatever the mask.

LANES = 128
_ROWS = 1024  # of the queries of one step: for each key, as many products as hide a step's overhead


class TpuBlocks(NamedTuple):
    """What every kernel reads; R = G * 128 rows of queries."""

    q: Float[Array, "M nq R H"]
    k: Float[Array, "M nk 128 H"]
    v: Float[Array, "M nk 128 Hv"]
    # Of each query: the first key row, one past the last, and its index if keys have ranges of
    # queries. Of each key row then: the first index, and one past the last.
    of_queries: Int32[Array, "M nq rows R"]
    of_keys: Int32[Array, "M nk 2 128"] | None

    @property
    def key_arrays(self) -> tuple[Array, ...]:
        """Returns keys, values, and their ranges of queries if there are any."""
        return self.k, self.v, *(() if self.of_keys is None else (self.of_keys,))


def tile(options: PassOptions, q, ranges: KeyRanges, kv) -> TpuBlocks:
    num_keys = kv[0].shape[1] * kv[0].shape[2]
    bounds, queries = ranges.of_heads(q.shape[2]), ranges.queries
    rows = [(bounds[:, :, 0], num_keys), (bounds[:, :, 1], 0)]
    of_keys = None
    if queries is not None:
        rows.append((queries.index, 0))
        of_keys = [tile_again(x, x.shape[2], LANES) for x in (queries.start, queries.end)]
        of_keys = jnp.stack(of_keys, 2)
    rows = [tile_again(x, options.block_q, LANES, fill) for x, fill in rows]
    k, v = (tile_again(x, x.shape[2], LANES) for x in kv)
    return TpuBlocks(tile_again(q, options.block_q, LANES), k, v, jnp.stack(rows, 2), of_keys)


def tile_again(x, rows: int, new_rows: int, fill: int | float = 0):
    """`[M, blocks, G*rows, ...] -> [M, blocks, G*new_rows, ...]`; pads the last with `fill`."""
    if rows == new_rows:
        return x
    M, blocks, all_rows, *features = x.shape
    heads = all_rows // rows
    x = jnp.swapaxes(x.reshape(M, blocks, heads, rows, *features), 1, 2)
    x = x.reshape(M, heads, blocks * rows, *features)
    num_blocks = -(-blocks * rows // new_rows)
    x = with_rows(x, num_blocks * new_rows, 2, fill)
    x = jnp.swapaxes(x.reshape(M, heads, num_blocks, new_rows, *features), 1, 2)
    return x.reshape(M, num_blocks, heads * new_rows, *features)


# Columns of both tables: the steps of all walks before, the first block and one past the last.
# A block that meets none has the walk of one step, because its results must be written.
BEGIN, FIRST, LAST = range(3)
# Of queries: the blocks of keys that all their ranges cover; then their smallest and largest index.
FULL_FIRST, FULL_LAST, INDEX_MIN, INDEX_MAX = range(3, 7)
# Of keys: extremes of their ranges of queries.
START_MIN, START_MAX, END_MIN, END_MAX = range(3, 7)


class Visits(NamedTuple):
    """The walks of each block, for `matrices` that are computed together."""

    of_queries: Int32[Array, "matrices columns nq"]
    of_keys: Int32[Array, "matrices columns nk"]


def find_visits(options: PassOptions, blocks: TpuBlocks) -> Visits:
    """Finds the walks; `jax.numpy` only, of shapes that do not depend on the ranges."""
    # If few queries share a KV head, one step computes several of these.
    most = min(options.kv_heads, max(1, _ROWS // blocks.q.shape[2]))
    together = max(x for x in range(1, most + 1) if options.kv_heads % x == 0)
    num_keys = blocks.k.shape[1] * LANES
    start, end = blocks.of_queries[:, :, 0], blocks.of_queries[:, :, 1]
    used = start < end
    start, end = jnp.where(used, start, num_keys), jnp.where(used, end, 0)
    smallest = lambda x: x.min(-1).reshape(-1, together, x.shape[1]).min(1)
    largest = lambda x: -smallest(-x)
    first, last = smallest(start) // LANES, -(-largest(end) // LANES)
    of_queries = [-(-largest(start) // LANES), smallest(end) // LANES]
    of_keys = []
    key_block = jnp.arange(blocks.k.shape[1], dtype=jnp.int32)[None, None]
    meet = (first[..., None] <= key_block) & (key_block < last[..., None])
    if blocks.of_keys is not None:
        index = blocks.of_queries[:, :, 2]
        starts, ends = blocks.of_keys[:, :, 0], blocks.of_keys[:, :, 1]
        seen = starts < ends  # others, as those that pad the last block, hide nothing less
        of_queries += [
            smallest(jnp.where(used, index, LAST_INDEX)),
            largest(jnp.where(used, index, -1)),
        ]
        of_keys = [
            smallest(jnp.where(seen, starts, LAST_INDEX)),
            largest(starts),
            smallest(ends),
            largest(ends),
        ]
        meet &= of_keys[0][:, None] <= of_queries[3][..., None]
        meet &= of_keys[3][:, None] > of_queries[2][..., None]
    tables = ([*_walks(meet), *of_queries], [*_walks(jnp.swapaxes(meet, 1, 2)), *of_keys])
    return Visits(*(jnp.stack(table, 1).astype(jnp.int32) for table in tables))


def _walks(meet):
    number = meet.shape[2]
    other = jnp.arange(number, dtype=jnp.int32)[None, None]
    first = jnp.where(meet, other, number - 1).min(2)
    last = jnp.where(meet, other + 1, 0).max(2)
    steps = jnp.maximum(last - first, 1)
    return jnp.cumsum(steps, 1) - steps, first, last


def find_walk(table, row):
    """Returns the first block of a walk and one past the last, in a kernel or outside."""
    return table[FIRST, row], jnp.maximum(table[LAST, row], table[FIRST, row] + 1)


# ---- Calls a kernel on a grid of blocks, each of which walks over the blocks that it meets.

_VMEM_BYTES = 32 * 2**20  # more than XLA's default of 16 MB, and a quarter of a TPU v5e's


class Kernel(NamedTuple):
    """One pass: what to do before, at each step of, and after the walk of a block."""

    begin: Callable[[], None]
    add: Callable[[Sequence[Any], Any, bool], None]  # walked blocks, block of keys, masked
    end: Callable[[], None] = lambda: None


class Arrays(NamedTuple):
    """What a kernel reads, all `[matrices, blocks, rows, columns]`."""

    own: Sequence[Array]  # the block of the same number
    walked: Sequence[Array]  # the blocks of the walk
    first: Sequence[Array] = ()  # values of the results before, whose memory these take


def call(
    kernel: functools.partial[Kernel],
    visits: Visits,
    arrays: Arrays,
    outs: Sequence[tuple[int, ...]],
    *,
    of_queries: bool,
    scratch: Sequence[tuple[int, ...]] = (),
) -> tuple[Array, ...]:
    """Runs `kernel(own, first, outs, scratch)` for each block of queries, or of keys.

    Args:
      outs: shapes of the float32 results, in blocks as `arrays.own`.
      of_queries: whether it walks from blocks of queries over keys, or the reverse.
      scratch: shapes of float32 arrays in VMEM.
    """
    own, walked, first = arrays
    (matrices, rows), together = own[0].shape[:2], own[0].shape[0] // visits[0].shape[0]
    axes = jax.typeof(own[0]).manual_axis_type

    def body(tables, owned, before, sources, results, buffers, arrived, rest):
        one = kernel(owned, before, results, rest)

        def step(row, other, slot):
            (i, j), (q, k) = (row, other) if of_queries else (other, row), tables
            meet = (q[FIRST, i] <= j) & (j < q[LAST, i])
            full = (q[FULL_FIRST, i] <= j) & (j < q[FULL_LAST, i])  # they hide no pair
            if k.shape[0] > START_MIN:
                meet &= (k[START_MIN, j] <= q[INDEX_MAX, i]) & (k[END_MAX, j] > q[INDEX_MIN, i])
                full &= (k[START_MAX, j] <= q[INDEX_MIN, i]) & (k[END_MIN, j] > q[INDEX_MAX, i])
            held = [buffer.at[slot] for buffer in buffers]
            pl.when(meet & full)(lambda: one.add(held, j, False))
            pl.when(meet & ~full)(lambda: one.add(held, j, True))

        one.begin()
        _walk(tables[not of_queries], rows, (sources, buffers, arrived), step)
        one.end()

    def specs(shapes):
        block = lambda m, row: (m, row, 0, 0)
        return [pl.BlockSpec((together, None, *shape[2:]), block) for shape in shapes]

    tables = [
        pl.BlockSpec((None, *x.shape[1:]), lambda m, row: (m, 0, 0), memory_space=pltpu.SMEM)
        for x in visits
    ]
    copied = [pl.BlockSpec(memory_space=pl.ANY)] * len(walked)
    owned, before = (specs([x.shape for x in part]) for part in (own, first))
    results = [jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes) for shape in outs]
    buffers = [pltpu.VMEM((2, together, *x.shape[2:]), x.dtype) for x in walked]
    arrived = pltpu.SemaphoreType.DMA((2, len(walked)))
    (results,) = pl.pallas_call(
        body,
        grid=(matrices // together, rows),
        in_specs=[tables, owned, before, copied],
        out_specs=[specs(outs)],
        out_shape=[results],
        scratch_shapes=[buffers, arrived, [pltpu.VMEM(shape, jnp.float32) for shape in scratch]],
        input_output_aliases={len(visits) + len(own) + n: n for n in range(len(first))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        name=kernel.func.__name__.strip("_"),
    )(*map(list, (visits, own, first, walked)))
    return tuple(results)


def _walk(table, num_rows, copied, step):
    """Runs `step(row, block, slot)`, with the walked blocks in their buffers' slot.

    A block is copied while the one before is computed; also the first one of the next row.
    """
    (sources, buffers, arrived), (m, row) = copied, (pl.program_id(0), pl.program_id(1))
    first, last = find_walk(table, row)
    begin = table[BEGIN, row]

    def copies(block, slot):
        for n, (source, buffer) in enumerate(zip(sources, buffers, strict=True)):
            together = buffer.shape[1]
            blocks = source.at[pl.ds(m * together, together), block]
            arrival = arrived.at[slot, jnp.int32(n)]  # an int would be int64 if these are enabled
            yield pltpu.make_async_copy(blocks, buffer.at[slot], arrival)

    def start(block, slot):
        for copy in copies(block, slot):
            copy.start()

    pl.when(row == 0)(lambda: start(first, begin & 1))

    def one_step(block, _):
        slot = (begin + block - first) & 1
        ends = block + 1 == last
        next_row = jnp.minimum(row + 1, num_rows - 1)
        following = jnp.where(ends, find_walk(table, next_row)[0], block + 1)
        pl.when(~ends | (row + 1 < num_rows))(lambda: start(following, 1 - slot))
        for copy in copies(block, slot):
            copy.wait()
        step(row, block, slot)

    lax.fori_loop(first, last, one_step, None)


# ---- The kernels for TPUs: an online softmax and dq by queries, dk and dv by keys.
#
# Logits of a block are `[128, R]`: queries lie on lanes. What a query has one of, such as its
# maximum, is then a row of a vector register, and broadcasts without copies.


def tile_dot(x, y, axis_x, axis_y):
    """Contracts two matrices with float32 sums; float32 matrices with all of their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((axis_x,), (axis_y,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def block_logits(options, of_queries, of_keys, h, j, masked):
    """Returns logits `[128, R]` of head h and block j of keys, and their derivative.

    The derivative is with respect to the scaled logits. A mask makes them -inf outside the ranges.
    """
    (ranges, q, *_), (k, _, *key_ranges) = of_queries, of_keys
    logits, slope = soft_capped(options.logit_soft_cap, options.scale * tile_dot(k[h], q[h], 1, 1))
    if not masked:
        return logits, slope
    bounds = ranges[h]
    key = j * LANES + lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    allowed = (bounds[0:1] <= key) & (key < bounds[1:2])
    if key_ranges:
        # Rows `[1, 128]` become columns by a transposition that TPUs have.
        column = lambda row: jnp.broadcast_to(row, (LANES, LANES)).T[:, :1]
        start, end = (column(key_ranges[0][h][n : n + 1]) for n in range(2))
        allowed &= (start <= bounds[2:3]) & (bounds[2:3] < end)
    return jnp.where(allowed, logits, -jnp.inf), slope


def gradients_of(options, of_queries, of_keys, h, j, masked):
    """Returns p and the gradient of `k q^T`, `[128, R]`, of head h and block j of keys."""
    (*_, dout, sums), v = of_queries, of_keys[1]
    logits, slope = block_logits(options, of_queries, of_keys, h, j, masked)
    p = jnp.exp(logits - sums[h][0:1])
    return p, p * (tile_dot(v[h], dout[h], 1, 1) - sums[h][1:2]) * slope * options.scale


def attend_blocks(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    blocks = tile(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    (M, nq, R, _), Hv = blocks.q.shape, blocks.v.shape[3]
    state = ()
    if seen is not None:
        peak, total, acc = (tile_again(x, options.block_q, LANES) for x in seen)
        state = peak[:, :, None], total[:, :, None], acc
    peak, total, acc = call(
        functools.partial(_forward, options),
        visits,
        Arrays((blocks.of_queries, blocks.q), blocks.key_arrays, state),
        [(M, nq, 1, R), (M, nq, 1, R), (M, nq, R, Hv)],
        of_queries=True,
        scratch=[(M // visits.of_queries.shape[0], Hv, R)],
    )
    found = (tile_again(x, LANES, options.block_q) for x in (peak[:, :, 0], total[:, :, 0], acc))
    return OnlineSoftmax(*(x[:, : q.shape[1]] for x in found))


def _forward(options, own, seen, outs, scratch) -> Kernel:
    (peak, total, out), (acc,) = outs, scratch
    heads = range(acc.shape[0])

    def begin():
        if not seen:
            peak[...] = jnp.full(peak.shape, jnp.finfo(jnp.float32).min, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            return
        peak[...], total[...] = seen[0][...], seen[1][...]
        for h in heads:
            acc[h] = seen[2][h].T

    def add(walked, j, masked):
        v = walked[1]
        for h in heads:
            logits, _ = block_logits(options, own, walked, h, j, masked)
            old = peak[h]  # [1, R]
            new = jnp.maximum(old, logits.max(0, keepdims=True))
            p, keep = jnp.exp(logits - new), jnp.exp(old - new)
            peak[h] = new
            total[h] = keep * total[h] + p.sum(0, keepdims=True)
            acc[h] = keep * acc[h] + tile_dot(v[h], p.astype(v.dtype), 0, 0)  # [Hv, R]

    def end():
        for h in heads:
            out[h] = acc[h].T

    return Kernel(begin, add, end)


def block_gradients(
    options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq
):
    blocks = tile(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    lse = tile_again(cotangents.lse, options.block_q, LANES, jnp.inf)
    delta = tile_again(cotangents.delta, options.block_q, LANES)
    dout = tile_again(cotangents.dout, options.block_q, LANES).astype(q.dtype)
    of_queries = blocks.of_queries, blocks.q, dout, jnp.stack([lse, delta], 2)
    by_features = lambda x: jnp.swapaxes(x, 2, 3)
    before = by_features(tile_again(by_features(dq), options.block_q, LANES))
    (after,) = call(
        functools.partial(_dq, options),
        visits,
        Arrays(of_queries, blocks.key_arrays, (before,)),
        [before.shape],
        of_queries=True,
    )
    dkv = call(
        functools.partial(_dkv, options),
        visits,
        Arrays(blocks.key_arrays, of_queries),
        [blocks.k.shape, blocks.v.shape],
        of_queries=False,
    )
    dq = by_features(tile_again(by_features(after), LANES, options.block_q)[:, : q.shape[1]])
    pairs = zip(dkv, kv, strict=True)
    return dq, *(tile_again(dx, LANES, x.shape[2])[:, : x.shape[1]] for dx, x in pairs)


def _dq(options, own, first, outs, scratch) -> Kernel:
    (before,), (dq,) = first, outs

    def begin():
        dq[...] = before[...]

    def add(walked, j, masked):
        k = walked[0]
        for h in range(k.shape[0]):
            _, ds = gradients_of(options, own, walked, h, j, masked)
            dq[h] += tile_dot(k[h], ds.astype(k.dtype), 0, 0)  # [H, R]

    return Kernel(begin, add)


def _dkv(options, own, first, outs, scratch) -> Kernel:
    dk, dv = outs

    def begin():
        for x in outs:
            x[...] = jnp.zeros(x.shape, x.dtype)

    def add(walked, j, masked):
        _, q, dout, _ = walked
        for h in range(q.shape[0]):
            p, ds = gradients_of(options, walked, own, h, j, masked)
            dv[h] += tile_dot(p.astype(dout.dtype), dout[h], 1, 0)  # [128, Hv]
            dk[h] += tile_dot(ds.astype(q.dtype), q[h], 1, 0)

    return Kernel(begin, add)


# What has been compiled: larger blocks exceed a TPU core's memory.
_LARGEST_HEAD, _MOST_HEADS = 256, 16


def serves(ctx, options: PassOptions, q, k, v) -> bool:
    """Whether the kernels support such blocks, whatever their ranges; otherwise all is blockwise.

    Args:
      ctx: of the lowering rule. XLA does not partition a kernel over automatic mesh axes.
    """
    axes, heads = ctx.module_context.axis_context, q.shape[2] // options.block_q
    manual = getattr(axes, "manual_axes", None)
    if manual is None:
        alone = getattr(axes, "num_devices", 1) == 1
    else:
        alone = manual | set(axes.mesh.manual_axes) == set(axes.mesh.axis_names)
    is_small = heads <= _MOST_HEADS and max(k.shape[3], v.shape[3]) <= _LARGEST_HEAD
    return alone and is_small and q.dtype in (jnp.bfloat16, jnp.float32)
