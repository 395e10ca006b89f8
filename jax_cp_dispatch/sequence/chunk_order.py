"""Whether the tokens of all ranks are in the order of the layout, and what happens if not.

Nearly always, ids ascend. The ends of the ranks' chunks, which they exchange anyway, then show that
each document is one run. Otherwise the ranks gather all ids, as attention does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.exchange import move
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.documents.layouts import SequenceLayout, zigzag_permutation
from jax_cp_dispatch.documents.order import gather_sequence, is_in_order
from jax_cp_dispatch.metadata import Metadata

_NO_ID = np.int32(2**31 - 1)


def chunk_order(
    ids: Int32[Array, "G L"], places: Any, highest: Int32[Array, "G L"]
) -> dict[str, Int32[Array, " G"]]:
    """Returns the lowest and highest id of each chunk, and whether its ids ascend without restarts.

    `highest` is the highest id so far, 0 before any.
    A restart is a document with the id of the one before it, which only positions separate.
    """
    same = ids[:, 1:] == ids[:, :-1]
    ascends = same | (ids[:, 1:] <= 0) | (ids[:, 1:] > highest[:, :-1])
    if places is not None:
        ascends &= ~same | (ids[:, 1:] <= 0) | (places[:, 1:] > places[:, :-1])
    return {
        "lowest": jnp.where(ids > 0, ids, _NO_ID).min(1, initial=_NO_ID),
        "highest": highest.max(1, initial=0),
        "ascends": ascends.all(1).astype(jnp.int32),
    }


def are_in_order(
    exchange: CollectiveOptions,
    layout: SequenceLayout,
    documents: tuple[Any, Any],
    edges: dict[str, Int32[Array, "B C"]],
    continues: Bool[Array, "B C"],
) -> Bool[Array, ""]:
    """Whether each document is one run, the same on all ranks.

    Args:
      exchange: options of the call.
      layout: of the tokens.
      documents: segment ids and positions of this rank's columns, for the gather.
      edges: of the chunks of all ranks, in the order of the sequence, with `chunk_order`.
      continues: whether the first document of a chunk continues the last of the chunk before.
    """
    before = jnp.pad(running_max(edges["highest"])[:, :-1], ((0, 0), (1, 0)))
    follows = (edges["lowest"] > before) | ((edges["lowest"] == before) & continues)
    ascend = ((edges["ascends"] == 1) & follows).all()
    (ascend,) = vary_alike([ascend], also=exchange.axis_names)

    def compared() -> Array:
        gathered = gather_sequence(exchange, documents, layout.num_ranks)
        if layout.num_blocks > 1:
            order = zigzag_permutation(layout.num_tokens, layout.num_ranks, inverse=True)
            gathered = jax.tree.map(lambda x: x[:, order], gathered)
        found = is_in_order(*gathered)
        return vary_alike([found], also=exchange.axis_names)[0]

    return lax.cond(ascend, lambda: ascend, compared)


def confirmed(exchange: CollectiveOptions, fingerprint: Int32[Array, " 9"]) -> Bool[Array, ""]:
    """Compares the fingerprints of all ranks where nothing moves, by an exchange of its own."""
    rank, num_ranks = lax.axis_index(exchange.axis_name), lax.axis_size(exchange.axis_name)
    own = (jnp.arange(num_ranks, dtype=jnp.int32) == rank).astype(jnp.uint32)
    metadata = Metadata(
        dst_rank=rank[None],
        dst_offset=jnp.zeros(1, jnp.uint32),
        seq_len=jnp.ones(1, jnp.uint32),
        num_recv_tokens=jnp.append(own, jnp.uint32(1)),
        world_size=num_ranks,
    )
    token = vary_alike([jnp.ones((1, 1), jnp.int32)], also=exchange.axis_names)[0]
    part = outgoing(exchange.op, "rows", token, metadata, capacity=1)
    (received,) = move(exchange, [part._replace(fingerprint=fingerprint)])
    return received[0, 0] == 1


def only_if_right(is_right: Bool[Array, ""], outputs: Any) -> Any:
    """Returns outputs, or NaN (zeros of integers): XLA's collectives raise no error."""

    def one(x: Array) -> Array:
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        return jnp.where(is_right, x, jnp.asarray(wrong, x.dtype))

    return jax.tree.map(one, outputs)
