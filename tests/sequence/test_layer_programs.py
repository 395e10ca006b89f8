"""What the programs of layers move, compute again and hold, counted while they are traced."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxprs import flattened, runs
from on_mesh import AXIS, mesh_of
from orders import BATCHES, Order

from jax_cp_dispatch import sequence
from jax_cp_dispatch._ranks.options import read_options  # inner: nothing public counts rows
from jax_cp_dispatch.sequence.call_layer import Carried  # inner: the same
from jax_cp_dispatch.sequence.chains import ChainPieces, _links  # inner: the same
from jax_cp_dispatch.sequence.shift import halo_metadata  # inner: the same


@partial(jax.jit, static_argnames=("num_ranks", "width"))
def counts_of_ranks(documents, num_ranks, width):
    def counts(documents):
        exchange = read_options("test", AXIS)
        pieces = sequence.document_pieces(documents, axis_name=AXIS)
        plans, *_ = _links(ChainPieces.of(exchange, pieces, Carried()))
        before, after = (halo_metadata(pieces, width, side, True) for side in (False, True))
        exchanges = before, after, *plans
        return jax.tree.map(lambda x: x[None], [x.num_recv_tokens[:-1] for x in exchanges])

    specs: Any = {"in_specs": (documents.specs(AXIS),), "out_specs": P(AXIS)}
    return jax.shard_map(counts, mesh=mesh_of(num_ranks), **specs)(documents)


def moved(name, batch, width=3):
    """Rows between different ranks: of a halo before and after, of states, of maps."""
    order = Order(name, BATCHES[batch], 8)
    counts = counts_of_ranks(order.documents, 8, width)
    received = [np.asarray(x).astype(int) for x in counts]
    return [int(x.sum() - np.trace(x)) for x in received], order.placement


def test_only_cut_documents_move_rows():
    """Whole documents move nothing, in contiguous and in placed order."""
    assert moved("packed", "whole")[0] == [0, 0, 0, 0]
    rows, placement = moved("placed", "whole")
    assert placement is not None
    assert rows == [0, 0, 0, 0] and "0 documents in 0 pieces" in placement.describe()
    # 7 cuts of 3 rows; the first piece sends its state to 7 ranks, piece r its map to 7 - r.
    assert moved("packed", "giant")[0] == [21, 21, 7, sum(7 - r for r in range(1, 7))]
    # 15 cuts of 16 pieces, one of them within a rank.
    assert moved("zigzag", "giant")[0][:3] == [42, 42, 7]


def test_the_description_of_a_placement_counts_the_same():
    rows, placement = moved("placed", "mixed", width=1)
    assert placement is not None
    text = placement.describe()
    assert f"moves {rows[0]} x (W - 1) rows" in text and rows[0] == rows[1]
    assert f"moves {rows[2]} states and {rows[3]} maps" in text


def test_one_exchange_of_each_layer_forward_and_one_backward():
    order = Order("placed", BATCHES["mixed"], 8)
    shape = *BATCHES["mixed"].shape, 8
    given = order.given | {"mesh": order.mesh, "implementation": "in_process"}

    def loss(x, log_decay, taps):
        conv = sequence.causal_conv(x, taps, **given)
        return (conv**2).sum() + (sequence.linear_recurrence(x, log_decay, **given) ** 2).sum()

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (shape, shape, (3, 8))]
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    found = [equation.primitive.name for equation in flattened(traced.jaxpr)]
    assert found.count("dispatch") + found.count("combine") == 4


def test_matrices_are_inverted_once():
    """An inverse is put together from blocks, and nothing else is: concatenations count them."""
    x, per_head = (np.zeros((1, 512, 8, *size), np.float32) for size in ((16,), ()))
    layer = partial(sequence.gated_delta_rule, mesh=mesh_of(1), axis_name=AXIS, batch_axis=())
    total = lambda *x: layer(*x).sum()
    of_both = jax.value_and_grad(total, argnums=(0, 1, 2, 3, 4))
    forward, both = (
        runs(jax.make_jaxpr(fn)(x, x, x, per_head, per_head).jaxpr) for fn in (total, of_both)
    )
    assert both["exp"] == 2 * forward["exp"]  # factors are computed again
    assert both["concatenate"] == forward["concatenate"] > 0
