"""Every function with every order of tokens, of masks and of plans: it computes, or it is refused.

Nothing is silent: a call in which two orders meet raises while it is traced.
"""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch import Documents, sequence
from jax_cp_dispatch.masks import PrefixLM

W, T = 2, 16
IDS = np.repeat([[1, 2, 0]], [9, 5, 2], axis=1)
PREFIX = PrefixLM((np.arange(T) < 3)[None])
PLACEMENT = cpd.place_tokens(segment_ids=IDS, world_size=W, masks=["causal", PREFIX])
PACKED = Documents(IDS)
ORDERS: dict[str, Any] = {
    "packed": PACKED,
    "packed, a plan": PACKED.with_plan(cpd.plan_attention(IDS, world_size=W)),
    "packed, a plan of the mask": PACKED.with_plan(
        cpd.plan_attention(IDS, world_size=W, mask=PREFIX)
    ),
    "zigzag": PACKED.zigzag(W),
    "zigzag of other ranks": PACKED.zigzag(2 * W),
    "placed": PLACEMENT.documents,
    "unplaced": PLACEMENT.documents.unplaced(),
    "of another length": Documents(np.ones((1, 2 * T), np.int32)),
}
MASKS: dict[str, Any] = {
    "none": None,
    "packed": PREFIX,
    "zigzag": PACKED.zigzag(W).apply(PREFIX),
    "placed": PLACEMENT.apply(PREFIX),
}
ALGORITHMS = ("balanced", "ring", "zigzag", "ulysses", "placed")
REFUSED = r"order|documents|mask|columns|shape"


def serves(algorithm, order):
    """Whether an algorithm may attend tokens in this order."""
    if order in ("zigzag of other ranks", "of another length"):
        return False
    if algorithm == "placed":
        return order == "placed"
    return order.startswith("packed") or order == ("zigzag" if algorithm != "balanced" else "")


def fits(order, mask, follows_plan):
    """Whether a mask is one of tokens in this order, and of the plan."""
    if mask == "none":  # that of the plan; of a placement with several, causal
        return order != "packed, a plan of the mask" or follows_plan
    if order == "packed, a plan" and follows_plan:
        return False
    return mask == order.split(",")[0]


X = jax.ShapeDtypeStruct((1, T, 2, 4), jnp.float32)


def serves_or_refuses(is_served, call, says=REFUSED):
    if is_served:
        call()
        return
    with pytest.raises((ValueError, TypeError), match=says):
        call()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_attention(algorithm):
    for order, mask in itertools.product(ORDERS, MASKS):
        if order == "unplaced":  # only data can tell whether tokens stayed: refused in the step
            continue
        options: Any = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": algorithm}
        options |= {"documents": ORDERS[order], "mask": MASKS[mask], "batch_axis": ()}
        attend = partial(cpd.context_parallel_attention, head_axis=(), **options)
        expected = serves(algorithm, order) and fits(order, mask, algorithm == "balanced")
        serves_or_refuses(expected, partial(jax.eval_shape, attend, X, X, X))


@pytest.mark.parametrize("order", ORDERS)
def test_attention_on_each_rank(order):
    """Documents reach a rank by their specs; whole ones are refused there."""
    documents, rows = ORDERS[order], P(None, AXIS)
    algorithm = "placed" if order == "placed" else "ring"

    def attend(x, documents):
        options: Any = {"axis_name": AXIS, "algorithm": algorithm, "mask": "causal"}
        return cpd.context_parallel_attention(x, x, x, documents=documents, **options)

    run = lambda specs: jax.eval_shape(
        jax.shard_map(attend, mesh=mesh_of(W), in_specs=(rows, specs), out_specs=rows), X, documents
    )
    is_served = serves(algorithm, order) or order == "unplaced"
    serves_or_refuses(is_served, lambda: run(documents.specs(AXIS)))
    serves_or_refuses(False, lambda: run(P()))


LAYERS: dict[str, Any] = {
    "shift": lambda x, **options: sequence.shift(x, 1, **options),
    "causal_conv": lambda x, **options: sequence.causal_conv(
        x[..., 0], jnp.ones((2, 2)), **options
    ),
    "linear_recurrence": lambda x, **options: sequence.linear_recurrence(x, x, **options),
}


@pytest.mark.parametrize("layer, order", list(itertools.product(LAYERS, ORDERS)))
def test_layers_beside_attention(layer, order):
    options: Any = {"mesh": mesh_of(W), "axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    run = partial(LAYERS[layer], documents=ORDERS[order], **options)
    is_served = order not in ("zigzag of other ranks", "of another length", "unplaced")
    says = rf"{REFUSED}|separate runs"  # ids show the last
    serves_or_refuses(is_served, partial(jax.eval_shape, run, X), says)


@pytest.mark.parametrize("order", ORDERS)
def test_labels_and_local_attention_take_packed_order(order):
    documents = ORDERS[order]
    shift = lambda: cpd.sequence.shift_documents(IDS, -1, documents=documents)
    local = lambda: jax.eval_shape(
        lambda x: cpd.local_attention(x, x, x, mask="causal", documents=documents), X
    )
    for call in (shift, local):
        serves_or_refuses(order.startswith("packed"), call, rf"{REFUSED}|separate runs")
