"""Balanced attention equals dense attention, forward and backward, on every mesh it can run on."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mask_oracle import batch_ranges
from on_mesh import AXIS, mesh_of
from packed_batches import causal_ranges, pack

from jax_cp_dispatch import (
    Balanced,
    Documents,
    PlanConfig,
    context_parallel_attention,
    plan_attention,
)
from jax_cp_dispatch.masks import Full, SlidingWindow

CONFIG = PlanConfig(block=16)


def draw(seed, *, batch, num_tokens, num_heads=4, num_kv_heads=2, max_length=200, dtype=np.float32):
    """q, k, v, a cotangent and the segment ids of random documents."""
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, batch, num_tokens, max_length=max_length)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    q, k, v, g = (rng.normal(size=(batch, num_tokens, n, 8)).astype(dtype) for n in heads)
    return q, k, v, g, segment_ids


def expected(q, k, v, g, segment_ids, **options):
    """Output and gradients in float64 from the oracle."""
    ranges = causal_ranges(segment_ids)
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    out, lse = attention(q, k, v, *ranges, **options)
    return out, *attention_gradients(q, k, v, *ranges, g, np.zeros(lse.shape), **options)


def out_and_gradients(fn, q, k, v, g):
    out, pull_back = jax.vjp(fn, q, k, v)
    return out, *pull_back(g)


def assert_close(results, references, *, relative=1e-5, smallest_scale=1e-30):
    """Compares relative to the largest entry, because gradients of one softmax differ widely.

    If entries are differences of larger numbers, `smallest_scale` is the size of these numbers.
    """
    assert len(results) == len(references)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, references, strict=False):
        scale = max(np.abs(want).max(), smallest_scale)
        difference = np.abs(np.asarray(got, np.float64) - want).max()
        assert difference <= relative * scale, f"{name}: {difference / scale:.1e}"


def attend(segment_ids, mesh, **options):
    options = {"axis_name": AXIS, "algorithm": Balanced(CONFIG), **options}
    return lambda q, k, v: context_parallel_attention(
        q, k, v, mesh=mesh, segment_ids=segment_ids, **options
    )


def planned(segment_ids, **options):
    return Documents(segment_ids).with_plan(plan_attention(segment_ids, **options))


@partial(jax.jit, static_argnames="mesh")
def attend_by_plan(q, k, v, g, documents, *, mesh):
    """Output and gradients; one program for all plans of one shape."""
    options = {"mesh": mesh, "axis_name": AXIS, "algorithm": "balanced", "documents": documents}
    return out_and_gradients(partial(context_parallel_attention, **options), q, k, v, g)


# Capacities that fit every plan of 8 x 32 rows.
ROOMY = PlanConfig(16, 80, 256, max_q_transfers=16, max_kv_transfers=24, max_pieces=64)


@pytest.mark.parametrize("num_ranks, per_rank", [(1, 128), (2, 96), (5, 50), (8, 64)])
def test_equals_dense_attention(num_ranks, per_rank):
    """Includes documents and blocks that do not divide the rows of a rank."""
    q, k, v, g, segment_ids = draw(num_ranks, batch=2, num_tokens=num_ranks * per_rank)
    fn = jax.jit(lambda *x: out_and_gradients(attend(segment_ids, mesh_of(num_ranks)), *x))
    assert_close(fn(q, k, v, g), expected(q, k, v, g, segment_ids))


@pytest.mark.parametrize(
    "mask, made",
    [
        *((SlidingWindow(19), "on the host"), (SlidingWindow(9, 14), "on the host")),
        *((SlidingWindow(9, 14), "inside jit"), (Full(), "inside jit")),
    ],
    ids=str,
)
def test_masks_and_tokens_that_do_not_divide(mask, made):
    q, k, v, g, segment_ids = draw(5, batch=2, num_tokens=4 * 48 - 5, max_length=120)
    start, end = batch_ranges(mask, segment_ids)
    out, lse = attention(q, k, v, start, end)
    references = out, *attention_gradients(q, k, v, start, end, g, np.zeros(lse.shape))
    run = lambda ids, *x: out_and_gradients(attend(ids, mesh_of(4), mask=mask), *x)
    if made == "inside jit":
        results = jax.jit(run)(segment_ids, q, k, v, g)
    else:
        results = jax.jit(partial(run, segment_ids))(q, k, v, g)
    assert_close(results, references)


@pytest.mark.parametrize(
    "kind", ["one document", "all padding", "first rank empty", "one token each", "last row only"]
)
def test_extreme_documents(kind):
    q, k, v, g, segment_ids = draw(0, batch=1, num_tokens=8 * 32)
    if kind == "one document":
        segment_ids[:] = 7
    elif kind == "all padding":
        segment_ids[:] = 0
    elif kind == "first rank empty":
        segment_ids[:, :40] = 0
    elif kind == "one token each":
        segment_ids[:] = np.arange(1, 8 * 32 + 1)
    else:
        segment_ids[:] = 0
        segment_ids[:, -1] = 1
    documents = planned(segment_ids, world_size=8, config=ROOMY)
    results = attend_by_plan(q, k, v, g, documents, mesh=mesh_of(8))
    # A single token has dq = p (g v - g out) k with out = v.
    is_alone = kind in ("one token each", "last row only")
    smallest_scale = float(np.prod([np.abs(x).max() for x in (g, v, k)])) if is_alone else 1e-30
    assert_close(results, expected(q, k, v, g, segment_ids), smallest_scale=smallest_scale)
    padding = segment_ids == 0
    for result in results:
        assert not np.asarray(result)[padding].any()


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_grouped_heads_scale_and_soft_cap(num_kv_heads):
    q, k, v, g, segment_ids = draw(3, batch=1, num_tokens=8 * 32, num_kv_heads=num_kv_heads)
    options = {"scale": 0.3, "logit_soft_cap": 2.0}
    fn = attend(segment_ids, mesh_of(8), **options)
    results = jax.jit(lambda *x: out_and_gradients(fn, *x))(q, k, v, g)
    assert_close(results, expected(q, k, v, g, segment_ids, **options))


def test_bfloat16():
    """Within the rounding of inputs and results; dK and dV of many ranks are rounded once."""
    q, k, v, g, segment_ids = draw(4, batch=1, num_tokens=8 * 32, dtype=jnp.bfloat16)
    fn = jax.jit(lambda *x: out_and_gradients(attend(segment_ids, mesh_of(8)), *x))
    results = fn(q, k, v, g)
    assert {x.dtype for x in results} == {np.dtype(jnp.bfloat16)}
    assert_close(results, expected(q, k, v, g, segment_ids), relative=1e-2)


def test_plan_made_inside_the_program_serves_all_batches_with_one_program():
    mesh = mesh_of(8)
    traces = []

    @jax.jit
    def fn(q, k, v, segment_ids, positions):
        traces.append(1)
        options = {"axis_name": AXIS, "algorithm": Balanced(CONFIG), "mesh": mesh}
        return context_parallel_attention(
            q, k, v, segment_ids=segment_ids, positions=positions, **options
        )

    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v, g, _ = draw(seed, batch=1, num_tokens=8 * 32)
        segment_ids, positions = pack(rng, 1, 8 * 32, max_length=150)
        got = fn(q, k, v, segment_ids, positions)
        assert_close([got], expected(q, k, v, g, segment_ids)[:1])
    assert len(traces) == 1


def test_repeats_bit_for_bit():
    q, k, v, g, segment_ids = draw(5, batch=1, num_tokens=8 * 32)
    documents = planned(segment_ids, world_size=8, config=ROOMY)
    first, second = (attend_by_plan(q, k, v, g, documents, mesh=mesh_of(8)) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_without_segment_ids_each_row_is_one_document():
    q, k, v, g, segment_ids = draw(6, batch=2, num_tokens=8 * 32)
    got = attend(None, mesh_of(8))(q, k, v)
    assert_close([got], expected(q, k, v, g, np.ones_like(segment_ids))[:1])


def test_permuted_mesh():
    q, k, v, g, segment_ids = draw(7, batch=1, num_tokens=8 * 32)
    got = attend(segment_ids, mesh_of(8, [3, 1, 7, 0, 6, 2, 5, 4]))(q, k, v)
    assert_close([got], expected(q, k, v, g, segment_ids)[:1])


@pytest.mark.parametrize(
    "axis_type, axes",
    [
        *((AxisType.Auto, {}), (AxisType.Explicit, {})),
        (AxisType.Auto, {"batch_axis": "data", "head_axis": "tp"}),
    ],
)
def test_one_axis_of_a_larger_mesh(axis_type, axes):
    q, k, v, g, segment_ids = draw(8, batch=2, num_tokens=2 * 64)
    mesh = jax.make_mesh((2, 2, 2), ("data", AXIS, "tp"), axis_types=(axis_type,) * 3)
    fn = attend(segment_ids, mesh, **axes)
    references = expected(q, k, v, g, segment_ids)
    if axis_type == AxisType.Auto:
        assert_close(jax.jit(lambda *x: out_and_gradients(fn, *x))(q, k, v, g), references)
    else:
        assert_close([jax.jit(fn)(q, k, v)], references[:1])


def test_explicit_mesh_set_for_the_context():
    q, k, v, g, segment_ids = draw(9, batch=1, num_tokens=8 * 32)
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in (q, k, v, g)]
        ids = jax.device_put(segment_ids, NamedSharding(mesh, P(None, AXIS)))
        fn = jax.jit(lambda *x: out_and_gradients(attend(x[4], None), *x[:4]))
        results = fn(*sharded, ids)
    assert_close(results, expected(q, k, v, g, segment_ids))
    assert results[0].sharding.spec[1] == AXIS


@pytest.mark.parametrize("form, check_vma", [("global", True), ("slice", False), ("slice", True)])
def test_inside_shard_map(form, check_vma):
    q, k, v, g, segment_ids = draw(10, batch=2, num_tokens=8 * 32)
    documents = planned(segment_ids, world_size=8, config=CONFIG)
    specs = documents.specs(AXIS)
    if form == "global":  # each rank gets the whole plan
        whole = lambda spec: P() if spec == P(AXIS) else spec
        specs = jax.tree.map(whole, specs, is_leaf=lambda x: isinstance(x, P))
    rows = P(None, AXIS)
    fn = jax.shard_map(
        lambda q, k, v, documents: context_parallel_attention(
            q, k, v, documents=documents, algorithm="balanced", axis_name=AXIS
        ),
        mesh=mesh_of(8),
        in_specs=(rows, rows, rows, specs),
        out_specs=rows,
        check_vma=check_vma,
    )
    results = jax.jit(lambda *x: out_and_gradients(lambda q, k, v: fn(q, k, v, documents), *x))(
        q, k, v, g
    )
    assert_close(results, expected(q, k, v, g, segment_ids))


def test_scan_over_layers_with_remat():
    """As in a model: gradients through a scanned, rematerialised stack."""
    q, k, v, _, segment_ids = draw(11, batch=1, num_tokens=8 * 16, num_kv_heads=4)
    balanced = attend(segment_ids, mesh_of(8))

    def loss(attend, q, layers):
        @jax.checkpoint
        def layer(x, w):
            return x + attend(x * w, k, v), None

        return jnp.sum(jax.lax.scan(layer, q, layers)[0] ** 2)

    def dense(q, k, v):
        mask = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, :, None] > 0)
        mask = (mask & np.tri(q.shape[1], dtype=bool))[:, None]
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(mask, logits, -1e30)) * mask
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    layers = np.linspace(0.5, 1.5, 3).astype(np.float32)
    got = jax.jit(jax.grad(partial(loss, balanced), argnums=(0, 1)))(q, layers)
    want = jax.jit(jax.grad(partial(loss, dense), argnums=(0, 1)))(q, layers)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


# ---- Invalid calls.


@pytest.fixture
def small():
    return draw(12, batch=1, num_tokens=8 * 16)


def call(small, **options):
    q, k, v, _, _ = small
    options = {
        "mesh": mesh_of(8),
        "axis_name": AXIS,
        "algorithm": "balanced",
        **options,
    }
    return context_parallel_attention(q, k, v, **options)


@pytest.mark.usefixtures("unchecked_types")
def test_plan_for_other_ranks_or_rows_is_rejected(small):
    segment_ids = small[-1]
    attend = lambda plan: call(small, documents=Documents(segment_ids).with_plan(plan))
    plan = plan_attention(segment_ids, None, world_size=4)
    with pytest.raises(ValueError, match="world_size=4 but mesh axis 'cp' has 8 devices"):
        attend(plan)
    plan = plan_attention(segment_ids[:, :64], None, world_size=8)
    with pytest.raises(ValueError, match="a rank holds 1 x 16 = 16 rows but the plan is for 8"):
        attend(plan)
    plan = plan_attention(segment_ids.reshape(2, 64), None, world_size=8)
    with pytest.raises(ValueError, match=r"a rank holds 1 x 16 rows but the plan is for 2 x 8\. P"):
        attend(plan)


def test_capacity_too_small_for_a_traced_plan_fails_on_all_ranks(small):
    q, k, v, _, segment_ids = small
    config = dataclasses.replace(CONFIG, kv_capacity=16)
    fn = jax.jit(lambda ids: attend(ids, mesh_of(8), algorithm=Balanced(config))(q, k, v))
    message = r"would receive \d+ tokens but PlanConfig.kv_capacity is 16. Pass PlanConfig.kv_capa"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(fn(np.ones_like(segment_ids)))


def test_mesh_with_an_axis_that_only_replicates():
    """Groups of devices along an unnamed axis compute the same result independently."""
    q, k, v, g, segment_ids = draw(13, batch=1, num_tokens=4 * 32)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "idle"))
    results = jax.jit(lambda *x: out_and_gradients(attend(segment_ids, mesh), *x))(q, k, v, g)
    assert_close(results, expected(q, k, v, g, segment_ids))
