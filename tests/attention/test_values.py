"""Every algorithm equals dense attention, forward and backward: one suite for all of them.

To keep programs few, each algorithm meets each option once, beside what the contract asks of all;
`sweep.py attention` draws many more. Meshes of several axes: test_mesh_axes.py; plans:
test_attention_plans.py; local attention: test_local_attention.py.
"""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from calls import Call, check, check_qkv, draw_qkv, with_gradients
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cp
from jax_cp_dispatch.cycles import chunk_maps
from jax_cp_dispatch.masks import BlockCausal, Chunked, SlidingWindow

BLOCK = cp.Balanced(cp.PlanConfig(block=8))
MAPS = cp.Hamilton(maps=chunk_maps(((0, 2, 4, 1, 3), (0, 1, 2, 3, 4))))
Fields = dict[str, Any]
ALL: Fields = {
    "sink": True, "returns": ("lse", "max_logits"), "logit_soft_cap": 3.0, "scale": 0.4,
}  # fmt: skip
ON_RANKS: Fields = {"check_vma": True}
UNCHECKED: Fields = {"check_vma": False}
BF16: Fields = {"dtype": "bfloat16", **UNCHECKED}
KNOWN: Fields = {"traced": False}

# If 2 * chunks does not divide the rows, blocks and chunks are uneven, some of them empty.
CASES = [
    Call("ring", 4, SlidingWindow(None, 3), rows=1, documents="positions", batch=2, heads=(4, 2),
         latents=True, implementation="xla", **ON_RANKS),
    Call("ring", 2, "ranges", "zigzag", rows=280, heads=(3, 1),
         **ALL),  # several blocks, one padded
    Call("zigzag", 3, "shared_prefix", heads=(4, 2), latents=True, sink=True,
         **ON_RANKS),  # put into zigzag order
    Call("halo", 5, Chunked(15), more=1, documents="none", batch=2, heads=(4, 2), **ALL),
    Call("halo", 5, SlidingWindow(9, 2), "zigzag", rows=7, documents="both", batch=2, latents=True,
         sink=True, **ON_RANKS),
    Call(MAPS, 5, "tree", "zigzag", rows=7, batch=2, heads=(4, 2), **ALL),
    Call(cp.Hamilton(nodes=2), 6, BlockCausal(5), rows=13, documents="none", latents=True,
         implementation="xla"),
    Call("ulysses", 4, "tree", "zigzag", heads=(4, 4), **ALL, **UNCHECKED),
    Call("ulysses", 8, SlidingWindow(9), documents="both", heads=(16, 2), batch=2, latents=True,
         sink=True, implementation="xla", **ON_RANKS),  # the only sum of latent rows by XLA
    Call(cp.Ulysses(cp.Zigzag()), 4, batch=2, heads=(4, 1), inner=2, latents=True, **ALL,
         **ON_RANKS),  # of zigzag attention too
    Call(cp.Ulysses(cp.Zigzag()), 4, "prefix", "zigzag", rows=4, heads=(2, 2), inner=2),
    Call(cp.Ulysses(BLOCK), 4, "full", rows=12, documents="both", heads=(4, 2), inner=2,
         returns=("lse",), **KNOWN),
    Call(BLOCK, 4, "tree", rows=31, more=1, batch=2, heads=(4, 2), **ALL, **KNOWN),
    Call(BLOCK, 3, "shared_prefix", rows=9, returns=("lse",), implementation="xla", **ON_RANKS),
    Call("placed", 3, "block_diffusion", "placed", rows=12, batch=2, heads=(4, 2), **ALL),
    Call("placed", 3, SlidingWindow(6, first=4), "placed", rows=24, documents="both", **ON_RANKS),
    Call("placed", 4, "ranges_of_keys", "placed", rows=24, batch=2, latents=True, **BF16,
         implementation="xla", returns=("max_logits",), **KNOWN),
    Call("auto", 3, SlidingWindow(3, 5), more=2, batch=2, heads=(4, 2), documents="both", **KNOWN),
]  # fmt: skip


@pytest.mark.parametrize("call", CASES, ids=str)
def test_equals_dense_attention(call):
    """On permuted devices; of masks of arrays two batches, which share a program if it can."""
    rng = np.random.default_rng(len(str(call)))
    mesh = mesh_of(call.num_ranks, rng.permutation(call.num_ranks))
    num_batches = 2 if isinstance(call.mask, str) and call.traced and call.order != "placed" else 1
    check(call, rng, mesh, num_batches=num_batches)


