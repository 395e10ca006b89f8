"""Public functions with one rank, where nothing moves: the first case of a new model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention
from jax.sharding import AxisType, PartitionSpec as P
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.documents import zigzag_permutation

T, N, K, H = 32, 4, 2, 8
IDS = np.repeat([1, 2, 0], [20, 9, 3])[None]
ALGORITHMS = ("balanced", "ring", "zigzag", "halo", "hamilton", "ulysses", "auto")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_rank(fn, *arrays):
    """Runs `fn` inside `shard_map` over one device."""
    mapped = jax.shard_map(fn, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


QKV = normal(1, T, N, H), normal(1, T, K, H, seed=1), normal(1, T, K, H, seed=2)


def causal(q, k, v):
    new = np.append(True, IDS[0, 1:] != IDS[0, :-1])
    start = np.maximum.accumulate(np.where(new, np.arange(T), 0))
    end = np.where(IDS[0] > 0, np.arange(T) + 1, start)
    return attention(q, k, v, start[None], end[None])[0]


def attend(*qkv, mesh=None, **options):
    mesh = mesh or mesh_of(1)
    return cpd.context_parallel_attention(*qkv, mesh=mesh, axis_name=AXIS, **options)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_attention():
    """Of named algorithms: test_values.py."""
    close(attend(*QKV, algorithm="auto", segment_ids=IDS), causal(*QKV))


def test_stacked_plans():
    plans = cpd.stack_plans([cpd.plan_attention(IDS, world_size=1)])
    assert float(cpd.plan_attention(IDS, world_size=1).imbalance) == 1
    mesh = jax.make_mesh((1, 1), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    documents = cpd.Documents(IDS).with_plan(plans)
    out = attend(*QKV, mesh=mesh, batch_axis="data", algorithm="balanced", documents=documents)
    close(out, causal(*QKV))


def test_the_choice_of_an_algorithm():
    sizes: Any = {"num_heads": N, "num_kv_heads": K, "head_size": H, "itemsize": 4}
    choice = cpd.choose_algorithm([[20, 9]], num_ranks=1, tokens_per_rank=T, **sizes)
    assert choice.algorithm.name in ALGORITHMS


def test_movement():
    """All rows go to the only rank, and return, in one call, in two, and beside work."""
    forward, _ = cpd.compute_metadata(np.array([[5, 3]]), np.zeros((1, 2), np.int32))
    x, k = normal(8, 3), normal(8, 2, seed=1)
    axis: Any = {"axis_name": AXIS}

    def there_and_back(x, k):
        there = cpd.dispatch(x, forward, capacity=8, **axis)
        moved = cpd.dispatch_qkv(x, (k,), forward, forward, q_capacity=8, kv_capacity=8, **axis)
        back = cpd.combine_qkv(*moved, forward, forward, q_num_tokens=8, kv_num_tokens=8, **axis)
        exchange, y = cpd.dispatch_start(x, forward, beside=x, capacity=8, **axis)
        begun, y = cpd.exchange_done(exchange, beside=y)
        exchange, y = cpd.combine_start(begun, forward, beside=y, num_tokens=8, **axis)
        done, y = cpd.exchange_done(exchange, beside=y)
        alone = cpd.combine(there, forward, num_tokens=8, **axis)
        return [there, alone, begun, done, y, ring_exchange(x, **axis)], moved, back

    same, *pairs = on_rank(there_and_back, x, k)
    for got in same:
        np.testing.assert_array_equal(got, x)
    for got_x, (got_k,) in pairs:
        np.testing.assert_array_equal(got_x, x)
        np.testing.assert_array_equal(got_k, k)


def test_cycles():
    assert cpd.cycles.hamiltonian_cycles(1) == []
    assert cpd.cycles.two_level_cycles(1, 1) == cpd.cycles.two_level_maps(1, 1).cycles == []
    assert cpd.cycles.source_is_earlier([]) == [[[]]]  # one rank, one step, no chunks
    assert cpd.cycles.chunk_maps([]) == ([[-1]], [[-1]])  # a rank sends itself nothing
    np.testing.assert_array_equal(zigzag_permutation(8, 1), np.arange(8))
    nothing = np.zeros((0, 3), np.float32)
    exchange = lambda x: chunk_exchange(x, [[-1]], [[-1]], axis_name=AXIS)
    assert on_rank(exchange, nothing).size == 0


@pytest.mark.parametrize("method", ["auto", "none", "pipeline", "ring_exchange"])
@pytest.mark.parametrize("function", [cpd.all_gather_matmul, cpd.matmul_reduce_scatter])
def test_overlapped_gemms(function, method):
    if function is cpd.all_gather_matmul and method == "pipeline":
        method = "auto"  # an all-gather has no pipeline
    x, w = jnp.asarray(normal(6, 8)), jnp.asarray(normal(8, 4, seed=1))
    out = on_rank(lambda x, w: function(x, w, axis_name=AXIS, method=method), x, w)
    close(out, np.asarray(x, np.float64) @ np.asarray(w, np.float64))
