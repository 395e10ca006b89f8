"""The size of lowered programs of attention: what JAX traces and XLA compiles, at every call."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import (
    Documents,
    context_parallel_attention,
    place_tokens,
)

NUM_RANKS, LENGTHS = 8, [300, 500, 150, 74]
IDS = np.repeat([1, 2, 3, 0], LENGTHS).astype(np.int32)[None]
FLOAT = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
PLACED = place_tokens(segment_ids=IDS, world_size=NUM_RANKS).documents
QKV = [FLOAT((1, 1024, num_heads, 64)) for num_heads in (8, 2, 2)]
# Of one call with its gradients, at most 5 % above the measured number.
MOST_LINES = {
    "ring": 1700,
    "zigzag": 1960,
    "hamilton": 2600,
    "balanced": 2630,
    "placed": 1050,
    "ulysses": 1140,
    "halo": 1160,
}


def num_lines(attend, num_calls):
    """Returns the lines of the lowered gradient of `num_calls` layers; `attend(q, k, v, ids)`."""

    def loss(q, k, v, ids):
        for _ in range(num_calls):
            q = q + attend(q, k, v, ids)
        return jnp.sum(q * q)

    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*QKV, jnp.asarray(IDS))
    return len(lowered.as_text().splitlines())


def of_all_ranks(algorithm):
    """Returns the algorithm over global arrays, with traced documents unless it needs a plan."""
    options = {"mesh": mesh_of(NUM_RANKS), "axis_name": AXIS, "batch_axis": ()}
    attend = partial(context_parallel_attention, algorithm=algorithm, **options)
    if algorithm == "placed":
        return lambda q, k, v, ids: attend(q, k, v, documents=PLACED)
    return lambda q, k, v, ids: attend(q, k, v, segment_ids=ids)


def in_shard_map(algorithm, num_calls):
    """Returns `num_calls` layers inside `shard_map`."""
    rows, documents = P(None, AXIS), PLACED if algorithm == "placed" else Documents(IDS)

    def layers(q, k, v, documents):
        attend = partial(context_parallel_attention, algorithm=algorithm, axis_name=AXIS)
        for _ in range(num_calls):
            q = q + attend(q, k, v, documents=documents)
        return q

    specs = rows, rows, rows, documents.specs(AXIS)
    mapped = jax.shard_map(layers, mesh=mesh_of(NUM_RANKS), in_specs=specs, out_specs=rows)
    return lambda q, k, v, _: mapped(q, k, v, documents)


@pytest.mark.parametrize("algorithm", MOST_LINES)
def test_lines_of_one_call_and_of_a_second_equal_one(algorithm):
    """A second equal call is a call of the functions of the first; below, of other algorithms."""
    first = num_lines(of_all_ranks(algorithm), 1)
    assert first <= MOST_LINES[algorithm]
    if algorithm in ("hamilton", "balanced"):
        assert num_lines(of_all_ranks(algorithm), 2) - first <= first // 10


@pytest.mark.parametrize("algorithm", ("ring", "placed", "ulysses"))
def test_lines_of_a_second_equal_call_on_a_rank(algorithm):
    """Also of the functions that are called inside `shard_map`."""
    first, both = (num_lines(in_shard_map(algorithm, calls), 1) for calls in (1, 2))
    assert both - first <= first // 10
