"""dispatch and combine move exactly the named rows of any plan, in all dtypes, and round sums once.

Values, gradients and contexts that all operations have: tests/contract. Meshes and storage:
test_dispatch_places.py.
"""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import metadata_oracle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from moving import bits, capacity_of
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh
from properties import examples

from jax_cp_dispatch import Metadata, combine, combine_qkv, dispatch, dispatch_qkv

W, S, T = 4, 5, 8
ORDER = [2, 0, 3, 1]

SUMMABLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SUMMABLE += ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
FLOAT8 = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
FLOAT8 = [f"float8_{kind}" for kind in FLOAT8]

both_implementations = pytest.mark.parametrize("implementation", ["in_process", "xla"])


def with_sources(rng, plan, num_tokens) -> dict[str, Any]:
    """Names rows that are skipped, and rows in several slots."""
    free = num_tokens - plan["seq_len"].astype(np.int64)
    return {**plan, "src_offset": rng.integers(0, free + 1).astype(np.uint32)}


def plan_of(kind, seed=0) -> dict[str, Any]:
    plan = random_plan(np.random.default_rng(seed), W, S, T, 3 if kind != "one replica" else 1)
    return with_sources(np.random.default_rng(1), plan, T) if kind == "rows named twice" else plan


def planned(seq_len, to) -> list[dict[str, Any]]:
    """Returns the forward and the reverse plan."""
    return [{**plan, "world_size": len(seq_len)} for plan in metadata_oracle.plan(seq_len, to)]


def options_of(implementation) -> dict[str, Any]:
    return {"axis_name": AXIS, "implementation": implementation}


def moving_both(implementation, capacity, num_tokens, mesh):
    """dispatch and combine of one plan, each of any arrays."""

    def both(x, y, m):
        options = options_of(implementation)
        sent = dispatch(x, m, capacity=capacity, **options)
        return sent, combine(y, m, num_tokens=num_tokens, **options)

    return on_ranks(both, mesh)


# ---- Plans.

MANY = 8
_programs = {}


@examples(15)
@given(
    seed=st.integers(0, 2**32 - 1),
    case=st.sampled_from([(1, "in_process"), (2, "in_process"), (2, "xla")]),
    kind=st.sampled_from(["random", "all to one", "one rank is empty", "all from row 0"]),
)
def test_any_plan_matches_the_definition(seed, case, kind):
    """One program serves every multiplicity: disjoint shards, chains, all slots on one row."""
    num_replicas, implementation = case
    rng, num_tokens = np.random.default_rng(seed), 30
    if kind in ("all to one", "one rank is empty"):
        seq_len = rng.integers(0, 6, (MANY, 6)).astype(np.int32)
        to = rng.integers(-1, MANY, (MANY, 6, num_replicas)).astype(np.int32)
        if kind == "all to one":
            to[:] = 2
        else:
            to[to == 5], seq_len[5] = 4, 0
        plan = planned(seq_len, to)[0]
    else:
        plan = random_plan(rng, MANY, 6, num_tokens, num_replicas)
    if num_replicas == 2:
        plan = with_sources(rng, plan, num_tokens)
        plan["src_offset"] *= kind != "all from row 0"
    capacity = MANY * num_tokens * num_replicas
    run = _programs.setdefault(
        case, moving_both(implementation, capacity, num_tokens, mesh_of(MANY))
    )
    x = rng.normal(size=(MANY, num_tokens, 2)).astype(np.float32)
    y = rng.normal(size=(MANY, capacity, 2)).astype(np.float32)
    sent, home = run(x, y, Metadata(**plan))
    np.testing.assert_array_equal(sent, dispatched(plan, x, capacity))
    np.testing.assert_array_equal(home, combined(plan, y, num_tokens, np.float32))


