"""Attention over placed tokens equals dense attention, forward and backward, on every mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention, attention_gradients
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mask_oracle import batch_ranges
from on_mesh import AXIS, mesh_of
from packed_batches import pack

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    place_tokens,
    plan_attention,
    stack_plans,
)
from jax_cp_dispatch.masks import Chunked, SlidingWindow
from jax_cp_dispatch.masks.mask import PACKED, PLACED


def draw(seed, *, batch, num_tokens, num_kv_heads=2, max_length=200, dtype=np.float32):
    """Returns q, k, v, a cotangent and the segment ids of random documents with padding."""
    rng = np.random.default_rng(seed)
    segment_ids, _ = pack(rng, batch, num_tokens, max_length=max_length)
    heads = (4, num_kv_heads, num_kv_heads, 4)
    arrays = [rng.normal(size=(batch, num_tokens, n, 8)).astype(dtype) for n in heads]
    return *arrays, segment_ids


def expected(arrays, segment_ids, mask: Any = "causal", **options):
    """Returns output and gradients in float64, for the batch before placement."""
    start, end = batch_ranges(mask, segment_ids)
    q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
    out, lse = attention(q, k, v, start, end, **options)
    gradients = attention_gradients(q, k, v, start, end, g, np.zeros(lse.shape), **options)
    return out, *gradients


@partial(jax.jit, static_argnames=("mesh", "options"))
def out_and_gradients(q, k, v, g, documents, *, mesh, options=()):
    attend = partial(
        context_parallel_attention,
        mesh=mesh,
        axis_name=AXIS,
        algorithm="placed",
        documents=documents,
        **dict(options),
    )
    out, pull_back = jax.vjp(attend, q, k, v)
    return out, *pull_back(g)


def attend_placed(arrays, placement, mesh, **options):
    """Places the arrays, applies attention, and restores the order."""
    options = tuple(options.items())
    results = out_and_gradients(
        *placement.apply(arrays), placement.documents, mesh=mesh, options=options
    )
    return placement.restore([np.asarray(x) for x in results])


def assert_close(results, references, *, relative=1e-5, smallest_scale=1e-30):
    assert len(results) == len(references)
    for name, got, want in zip(("out", "dq", "dk", "dv"), results, references, strict=False):
        scale = max(np.abs(want).max(), smallest_scale)
        difference = np.abs(np.asarray(got, np.float64) - want).max()
        assert difference <= relative * scale, f"{name}: {difference / scale:.1e}"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_equals_dense_attention(world_size):
    """Documents of any length, in two batch rows, on any number of ranks."""
    *arrays, segment_ids = draw(world_size, batch=2, num_tokens=world_size * 31)
    placement = place_tokens(segment_ids=segment_ids, world_size=world_size)
    results = attend_placed(arrays, placement, mesh_of(world_size))
    assert_close(results, expected(arrays, segment_ids))


WINDOWS = [SlidingWindow(*x) for x in ((1,), (19,), (8, 19), (501, 2), (None, 5), (4, None))]


@pytest.mark.parametrize("mask", [*WINDOWS, Chunked(7), Chunked(1), Chunked(500)], ids=str)
def test_masks(mask):
    *arrays, segment_ids = draw(5, batch=1, num_tokens=4 * 48, max_length=150)
    placement = place_tokens(segment_ids=segment_ids, world_size=4, mask=mask)
    results = attend_placed(arrays, placement, mesh_of(4))
    # If a token attends only to itself, its gradients are differences of equal numbers.
    only_itself = mask in (SlidingWindow(1), Chunked(1))
    smallest_scale = float(np.prod([np.abs(x).max() for x in arrays[1:]])) if only_itself else 1e-30
    assert_close(results, expected(arrays, segment_ids, mask), smallest_scale=smallest_scale)


@pytest.mark.parametrize("world_size", [2, 8])
def test_full_attention(world_size):
    *arrays, segment_ids = draw(10 + world_size, batch=2, num_tokens=world_size * 24)
    placement = place_tokens(segment_ids=segment_ids, world_size=world_size, mask="full")
    results = attend_placed(arrays, placement, mesh_of(world_size), mask="full")
    assert_close(results, expected(arrays, segment_ids, "full"))


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_grouped_heads_scale_and_soft_cap(num_kv_heads):
    *arrays, segment_ids = draw(3, batch=1, num_tokens=8 * 24, num_kv_heads=num_kv_heads)
    placement = place_tokens(segment_ids=segment_ids, world_size=8)
    options = {"scale": 0.3, "logit_soft_cap": 2.0}
    results = attend_placed(arrays, placement, mesh_of(8), **options)
    assert_close(results, expected(arrays, segment_ids, **options))


@pytest.mark.parametrize("lengths", [[192], [1] * 192, [24] * 8, [], [100, 3, 5, 60]])
def test_extreme_documents(lengths):
    """One huge document, one token each, all equal, only padding: one program serves all."""
    *arrays, _ = draw(0, batch=1, num_tokens=192)
    segment_ids = np.zeros((1, 192), int)
    segment_ids[0, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    config = PlanConfig(
        kv_capacity=192, max_kv_transfers=64, max_pieces=24, max_cut_pieces=24, max_linked_pieces=99
    )
    placement = place_tokens([lengths], columns=192, world_size=8, config=config)
    results = attend_placed(arrays, placement, mesh_of(8))
    smallest_scale = float(np.prod([np.abs(x).max() for x in arrays[1:]]))
    assert_close(results, expected(arrays, segment_ids), smallest_scale=smallest_scale)
    for result in results:
        assert not result[segment_ids == 0].any()


def test_bfloat16():
    """Within the rounding of inputs and results; dK and dV of many ranks are rounded once."""
    *arrays, segment_ids = draw(4, batch=1, num_tokens=8 * 32, dtype=jnp.bfloat16)
    placement = place_tokens(segment_ids=segment_ids, world_size=8)
    results = attend_placed(arrays, placement, mesh_of(8))
    assert {x.dtype for x in results} == {np.dtype(jnp.bfloat16)}
    assert_close(results, expected(arrays, segment_ids), relative=1e-2)


def test_by_xla_collectives():
    *arrays, segment_ids = draw(6, batch=1, num_tokens=4 * 32)
    placement = place_tokens(segment_ids=segment_ids, world_size=4)
    results = attend_placed(arrays, placement, mesh_of(4), implementation="xla")
    assert_close(results, expected(arrays, segment_ids))


def test_repeats_bit_for_bit():
    *arrays, segment_ids = draw(7, batch=1, num_tokens=8 * 24)
    placement = place_tokens(segment_ids=segment_ids, world_size=8)
    first, second = (attend_placed(arrays, placement, mesh_of(8)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("operations_compiled_once")
def test_shard_map_outside_of_jit():
    """JAX executes its operations one by one."""
    *arrays, segment_ids = draw(12, batch=1, num_tokens=2 * 24)
    placement = place_tokens(segment_ids=segment_ids, world_size=2)
    attend = jax.shard_map(
        lambda q, k, v, documents: context_parallel_attention(
            q, k, v, documents=documents, algorithm="placed", axis_name=AXIS
        ),
        mesh=mesh_of(2),
        in_specs=(*[P(None, AXIS)] * 3, placement.documents.specs(AXIS)),
        out_specs=P(None, AXIS),
    )
    *qkv, g = placement.apply(arrays)
    out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, placement.documents), *qkv)
    results = placement.restore([np.asarray(x) for x in (out, *pull_back(g))])
    assert_close(results, expected(arrays, segment_ids))


def test_auto_follows_the_plan_on_an_explicit_mesh():
    *arrays, segment_ids = draw(8, batch=1, num_tokens=4 * 24)
    placement = place_tokens(segment_ids=segment_ids, world_size=4)
    mesh = Mesh(np.array(jax.devices()[:4]), (AXIS,), axis_types=(AxisType.Explicit,))
    q, k, v, _ = placement.apply(arrays)
    q, k, v = (jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in (q, k, v))
    out = context_parallel_attention(
        q, k, v, mesh=mesh, axis_name=AXIS, algorithm="auto", documents=placement.documents
    )
    out = placement.restore(np.asarray(out))
    assert_close([out], expected(arrays, segment_ids)[:1])


def test_plans_are_for_their_own_algorithm():
    q, k, v, _, segment_ids = draw(9, batch=1, num_tokens=2 * 16)
    place = lambda ids, **options: place_tokens(segment_ids=ids, world_size=2, **options).documents
    packed, placed = Documents(segment_ids), place(segment_ids)
    moved = plan_attention(segment_ids, world_size=2)
    attend = partial(context_parallel_attention, q, k, v, mesh=mesh_of(2), axis_name=AXIS)
    for documents, order in (
        (None, "packed"),
        (packed, "packed"),
        (packed.with_plan(moved), "packed"),
        (packed.zigzag(2), "zigzag"),
    ):
        with pytest.raises(ValueError, match=f"'placed' needs tokens in placed order; got {order}"):
            attend(algorithm="placed", documents=documents)
    with pytest.raises(ValueError, match="'balanced' needs tokens in packed order; got placed"):
        attend(algorithm="balanced", documents=placed)
    for algorithm in ("ring", "zigzag", "hamilton", "ulysses"):
        with pytest.raises(ValueError, match=f"algorithm='{algorithm}' cannot follow. Pass alg"):
            attend(algorithm=algorithm, documents=placed)
    with pytest.raises(ValueError, match=r"mask is Full\(\), but the documents have a plan for"):
        attend(algorithm="placed", documents=placed, mask="full")
    for other, rows in (
        (place(segment_ids[:, :16]), 1),
        (place(segment_ids.reshape(2, 16)), 2),
        (place(segment_ids, rank=1), 1),
    ):
        with pytest.raises(ValueError, match=rf"segment_ids has shape \({rows}, 16\) but q has"):
            attend(algorithm="placed", documents=other)
    with pytest.raises(ValueError, match=r"the plan is the part of 1 of 2 ranks\. Pass"):
        attend(algorithm="balanced", documents=packed.with_plan(moved.slice_of(1)))


def test_stacked_plans_are_for_the_steps_of_a_scan():
    q, k, v, _, segment_ids = draw(9, batch=1, num_tokens=2 * 16)
    placed = place_tokens(segment_ids=segment_ids, world_size=2).documents
    moved = Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=2))
    rows = P(None, AXIS)
    for algorithm, whole, order in (("placed", placed, PLACED), ("balanced", moved, PACKED)):
        documents = Documents.in_order(
            whole.segment_ids, whole.positions, (stack_plans([whole.plan] * 2),), order=order,
            columns=whole.columns,
        )  # fmt: skip
        attend = jax.shard_map(
            lambda q, k, v, documents, algorithm=algorithm: context_parallel_attention(
                q, k, v, documents=documents, algorithm=algorithm, axis_name=AXIS
            ),
            mesh=mesh_of(2),
            in_specs=(rows, rows, rows, documents.specs(AXIS)),
            out_specs=rows,
        )
        with pytest.raises(ValueError, match=r"got stacked plans, of \[2\]. Pass one of them"):
            jax.eval_shape(attend, q, k, v, documents)
