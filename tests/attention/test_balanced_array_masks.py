"""Balanced attention under masks of arrays equals dense attention; another mask is refused.

`sweep_attention.py` runs all kinds.
"""

from functools import partial

import jax
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from mask_oracle import batch_visible
from on_mesh import AXIS, all_fail, mesh_of
from packed_batches import pack

from jax_cp_dispatch import (
    Balanced,
    Documents,
    PlanConfig,
    context_parallel_attention,
    plan_attention,
)
from jax_cp_dispatch.masks import Causal, PrefixLM, Ranges

W, T = 4, 32
CONFIG = PlanConfig(8, 48, 136, max_q_transfers=16, max_kv_transfers=48, max_pieces=64)


def draw(kind, rng):
    """Returns q, k, v and a cotangent, documents, a mask, and its pairs."""
    sizes = (4, 8), (2, 8), (2, 4), (4, 4)
    arrays = [rng.normal(size=(1, W * T, *size)).astype(np.float32) for size in sizes]
    segment_ids, _ = pack(rng, 1, W * T, max_length=W * T, padding=0.1)
    constructor, of_mask, pairs = random_mask(kind, rng, segment_ids)
    return arrays, segment_ids, constructor(*of_mask), batch_visible(segment_ids, pairs)


def planned(segment_ids, mask):
    plan = plan_attention(segment_ids, world_size=W, mask=mask, config=CONFIG)
    return Documents(segment_ids).with_plan(plan)


@partial(jax.jit, static_argnames="implementation")
def attend(arrays, documents, mask, implementation=None):
    """Output and gradients; one program for all plans of one kind."""
    *qkv, g = arrays
    call = partial(
        context_parallel_attention, mesh=mesh_of(W), axis_name=AXIS, algorithm="balanced",
        documents=documents, mask=mask, implementation=implementation,
    )  # fmt: skip
    out, pull_back = jax.vjp(call, *qkv)
    return out, *pull_back(g)


def check(results, arrays, pairs):
    q, k, v, g = arrays
    out, lse = masked_attention(q, k, v, pairs)
    wanted = (out, *masked_attention_gradients(q, k, v, pairs, g, np.zeros_like(lse)))
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        error = np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1)
        assert error <= 2e-6, f"{name}: {error}"


@pytest.mark.parametrize("kind", ["blocks", "tree", "ranges", "ranges_of_keys"])
def test_equals_dense_attention(kind):
    rng = np.random.default_rng()
    for _ in range(3):
        arrays, segment_ids, mask, pairs = draw(kind, rng)
        check(attend(arrays, planned(segment_ids, mask), mask), arrays, pairs)


@pytest.mark.parametrize("kind", ["prefix", "shared_prefix", "ranges"])
def test_a_plan_made_inside_the_program_serves_all_masks_of_a_kind(kind):
    rng = np.random.default_rng()

    @jax.jit
    def run(arrays, segment_ids, mask):
        *qkv, g = arrays
        call = partial(
            context_parallel_attention, mesh=mesh_of(W), axis_name=AXIS, segment_ids=segment_ids,
            algorithm=Balanced(PlanConfig(block=8)), mask=mask,
        )  # fmt: skip
        out, pull_back = jax.vjp(call, *qkv)
        return out, *pull_back(g)

    for _ in range(3):
        arrays, segment_ids, mask, pairs = draw(kind, rng)
        check(run(arrays, segment_ids, mask), arrays, pairs)


def test_a_plan_need_not_be_told_its_mask_again():
    """The call makes the same plan itself, of arrays that it knows."""
    rng = np.random.default_rng()
    arrays, segment_ids, mask, _ = draw("tree", rng)
    documents = planned(segment_ids, mask)
    explicit = attend(arrays, documents, mask)
    jax.tree.map(np.testing.assert_array_equal, attend(arrays, documents, None), explicit)
    out = context_parallel_attention(
        *arrays[:3], mesh=mesh_of(W), axis_name=AXIS, algorithm=Balanced(CONFIG),
        segment_ids=segment_ids, mask=mask,
    )  # fmt: skip
    np.testing.assert_array_equal(out, explicit[0])


def test_another_mask_is_refused():
    """Of another kind when the call is made; of other arrays in the step, on all ranks."""
    rng = np.random.default_rng()
    arrays, segment_ids, mask, _ = draw("blocks", rng)
    documents = planned(segment_ids, mask)
    message = r"mask is .*, but the documents have a plan for Blocks"
    for other in (PrefixLM(np.ones((1, W * T), bool)), Causal()):
        with pytest.raises(ValueError, match=message):
            attend(arrays, documents, other)
    rank = int(rng.integers(W))
    block_end = np.array(mask.block_end)
    block_end[0, rank * T + int(rng.integers(T))] += 1
    ends = np.arange(1, W * T + 1)[None]
    general = Ranges(0 * ends, ends)
    other = jax.tree.unflatten(jax.tree.structure(mask), [block_end])
    message = f"made for another batch: the mask of rank {rank} has checksum"
    all_fail(attend(arrays, documents, other)[0], message)
    with pytest.raises(ValueError, match=f"the arrays of the mask of rank {rank} are not those"):
        documents.plan.validate(segment_ids, None, other)
    documents.plan.validate(segment_ids, None, mask)
    by_xla = attend(arrays, documents, other, implementation="xla")
    assert np.isnan(by_xla[0]).all()
    with pytest.raises(
        ValueError, match=r"mask is Ranges.* but the documents have a plan for Caus"
    ):
        attend(arrays, planned(segment_ids, None), general)
