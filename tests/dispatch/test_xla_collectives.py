"""Movement by XLA's collectives alone, against the definition.

Plans that are rejected: test_xla_invalid_plans.py.
"""

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
from on_mesh import mesh_of, on_ranks
from xla_moving import CAPACITY, C, S, T, W, both, move, move_back, program, random_rows

from jax_cp_dispatch._dispatch import xla_collectives
from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dispatch.xla_plan import XlaRanks

pytestmark = pytest.mark.usefixtures("full_optimization")  # XLA sums

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


def assert_as_defined(got, plan, x, y):
    np.testing.assert_array_equal(got[0], dispatched(plan, x, CAPACITY))
    np.testing.assert_array_equal(got[1], combined(plan, y, T, np.float32))


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
