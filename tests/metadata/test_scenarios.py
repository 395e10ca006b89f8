"""The scenario generators, and the simulated network against a loop over tokens."""

import jax
import jax.numpy as jnp
import metadata_oracle as oracle
import numpy as np
import pytest

from jax_cp_dispatch import Metadata, scenarios


@pytest.mark.parametrize(("world_size", "num_seqs", "total"), [(1, 1, 1), (3, 4, 4)])
def test_gen_seq_lens_are_positive_and_fill_the_row(world_size, num_seqs, total):
    lengths, again = (
        scenarios.gen_seq_lens(jax.random.key(3), world_size, num_seqs, total) for _ in "ab"
    )
    np.testing.assert_array_equal(lengths, again)
    assert lengths.shape == (world_size, num_seqs) and lengths.dtype == jnp.int32
    assert np.all(np.asarray(lengths) >= 1)
    np.testing.assert_array_equal(lengths.sum(1), total)


def test_create_qkv_dispatch_is_causal_and_valid():
    world_size, total, num_seqs, degree = 4, 60, 2, 6
    key = jax.random.key(degree)
    inputs = scenarios.draw_qkv_dispatch(key, world_size, total, num_seqs, degree)
    *plans, lengths = scenarios.create_qkv_dispatch(key, world_size, total, num_seqs, degree)
    for plan in plans:
        plan.validate()
    np.testing.assert_array_equal(inputs.seq_len.sum(1), total)
    assert inputs.seq_len.shape == (world_size, num_seqs * degree)

    mapping, position, context, num_kv, kv_tokens, seq_len, num_seqs_used, dispatch = inputs
    served = {}
    for r, s, c in np.argwhere(mapping[..., 0] >= 0):
        served.setdefault(tuple(map(int, mapping[r, s, c])), []).append(
            (position[r, s, c], context[r, s], seq_len[r, s], (r, s))
        )
    assert set(served) == {tuple(map(int, q)) for q in np.argwhere(seq_len > 0)}
    for query, keys in served.items():
        keys.sort()
        assert [k[0] for k in keys] == list(range(num_kv[query]))
        np.testing.assert_array_equal(
            [k[1] for k in keys], np.cumsum([0] + [k[2] for k in keys])[:-1]
        )
        assert keys[-1][3] == query, "a query shard sees its own keys, last"
        assert kv_tokens[query] == sum(k[2] for k in keys)
        assert len({k[2] for k in keys}) == 1, "equal shards"
    np.testing.assert_array_equal(num_seqs_used, oracle.last_used(dispatch >= 0))
    np.testing.assert_array_equal(lengths.num_local_seqs.sum(), (dispatch >= 0).sum())
    np.testing.assert_array_equal(lengths.cu_seqlens_kv[:, -1], plans[2].num_total_recv_tokens)


def test_orchestrate_simulate_equals_token_by_token():
    rng = np.random.default_rng(5)
    seq_len, dispatch = oracle.random_shards(rng, 4, 5, 2)
    forward = Metadata(**oracle.plan(seq_len, dispatch)[0], world_size=4)
    x = rng.integers(0, 99, (4, 40, 2, 2)).astype(np.int16)
    out = np.full((4, 150, 2, 2), -1, np.int16)
    got = scenarios.orchestrate_simulate(x, out, forward)
    want = oracle.move(x, out, dispatch, np.asarray(forward.dst_offset), seq_len)
    assert got.dtype == jnp.int16
    np.testing.assert_array_equal(got, want)


def test_simulation_reads_from_src_offset_leaves_holes_and_is_differentiable():
    fields, _ = oracle.plan(np.array([[2, 3], [1, 0]]), np.array([[1, 1], [0, -1]]))
    starts = {"src_offset": np.array([[4, 3], [0, 0]]), "dst_offset": np.array([[6, 1], [2, 0]])}
    plan = Metadata(**{**fields, **starts}, world_size=2)
    x = np.arange(14.0, dtype=np.float32).reshape(2, 7)
    hole, out = np.nan, np.full((2, 9), np.nan, np.float32)
    got, pull = jax.vjp(lambda x, out: scenarios.orchestrate_simulate(x, out, plan), x, out)
    np.testing.assert_array_equal(
        got, [[hole, hole, 7, *[hole] * 6], [hole, 3, 4, 5, hole, hole, 4, 5, hole]]
    )
    weights = np.arange(18, dtype=np.float32).reshape(2, 9)
    dx, dout = pull(weights)  # a row sent twice sums
    got = np.asarray(got)
    np.testing.assert_array_equal(dx, [[weights[got == row].sum() for row in of] for of in x])
    np.testing.assert_array_equal(dout, np.where(np.isnan(got), weights, 0))
