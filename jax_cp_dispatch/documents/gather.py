"""Gathers segment ids and positions: every rank learns the documents of the whole sequence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Integer, PyTree

from jax_cp_dispatch._dispatch import move, outgoing
from jax_cp_dispatch._dispatch.by_platform import dispatch_or_collectives
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch.metadata import Metadata


def gather_sequence(
    exchange: CollectiveOptions, arrays: PyTree[Integer[Array, "B T"]], num_ranks: int
) -> PyTree[Integer[Array, "B W_T"]]:
    """Returns the columns of all ranks, one rank after the other, on every rank.

    Between CPU devices all arrays move in one `dispatch`, so the deadline holds. XLA's all-gather
    would wait without a limit for a process that hangs.

    Args:
      exchange: options of the call.
      arrays: of this rank; the same shapes on all ranks.
      num_ranks: of the axis, W.
    """
    leaves, structure = jax.tree.flatten(arrays)
    if num_ranks == 1 or not leaves:
        return arrays
    arrays = structure.unflatten(vary_alike(leaves, also=exchange.axis_names))
    by_xla = lambda arrays: jax.tree.map(
        lambda x: lax.all_gather(x, exchange.axis_name, axis=1, tiled=True), arrays
    )
    by_dispatch = lambda arrays: _by_dispatch(exchange, arrays, num_ranks)
    return dispatch_or_collectives(exchange, arrays, by_dispatch, by_xla)


def _by_dispatch(exchange: CollectiveOptions, arrays: Any, num_ranks: int):
    """Sends this rank's arrays to all ranks as one token, to the row of its number."""
    rank = np.arange(num_ranks)
    received = np.ones((num_ranks, num_ranks + 1), np.uint32)
    received[:, -1] = num_ranks
    to_all = (num_ranks, 1, num_ranks)  # one token, with a replica for every rank
    plan = Metadata(
        dst_rank=np.broadcast_to(rank.astype(np.int32), to_all),
        dst_offset=np.broadcast_to(rank.astype(np.uint32)[:, None, None], to_all),
        seq_len=np.ones((num_ranks, 1), np.uint32),
        num_recv_tokens=received,
        world_size=num_ranks,
    )
    tokens = jax.tree.map(lambda x: x[None], arrays)
    ids = outgoing(exchange.op, "segment_ids", tokens, plan, capacity=num_ranks)
    (gathered,) = move(exchange, [ids])
    in_columns = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], num_ranks * x.shape[2])
    return jax.tree.map(in_columns, gathered)