def test_summaries_are_not_read_and_gaps_are_zero():
    """Movement accepts every plan that `Metadata.validate` accepts, and more."""
    rng = np.random.default_rng(0)
    plan = random_plan(rng, W, S, T, 2)
    capacity = capacity_of(plan) + 2
    run = moving_both("in_process", capacity, T, mesh_of(W))
    x = rng.normal(size=(W, T, 2)).astype(np.float32)
    y = rng.normal(size=(W, capacity, 2)).astype(np.float32)
    Metadata(**plan).validate()
    counts = plan["num_recv_tokens"].copy()
    counts[:, -1] = 0  # only a sum above the capacity is rejected
    for wrong in (
        {"num_recv_tokens": counts},
        {"num_total_recv_tokens": plan["num_total_recv_tokens"] + 1},
        {"num_seqs": np.full(W, 99, np.int32)},
        {"recv_seq_lens": np.full((W, 2), 5, np.uint32)},
        {"dst_offset": plan["dst_offset"] + 2},  # gaps
    ):
        other = Metadata(**{**plan, **wrong})
        expected = {**plan, "dst_offset": np.asarray(other.dst_offset)}
        sent, home = run(x, y, other)
        np.testing.assert_array_equal(sent, dispatched(expected, x, capacity))
        np.testing.assert_array_equal(home, combined(expected, y, T, np.float32))
        with pytest.raises(ValueError, match=r"^Metadata\.validate: "):
            other.validate()
    omitted = {**plan, "num_seqs": None, "num_total_recv_tokens": None}
    Metadata(**omitted).validate()
    np.testing.assert_array_equal(run(x, y, Metadata(**omitted))[0], dispatched(plan, x, capacity))


def test_forward_then_reverse_returns_every_replica():
    """The reverse plan fills a buffer (C, T) of copies; `combine` is the sum over its C."""
    rng, num_replicas = np.random.default_rng(3), 3
    seq_len = rng.integers(0, 6, (W, S)).astype(np.int32)
    to = rng.integers(-1, W, (W, S, num_replicas)).astype(np.int32)
    forward, reverse = planned(seq_len, to)
    num_tokens, capacity = int(seq_len.sum(1).max()), capacity_of(forward)
    x = rng.integers(-8, 9, (W, num_tokens, 4)).astype(np.float32)

    def there_and_back(x, forward, reverse):
        y = dispatch(x, forward, axis_name=AXIS, capacity=capacity)
        copies = dispatch(y, reverse, axis_name=AXIS, capacity=num_replicas * num_tokens)
        return copies, combine(y, forward, axis_name=AXIS, num_tokens=num_tokens)

    copies, total = on_ranks(there_and_back, mesh_of(W))(
        x, Metadata(**forward), Metadata(**reverse)
    )
    for rank in range(W):
        n = seq_len[rank].sum()
        of_rank = np.asarray(copies[rank])[: num_replicas * n].reshape(num_replicas, n, 4)
        is_sent = np.repeat(to[rank] >= 0, seq_len[rank], axis=0).T[..., None]
        np.testing.assert_array_equal(of_rank, np.where(is_sent, x[rank, :n], 0))
        np.testing.assert_array_equal(total[rank, :n], of_rank.sum(0))


def test_metadata_may_be_global_or_this_ranks_slice():
    rng = np.random.default_rng(8)
    plan = random_plan(rng, W, S, T, 2)
    capacity = capacity_of(plan)
    x = rng.normal(size=(W, T, 3)).astype(np.float32)

    def local(x, m):
        views = m, m.get_slice(jax.lax.axis_index(AXIS))
        return [dispatch(x[0], view, axis_name=AXIS, capacity=capacity)[None] for view in views]

    specs = {"in_specs": (P(AXIS), P()), "out_specs": P(AXIS)}
    for got in jax.jit(jax.shard_map(local, mesh=mesh_of(W), **specs))(x, Metadata(**plan)):
        np.testing.assert_array_equal(got, dispatched(plan, x, capacity))


def test_a_plan_without_slots():
    empty: Any = {
        name: np.zeros((W, 0), np.int32) for name in ("dst_rank", "dst_offset", "seq_len")
    }
    plan = Metadata(**empty, num_recv_tokens=np.zeros((W, W + 1), np.int32), world_size=W)
    run = moving_both("in_process", 3, 2, mesh_of(W))
    for out in run(np.ones((W, 2, 3)), np.ones((W, 3, 3)), plan):
        assert out.size and not np.any(out)


# ---- Dtypes, and plans that do not fit.


