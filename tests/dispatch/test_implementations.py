"""All implementations of movement give the same bits and gradients, and reject the same plans."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import Metadata, available_implementations, combine, dispatch
from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS, Operation
from jax_cp_dispatch._text import say_once

W, S, T = 4, 5, 8
MESH_ORDER = [2, 0, 3, 1]

SUMMABLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SUMMABLE += ["bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
FLOAT8 = ["e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
FLOAT8 = [f"float8_{kind}" for kind in FLOAT8]


@pytest.fixture(params=["in_process", "xla"])
def implementation(request):
    return request.param


def plan_of(kind, seed=0) -> dict[str, Any]:
    plan = random_plan(np.random.default_rng(seed), W, S, T, 3 if kind != "one replica" else 1)
    if kind == "rows named twice":
        last = T - plan["seq_len"].astype(np.int64)
        plan["src_offset"] = np.random.default_rng(1).integers(0, last + 1).astype(np.uint32)
    return plan


def capacity_of(plan):
    return int(plan["num_total_recv_tokens"].max()) + 2


def bits(x):
    """Compares bytes, so NaN and -0.0 count."""
    return np.ascontiguousarray(x).view(np.uint8)


def random_bits(rng, dtype, *shape):
    """Returns elements of any value, including every kind of NaN."""
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)


def small_integers(rng, dtype, *shape):
    """Returns values whose sums are exact in every type."""
    return rng.integers(0, 4, shape).astype(jnp.dtype(dtype))


@pytest.fixture
def wide_types():
    with jax.enable_x64(True):
        yield


def test_every_dtype_moves_bit_for_bit(implementation, wide_types):
    """In one call: rows of 1, 3, 7 and 17 bytes, empty rows, and rows of several dimensions."""
    rng = np.random.default_rng(0)
    plan = plan_of("three replicas")
    capacity = capacity_of(plan)
    x = {name: random_bits(rng, name, W, T, 3) for name in ["bool", *SUMMABLE, *FLOAT8]}
    x |= {f"{n} bytes": random_bits(rng, "uint8", W, T, n) for n in (1, 7, 17)}
    x |= {"no features": np.zeros((W, T, 0, 4), np.float32)}
    x |= {"dimensions": random_bits(rng, "float32", W, T, 2, 3), "none": x["int32"][..., 0]}

    def local(x, m):
        return dispatch(x, m, axis_name=AXIS, capacity=capacity, implementation=implementation)

    got = on_ranks(local, mesh_of(W, MESH_ORDER))(x, Metadata(**plan))
    for name, rows in x.items():
        assert got[name].dtype == rows.dtype, name
        expected = dispatched(plan, rows, capacity)
        np.testing.assert_array_equal(bits(got[name]), bits(expected), err_msg=name)


def test_every_summable_dtype_returns(implementation, wide_types):
    rng = np.random.default_rng(1)
    plan = plan_of("three replicas")
    y = {n: small_integers(rng, n, W, capacity_of(plan), 3) for n in [*SUMMABLE, "float8_e4m3fn"]}

    def local(y, m):
        return combine(y, m, axis_name=AXIS, num_tokens=T, implementation=implementation)

    got = on_ranks(local, mesh_of(W, MESH_ORDER))(y, Metadata(**plan))
    for name, rows in y.items():
        assert got[name].dtype == rows.dtype, name
        wide = np.complex128 if "complex" in name else np.float64
        expected = combined(plan, rows, T, wide).astype(rows.dtype)
        np.testing.assert_array_equal(bits(got[name]), bits(expected), err_msg=name)


def test_on_arrays_of_all_ranks(implementation):
    """Under plain jit, features stay on their devices; <dispatch(x), y> = <x, combine(y)>."""
    rng = np.random.default_rng(3)
    plan = plan_of("rows named twice")
    capacity = capacity_of(plan)
    split = NamedSharding(permuted_mesh((2, W), ("tp", AXIS)), P(AXIS, "tp"))
    x, y = (rng.integers(-8, 9, (W * rows, 6)).astype(np.float32) for rows in (T, capacity))

    def run(x, y, m):
        options: Any = {"axis_name": AXIS, "implementation": implementation}
        send = lambda x: dispatch(x, m, capacity=capacity, **options)
        sent, pull = jax.vjp(send, x)
        return sent, combine(y, m, num_tokens=T, **options), pull(2 * y)[0]

    sent, home, pulled = jax.jit(run)(*jax.device_put((x, y), split), Metadata(**plan))
    by_rank = lambda a: np.asarray(a).reshape(W, -1, 6)
    np.testing.assert_array_equal(by_rank(sent), dispatched(plan, by_rank(x), capacity))
    np.testing.assert_array_equal(by_rank(home), combined(plan, by_rank(y), T))
    np.testing.assert_array_equal(by_rank(pulled), combined(plan, 2 * by_rank(y), T))
    assert np.vdot(sent, y) == np.vdot(x, home)
    assert sent.sharding.is_equivalent_to(split, 2)


# ---- Invalid plans: an error from native handlers, NaN (or zero) from XLA's collectives.


def moving_shards(plan):
    """Returns the indices (rank, slot, replica) of the shards that move rows."""
    return np.argwhere((plan["dst_rank"] >= 0) & (plan["seq_len"] > 0)[..., None])


def first_to(rank):
    def spoil(plan):
        plan["dst_rank"][tuple(moving_shards(plan)[0])] = rank

    return spoil


def too_many_rows(plan):
    plan["seq_len"][2, S - 1] += 2 * T
    plan["dst_rank"][2, S - 1] = 0


def rows_past_32_bits(plan):
    plan["seq_len"][2] = 2**31
    plan["dst_rank"][2] = -1
    plan["dst_rank"][2, S - 1, 0] = 0


def an_offset_too_large(plan):
    plan["dst_offset"][plan["dst_rank"] == 3] = 2**31


def overlapping_rows(plan):
    first, last = map(tuple, moving_shards(plan)[[0, -1]])
    for field in "dst_offset", "dst_rank":
        plan[field][last] = plan[field][first]


def a_slot_cut_off(plan):
    plan["dst_rank"][tuple(moving_shards(plan)[0])] = -1


def counts_that_are_not_what_is_sent(plan):
    plan["num_recv_tokens"][0, [1, W]] += 1


def a_total_beyond_capacity(plan):
    plan["num_recv_tokens"][3, W] = 2**20


def a_source_beyond_the_rows(plan):
    rank, slot, _ = moving_shards(plan)[0]
    plan["src_offset"][rank, slot] = T


INVALID = {
    first_to(W): r"has dst_rank 4; it must be in \[-1, 4\)",
    first_to(-2): r"has dst_rank -2; it must be in \[-1, 4\)",
    too_many_rows: r"rank 2 slot 4 names \d+ rows from row \d+ but the rank",
    rows_past_32_bits: r"rank 2 slot 4 names 2147483648 rows",
    an_offset_too_large: r"rank 3 would receive 21474836\d\d tokens",
    overlapping_rows: "",  # whichever error is found first
    a_slot_cut_off: r"num_recv_tokens.*a static bound \(max_recv_seqs",
    counts_that_are_not_what_is_sent: r"rank 0 expects \d+ tokens from rank 1 \(num_recv_tokens",
    a_total_beyond_capacity: "rank 3 would receive 1048576 tokens but capacity .* Pass capacity>",
    a_source_beyond_the_rows: r"rank \d slot \d names \d+ rows from row 8",
}
WIDTHS = ["bfloat16", "complex64", "float8_e4m3b11fnuz", "float8_e8m0fnu", "bool"]


def test_invalid_plans_are_rejected_on_all_ranks(implementation):
    good = plan_of("rows named twice")
    capacity = capacity_of(good)
    x = np.random.default_rng(4).normal(size=(W, T, 3)).astype(np.float32)
    y = dispatched(good, x, capacity)
    others = [np.abs(x).astype(jnp.dtype(name)) for name in ["int32", *WIDTHS]]

    def local(x, others, y, m):
        options: Any = {"axis_name": AXIS, "implementation": implementation}
        sent = dispatch((x, others), m, capacity=capacity, **options)
        return sent, combine(y, m, num_tokens=T, **options)

    run = on_ranks(local, mesh_of(W, MESH_ORDER))
    for spoil, message in INVALID.items():
        bad: dict[str, Any] = {name: np.array(value) for name, value in good.items()}
        bad["world_size"] = W
        spoil(bad)
        if implementation == "in_process":
            with pytest.raises(jax.errors.JaxRuntimeError, match=message or "rank"):
                jax.block_until_ready(run(x, others, y, Metadata(**bad)))
            continue
        for result in map(np.asarray, jax.tree.leaves(run(x, others, y, Metadata(**bad)))):
            if jnp.issubdtype(result.dtype, jnp.inexact):
                assert np.isnan(np.real(result).astype(np.float32)).all(), (message, result.dtype)
            else:
                assert not result.any(), (message, result.dtype)
    (sent, _), home = run(x, others, y, Metadata(**good))
    np.testing.assert_array_equal(sent, y)
    np.testing.assert_array_equal(home, combined(good, y, T, np.float32))


def test_slots_that_move_nothing_are_not_checked(implementation):
    plan = plan_of("one replica")
    plan["dst_rank"][[1, 2], S - 1] = -1
    plan["num_recv_tokens"][:] = 0
    for rank, slot, _ in moving_shards(plan):
        to = plan["dst_rank"][rank, slot, 0]
        plan["num_recv_tokens"][to, [rank, W]] += plan["seq_len"][rank, slot]
    capacity = 4 * W * T
    x = np.random.default_rng(5).normal(size=(W, T, 3)).astype(np.float32)

    def local(x, m):
        return dispatch(x, m, axis_name=AXIS, capacity=capacity, implementation=implementation)

    run = on_ranks(local, mesh_of(W))
    expected = run(x, Metadata(**plan))
    assert not np.isnan(expected).any()
    plan["seq_len"][1, S - 1] = 2**32 - 1  # the last of its rank, not sent
    plan["seq_len"][2, S - 1], plan["dst_rank"][2, S - 1] = 0, 99
    plan["dst_offset"][[1, 2], S - 1] = 2**32 - 1
    np.testing.assert_array_equal(run(x, Metadata(**plan)), expected)


def test_metadata_may_have_64_bits(implementation, wide_types):
    plan = plan_of("three replicas")
    capacity = capacity_of(plan)
    x = np.random.default_rng(6).normal(size=(W, T, 3)).astype(np.float32)

    def local(x, m):
        return dispatch(x, m, axis_name=AXIS, capacity=capacity, implementation=implementation)

    run = on_ranks(local, mesh_of(W))
    fields = ("num_recv_tokens", "seq_len", "dst_rank", "dst_offset")
    wide = {**plan, **{name: plan[name].astype(np.int64) for name in fields}}
    np.testing.assert_array_equal(run(x, Metadata(**wide)), dispatched(plan, x, capacity))
    for name, step in ("num_recv_tokens", 2**32), ("seq_len", 2**32), ("dst_offset", -capacity):
        bad = Metadata(**{**wide, name: wide[name] + step})
        if implementation == "in_process":
            with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
                jax.block_until_ready(run(x, bad))
        else:
            assert np.isnan(run(x, bad)).all(), name


def test_ranks_without_rows(implementation):
    """T = 0 moves nothing, but a plan that still names rows is rejected."""
    plan: dict[str, Any] = {n: np.zeros_like(v) for n, v in plan_of("one replica").items()}
    plan["world_size"] = W
    x = np.zeros((W, 0, 3), np.float32)

    def local(x, m):
        return dispatch(x, m, axis_name=AXIS, capacity=6, implementation=implementation)

    run = on_ranks(local, mesh_of(W))
    np.testing.assert_array_equal(run(x, Metadata(**plan)), np.zeros((W, 6, 3)))
    plan["seq_len"][2, 0] = 2
    plan["num_recv_tokens"][0, [2, W]] = 2
    if implementation == "in_process":
        with pytest.raises(jax.errors.JaxRuntimeError, match="rank 2 slot 0 names 2 rows from row"):
            jax.block_until_ready(run(x, Metadata(**plan)))
    else:
        assert np.isnan(run(x, Metadata(**plan))).all()


# ---- The choice.


def test_available_implementations_have_names_and_reasons():
    found = available_implementations()
    gpus = ["cuda_peer", "nvshmem", "cuda_ipc"]
    assert list(found) == ["in_process", "shared_memory", *gpus, "xla"]
    assert [name for name, one in found.items() if one.available] == ["in_process", "xla"]
    assert found["nvshmem"].reason == "the platform is 'cpu', but it serves NVIDIA GPUs"
    assert found["shared_memory"].reason == "there is one process"
    assert found["in_process"].reason == "all devices are CPU devices of this process"
    assert "a plan that does not fit gives NaN, not an error" in found["xla"].reason


@pytest.mark.parametrize("name", available_implementations())
def test_every_implementation_lowers_every_operation(name):
    """Exchanges of arrays on one device have a rule where no other implementation is taken."""
    row = IMPLEMENTATIONS[name]
    operations = {Operation.EXCHANGE, Operation.GEMM, Operation.GROUPED_GEMM}
    if row.platform != "cpu":
        operations.add(Operation.EXCHANGE_ON_ONE_DEVICE)
    if row.platform == "cuda":  # elsewhere, the first of two calls is the whole exchange
        operations |= {Operation.EXCHANGE_START, Operation.EXCHANGE_DONE}
    assert row.lowerings.keys() == operations
    assert row.name == name and (row.why_not(["rocm"], None) is None) == (name == "xla")


@pytest.mark.parametrize("place", ["shard_map", "all ranks", "explicit axes"])
def test_lowering_for_a_platform_without_a_transport(place):
    """XLA's collectives serve it, even without such a device; by default, one warning says so."""
    plan = plan_of("three replicas")
    kind = jax.sharding.AxisType.Explicit if place == "explicit axes" else None
    mesh = permuted_mesh((W,), (AXIS,), kind or jax.sharding.AxisType.Auto)
    shape = jax.ShapeDtypeStruct((W * T, 3), np.float32, sharding=NamedSharding(mesh, P(AXIS)))

    def lower(implementation):
        def move(x):
            options: Any = {"axis_name": AXIS, "implementation": implementation}
            y = dispatch(x, Metadata(**plan), capacity=capacity_of(plan), **options)
            return combine(y, Metadata(**plan), num_tokens=T, **options)

        if place == "shard_map":
            move = jax.shard_map(move, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        lowered = jax.jit(move).trace(shape).lower(lowering_platforms=("rocm",))
        assert "jax_cp_dispatch." not in lowered.as_text()

    say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower("xla")
    if place == "all ranks":  # the partitioner chooses during compilation
        return
    with pytest.warns(UserWarning, match="moves rows with XLA's collectives.*is 'rocm'") as said:
        lower(None)
        lower(None)
    assert len(said) == 1, "one warning for dispatch, combine and all later calls"


# ---- Last, with all optimizations: they must not change the bits.


@pytest.mark.usefixtures("full_optimization")
@pytest.mark.parametrize("kind", ["three replicas", "rows named twice"])
def test_values_and_gradients_are_the_same_bits(kind):
    """Sums round once, in one order, so all implementations round alike."""
    rng = np.random.default_rng(2)
    plan = plan_of(kind)
    capacity = capacity_of(plan)
    draw = lambda rows, dtype: rng.normal(size=(W, rows, 5)).astype(dtype)
    x = {"wide": draw(T, np.float32), "narrow": draw(T, jnp.bfloat16)}
    y = {"wide": draw(capacity, np.float32), "narrow": draw(capacity, jnp.bfloat16)}
    results = {}
    for name in "in_process", "xla":

        def local(x, y, m, name=name):
            options: Any = {"axis_name": AXIS, "implementation": name}
            send = lambda x: dispatch(x, m, capacity=capacity, **options)
            combine_rows = lambda y: combine(y, m, num_tokens=T, **options)
            (sent, pull), (home, push) = jax.vjp(send, x), jax.vjp(combine_rows, y)
            twice = lambda tree: jax.tree.map(lambda a: 2 * a, tree)
            return sent, home, pull(twice(y))[0], push(twice(x))[0]

        results[name] = on_ranks(local, mesh_of(W, MESH_ORDER))(x, y, Metadata(**plan))
    for one, other in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))
    sent, home, pulled, pushed = results["xla"]
    for name in x:
        rounded = lambda a: a.astype(y[name].dtype)  # noqa: B023
        total = combined(plan, y[name], T, np.float32)
        np.testing.assert_array_equal(bits(sent[name]), bits(dispatched(plan, x[name], capacity)))
        np.testing.assert_array_equal(bits(home[name]), bits(rounded(total)))
        np.testing.assert_array_equal(bits(pulled[name]), bits(rounded(2 * total)))
        expected = dispatched(plan, rounded(2 * x[name]), capacity)
        np.testing.assert_array_equal(bits(pushed[name]), bits(expected))


