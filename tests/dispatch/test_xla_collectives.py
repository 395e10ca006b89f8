"""Movement by XLA's collectives alone, against the definition; invalid plans give NaN."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch._dispatch import xla_collectives
from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._dispatch.xla_plan import XlaRanks

pytestmark = pytest.mark.usefixtures("full_optimization")  # XLA sums

W, S, T, C = 8, 5, 24, 2
CAPACITY = W * T  # enough for every plan, so one program serves many plans

FLOATS = [name for name in dir(ml_dtypes) if name.startswith("float8_")]
MOVED = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", *FLOATS),
]
INTEGERS = [f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)]
SUMMED = [  # the type that arrives, of the sum, and of the rounded result
    *[(name, name, name) for name in ("float32", "float64", "complex64", "complex128", *INTEGERS)],
    *[(name, "float32", name) for name in ("float16", "bfloat16")],
    *[("bfloat16", "float32", "float32"), ("float32", "float32", "bfloat16")],
]


def operands(plan):
    return MetadataOperands(**{k: plan[k] for k in MetadataOperands._fields if k in plan})


def bits(x):
    """Compares bytes, so NaN and -0.0 count."""
    return np.ascontiguousarray(x).view(np.uint8)


def random_bits(rng, shape, dtype):
    """Returns every bit pattern, including every NaN; booleans have only two."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype)[..., 0]


def ranks(axis_names, num_ranks):
    rank = jax.lax.axis_index(axis_names) if axis_names else None
    return XlaRanks(rank, axis_names, num_ranks)


def move(arrays, m, axis_names=(AXIS,), num_ranks=W, capacity=CAPACITY):
    return dispatch_with_xla(ranks(axis_names, num_ranks), m, arrays, capacity=capacity)


def move_back(arrays, m, axis_names=(AXIS,), num_ranks=W, num_tokens=T, dtypes=None):
    return combine_with_xla(
        ranks(axis_names, num_ranks),
        m,
        arrays,
        num_tokens=num_tokens,
        dtypes=dtypes or tuple(y.dtype.name for y in arrays),
    )


def both(x, y, m, **kwargs):
    return move([x], m, **kwargs)[0], move_back([y], m, **kwargs)[0]


def random_rows(rng, num_ranks=W, num_features=3):
    x = rng.normal(size=(num_ranks, T, num_features)).astype(np.float32)
    y = rng.normal(size=(num_ranks, CAPACITY, num_features)).astype(np.float32)
    return x, y


def assert_as_defined(got, plan, x, y):
    np.testing.assert_array_equal(got[0], dispatched(plan, x, CAPACITY))
    np.testing.assert_array_equal(got[1], combined(plan, y, T, np.float32))


@functools.cache
def program():
    """Compiles once for all plans of W, S, C without `src_offset`."""
    return on_ranks(both, mesh_of(W))


def test_every_dtype_moves_bit_for_bit():
    rng = np.random.default_rng(0)
    plan = random_plan(rng, W, S, T, C)
    with jax.enable_x64(True):
        x = [random_bits(rng, (W, T, 3), dtype) for dtype in MOVED]
        got = on_ranks(move, mesh_of(W))(x, operands(plan))
        for name, received, sent in zip(MOVED, got, x, strict=True):
            assert received.dtype == sent.dtype == jnp.dtype(name)
            raw = sent.view(f"u{min(sent.itemsize, 8)}")
            np.testing.assert_array_equal(bits(received), bits(dispatched(plan, raw, CAPACITY)))


def test_sums_have_a_fixed_order_and_round_once():
    rng = np.random.default_rng(1)
    plan = random_plan(rng, W, S, T, 3)
    results = tuple(result for _, _, result in SUMMED)
    with jax.enable_x64(True):
        y = [
            random_bits(rng, (W, CAPACITY, 2), name)
            if name in INTEGERS
            else rng.normal(size=(W, CAPACITY, 2)).astype(jnp.dtype(name))
            for name, _, _ in SUMMED
        ]
        got = on_ranks(lambda y, m: move_back(y, m, dtypes=results), mesh_of(W))(y, operands(plan))
        for (name, accumulate, result), total, rows in zip(SUMMED, got, y, strict=True):
            expected = combined(plan, rows, T, accumulate).astype(jnp.dtype(result))
            assert total.dtype == expected.dtype
            np.testing.assert_array_equal(bits(total), bits(expected), err_msg=name)