def random_bits(rng, dtype, *shape):
    """Returns elements of any value, including every kind of NaN."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


@both_implementations
def test_every_dtype_moves_bit_for_bit_and_is_summed(implementation):
    """In one program, by metadata of 64 bits, of which none may become another number.

    Rows of 1, 3, 7 and 17 bytes, empty rows, and rows of several dimensions.
    """
    rng, plan = np.random.default_rng(0), plan_of("three replicas")
    capacity = capacity_of(plan) + 2
    x = {name: random_bits(rng, name, W, T, 3) for name in ["bool", *SUMMABLE, *FLOAT8]}
    x |= {f"{n} bytes": random_bits(rng, "uint8", W, T, n) for n in (1, 7, 17)}
    x |= {"no features": np.zeros((W, T, 0, 4), np.float32)}
    x |= {"dimensions": random_bits(rng, "float32", W, T, 2, 3), "none": x["int32"][..., 0]}
    small = lambda name: rng.integers(0, 4, (W, capacity, 3)).astype(jnp.dtype(name))
    y = {name: small(name) for name in [*SUMMABLE, "float8_e4m3fn"]}  # sums are exact
    fields = ("num_recv_tokens", "seq_len", "dst_rank", "dst_offset")
    wide = {**plan, **{name: plan[name].astype(np.int64) for name in fields}}
    with jax.enable_x64(True):
        run = moving_both(implementation, capacity, T, mesh_of(W, ORDER))
        sent, home = run(x, y, Metadata(**wide))
        for name, step in ("num_recv_tokens", 2**32), ("seq_len", 2**32), ("dst_offset", -capacity):
            bad = Metadata(**{**wide, name: wide[name] + step})
            if implementation == "in_process":
                with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
                    jax.block_until_ready(run(x, y, bad))
            else:
                assert all(np.isnan(out["float32"]).all() for out in run(x, y, bad)), name
    for name, rows in x.items():
        assert sent[name].dtype == rows.dtype, name
        expected = dispatched(plan, rows, capacity)
        np.testing.assert_array_equal(bits(sent[name]), bits(expected), err_msg=name)
    for name, rows in y.items():
        assert home[name].dtype == rows.dtype, name
        total = combined(plan, rows, T, np.complex128 if "complex" in name else np.float64)
        expected = total.astype(rows.dtype)
        np.testing.assert_array_equal(bits(home[name]), bits(expected), err_msg=name)


def test_gradients_of_dtypes_that_move_as_others():
    """Complex numbers are summed as pairs, 8-bit floats in float32, rounded once."""
    rng, plan = np.random.default_rng(9), plan_of("three replicas")
    capacity = capacity_of(plan)
    small = lambda: rng.integers(-8, 9, (W, capacity, 3)).astype(np.float32)
    y = {"complex64": small() + 1j * small(), "float8_e4m3fn": small().astype("float8_e4m3fn")}
    x = {name: np.zeros((W, T, 3), rows.dtype) for name, rows in y.items()}

    def local(x, y, m):
        send = lambda x: dispatch(x, m, axis_name=AXIS, capacity=capacity)
        return jax.vjp(send, x)[1](y)[0]

    pulled = on_ranks(local, mesh_of(W))(x, y, Metadata(**plan))
    for name, rows in y.items():
        wide = np.complex64 if name == "complex64" else np.float32
        expected = combined(plan, rows, T, wide).astype(rows.dtype)
        assert pulled[name].dtype == rows.dtype
        got = np.asarray(pulled[name]).astype(wide)
        np.testing.assert_array_equal(got, expected.astype(wide))


def moving_shards(plan):
    """Returns the indices (rank, slot, replica) of the shards that move rows."""
    return np.argwhere((plan["dst_rank"] >= 0) & (plan["seq_len"] > 0)[..., None])


TWICE = plan_of("rows named twice")
FIRST, LAST = map(tuple, moving_shards(TWICE)[[0, -1]])
COUNTS = TWICE["num_recv_tokens"]
# Changes of that plan, (field, index, value) each, and the error; "": whichever is found first.
INVALID = [
    ([("dst_rank", FIRST, W)], r"has dst_rank 4; it must be in \[-1, 4\)"),
    ([("dst_rank", FIRST, -2)], r"has dst_rank -2; it must be in \[-1, 4\)"),
    (
        [("seq_len", (2, S - 1), 3 * T), ("dst_rank", (2, S - 1), 0)],
        r"rank 2 slot 4 names \d+ rows from row \d+ but the rank",
    ),
    (
        [("seq_len", 2, 2**31), ("dst_rank", 2, -1), ("dst_rank", (2, S - 1, 0), 0)],
        r"rank 2 slot 4 names 2147483648 rows",
    ),
    ([("dst_offset", TWICE["dst_rank"] == 3, 2**31)], r"rank 3 would receive 21474836\d\d tokens"),
    ([(field, LAST, TWICE[field][FIRST]) for field in ("dst_offset", "dst_rank")], ""),
    ([("dst_rank", FIRST, -1)], r"num_recv_tokens.*a static bound \(max_recv_seqs"),
    (
        [("num_recv_tokens", (0, i), COUNTS[0, i] + 1) for i in (1, W)],
        r"rank 0 expects \d+ tokens from rank 1 \(num_recv_tokens",
    ),
    (
        [("num_recv_tokens", (3, W), 2**20)],
        "rank 3 would receive 1048576 tokens but capacity .* Pass capacity>",
    ),
    ([("src_offset", FIRST[:2], T)], r"rank \d slot \d names \d+ rows from row 8"),
]
WIDTHS = ["int32", "bfloat16", "complex64", "float8_e4m3b11fnuz", "float8_e8m0fnu", "bool"]


@both_implementations
def test_invalid_plans_are_rejected_on_all_ranks(implementation):
    """An error from native handlers, NaN (or zero) from XLA's collectives.

    What is wrong in a slot that moves nothing does not count.
    """
    capacity = capacity_of(TWICE) + 2
    x = np.random.default_rng(4).normal(size=(W, T, 3)).astype(np.float32)
    y = dispatched(TWICE, x, capacity)
    rows = {"x": x, **{name: np.abs(x).astype(jnp.dtype(name)) for name in WIDTHS}}
    run = moving_both(implementation, capacity, T, mesh_of(W, ORDER))
    copy_of = lambda plan: {**{name: np.array(x) for name, x in plan.items()}, "world_size": W}
    for changes, message in INVALID:
        bad: dict[str, Any] = copy_of(TWICE)
        for field, index, value in changes:
            bad[field][index] = value
        if implementation == "in_process":
            with pytest.raises(jax.errors.JaxRuntimeError, match=message or "rank"):
                jax.block_until_ready(run(rows, y, Metadata(**bad)))
            continue
        for result in map(np.asarray, jax.tree.leaves(run(rows, y, Metadata(**bad)))):
            if jnp.issubdtype(result.dtype, jnp.inexact):
                assert np.isnan(np.real(result).astype(np.float32)).all(), (message, result.dtype)
            else:
                assert not result.any(), (message, result.dtype)

    idle: dict[str, Any] = copy_of(TWICE)
    idle["dst_rank"][[1, 2], S - 1] = -1
    idle["num_recv_tokens"][:] = 0
    for rank, slot, replica in moving_shards(idle):
        to = idle["dst_rank"][rank, slot, replica]
        idle["num_recv_tokens"][to, [rank, W]] += idle["seq_len"][rank, slot]
    odd: dict[str, Any] = copy_of(idle)
    odd["seq_len"][1, S - 1] = 2**32 - 1
    odd["seq_len"][2, S - 1], odd["dst_rank"][2, S - 1] = 0, 99
    odd["dst_offset"][[1, 2], S - 1] = 2**32 - 1
    for plan, same in (odd, idle), (TWICE, TWICE):  # the next call is fine
        sent, home = run(rows, y, Metadata(**plan))
        np.testing.assert_array_equal(sent["x"], dispatched(same, x, capacity))
        np.testing.assert_array_equal(home, combined(same, y, T, np.float32))


@both_implementations
def test_ranks_without_rows_of_which_a_plan_names_some(implementation):
    plan: dict[str, Any] = {n: np.zeros_like(v) for n, v in plan_of("one replica").items()}
    plan["world_size"] = W
    plan["seq_len"][2, 0] = 2
    plan["num_recv_tokens"][0, [2, W]] = 2
    x = np.zeros((W, 0, 3), np.float32)
    move = lambda x, m: dispatch(x, m, capacity=6, **options_of(implementation))
    run = on_ranks(move, mesh_of(W))
    if implementation == "in_process":
        with pytest.raises(jax.errors.JaxRuntimeError, match="rank 2 slot 0 names 2 rows from row"):
            jax.block_until_ready(run(x, Metadata(**plan)))
    else:
        assert np.isnan(run(x, Metadata(**plan))).all()


def test_global_arrays_of_64_bits():
    """XLA's partitioner asks for each device's part outside of the context `jax.enable_x64`."""
    given = plan_of("one replica")
    wide: Any = lambda x: np.asarray(x, np.int64) if np.ndim(x) else x
    x = np.random.default_rng(0).normal(size=(W * T, 4))
    mesh = permuted_mesh((2, W), ("tp", AXIS))
    split = NamedSharding(mesh, P(AXIS, "tp"))

    @jax.jit
    def both(x, m):
        rows = dispatch(x, m, capacity=capacity_of(given), **options_of("in_process"))
        return rows, combine(rows, m, num_tokens=T, **options_of("xla"))

    with jax.enable_x64(True):
        plan = Metadata(**{name: wide(x) for name, x in given.items()})
        rows, home = both(jax.device_put(x, split), plan)
        assert rows.dtype == home.dtype == np.float64
        assert rows.sharding.is_equivalent_to(split, 2)
    sent = dispatched(given, x.reshape(W, T, 4), capacity_of(given))
    np.testing.assert_array_equal(rows, sent.reshape(rows.shape))
    np.testing.assert_array_equal(home, combined(given, sent, T).reshape(x.shape))


# ---- Queries and keys in one exchange.

TKV = 12
_RNG = np.random.default_rng(0)
PLANS = random_plan(_RNG, W, S, T), random_plan(_RNG, W, S + 2, TKV, 3)
Q_ROWS, KV_ROWS = (capacity_of(plan) + 1 for plan in PLANS)
SEND = {"axis_name": AXIS, "q_capacity": Q_ROWS, "kv_capacity": KV_ROWS}
COMBINE = {"axis_name": AXIS, "q_num_tokens": T, "kv_num_tokens": TKV}


def queries_and_keys(num_q, num_kv, seed, dtype: Any = np.float32):
    """Returns q and the pair (k, v) [W, rows, ...]: small integers, so sums are exact."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-8, 9, (W, *shape)).astype(dtype)
    return draw(num_q, 4), (draw(num_kv, 2, 3), draw(num_kv, 2))


