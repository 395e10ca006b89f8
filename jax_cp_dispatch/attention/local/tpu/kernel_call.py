"""Calls a kernel on a grid of blocks, each of which walks over the blocks that it meets."""

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
from jaxtyping import Array

from jax_cp_dispatch.attention.local.tpu.layout import BEGIN, Visits, find_walk, relation

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