# ---- Documents are data: a new batch causes no new trace.

W = 4
# Capacities that fit every plan of 4 x 32 rows.
ROOMY: dict[str, Any] = {
    "balanced": cp.PlanConfig(16, 80, 256, max_q_transfers=16, max_kv_transfers=24, max_pieces=64),
    "placed": cp.PlanConfig(
        kv_capacity=256, max_kv_transfers=64, max_pieces=32, max_cut_pieces=32, max_linked_pieces=99
    ),
}
EXTREMES = {
    "one document": [7] * 128,
    "all padding": [0] * 128,
    "first rank empty": [0] * 40 + [1] * 50 + [2] * 3 + [3] * 35,
    "one token each": np.arange(1, 129),
    "all equal": np.repeat(np.arange(1, 5), 32),
    "last row only": [0] * 127 + [1],
}


@pytest.mark.parametrize("algorithm", ["zigzag", "balanced", "placed"])
def test_one_program_serves_extreme_documents_and_repeats_bit_for_bit(algorithm):
    *arrays, _ = draw_qkv(0, 1, W * 32)
    arrays = [x / 2 for x in arrays]  # gradients of a token alone are differences of products
    where = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": algorithm}
    attend = lambda q, k, v, x: cp.context_parallel_attention(q, k, v, documents=x, **where)
    run: Any = jax.jit(with_gradients(attend))
    for ids in EXTREMES.values():
        segment_ids = np.array([ids])
        documents = moves = cp.Documents(segment_ids)
        if algorithm == "zigzag":
            documents = moves = documents.zigzag(W)
        elif algorithm == "balanced":
            plan = cp.plan_attention(segment_ids, world_size=W, config=ROOMY[algorithm])
            documents = documents.with_plan(plan)
        else:
            config = ROOMY[algorithm]
            moves = cp.place_tokens(segment_ids=segment_ids, world_size=W, config=config)
            documents = moves.documents
        call = partial(run, *moves.apply(arrays), documents)
        results = call()
        jax.tree.map(np.testing.assert_array_equal, call(), results)
        results = moves.restore([np.asarray(x) for x in results])
        check_qkv(results, (*arrays, segment_ids))
        assert not any(x[segment_ids == 0].any() for x in results)
    assert run._cache_size() == 1


# ---- No tokens, and many.


@pytest.mark.parametrize("rows", [(0, 8), (2, 0)])
def test_no_rows_and_no_tokens(rows):
    """Traced only: "auto" plans nothing. Algorithms: tests/contract."""
    q = jax.ShapeDtypeStruct((*rows, 2, 4), np.float32)
    where = {"mesh": mesh_of(2), "axis_name": AXIS, "segment_ids": np.ones(rows, np.int32)}
    run = partial(cp.context_parallel_attention, algorithm="auto", return_lse=True, **where)
    assert [x.shape for x in jax.eval_shape(run, q, q, q)] == [q.shape, q.shape[:3]]
    loss = lambda *qkv: run(*qkv)[0].sum()
    assert jax.eval_shape(jax.grad(loss), q, q, q).shape == q.shape


def test_long_sequences():
    """More than 65,536 tokens: rows around 2**16, and at the ends of documents, by definition."""
    lengths, window = [65_000, 2_500, 490], 40
    ids = np.repeat([1, 2, 3, 0], [*lengths, 10]).astype(np.int32)[None]
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, ids.size, 1, 4)).astype("f") for _ in range(3))
    options = {"mesh": mesh_of(4), "axis_name": AXIS, "algorithm": "balanced"}
    out = cp.context_parallel_attention(
        q, k, v, segment_ids=ids, mask=SlidingWindow(window), **options
    )
    out = np.asarray(out)[0, :, 0]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    sample = [0, 39, 40, 64_999, 65_000, 65_001, *range(65_534, 65_539), 67_499, 67_500, 67_989]
    for row in sample:
        seen = slice(max(starts[row], row + 1 - window), row + 1)
        weights = np.exp(k[0, seen, 0].astype(float) @ q[0, row, 0] / 2)
        want = weights @ v[0, seen, 0] / weights.sum()
        np.testing.assert_allclose(out[row], want, rtol=0, atol=1e-5)
    assert not out[sum(lengths) :].any()