def sent(q, kv):
    return dispatched(PLANS[0], q, Q_ROWS), tuple(dispatched(PLANS[1], x, KV_ROWS) for x in kv)


def returned(q, kv):
    home = lambda plan, y, num_tokens: combined(plan, y, num_tokens).astype(y.dtype)
    return home(PLANS[0], q, T), tuple(home(PLANS[1], y, TKV) for y in kv)


def same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_dispatch_qkv_and_combine_qkv_are_two_exchanges_of_different_plans():
    """An invalid plan is named, and also stops the other plan: both fail on every rank."""
    plans = [Metadata(**plan) for plan in PLANS]
    run = on_ranks(lambda q, kv, *m: dispatch_qkv(q, kv, *m, **SEND), mesh_of(W, ORDER))
    back = on_ranks(lambda q, kv, *m: combine_qkv(q, kv, *m, **COMBINE), mesh_of(W, ORDER))
    x = queries_and_keys(T, TKV, 1, jnp.bfloat16)
    y = queries_and_keys(Q_ROWS, KV_ROWS, 2, jnp.bfloat16)
    for move, rows, expected in (run, x, sent(*x)), (back, y, returned(*y)):
        lowered = move.lower(*rows, *plans)
        assert lowered.as_text().count("custom_call @jax_cp_dispatch") == 1
        op = "dispatch" if move is run else "combine"
        for bad in range(2):
            long = {**PLANS[bad], "seq_len": PLANS[bad]["seq_len"] + 100}
            mixed = [*plans[:bad], Metadata(**long), *plans[bad + 1 :]]
            with pytest.raises(
                jax.errors.JaxRuntimeError, match=rf"{op}_qkv.*, plan {bad} of 0\.\.1: rank"
            ):
                jax.block_until_ready(move(*rows, *mixed))
        same(move(*rows, *plans), expected)


