"""Plans that the native handlers reject: with XLA's collectives, all results are NaN or zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import mesh_of, on_ranks
from xla_moving import CAPACITY, C, S, T, W, move, move_back, program, random_rows

from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands


def plain_plan(unmoved=()):
    """Shard s of rank r, three rows, goes to rank r + s, except the `unmoved` ones (r, s)."""
    dst_rank = np.full((W, S, C), -1, np.int32)
    dst_rank[:, :, 0] = np.add.outer(np.arange(W), np.arange(S)) % W
    for r, s in unmoved:
        dst_rank[r, s] = -1
    num_recv = np.zeros((W, W + 1), np.uint32)
    dst_offset = np.zeros((W, S, C), np.uint32)
    for r, s, c in np.argwhere(dst_rank >= 0):
        d = dst_rank[r, s, c]
        dst_offset[r, s, c] = num_recv[d, W]
        num_recv[d, [r, W]] += 3
    return MetadataOperands(
        num_recv_tokens=num_recv,
        seq_len=np.full((W, S), 3, np.uint32),
        dst_rank=dst_rank,
        dst_offset=dst_offset,
    )


# Each error: the shards that do not move, the field, its index, and the invalid value.
INVALID = {
    "destination past the capacity": ([], "dst_offset", (3, 0, 0), CAPACITY - 2),
    "destination past 32 bits": ([], "dst_offset", (3, 0, 0), 2**32 - 2),
    "rows past the array": ([(3, 0)], "seq_len", (3, 0), T - 2),
    "row numbers past 32 bits": ([(3, 0), (3, 1)], "seq_len", (3, slice(2)), 2**31),
    "overlapping destinations": ([], "dst_offset", (3, 0, 0), 5),
    "rank past the last": ([], "dst_rank", (3, 0, 0), W),
    "rank before none": ([], "dst_rank", (3, 0, 0), -2),
    "destination is another rank": ([], "dst_rank", (3, 0, 0), 6),
    "fewer rows than announced": ([], "num_recv_tokens", (2, 1), 4),
    "a total past the capacity": ([], "num_recv_tokens", (2, W), CAPACITY + 1),
}


@pytest.mark.parametrize("what", INVALID)
def test_invalid_plans_fill_every_rank_with_nan(what):
    unmoved, field, place, value = INVALID[what]
    m = plain_plan(unmoved)
    x, y = random_rows(np.random.default_rng(7))
    assert not any(np.isnan(out).any() for out in program()(x, y, m))
    getattr(m, field)[place] = value
    assert all(np.isnan(out).all() for out in program()(x, y, m))


def test_invalid_plans_are_reported_in_every_dtype():
    m = plain_plan()
    m.num_recv_tokens[2, 1] = 4
    floats = ["bfloat16", "float32", "complex64", "float8_e4m3b11fnuz", "float8_e8m0fnu"]
    x = [np.ones((W, T, 2), jnp.dtype(name)) for name in [*floats, "int8", "uint32", "bool"]]
    run = on_ranks(lambda x, m: (move(x, m), move_back(x[:-1], m)), mesh_of(W))
    for out in map(np.asarray, jax.tree.leaves(run(x, m))):
        if jnp.issubdtype(out.dtype, np.complexfloating):
            assert np.isnan(np.real(out)).all() and np.isnan(np.imag(out)).all()
        elif jnp.issubdtype(out.dtype, np.floating):
            assert np.isnan(out.astype(np.float32)).all(), out.dtype
        else:
            assert not out.any()


def test_slots_that_move_nothing_are_not_checked():
    m = plain_plan([(3, 4), (5, 4)])
    x, y = random_rows(np.random.default_rng(8))
    expected = program()(x, y, m)
    m.seq_len[3, 4] = 2**32 - 1  # the last of its rank, not sent
    m.seq_len[5, 4], m.dst_rank[5, 4] = 0, 99
    m.dst_offset[[3, 5], 4] = 2**32 - 1
    for got, same in zip(program()(x, y, m), expected, strict=True):
        np.testing.assert_array_equal(got, same)
        assert not np.isnan(got).any()