@pytest.mark.usefixtures("full_optimization")
def test_a_row_with_one_source_keeps_its_bits_by_xla():
    """Every NaN and -0.0, whether rows are named in order or by `src_offset`."""
    rng, plan = np.random.default_rng(3), plan_of("one replica")
    y = [random_bits(rng, n, W, capacity_of(plan), 2) for n in ("float32", "bfloat16", FLOAT8[3])]

    def local(y, m):
        return combine(y, m, axis_name=AXIS, num_tokens=T, implementation="xla")

    run = on_ranks(local, mesh_of(W))
    starts = np.cumsum(plan["seq_len"], 1, dtype=np.uint32) - plan["seq_len"]
    for fields in (plan, {**plan, "src_offset": starts}):
        for total, rows in zip(run(y, Metadata(**fields)), y, strict=True):
            raw = rows.view(f"u{rows.itemsize}")
            np.testing.assert_array_equal(bits(total), bits(combined(plan, raw, T, raw.dtype)))


def test_global_arrays_of_64_bits(implementation, wide_types):
    """XLA's partitioner asks for each device's part outside of the context `jax.enable_x64`."""
    given = plan_of("one replica")
    wide: Any = lambda x: np.asarray(x, np.int64) if np.ndim(x) else x
    plan = Metadata(**{name: wide(x) for name, x in given.items()})
    x = np.random.default_rng(0).normal(size=(W * T, 3))
    options = {"axis_name": AXIS, "mesh": mesh_of(W), "implementation": implementation}
    rows = jax.jit(lambda x, m: dispatch(x, m, capacity=capacity_of(given), **options))(x, plan)
    home = jax.jit(lambda y, m: combine(y, m, num_tokens=T, **options))(rows, plan)
    assert rows.dtype == home.dtype == np.float64
    is_sent = np.asarray(home) != 0
    assert is_sent.any() and np.isin(rows, [0, *x[is_sent]]).all()
    np.testing.assert_array_equal(home, np.where(is_sent, x, 0))
