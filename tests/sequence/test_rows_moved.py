"""What moves, counted in the metadata of the exchanges: nothing for documents that are whole."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import flattened
from on_mesh import AXIS, mesh_of
from orders import BATCHES, Order

from jax_cp_dispatch import sequence
from jax_cp_dispatch.planning.cuts import describe_cuts
from jax_cp_dispatch.sequence import document_pieces
from jax_cp_dispatch.sequence.chains import CutPieces, _links
from jax_cp_dispatch.sequence.halo import _metadata
from jax_cp_dispatch.sequence.pieces import Options


@partial(jax.jit, static_argnames=("num_ranks", "width"))
def counts_of_ranks(documents, num_ranks, width):
    def counts(documents):
        options = Options.of_call("test", AXIS)
        pieces = document_pieces(documents, axis_name=AXIS)
        links = _links(CutPieces.of(options.exchange, pieces))
        before, after = (_metadata(pieces, width, side, True) for side in (False, True))
        exchanges = before, after, links.first, links.others
        return jax.tree.map(lambda x: x[None], [x.num_recv_tokens[:-1] for x in exchanges])

    specs: Any = {"in_specs": (documents.specs(AXIS),), "out_specs": P(AXIS)}
    return jax.shard_map(counts, mesh=mesh_of(num_ranks), **specs)(documents)


def moved(name, batch, num_ranks=8, width=3):
    """Rows between different ranks: of a halo before and after, of states, of maps."""
    order = Order(name, BATCHES[batch], num_ranks)
    counts = counts_of_ranks(order.documents, num_ranks, width)
    received = [np.asarray(x).astype(int) for x in counts]
    return [int(x.sum() - np.trace(x)) for x in received], order.placement


@pytest.mark.parametrize("order", ["packed", "zigzag", "placed"])
def test_whole_documents_move_nothing(order):
    rows, placement = moved(order, "whole")
    if order != "zigzag":  # which halves the documents
        assert rows == [0, 0, 0, 0]
    if placement is not None:
        assert "0 documents in 0 pieces" in placement.describe()


def test_a_giant_document_in_contiguous_order():
    """7 cuts of 3 rows; the first piece sends its state to 7 ranks, piece r its map to 7 - r."""
    rows, _ = moved("packed", "giant")
    assert rows == [21, 21, 7, sum(7 - r for r in range(1, 7))]


def test_a_giant_document_in_zigzag_order():
    """15 cuts of 16 pieces, one of them within a rank."""
    rows, _ = moved("zigzag", "giant")
    assert rows[:3] == [42, 42, 7]


def test_the_description_of_a_placement_counts_the_same():
    rows, placement = moved("placed", "mixed", width=1)
    assert placement is not None
    text = "\n".join(describe_cuts(placement.plan.cut_pieces, placement.plan.num_tokens))
    assert f"moves {rows[0]} x (W - 1) rows" in text and rows[0] == rows[1]
    assert f"moves {rows[2]} states and {rows[3]} maps" in text


def layers(x, log_decay, rate, taps, **given):
    """Each layer of the same rows: [B, T, N, H], and [B, T, N] twice."""
    yield sequence.shift(x, 2, **given)
    yield sequence.causal_conv(x.reshape(*x.shape[:2], -1), taps, **given)
    yield sequence.gated_delta_rule(x, x, x, log_decay, rate, **given)
    yield sequence.linear_attention(x, x, x, log_decay, **given)
    yield sequence.linear_recurrence(rate, log_decay, **given)


def test_one_exchange_of_each_layer_forward_and_one_backward():
    order = Order("placed", BATCHES["mixed"], 8)
    rows = BATCHES["mixed"].shape
    shapes = [(*rows, 2, 4), (*rows, 2), (*rows, 2), (3, 8)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    attributes = order.given | {"mesh": order.mesh, "implementation": "in_process"}
    run = partial(layers, **attributes)

    def loss(*arrays):
        return sum((y**2).sum() for y in run(*arrays))

    def exchanges(fn):
        found = flattened(jax.make_jaxpr(fn)(*arrays).jaxpr)
        return sum(equation.primitive.name in ("dispatch", "combine") for equation in found)

    assert exchanges(lambda *arrays: list(run(*arrays))) == 5
    assert exchanges(jax.grad(loss, argnums=(0, 1, 2, 3))) == 10
