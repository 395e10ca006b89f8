"""Rows of a combine home by several all-gathers, each of some rows of every rank's buffer.

One all-gather of whole buffers needs W times the memory of one. With a plan that reserves space for
all keys, that exceeds the memory of an accelerator.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._dispatch.xla_plan import Plan, XlaRanks
from jax_cp_dispatch._ranks.varying import vary_alike

MAX_GATHERED_BYTES = 2**30
"""Rows that one all-gather of a combine brings to a rank; not measured."""


def gather_in_turns(
    plan: Plan,
    ranks: XlaRanks,
    arrays: Sequence[Shaped[Array, "capacity ..."]],
    num_home: int,
    num_at_once: int,
) -> tuple[list[Shaped[Array, "home ..."]], Int32[Array, "S C"]]:
    """Brings the rows of a combine home, as `return_rows`; `num_at_once` of each rank in a turn."""
    rank, capacity = ranks.rank, arrays[0].shape[0]
    begin = plan.begin_at_home[rank]
    rows = jnp.arange(num_home, dtype=jnp.int32)
    replica = jnp.searchsorted(begin.ravel(), rows, side="right") - 1
    src_rank = plan.dst_rank[rank].ravel()[replica]
    src_row = plan.dst_row[rank].ravel()[replica] + rows - begin.ravel()[replica]

    def turn(i, homes):
        first = jnp.minimum(i * num_at_once, capacity - num_at_once)
        row = src_row - first
        is_here = (row >= 0) & (row < num_at_once) & (src_rank >= 0)
        results = []
        for x, home in zip(arrays, homes, strict=True):
            gathered = ranks.gather(lax.dynamic_slice_in_dim(x, first, num_at_once))
            taken = gathered.at[src_rank, row].get(mode="clip")
            results.append(jnp.where(is_here.reshape(-1, *[1] * (x.ndim - 1)), taken, home))
        return results

    homes = [jnp.zeros((num_home, *x.shape[1:]), x.dtype) for x in arrays]
    homes = vary_alike([*homes, *arrays, src_row])[: len(homes)]
    return lax.fori_loop(0, -(-capacity // num_at_once), turn, homes), begin
