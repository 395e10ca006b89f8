"""All works if JAX promotes neither ranks nor dtypes, as in its own tests.

Of attention otherwise: test_values.py.
"""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import draw as draw_experts, with_gradients
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of, on_ranks as expert_ranks

from jax_cp_dispatch import (
    Documents,
    all_gather_matmul,
    combine,
    compute_metadata,
    context_parallel_attention,
    dispatch,
    local_attention,
    matmul_reduce_scatter,
    merge_partials,
    plan_attention,
    ragged_all_to_all,
    sequence,
)

W = 4


@pytest.fixture(autouse=True)
def strict():
    """Enables 64-bit types, which would mix with ours."""
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


def draw(*shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def on_ranks(fn, in_specs, out_specs):
    return jax.jit(
        jax.shard_map(fn, mesh=mesh_of(W), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def test_plans_with_a_recorded_batch():
    q, k = draw(1, 8 * W, 2, 8), draw(1, 8 * W, 1, 8)
    ids = np.repeat(np.arange(1, 3, dtype=np.uint32), [10, 8 * W - 10])[None]

    @jax.jit
    def attend(ids):
        plan = plan_attention(ids, world_size=W)
        documents = Documents(ids).with_plan(plan)
        options = {"mesh": mesh_of(W), "axis_name": AXIS, "documents": documents}
        return context_parallel_attention(q, k, k, algorithm="balanced", **options), plan.fits

    out, fits = attend(ids)
    assert np.isfinite(np.asarray(out, np.float32)).all() and fits
    plan_attention(ids, world_size=W).validate(ids)


def test_merged_parts():
    q, k = draw(1, 16, 4, 8), draw(1, 16, 2, 8)
    start, middle, end = (jnp.full((1, 16), n, jnp.int32) for n in (0, 7, 16))
    first = local_attention(q, k, k, start, middle)
    out, _ = merge_partials(*first, *local_attention(q, k, k, middle, end))
    whole, _ = local_attention(q, k, k, start, end)
    close: Any = {"rtol": 0, "atol": 2e-2}
    got, want = (np.asarray(x, np.float32) for x in (out, whole))
    np.testing.assert_allclose(got, want, **close)


def test_movement():
    lengths = np.array([[5, 3], [8, 0], [4, 4], [1, 7]], np.int32)
    ranks = np.array([[0, 1], [2, -1], [3, 0], [1, 2]], np.int32)
    plan, _ = compute_metadata(lengths, ranks, max_recv_seqs=2 * W)
    options: Any = {"axis_name": AXIS}

    def there_and_back(x):
        y = dispatch(x, plan, capacity=8 * W, **options)
        return combine(y, plan, num_tokens=8, **options)

    x = draw(8 * W, 3)
    fn = on_ranks(there_and_back, P(AXIS), P(AXIS))
    back, pull = jax.vjp(fn, x)
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(pull(x)[0], x)


def test_products():
    x, w, bias, v = draw(4 * W, 8), draw(8, 8 * W), draw(8 * W), draw(8 * W, 8)
    options: Any = {"axis_name": AXIS, "method": "ring"}

    def layers(x, w, bias, v):
        return matmul_reduce_scatter(all_gather_matmul(x, w, bias=bias, **options), v, **options)

    specs = P(AXIS), P(None, AXIS), P(AXIS), P(AXIS)
    fn = on_ranks(layers, specs, P(AXIS))
    loss = lambda *operands: fn(*operands).astype(jnp.float32).sum()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, w, bias, v)
    for gradient, operand in zip(gradients, (x, w, bias, v), strict=True):
        assert gradient.dtype == operand.dtype
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"implementation": "xla"},
        {"capacity": 12, "overflow": "drop"},
        {"physical_to_logical": np.arange(8).reshape(W, 2)},
    ],
    ids=str,
)
def test_experts(options):
    """Traced only; both derivatives too."""
    run = expert_ranks(partial(with_gradients, **options), mesh_of(W))
    operands = draw_experts()
    shapes = jax.eval_shape(run, *operands)
    x, weights, matrices, *_ = operands
    wanted = [(a.shape, a.dtype) for a in (x, x, weights, matrices)]
    assert [(a.shape, a.dtype) for a in shapes] == wanted


LAYERS = ("shift", "causal_conv", "gated_delta_rule", "linear_attention", "by channel",
          "linear_recurrence")  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_beside_attention(name):
    """Traced only; with states, and both passes."""
    tokens, heads = draw(2, 8 * W, 2, 8), draw(2, 8 * W, 2)
    ids = np.repeat(np.arange(1, 3, dtype=np.int32), [10, 8 * W - 10])[None].repeat(2, 0)
    arrays: Any = {
        "shift": (tokens,),
        "causal_conv": (heads, draw(3, 2), draw(2)),
        "gated_delta_rule": (tokens, tokens, tokens, heads, heads),
        "linear_attention": (tokens, tokens, tokens, heads),
        "by channel": (tokens, tokens, tokens, tokens),
        "linear_recurrence": (heads, heads),
    }[name]
    options: Any = {"offset": 2} if name == "shift" else {}
    layer = getattr(sequence, "linear_attention" if name == "by channel" else name)
    layer = partial(layer, axis_name=AXIS, return_state=True, **options)

    def loss(arrays, ids):
        *arrays, bias = arrays if name == "causal_conv" else (*arrays, None)
        given = {} if bias is None else {"bias": bias}
        out, state = layer(*arrays, segment_ids=ids, **given)
        out, state = layer(*arrays, segment_ids=ids, initial_state=state, **given)
        return out.astype(jnp.float32).sum() + state.astype(jnp.float32).sum()

    rows = P(None, AXIS)
    of_arrays = tuple(rows if x.shape[:2] == ids.shape else P() for x in arrays)
    run = on_ranks(jax.grad(loss), (of_arrays, rows), of_arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        gradients = jax.eval_shape(run, arrays, ids)
    assert [x.dtype for x in gradients] == [x.dtype for x in arrays]


def test_ragged_all_to_all():
    x, plan = np.ones((W, 6, 3), np.float32), np.zeros((W, W), np.int32)
    gradient = jax.grad(lambda x, p: ragged_all_to_all(x, x, p, p, p, p, axis_name=AXIS).sum())
    assert jax.eval_shape(expert_ranks(gradient, mesh_of(W)), x, plan).shape == x.shape
