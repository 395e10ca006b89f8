"""Planning of metadata by example: results against the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest
from metadata_oracle import kv_arguments

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv

SEQ_LEN = np.array([[4, 0, 6], [3, 5, 0]])
DISPATCH = np.array([[1, 0, 0], [0, 1, -1]])


def without_num_seqs(arguments) -> tuple[Any, ...]:
    return (*arguments[:6], arguments[7])


# --- planning -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "num_shards", "num_replicas"),
    [(1, 6, 3), (6, 1, 1), (4, 65, None)],
)
def test_compute_metadata_equals_oracle(world_size, num_shards, num_replicas):
    rng = np.random.default_rng(world_size * num_shards)
    seq_len, dispatch = oracle.random_shards(rng, world_size, num_shards, num_replicas)
    plans = compute_metadata(seq_len, dispatch)
    for plan, expected in zip(plans, oracle.plan(seq_len, dispatch), strict=True):
        oracle.assert_fields(plan, expected)
        plan.validate()


@pytest.mark.parametrize("size", [(1, 1, 1), (5, 30, 3)])
def test_compute_metadata_kv_of_documents_that_span_ranks(size):
    arguments = kv_arguments(7, *size)
    plans = compute_metadata_kv(*arguments)
    expected = oracle.plan_kv(*without_num_seqs(arguments), num_slots=plans[1].seq_len.shape[1])
    for plan, fields in zip(plans, expected, strict=True):
        oracle.assert_fields(plan, fields)
        plan.validate()


def test_kv_counts_by_the_rank_of_the_key():
    # One document of two shards; the key on rank 0 serves the query on rank 1, which goes to 1.
    forward, _ = compute_metadata_kv(
        np.array([[[[0, 0], [1, 0]]], [[[1, 0], [-1, -1]]]]), np.array([[[0, 0]], [[1, -1]]]),
        np.array([[0], [4]]), np.array([[1], [2]]), np.array([[4], [7]]), np.array([[4], [3]]),
        np.array([1, 1]), np.array([[0], [1]]),
    )  # fmt: skip
    np.testing.assert_array_equal(forward.num_recv_tokens, [[4, 0, 4], [4, 3, 7]])


@pytest.mark.parametrize(("world_size", "num_shards"), [(1, 1), (4, 70)])
def test_compute_attn_layout_seqlens(world_size, num_shards):
    rng = np.random.default_rng(num_shards)
    shard_len, dispatch = oracle.random_shards(rng, world_size, num_shards)
    context = shard_len + rng.integers(0, 9, shard_len.shape)  # also in padding: ignored
    got = compute_attn_layout_seqlens(shard_len, context, dispatch)
    for name, want in oracle.attn_layout(shard_len, context, dispatch).items():
        np.testing.assert_array_equal(np.asarray(getattr(got, name)), want, err_msg=name)
        assert getattr(got, name).dtype == jnp.int32


def test_dtypes_and_static_fields():
    forward, reverse = compute_metadata(SEQ_LEN, DISPATCH[..., None])
    for plan in (forward, reverse):
        assert plan.world_size == 2
        for name in ("dst_rank", "num_seqs"):
            assert getattr(plan, name).dtype == jnp.int32
        for name in ("dst_offset", "seq_len", "num_recv_tokens", "num_total_recv_tokens"):
            assert getattr(plan, name).dtype == jnp.uint32
    assert reverse.seq_recv_mask.dtype == jnp.bool_
    assert reverse.recv_seq_lens.dtype == jnp.uint32
    assert forward.src_offset is None and forward.seq_recv_mask is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_any_integer_dtype_of_numpy_and_jax(dtype):
    unsigned = np.issubdtype(dtype, np.unsignedinteger)
    dispatch = DISPATCH.clip(0).astype(dtype) if unsigned else DISPATCH.astype(dtype)
    for make in (np.asarray, jnp.asarray):
        plan, _ = compute_metadata(make(SEQ_LEN.astype(dtype)), make(dispatch))
        oracle.assert_fields(plan, oracle.plan(SEQ_LEN, dispatch.astype(int))[0])


def test_either_component_of_the_mapping_marks_an_unused_replica():
    mapping, *rest = kv_arguments()
    half = mapping.copy()
    unused = half[..., 0] < 0
    half[..., 1] = np.where(unused, 2, half[..., 1])
    for plan, same in zip(*(compute_metadata_kv(x, *rest) for x in (mapping, half)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, same)


def test_slots_in_use_counts_gaps_and_rows_that_stay():
    plan, _ = compute_metadata(
        np.array([[0, 3, 0], [2, 0, 0], [0, 4, 0]]),
        np.array([[-1, 0, 2], [-1, -1, -1], [0, 0, -1]]),
    )
    np.testing.assert_array_equal(plan.num_seqs, [3, 1, 2])


def test_traced_equals_concrete_also_under_vmap():
    plans = compute_metadata(SEQ_LEN, DISPATCH)
    slots = plans[1].dst_rank.shape[1]

    def call(seq_len, dispatch):
        return compute_metadata(seq_len, dispatch, max_recv_seqs=slots)

    batch = jax.jit(jax.vmap(call))(np.stack([SEQ_LEN, SEQ_LEN * 2]), np.stack([DISPATCH] * 2))
    traced = jax.jit(call)(SEQ_LEN, DISPATCH)
    for plan, one, many in zip(plans, traced, batch, strict=True):
        jax.tree.map(np.testing.assert_array_equal, plan, one)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0]), plan, many)


def test_constants_inside_jit_are_planned_exactly():
    @jax.jit
    def inside(x):
        _, reverse = compute_metadata(SEQ_LEN, DISPATCH)
        reverse.validate()  # still concrete, so host functions work
        return x + reverse.num_seqs

    np.testing.assert_array_equal(inside(0), [3, 2])


def test_kv_and_lengths_trace():
    arguments = kv_arguments()
    plans = compute_metadata_kv(*arguments)
    slots = plans[1].dst_rank.shape[1]
    traced = jax.jit(lambda a: compute_metadata_kv(*a, max_recv_seqs=slots))(arguments)
    jax.tree.map(np.testing.assert_array_equal, plans, traced)
    lengths = jax.jit(lambda a, b, c: compute_attn_layout_seqlens(a, b, c, max_recv_seqs=4))
    assert lengths(SEQ_LEN, SEQ_LEN, DISPATCH).cu_seqlens_q.shape == (2, 5)


def test_traced_overflow_drops_slots_but_not_counts():
    seq_len, dispatch = np.full((3, 2), 4), np.full((3, 2), 2)
    _, reverse = jax.jit(lambda x, d: compute_metadata(x, d, max_recv_seqs=4))(seq_len, dispatch)
    np.testing.assert_array_equal(reverse.num_seqs, [0, 0, 6])
    np.testing.assert_array_equal(reverse.num_total_recv_tokens, [8, 8, 8])
    np.testing.assert_array_equal(reverse.dst_rank, [[-1] * 4, [-1] * 4, [0, 0, 1, 1]])
    with pytest.raises(ValueError, match="rank 2: num_seqs is 6"):
        reverse.validate()
    arguments = kv_arguments()
    _, exact = compute_metadata_kv(*arguments)
    need = int(np.max(exact.num_seqs))
    _, short = jax.jit(lambda a: compute_metadata_kv(*a, max_recv_seqs=need - 1))(arguments)
    assert int(np.max(short.num_seqs)) == need
