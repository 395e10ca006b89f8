"""Memory of one rank for attention and its gradients, by the compiler's count of each algorithm.

In units of a rank's rows of q, in float32, with as many KV heads. Documents are at most three
ranks long. All keys of all ranks would be 2 x (8 - 1) more units, and scores of a rank's rows
with all keys 512. Arguments and results, four each, are not temporary.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch.attention.algorithms import ALGORITHMS
from jax_cp_dispatch.masks import SlidingWindow

W, ROWS, N, H = 8, 4096, 8, 64
LENGTHS = [3 * ROWS, *[ROWS // 2] * (2 * (W - 3))]
IDS = np.repeat(np.arange(1, 1 + len(LENGTHS)), LENGTHS).astype(np.int32)[None]
UNIT = ROWS * N * H * 4

IN_ORDER = cpd.Documents(IDS)
WINDOW = cpd.Documents(IDS, mask=SlidingWindow(ROWS // 2 + 1))
PLANNED = IN_ORDER.with_plan(cpd.plan_attention(IDS, world_size=W))
PLACED = cpd.place_tokens([LENGTHS], world_size=W).documents
KEYS = PLACED.plan.kv_capacity / ROWS
OF_PLAN = PLANNED.plan.q_capacity / ROWS + PLANNED.plan.kv_capacity / ROWS

# Of the backward pass, which needs the most: of the queries, q, out, dout and dq; keys and values
# that are held, and those that arrive; the gradients of both, that travel and that are computed.
RING = 4 + 2 * 2 + 2 * 2
MOST = {
    "ring": (IN_ORDER, RING),
    "zigzag": (IN_ORDER, RING + 2),  # a rank's own keys in zigzag order
    "halo": (WINDOW, 6 * 1.5 + 2),  # as placed, with half a rank of keys beside its own
    "hamilton": (IN_ORDER, RING + 2 + 2),  # and those of a step once more, in order
    "ulysses": (IN_ORDER, 8),  # q, k, v, out of a share of the heads, and the gradients of these
    # Six arrays of the rows that came: keys and values, as they came, in blocks and their
    # gradients; likewise of the queries q, out and dout. If queries stay, out and dq.
    "balanced": (PLANNED, 6 * OF_PLAN),
    "placed": (PLACED, 6 * KEYS + 2),
}
LONGEST_AND_OWN = 3 + 1  # keys of a plan: of the longest document, and a rank's own
# Ids, positions and ranges of all tokens, int32; 16 arrays of them.
OF_TOKENS = 16 * 4 * W * ROWS / UNIT


@pytest.mark.parametrize("algorithm", [kind.name for kind in ALGORITHMS])
def test_memory(algorithm):
    documents, most = MOST[algorithm]
    assert documents.plan is None or documents.plan.kv_capacity <= LONGEST_AND_OWN * ROWS
    options = {"mesh": mesh_of(W), "axis_name": AXIS, "batch_axis": (), "head_axis": ()}
    attend = partial(
        cpd.context_parallel_attention, algorithm=algorithm, documents=documents, **options
    )

    def out_and_gradients(q, k, v, g):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(g)

    rows = NamedSharding(mesh_of(W), P(None, AXIS))
    x = jax.ShapeDtypeStruct((1, W * ROWS, N, H), jnp.float32, sharding=rows)
    compiled = jax.jit(out_and_gradients, out_shardings=rows).lower(x, x, x, x).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= 4 * UNIT  # it counts those of one rank
    assert memory.temp_size_in_bytes / UNIT <= most + OF_TOKENS