def test_gradient_of_one_side_alone():
    """Only the keys are used; segment ids move with the keys and have no tangent."""
    q, (k, _) = queries_and_keys(T, TKV, 5)
    ids = np.arange(W * TKV, dtype=np.int32).reshape(W, TKV)

    def local(q, k, ids, mq, mkv):
        def loss(q, k):
            _, (k, tags) = dispatch_qkv(q, (k, ids), mq, mkv, **SEND)
            return jnp.sum(k * tags[:, None, None])

        return jax.grad(loss, argnums=(0, 1))(q, k)

    got = on_ranks(local, mesh_of(W))(q, k, ids, *(Metadata(**plan) for plan in PLANS))
    weights = dispatched(PLANS[1], ids, KV_ROWS)[..., None, None] * np.ones(k.shape[2:])
    same(got, (np.zeros_like(q), combined(PLANS[1], weights, TKV).astype(np.float32)))


@pytest.mark.parametrize(
    "implementation, empty", [("in_process", "no capacity"), ("xla", "no rows")]
)
def test_one_side_moves_nothing(implementation, empty):
    q, kv = queries_and_keys(T, TKV, 6)
    plan: dict[str, Any] = {name: np.zeros_like(value) for name, value in PLANS[1].items()}
    plan |= {"world_size": W, "dst_rank": plan["dst_rank"] - 1}
    num_kv, kv_rows = (TKV, 0) if empty == "no capacity" else (0, KV_ROWS)
    kv = tuple(x[:, :num_kv] for x in kv)

    def local(q, kv, mq, mkv):
        options = options_of(implementation)
        there = dispatch_qkv(q, kv, mq, mkv, q_capacity=Q_ROWS, kv_capacity=kv_rows, **options)
        home = combine_qkv(*there, mq, mkv, q_num_tokens=T, kv_num_tokens=num_kv, **options)
        return there, home

    there, home = on_ranks(local, mesh_of(W))(q, kv, Metadata(**PLANS[0]), Metadata(**plan))
    nothing = tuple(np.zeros((W, kv_rows, *x.shape[2:]), x.dtype) for x in kv)
    q_there = dispatched(PLANS[0], q, Q_ROWS)
    same(there, (q_there, nothing))
    q_home = combined(PLANS[0], q_there, T).astype(np.float32)
    same(home, (q_home, tuple(np.zeros_like(x) for x in kv)))