@pytest.mark.parametrize("has_src_offset", [False, True])
def test_a_row_with_one_source_keeps_its_bits(has_src_offset):
    rng = np.random.default_rng(3)
    plan = random_plan(rng, W, S, T)
    if has_src_offset:
        plan["src_offset"] = np.cumsum(plan["seq_len"], 1, dtype=np.uint32) - plan["seq_len"]
    names = ("float32", "bfloat16", "float8_e4m3fn")
    y = [random_bits(rng, (W, CAPACITY, 2), name) for name in names]
    got = on_ranks(move_back, mesh_of(W))(y, operands(plan))
    for total, rows in zip(got, y, strict=True):
        raw = rows.view(f"u{rows.itemsize}")
        np.testing.assert_array_equal(bits(total), bits(combined(plan, raw, T, raw.dtype)))


def test_any_plan_matches_the_definition():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        plan = random_plan(rng, W, S, T, C)
        x, y = random_rows(rng)
        assert_as_defined(program()(x, y, operands(plan)), plan, x, y)


@pytest.mark.parametrize("num_ranks, check_vma", [(1, True), (5, True), (5, False)])
def test_rank_is_the_index_on_a_permuted_axis(num_ranks, check_vma):
    rng = np.random.default_rng(num_ranks)
    plan = random_plan(rng, num_ranks, S, T, C)
    plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
    x, y = random_rows(rng, num_ranks)
    mesh = mesh_of(num_ranks, np.random.default_rng(0).permutation(num_ranks))
    run = on_ranks(functools.partial(both, num_ranks=num_ranks), mesh, check_vma=check_vma)
    assert_as_defined(run(x, y, operands(plan)), plan, x, y)


@pytest.mark.parametrize("is_global", [True, False])
def test_two_mesh_axes_can_be_one_axis_of_ranks(is_global):
    """The metadata may be global, or a slice with a leading dimension of 1."""
    rng = np.random.default_rng(4)
    plan = random_plan(rng, W, S, T, C)
    x, y = random_rows(rng)
    names = ("pod", "data")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), names)

    def local(x, y, m):
        return [out[None] for out in both(x[0], y[0], m, axis_names=names)]

    specs = (P(names), P(names), P() if is_global else P(names))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(names))
    assert_as_defined(jax.jit(run)(x, y, operands(plan)), plan, x, y)


def test_rows_may_be_named_by_many_slots_and_by_none():
    """One program serves every multiplicity: disjoint shards, chains, all slots on one row."""
    run = on_ranks(both, mesh_of(W))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        plan = random_plan(rng, W, S, T, C)
        free = T - plan["seq_len"] + 1
        plan["src_offset"] = (0 * free if seed == 0 else rng.integers(0, free)).astype(np.uint32)
        x, y = random_rows(rng)
        assert_as_defined(run(x, y, operands(plan)), plan, x, y)


def test_metadata_may_have_64_bits():
    rng = np.random.default_rng(5)
    plan = random_plan(rng, W, S, T, C)
    x, y = random_rows(rng)
    with jax.enable_x64(True):
        m = jax.tree.map(lambda field: field.astype(np.int64), operands(plan))
        m = m._replace(num_recv_tokens=m.num_recv_tokens.astype(np.uint64))
        run = on_ranks(both, mesh_of(W))
        assert_as_defined(run(x, y, m), plan, x, y)
        one = plan["dst_rank"][:, :, 0] >= 0
        invalid = {
            "counts that would fit in 32 bits": dict(num_recv_tokens=m.num_recv_tokens + 2**32),
            "offsets that would fit in 32 bits": dict(dst_offset=m.dst_offset + 2**32),
            "lengths that would fit in 32 bits": dict(seq_len=m.seq_len + 2**32),
            "offsets below zero": dict(dst_offset=m.dst_offset - CAPACITY),
            "lengths below zero": dict(seq_len=np.where(one, m.seq_len, -1)),
        }
        for what, fields in invalid.items():
            assert all(np.isnan(out).all() for out in run(x, y, m._replace(**fields))), what


