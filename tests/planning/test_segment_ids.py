"""Segment ids mean the same to every algorithm, in every integer dtype, or are rejected alike."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from attention_oracle import attention
from on_mesh import AXIS, mesh_of
from packed_batches import causal_ranges
from planner_oracle import check_plan

import jax_cp_dispatch as cp
from jax_cp_dispatch.documents import document_lengths

pytestmark = pytest.mark.usefixtures("unchecked_types")

CONFIG = cp.PlanConfig(block=4)
T = 24
# Documents of one batch row each, numbered in order from 1; 0 is padding.
DOCUMENTS = np.repeat([[1, 2, 0, 3, 4, 5], [1, 1, 2, 0, 0, 3]], 4, axis=1)


rng = np.random.default_rng(3)
QKV = [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (2, 1, 1)]
WHERE: Any = {"mesh": mesh_of(3), "axis_name": AXIS}


def attend(segment_ids, positions=None, algorithm: Any = "ring"):
    """All algorithms read ids alike."""
    documents = {"segment_ids": segment_ids, "positions": positions}
    return cp.context_parallel_attention(*QKV, **documents, algorithm=algorithm, **WHERE)


plan_traced = jax.jit(partial(cp.plan_attention, world_size=3, config=CONFIG))


def equals(out, documents):
    q, k, v = (x.astype(float) for x in QKV)
    want = attention(q, k, v, *causal_ranges(documents))[0]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def named(documents, ids, dtype):
    """Returns the same documents with other ids; padding stays 0."""
    return np.array([0, *ids], object)[documents].astype(dtype)


HASHED = np.random.default_rng().integers(2**31, 2**62, 3)
WIDE = {
    "equal low words": (np.int64, [1, 1 + 2**32, 1 + 2**33, 2**40, 2**32]),
    "a low word of zero": (np.int64, [2**32, 2**33, 5, 2**62, 2**63 - 1]),
    "hashes": (np.int64, [*HASHED, 7, 2**31]),
    "uint32": (np.uint32, [2**31, 2**31 + 1, 2**32 - 1, 1, 2]),
    "uint64": (np.uint64, [2**63, 2**63 + 2**32, 2**64 - 1, 1, 2**31]),
    "int8": (np.int8, [127, 1, 2, 3, 4]),
    "uint32 in pairs": (np.uint32, [2**31, 2**31 + 1, 2**31 + 3, 2**31 + 2, 7]),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_plan_and_the_documents_of_one_batch_agree(name):
    """However either was made; and where a document ends is seen."""
    dtype, ids = WIDE[name]
    segment_ids = named(DOCUMENTS, ids, dtype)
    plan = cp.plan_attention(segment_ids, world_size=3, config=CONFIG)
    documents, plans = [cp.Documents(segment_ids)], [plan]
    with jax.enable_x64(True):  # or JAX cuts them
        if name in ("equal low words", "uint32", "uint64"):
            documents.append(jax.jit(cp.Documents)(segment_ids))
        if name == "uint64":
            plans.append(jax.device_get(plan_traced(segment_ids)))
    for x in documents:
        assert x.segment_ids.dtype == np.int32
        np.testing.assert_array_equal(x.segment_ids, documents[0].segment_ids)
    for x in (segment_ids, documents[0].segment_ids):
        for each in plans:
            each.validate(x)
    placement = cp.place_tokens(segment_ids=segment_ids, world_size=3)
    placed = placement.documents
    placed.plan.validate(placed.segment_ids, placed.positions)
    np.testing.assert_array_equal(placed.segment_ids, placement.apply(documents[0].segment_ids))
    assert placed.segment_ids.dtype == placed.positions.dtype == np.int32
    segment_ids[0, 15] = segment_ids[0, 16]  # of document 3, now of 4
    for x in (segment_ids, cp.Documents(segment_ids).segment_ids):
        with pytest.raises(ValueError, match="was made for another batch: the segment_ids of rank"):
            plan.validate(x)


def test_layers_beside_attention_compare_traced_ids_exactly():
    """Also positions beyond 32 bits; in zigzag order."""
    x = np.random.default_rng(5).normal(size=(2, T, 4)).astype(np.float32)
    begins = np.diff(DOCUMENTS, axis=1, prepend=-1) != 0
    right = np.where((begins | (DOCUMENTS == 0))[..., None], 0, np.roll(x, 1, axis=1))
    shift = partial(cp.sequence.shift, offset=1, **WHERE)
    documents = cp.Documents(DOCUMENTS)

    @jax.jit
    def zigzag(segment_ids, positions):
        stored = cp.Documents(segment_ids, positions).zigzag(3)
        return shift(documents.zigzag(3).apply(x), documents=stored)

    with jax.enable_x64(True):
        places = documents.positions + np.int64(2**40)
        out = zigzag(named(DOCUMENTS, WIDE["uint64"][1], np.uint64), places)
    np.testing.assert_array_equal(documents.zigzag(3).restore(np.asarray(out)), right)


def test_traced_ids_that_the_host_would_reject():
    """Negative is padding, also in several places."""
    segment_ids = np.repeat([[1, 2, -1, 9, 4, 5], [-3, 7, 7, 0, 2, -3]], 4, axis=1)
    segment_ids = segment_ids.astype(np.int32)
    runs = np.repeat([[1, 2, 0, 3, 4, 5], [0, 1, 1, 0, 2, 0]], 4, axis=1)
    equals(jax.jit(attend)(segment_ids), runs)
    check_plan(jax.device_get(plan_traced(segment_ids)), runs)


def test_positions_separate_runs_of_one_id():
    segment_ids = np.repeat([[5, 6, 0, 5, 5, 6], [1, 1, 1, 0, 0, 1]], 4, axis=1)
    positions = np.tile(np.arange(4), (2, 6))
    positions[1, 4:8] += 4  # one document of 8 tokens
    documents = np.repeat([[1, 2, 0, 3, 4, 5], [1, 1, 2, 0, 0, 3]], 4, axis=1)
    equals(attend(segment_ids, positions), documents)
    with pytest.raises(ValueError, match="positions has a value beyond 32 bits"):
        attend(segment_ids, positions + 2**40)
    positions[1, 20:] += 100
    for algorithm in "ring", cp.Balanced(CONFIG):
        with pytest.raises(ValueError, match="segment 1 occurs in separate runs of batch row 1"):
            attend(segment_ids, positions, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["ring", cp.Balanced(CONFIG), cp.Auto(config=CONFIG)])
@pytest.mark.parametrize(
    "change, message",
    [
        ({(1, 3): -1}, r"segment_ids\[1, 3\] is -1; it needs to be at least 0. .* add 1 to ids"),
        ({(0, 23): 1}, "segment 1 occurs in separate runs of batch row 0, but a document must be"),
    ],
)
def test_rejected_alike(algorithm, change, message):
    segment_ids = DOCUMENTS.copy()
    for place, value in change.items():
        segment_ids[place] = value
    with pytest.raises(ValueError, match=f"context_parallel_attention: {message}"):
        attend(segment_ids, algorithm=algorithm)
    shift = partial(cp.sequence.shift, np.ones((2, 24, 1)), 1, mesh=mesh_of(4), axis_name=AXIS)
    for name, call in (
        ("plan_attention", lambda: cp.plan_attention(segment_ids, world_size=3)),
        ("document_lengths", lambda: document_lengths(segment_ids)),
        ("place_tokens", lambda: cp.place_tokens(segment_ids=segment_ids, world_size=3)),
        ("shift", lambda: shift(segment_ids=segment_ids)),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            call()


def test_zigzag_order_keeps_documents_together_in_the_sequence():
    documents = cp.Documents(named(DOCUMENTS, WIDE["equal low words"][1], np.int64)).zigzag(3)
    options = {"documents": documents, "algorithm": "zigzag", **WHERE}
    out = cp.context_parallel_attention(*documents.apply(QKV), **options)
    equals(documents.restore(out), DOCUMENTS)
    apart = np.repeat([[1, 2, 1, 3, 3, 3]] * 2, 4, axis=1)
    with pytest.raises(ValueError, match="segment 1 occurs in separate runs of batch row 0"):
        cp.Documents(apart)