def test_every_derivative_is_a_movement():
    """Forward mode, the transpose, and the second derivative of a sum of squares."""
    rng, plan = np.random.default_rng(1), plan_of("three replicas")
    n, m, mesh = capacity_of(plan), Metadata(**plan), mesh_of(W)
    send = on_ranks(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=n), mesh)
    home = on_ranks(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T), mesh)
    draw = lambda rows: rng.integers(-8, 9, (2, W, rows, 3)).astype(np.float32)
    (x, dx), (y, dy) = draw(T), draw(n)
    there = dispatched(plan, dx, n)
    loss = lambda x: 0.5 * (send(x, m) ** 2).sum()
    for got, want in (
        (jax.jvp(lambda x: send(x, m), (x,), (dx,))[1], there),
        (jax.jvp(lambda y: home(y, m), (y,), (dy,))[1], combined(plan, dy, T)),
        (jax.linear_transpose(lambda x: send(x, m), x)(y)[0], combined(plan, y, T)),
        (jax.linear_transpose(lambda y: home(y, m), y)(x)[0], dispatched(plan, x, n)),
        (jax.jvp(jax.grad(loss), (x,), (dx,))[1], combined(plan, there, T)),
    ):
        np.testing.assert_array_equal(got, want)


# ---- Memory.

SMAPS = pathlib.Path("/proc/self/smaps")
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_large_results_use_huge_pages():
    """If the system grants them on request: with small pages, fresh memory costs several copies."""
    rows = 16 << 20
    m = Metadata(**planned(np.array([[rows]]), np.zeros((1, 1), np.int32))[0])
    move = on_ranks(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=rows), mesh_of(1))
    got = move(np.ones((1, rows), np.int8), m)
    assert np.asarray(got).all()
    if not HUGE_PAGES.exists():
        return  # this system has none; the result is still correct
    middle = got.addressable_shards[0].data.unsafe_buffer_pointer() + rows // 2
    for region in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.M)[1:]:
        first, end = (int(x, 16) for x in region.split(" ", 1)[0].split("-"))
        if first <= middle < end:
            assert " hg" in region.split("VmFlags:")[1]
            return
    pytest.fail("the result is nowhere in this process")


