"""Every public function with one rank, where nothing moves: the first case of a new model."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import attention
from jax.sharding import AxisType, PartitionSpec as P
from on_mesh import AXIS, mesh_of

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cost import CommGemmShape

T, N, K, H = 32, 4, 2, 8
IDS = np.repeat([1, 2, 0], [20, 9, 3])[None]
ALGORITHMS = ("balanced", "ring", "zigzag", "hamilton", "ulysses", "auto")

# They do not depend on the number of ranks; other tests cover them.
WITHOUT_RANKS = {
    *("available_implementations", "current_tuning", "use_tuning", "initialize"),
    *("quantize", "dequantize", "pad_scales", "unpad_scales", "swizzle_scales", "unswizzle_scales"),
    *("grouped_gemm", "local_attention", "local_attention_backward", "merge_partials"),
    *("document_lengths", "hamiltonian_paths"),
    *("fit_plan_config", "needs_inside_jit"),
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_rank(fn, *arrays):
    """Runs `fn` inside `shard_map` over one device."""
    mapped = jax.shard_map(fn, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


def qkv():
    return normal(1, T, N, H), normal(1, T, K, H, seed=1), normal(1, T, K, H, seed=2)


def causal(q, k, v, ids=IDS):
    new = np.append(True, ids[0, 1:] != ids[0, :-1])
    start = np.maximum.accumulate(np.where(new, np.arange(T), 0))
    end = np.where(ids[0] > 0, np.arange(T) + 1, start)
    return attention(q, k, v, start[None], end[None])[0]


def one_shard():
    """Sends all rows to the only rank."""
    return cpd.compute_metadata(np.array([[5, 3]]), np.zeros((1, 2), np.int32))


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


# ---- Attention.


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_context_parallel_attention(algorithm):
    q, k, v = qkv()
    out = cpd.context_parallel_attention(
        q, k, v, mesh=mesh_of(1), axis_name=AXIS, algorithm=algorithm, segment_ids=IDS
    )
    close(out, causal(q, k, v))


@pytest.mark.parametrize(
    "function",
    [
        *(cpd.ring_attention, cpd.zigzag_ring_attention, cpd.hamilton_attention),
        cpd.ulysses_attention,
    ],
)
def test_rotating_attention(function):
    q, k, v = qkv()
    close(
        on_rank(lambda *x: function(*x, axis_name=AXIS, segment_ids=jnp.asarray(IDS)), q, k, v),
        causal(q, k, v),
    )


def test_balanced_attention():
    q, k, v = qkv()
    plan = cpd.plan_attention(IDS, world_size=1)
    assert float(plan.imbalance) == 1
    close(
        on_rank(lambda q, k, v: cpd.balanced_attention(q, k, v, plan, axis_name=AXIS), q, k, v),
        causal(q, k, v),
    )


def test_placed_attention():
    q, k, v = qkv()
    placement = cpd.place_tokens(segment_ids=IDS, world_size=1)
    placed = placement.apply((q, k, v))
    attend = lambda q, k, v: cpd.placed_attention(q, k, v, placement.plan, axis_name=AXIS)
    out = on_rank(attend, *placed)
    close(placement.restore(out), causal(q, k, v))


def test_stack_plans():
    q, k, v = qkv()
    plans = cpd.stack_plans([cpd.plan_attention(IDS, world_size=1)])
    mesh = jax.make_mesh((1, 1), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    axes = {"mesh": mesh, "axis_name": AXIS, "batch_axis": "data"}
    out = cpd.context_parallel_attention(q, k, v, algorithm="balanced", plan=plans, **axes)
    close(out, causal(q, k, v))


def test_profile():
    q, k, v = qkv()
    profile = cpd.profiling.hamilton_attention_profile(
        q, k, v, mesh=mesh_of(1), axis_name=AXIS, repeats=1
    )
    close(profile.out, causal(q, k, v, np.ones_like(IDS)))


def test_choose_algorithm():
    choice = cpd.choose_algorithm(
        [[20, 9]],
        num_ranks=1,
        tokens_per_rank=T,
        num_heads=N,
        num_kv_heads=K,
        head_size=H,
        itemsize=4,
    )
    assert choice.algorithm.name in ALGORITHMS


# ---- Movement.


def test_dispatch_and_combine():
    forward, _ = one_shard()
    x = normal(8, 3)
    there = on_rank(lambda x: cpd.dispatch(x, forward, axis_name=AXIS, capacity=8), x)
    np.testing.assert_array_equal(there, x)
    back = on_rank(lambda y: cpd.combine(y, forward, axis_name=AXIS, num_tokens=8), x)
    np.testing.assert_array_equal(back, x)


def test_exchanges_in_two_calls():
    forward, _ = one_shard()
    x = normal(8, 3)

    def there_and_back(x):
        exchange, y = cpd.dispatch_start(x, forward, beside=x, axis_name=AXIS, capacity=8)
        there, y = cpd.exchange_done(exchange, beside=y + 1)
        exchange, y = cpd.combine_start(there, forward, beside=y, axis_name=AXIS, num_tokens=8)
        return cpd.exchange_done(exchange, beside=y - 1)

    for got in on_rank(there_and_back, x):
        np.testing.assert_allclose(got, x, atol=1e-6)


def test_dispatch_and_combine_of_queries_and_keys():
    forward, _ = one_shard()
    q, k = normal(8, 3), normal(8, 2, seed=1)

    def there_and_back(q, k):
        moved = cpd.dispatch_qkv(
            q, (k,), forward, forward, axis_name=AXIS, q_capacity=8, kv_capacity=8
        )
        return moved, cpd.combine_qkv(
            *moved, forward, forward, axis_name=AXIS, q_num_tokens=8, kv_num_tokens=8
        )

    for got_q, (got_k,) in on_rank(there_and_back, q, k):
        np.testing.assert_array_equal(got_q, q)
        np.testing.assert_array_equal(got_k, k)


def test_exchanges():
    x = normal(8, 3)
    np.testing.assert_array_equal(on_rank(lambda x: cpd.ring_exchange(x, axis_name=AXIS), x), x)
    nothing = np.zeros((0, 3), np.float32)
    none = [[-1]]  # a rank sends itself nothing
    assert on_rank(lambda x: cpd.chunk_exchange(x, none, none, axis_name=AXIS), nothing).size == 0


def test_dispatch_buffers():
    buffer = cpd.buffers.create_dispatch_buffer(capacity=16)
    try:
        forward, _ = one_shard()
        x = normal(8, 3)
        send = lambda x: cpd.dispatch(x, forward, axis_name=AXIS, buffer=buffer)
        np.testing.assert_array_equal(on_rank(send, x)[:8], x)
    finally:
        cpd.buffers.destroy_dispatch_buffer(buffer)
    cpd.buffers.destroy_all_dispatch_buffers()


# ---- Plans and cycles.


def test_metadata():
    forward, reverse = one_shard()
    forward.validate()
    reverse.validate()
    x = normal(1, 8, 3)
    np.testing.assert_array_equal(
        cpd.scenarios.orchestrate_simulate(x, np.zeros_like(x), forward), x
    )
    layout = cpd.metadata.compute_attn_layout_seqlens(
        np.array([[5, 3]]), np.array([[5, 8]]), np.zeros((1, 2), np.int32)
    )
    np.testing.assert_array_equal(layout.cu_seqlens_q[0, :3], [0, 5, 8])


def test_key_metadata():
    """Two queries of one document: the second one attends to the keys of both."""
    forward, reverse = cpd.metadata.compute_metadata_kv(
        kv_to_q_mapping=np.array([[[[0, 0], [0, 1]], [[0, 1], [-1, -1]]]]),
        kv_to_q_rank=np.array([[[0, 0], [1, -1]]]),
        kv_context_size=np.array([[0, 5]]),
        q_to_num_kv_seq=np.array([[1, 2]]),
        q_to_num_kv_token=np.array([[5, 8]]),
        seq_len=np.array([[5, 3]]),
        num_seqs=np.array([2]),
        q_dispatch=np.zeros((1, 2), np.int32),
    )
    forward.validate()
    reverse.validate()
    np.testing.assert_array_equal(forward.dst_offset[0, :2], [[0, 5], [10, 0]])
    assert int(forward.num_total_recv_tokens[0]) == 13


def test_scenarios():
    lengths = cpd.scenarios.gen_seq_lens(jax.random.key(0), 1, 3, 10)
    assert int(lengths.sum()) == 10
    *plans, _ = cpd.scenarios.create_qkv_dispatch(jax.random.key(1), 1, 16, 2, 2)
    for plan in plans:
        plan.validate()


def test_cycles():
    assert cpd.cycles.hamiltonian_cycles(1) == []
    assert cpd.cycles.two_level_cycles(1, 1) == []
    assert cpd.cycles.source_is_earlier([]) == [[[]]]  # one rank, one step, no chunks
    assert cpd.cycles.chunk_maps([]) == ([[-1]], [[-1]])
    assert cpd.cycles.two_level_maps(1, 1).cycles == []
    np.testing.assert_array_equal(cpd.zigzag_permutation(8, 1), np.arange(8))


# ---- GEMMs.


@pytest.mark.parametrize("method", ["auto", "none", "pipeline", "ring_exchange"])
@pytest.mark.parametrize("function", [cpd.all_gather_matmul, cpd.matmul_reduce_scatter])
def test_overlapped_gemms(function, method):
    if function is cpd.all_gather_matmul and method == "pipeline":
        method = "auto"  # an all-gather has no pipeline
    x, w = normal(6, 8), normal(8, 4, seed=1)
    out = on_rank(lambda x, w: function(x, w, axis_name=AXIS, method=method), x, w)
    close(out, x.astype(np.float64) @ w)


def test_gemm_with_a_buffer():
    x, w = normal(6, 8), normal(8, 4, seed=1)
    arguments = ("AG", "RING_EXCHANGE", (6, 8), np.float32, 1)
    assert cpd.buffers.comm_overlap_buffer_bytes(*arguments) >= 0
    buffer = cpd.buffers.create_comm_overlap_buffer(*arguments)
    try:
        assert buffer in cpd.buffers.list_comm_overlap_buffers()
        close(
            on_rank(lambda x, w: cpd.gemm(x, w, comm_overlap=buffer, axis_name=AXIS), x, w),
            x.astype(np.float64) @ w,
        )
    finally:
        cpd.buffers.destroy_comm_overlap_buffer(buffer)
    cpd.buffers.destroy_all_comm_overlap_buffers()


def test_choice_and_tuning_of_gemms():
    op = "all_gather_matmul"
    table = cpd.profiling.tune([(op, 8, 8, 8)], mesh=mesh_of(1), axis_name=AXIS, repeats=1)
    choice = cpd.choose_comm_gemm(CommGemmShape(op, 8, 8, 8, 1, 4), table=table)
    assert choice.label in choice.seconds


def test_profile_of_a_gemm():
    x, w = normal(6, 8), normal(8, 4, seed=1)
    product = jax.shard_map(
        lambda x, w: cpd.all_gather_matmul(x, w, axis_name=AXIS, method="ring_exchange"),
        mesh=mesh_of(1),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    profile = cpd.profiling.overlap_profile(jax.jit(product), x, w)
    assert profile.total >= 0


def test_every_public_function_is_covered():
    tried = inspect.getsource(inspect.getmodule(qkv) or inspect)
    functions = {
        name
        for name in cpd.__all__
        if callable(getattr(cpd, name)) and not isinstance(getattr(cpd, name), type)
    }
    assert {name for name in functions - WITHOUT_RANKS if f"cpd.{name}" not in tried} == set()
