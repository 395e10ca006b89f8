"""The passes of local attention for TPUs: Pallas kernels over blocks of 128 queries and 128 keys.

Larger blocks waste more pairs: a document rarely ends at the end of a block.
"""

from __future__ import annotations

import functools
import itertools
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
    divisors,
    soft_capped,
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
    bounds = ranges.of_heads(q.shape[2])
    rows = [tile_rows(options, bounds[:, :, n], fill) for n, fill in enumerate((num_keys, 0))]
    of_keys = None
    if (queries := ranges.queries) is not None:
        rows.append(tile_rows(options, queries.index))
        of_keys = jnp.stack(
            [_tile_keys(x[..., None])[..., 0] for x in (queries.start, queries.end)]
        )
        of_keys = jnp.moveaxis(of_keys, 0, 2)
    k, v = map(_tile_keys, kv)
    return TpuBlocks(tile_queries(options, q), k, v, jnp.stack(rows, 2), of_keys)


def matrices_together(options: PassOptions, blocks: TpuBlocks) -> int:
    """Returns how many KV heads one step computes: if few queries share a head, several."""
    most = max(1, _ROWS // blocks.q.shape[2])
    return max(x for x in divisors(options.kv_heads) if x <= most)


def tile_queries(options: PassOptions, x, fill: int | float = 0):
    """`[M, blocks, G*block_q, F] -> [M, blocks, G*128, F]`; pads the last block with `fill`."""
    return _tile_again(x, options.block_q, LANES, fill)


def untile_queries(options: PassOptions, x, num_blocks: int):
    return _tile_again(x, LANES, options.block_q, 0)[:, :num_blocks]


def tile_rows(options: PassOptions, x, fill: int | float = 0):
    """`tile_queries` of one number per row, `[M, blocks, G*block_q]`."""
    return tile_queries(options, x[..., None], fill)[..., 0]


def untile_keys(x, like):
    """Returns keys or values in the blocks of `like`, `[M, nk, block_kv, F]`."""
    x = x.reshape(x.shape[0], -1, x.shape[3])[:, : like.shape[1] * like.shape[2]]
    return x.reshape(like.shape)


def _tile_again(x, rows: int, new_rows: int, fill: int | float):
    if rows == new_rows:
        return x
    M, blocks, all_rows, F = x.shape
    heads = all_rows // rows
    x = jnp.swapaxes(x.reshape(M, blocks, heads, rows, F), 1, 2).reshape(M, heads, -1, F)
    x = _padded(x, new_rows, fill).reshape(M, heads, -1, new_rows, F)
    return jnp.swapaxes(x, 1, 2).reshape(M, -1, heads * new_rows, F)


def _tile_keys(x):
    x = _padded(x.reshape(x.shape[0], 1, -1, x.shape[3]), LANES, 0)
    return x.reshape(x.shape[0], -1, LANES, x.shape[3])


def _padded(x, multiple: int, fill: int | float):
    widths = [(0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)]
    return jnp.pad(x, widths, constant_values=fill)


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
    together = matrices_together(options, blocks)
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


def relation(visits: Visits, i, j):
    """Whether block i of queries meets block j of keys; and if so, without hiding a pair."""
    q, k = visits
    meet = (q[FIRST, i] <= j) & (j < q[LAST, i])
    full = (q[FULL_FIRST, i] <= j) & (j < q[FULL_LAST, i])
    if k.shape[0] > START_MIN:
        meet &= (k[START_MIN, j] <= q[INDEX_MAX, i]) & (k[END_MAX, j] > q[INDEX_MIN, i])
        full &= (k[START_MAX, j] <= q[INDEX_MIN, i]) & (k[END_MIN, j] > q[INDEX_MAX, i])
    return meet, full


# ---- Calls a kernel on a grid of blocks, each of which walks over the blocks that it meets.

_VMEM_BYTES = 32 * 2**20  # more than XLA's default of 16 MB, and a quarter of a TPU v5e's


class Kernel(NamedTuple):
    """One pass: what to do before, at each step of, and after the walk of a block."""

    begin: Callable[[], None]
    add: Callable[[Sequence[Any], Any, bool], None]  # walked blocks, block of keys, masked
    end: Callable[[], None]


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
    inputs = [visits, own, first, walked]
    counts = [*map(len, inputs), len(outs), len(walked), 1, len(scratch)]

    def body(*refs):
        refs = iter(refs)
        tables, owned, before, sources, results, buffers, (arrived,), rest = (
            tuple(itertools.islice(refs, count)) for count in counts
        )
        tables = Visits(*tables)
        one = kernel(owned, before, results, rest)

        def step(row, other, slot):
            i, j = (row, other) if of_queries else (other, row)
            meet, full = relation(tables, i, j)
            held = [buffer.at[slot] for buffer in buffers]
            pl.when(meet & full)(lambda: one.add(held, j, False))
            pl.when(meet & ~full)(lambda: one.add(held, j, True))

        one.begin()
        _walk(tables[not of_queries], rows, (sources, buffers, arrived), step)
        one.end()

    def spec(shape):
        return pl.BlockSpec((together, None, *shape[2:]), lambda m, row: (m, row, 0, 0))

    table_specs = [
        pl.BlockSpec((None, *x.shape[1:]), lambda m, row: (m, 0, 0), memory_space=pltpu.SMEM)
        for x in visits
    ]
    copies = [pl.BlockSpec(memory_space=pl.ANY)] * len(walked)
    buffers = [pltpu.VMEM((2, together, *x.shape[2:]), x.dtype) for x in walked]
    results = pl.pallas_call(
        body,
        grid=(matrices // together, rows),
        in_specs=[*table_specs, *(spec(x.shape) for x in (*own, *first)), *copies],
        out_specs=[*map(spec, outs)],
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes) for shape in outs
        ],
        scratch_shapes=[
            *buffers,
            pltpu.SemaphoreType.DMA((2, len(walked))),
            *(pltpu.VMEM(shape, jnp.float32) for shape in scratch),
        ],
        input_output_aliases={len(visits) + len(own) + n: n for n in range(len(first))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        name=kernel.func.__name__.strip("_"),
    )(*itertools.chain(*inputs))
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
            yield pltpu.make_async_copy(blocks, buffer.at[slot], arrived.at[slot, n])

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


def dot(x, y, axis_x, axis_y):
    """Contracts two matrices with float32 sums; float32 matrices with all of their bits."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((axis_x,), (axis_y,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def block_logits(options, q, k):
    """Returns scaled and capped logits, and their derivative with respect to the scaled ones."""
    return soft_capped(options, options.scale * dot(k, q, 1, 1))


def allowed(j, of_queries, of_keys=None):
    """Which pairs the ranges allow, for block j of keys; see `TpuBlocks`."""
    shape = (LANES, of_queries.shape[1])
    key = j * LANES + lax.broadcasted_iota(jnp.int32, shape, 0)
    inside = (of_queries[0:1] <= key) & (key < of_queries[1:2])
    if of_keys is None:
        return inside
    # Rows `[1, 128]` become columns by a transposition that TPUs have.
    column = lambda row: jnp.broadcast_to(row, (LANES, LANES)).T[:, :1]
    start, end = (column(of_keys[n : n + 1]) for n in range(2))
    index = of_queries[2:3]
    return inside & (start <= index) & (index < end)


def gradients_of(options, q, cotangents, kv, mask):
    """Returns p and the gradient of `k q^T`, `[128, R]`, of one query head's `kv`."""
    (dout, sums), (k, v) = cotangents, kv
    logits, slope = block_logits(options, q, k)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    p = jnp.exp(logits - sums[0:1])
    return p, p * (dot(v, dout, 1, 1) - sums[1:2]) * slope * options.scale


def attend_blocks(
    options: PassOptions, q, ranges: KeyRanges, kv, seen: OnlineSoftmax | None
) -> OnlineSoftmax:
    blocks = tile(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    M, nq, R, _ = blocks.q.shape
    state = ()
    if seen is not None:
        peak, total = (tile_rows(options, x)[:, :, None] for x in seen[:2])
        state = peak, total, tile_queries(options, seen.acc)
    Hv = blocks.v.shape[3]
    peak, total, acc = call(
        functools.partial(_forward, options),
        visits,
        Arrays((blocks.of_queries, blocks.q), blocks.key_arrays, state),
        [(M, nq, 1, R), (M, nq, 1, R), (M, nq, R, Hv)],
        of_queries=True,
        scratch=[(M // visits.of_queries.shape[0], Hv, R)],
    )
    untile = functools.partial(untile_queries, options, num_blocks=q.shape[1])
    peak, total = (untile(jnp.swapaxes(x, 2, 3))[..., 0] for x in (peak, total))
    return OnlineSoftmax(peak, total, untile(acc))


def _forward(options, own, seen, outs, scratch) -> Kernel:
    (of_queries, q), (peak, total, out), (acc,) = own, outs, scratch
    heads = range(q.shape[0])

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
        k, v, *of_keys = walked
        for h in heads:
            logits, _ = block_logits(options, q[h], k[h])  # [128, R]
            if masked:
                mask = allowed(j, of_queries[h], *(x[h] for x in of_keys))
                logits = jnp.where(mask, logits, -jnp.inf)
            old = peak[h]  # [1, R]
            new = jnp.maximum(old, logits.max(0, keepdims=True))
            p, keep = jnp.exp(logits - new), jnp.exp(old - new)
            peak[h] = new
            total[h] = keep * total[h] + p.sum(0, keepdims=True)
            acc[h] = keep * acc[h] + dot(v[h], p.astype(v.dtype), 0, 0)  # [Hv, R]

    def end():
        for h in heads:
            out[h] = acc[h].T

    return Kernel(begin, add, end)


def add_to_dq(options: PassOptions, blocks: TpuBlocks, visits: Visits, cotangents, dq):
    """Returns `dq`, `[M, nq, H, G*block_q]`, plus the part of these keys.

    Args:
      cotangents: dout `[M, nq, R, Hv]`; lse and delta `[M, nq, 2, R]`.
    """
    num_blocks = dq.shape[1]
    dq = jnp.swapaxes(tile_queries(options, jnp.swapaxes(dq, 2, 3)), 2, 3)
    (dq,) = call(
        functools.partial(_dq, options),
        visits,
        Arrays((blocks.of_queries, blocks.q, *cotangents), blocks.key_arrays, (dq,)),
        [dq.shape],
        of_queries=True,
    )
    return jnp.swapaxes(untile_queries(options, jnp.swapaxes(dq, 2, 3), num_blocks), 2, 3)


def _dq(options, own, first, outs, scratch) -> Kernel:
    (of_queries, q, dout, sums), (before,), (dq,) = own, first, outs

    def begin():
        dq[...] = before[...]

    def add(walked, j, masked):
        k, v, *of_keys = walked
        for h in range(q.shape[0]):
            mask = allowed(j, of_queries[h], *(x[h] for x in of_keys)) if masked else None
            _, ds = gradients_of(options, q[h], (dout[h], sums[h]), (k[h], v[h]), mask)
            dq[h] += dot(k[h], ds.astype(k.dtype), 0, 0)  # [H, R]

    return Kernel(begin, add, lambda: None)


def dk_and_dv(options: PassOptions, blocks: TpuBlocks, visits: Visits, cotangents):
    """Returns the float32 gradients of `blocks.k` and `blocks.v`; `cotangents`: see `add_to_dq`."""
    return call(
        functools.partial(_dkv, options),
        visits,
        Arrays(blocks.key_arrays, (blocks.of_queries, blocks.q, *cotangents)),
        [blocks.k.shape, blocks.v.shape],
        of_queries=False,
    )


def _dkv(options, own, first, outs, scratch) -> Kernel:
    (k, v, *of_keys), (dk, dv) = own, outs

    def begin():
        for x in outs:
            x[...] = jnp.zeros(x.shape, x.dtype)

    def add(walked, j, masked):
        of_queries, q, dout, sums = walked
        for h in range(k.shape[0]):
            mask = allowed(j, of_queries[h], *(x[h] for x in of_keys)) if masked else None
            p, ds = gradients_of(options, q[h], (dout[h], sums[h]), (k[h], v[h]), mask)
            dv[h] += dot(p.astype(dout.dtype), dout[h], 1, 0)  # [128, Hv]
            dk[h] += dot(ds.astype(q.dtype), q[h], 1, 0)

    return Kernel(begin, add, lambda: None)


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


def block_gradients(
    options: PassOptions, q, cotangents: OutputCotangents, ranges: KeyRanges, kv, dq
):
    blocks = tile(options, q, ranges, kv)
    visits = find_visits(options, blocks)
    lse, delta = tile_rows(options, cotangents.lse, jnp.inf), tile_rows(options, cotangents.delta)
    dout = tile_queries(options, cotangents.dout).astype(q.dtype)
    of_outputs = dout, jnp.stack([lse, delta], 2)
    dq = add_to_dq(options, blocks, visits, of_outputs, dq)
    dk, dv = dk_and_dv(options, blocks, visits, of_outputs)
    return dq, *map(untile_keys, (dk, dv), kv)