@pytest.mark.parametrize("num_turns", [2, 5])
def test_a_combine_of_many_bytes_gathers_in_turns(num_turns, monkeypatch):
    """Of 192 rows per rank, which the turns divide, and do not."""
    limit = -(-W * CAPACITY * 3 * 4 // num_turns)
    monkeypatch.setattr(xla_collectives, "MAX_GATHERED_BYTES", limit)
    gather, gathered = XlaRanks.gather, []
    note = lambda self, x: gathered.append(x.size * W * 4) or gather(self, x)
    monkeypatch.setattr(XlaRanks, "gather", note)
    move_all_back = on_ranks(lambda y, m: move_back([y], m)[0], mesh_of(W))
    for seed in range(4):
        rng = np.random.default_rng(seed)
        plan = random_plan(rng, W, S, T, C)
        plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
        y = random_rows(rng)[1]
        got = move_all_back(y, operands(plan))
        np.testing.assert_array_equal(got, combined(plan, y, T, np.float32))
    assert limit / 2 < max(gathered) <= limit


@pytest.mark.parametrize("has_src_offset", [False, True])
def test_one_device_may_hold_all_ranks(has_src_offset):
    rng = np.random.default_rng(6)
    plan = random_plan(rng, W, S, T, C)
    if has_src_offset:
        plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
    x, y = random_rows(rng)
    run = jax.jit(functools.partial(both, axis_names=()))
    got = run(x.reshape(W * T, 3), y.reshape(W * CAPACITY, 3), operands(plan))
    assert_as_defined([out.reshape(W, -1, 3) for out in got], plan, x, y)


# ---- Plans that the native handlers reject.


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


# ---- Empty plans, and use as a lowering rule.


@pytest.mark.parametrize("num_slots, num_tokens, capacity", [(0, 0, 4), (S, T, 0)])
def test_plans_buffers_and_arrays_may_be_empty(num_slots, num_tokens, capacity):
    m = MetadataOperands(
        num_recv_tokens=np.zeros((W, W + 1), np.uint32),
        seq_len=np.zeros((W, num_slots), np.uint32),
        dst_rank=np.full((W, num_slots, C), -1, np.int32),
        dst_offset=np.zeros((W, num_slots, C), np.uint32),
    )
    x = [np.ones((W, num_tokens, features), np.float32) for features in (2, 0)]
    y = [np.ones((W, capacity, features), np.float32) for features in (2, 0)]
    run = on_ranks(
        lambda x, y, m: (move(x, m, capacity=capacity), move_back(y, m, num_tokens=num_tokens)),
        mesh_of(W),
    )
    sent, home = run(x, y, m)
    for outs, num_rows in ((sent, capacity), (home, num_tokens)):
        for out, features in zip(outs, (2, 0), strict=True):
            np.testing.assert_array_equal(out, np.zeros((W, num_rows, features)))


both_p = Primitive("both")
both_p.multiple_results = True
both_p.def_abstract_eval(
    lambda x, y, *_: [
        x.update(shape=(CAPACITY, *x.shape[1:])),
        y.update(shape=(T, *y.shape[1:])),
    ]
)
mlir.register_lowering(
    both_p,
    mlir.lower_fun(lambda x, y, *m: both(x, y, MetadataOperands(*m)), multiple_results=True),
)


@pytest.mark.parametrize("check_vma", [True, False])
def test_use_as_the_lowering_rule_of_a_primitive(check_vma):
    """Includes the loop over rows named several times; its carry must vary like its operands."""
    rng = np.random.default_rng(9)
    plan = random_plan(rng, W, S, T, C)
    plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
    x, y = random_rows(rng)
    run = on_ranks(lambda x, y, m: both_p.bind(x, y, *m), mesh_of(W), check_vma=check_vma)
    assert_as_defined(run(x, y, operands(plan)), plan, x, y)