# ---- Roundings, with all optimizations: they must not change the bits.


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize("kind", ["three replicas", "rows named twice"])
def test_sums_round_once_in_one_order_by_all_implementations(kind):
    """Also those of gradients, and in a type that the caller prefers; integers wrap in their own.

    By XLA, gradients are the same operations, which the contract compares.
    """
    rng, plan = np.random.default_rng(2), plan_of(kind)
    capacity, floats = capacity_of(plan), ("float32", "bfloat16")
    preferred = {"float32": jnp.bfloat16, "bfloat16": jnp.float32}
    preferred |= {"uint8": jnp.int32, "int32": jnp.float32}
    draw = lambda rows, n: (100 * rng.normal(size=(W, rows, 5))).astype(n)
    x = {name: draw(T, name) for name in floats}
    y = {name: draw(capacity, name) for name in (*floats, "float16", "int32", "uint8")}

    def local(x, y, m):
        send = lambda x: dispatch(x, m, capacity=capacity, **options_of("in_process"))
        sums = lambda y, name="in_process", **to: combine(
            y, m, num_tokens=T, **options_of(name), **to
        )
        of_floats = {name: y[name] for name in floats}
        pulled = jax.vjp(send, x)[1](of_floats)[0]
        pushed = jax.vjp(sums, of_floats)[1](x)[0]
        totals = sums(y), sums(of_floats, "xla"), pulled
        return (
            totals,
            pushed,
            {n: sums(y[n], preferred_element_type=to) for n, to in preferred.items()},
        )

    totals, pushed, as_preferred = on_ranks(local, mesh_of(W, ORDER))(x, y, Metadata(**plan))
    for name, rows in y.items():
        is_float = jnp.issubdtype(rows.dtype, jnp.floating)
        total = combined(plan, rows, T, np.float32 if is_float else rows.dtype)
        for found in totals if name in floats else totals[:1]:
            np.testing.assert_array_equal(bits(found[name]), bits(total.astype(rows.dtype)))
    for name, dtype in preferred.items():
        expected = combined(plan, y[name], T, np.float32).astype(dtype)
        np.testing.assert_array_equal(bits(as_preferred[name]), bits(expected))
    for name, rows in x.items():
        there = dispatched(plan, rows, capacity)
        np.testing.assert_array_equal(bits(pushed[name]), bits(there))


@pytest.mark.usefixtures("full_optimization")
def test_a_row_with_one_source_keeps_its_bits_by_xla():
    """Every NaN and -0.0, whether rows are named in order or by `src_offset`."""
    rng, plan = np.random.default_rng(3), plan_of("one replica")
    y = [random_bits(rng, n, W, capacity_of(plan), 2) for n in ("float32", FLOAT8[3])]
    run = on_ranks(lambda y, m: combine(y, m, num_tokens=T, **options_of("xla")), mesh_of(W))
    starts = np.cumsum(plan["seq_len"], 1, dtype=np.uint32) - plan["seq_len"]
    for fields in (plan, {**plan, "src_offset": starts}):
        for total, rows in zip(run(y, Metadata(**fields)), y, strict=True):
            raw = rows.view(f"u{rows.itemsize}")
            np.testing.assert_array_equal(bits(total), bits(combined(plan, raw, T, raw.dtype)))


@pytest.mark.usefixtures("full_optimization")
def test_half_precision_rounds_as_numpy_does_over_the_whole_range():
    """One replica of every float16, and one float32 sum of two, against NumPy's conversion."""
    values = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = values[~np.isnan(values)]
    other = np.random.default_rng(0).permutation(values)
    num_tokens = len(values)
    plan = planned(np.array([[num_tokens]]), np.array([[[0, 0]]]))[0]
    y = np.concatenate([values, other])[None, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (values.astype(np.float32) + other.astype(np.float32)).astype(np.float16)
    sums = lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=num_tokens)
    got = np.asarray(on_ranks(sums, mesh_of(1))(y, Metadata(**plan)))[0, :, 0]
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(bits(got[finite]), bits(expected[finite]))
    assert np.isnan(got[~finite]).all()
