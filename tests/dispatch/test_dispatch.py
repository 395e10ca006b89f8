"""dispatch and combine move exactly the named rows: values, on every kind of plan and mesh."""

import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from moving import bits, capacity_of, run_combine, run_dispatch
from on_mesh import AXIS, mesh_of, on_ranks
from properties import examples

from jax_cp_dispatch import Metadata, combine, compute_metadata, dispatch
from jax_cp_dispatch.scenarios import create_qkv_dispatch, orchestrate_simulate

W, S, T = 8, 6, 32


@pytest.mark.parametrize("num_ranks, num_replicas", [(1, 3), (2, 1), (5, 3), (8, 1)])
def test_rows_arrive_bit_for_bit(num_ranks, num_replicas):
    rng = np.random.default_rng(num_ranks)
    plan = random_plan(rng, num_ranks, S, T, num_replicas)
    x = rng.normal(size=(num_ranks, T, 3, 5)).astype(np.float32)
    x[:, ::7] = np.nan
    x[:, 1::7] = -0.0
    capacity = capacity_of(plan) + 3
    got = run_dispatch(plan, x, capacity)
    np.testing.assert_array_equal(bits(got), bits(dispatched(plan, x, capacity)))


_run_with_static_shapes = {}


@examples(15)
@given(
    seed=st.integers(0, 2**32 - 1),
    case=st.sampled_from([(1, "in_process"), (2, "in_process"), (2, "xla")]),
)
def test_any_plan_matches_the_definition(seed, case):
    num_replicas, implementation = case
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, W, S, T, num_replicas)
    capacity = W * T * num_replicas

    def both(x, y, m):
        options: Any = {"axis_name": AXIS, "implementation": implementation}
        sent = dispatch(x, m, capacity=capacity, **options)
        return sent, combine(y, m, num_tokens=T, **options)

    run = _run_with_static_shapes.setdefault(case, on_ranks(both, mesh_of(W)))
    x = rng.normal(size=(W, T, 2)).astype(np.float32)
    y = rng.normal(size=(W, capacity, 2)).astype(np.float32)
    sent, home = run(x, y, Metadata(**plan))
    np.testing.assert_array_equal(sent, dispatched(plan, x, capacity))
    np.testing.assert_array_equal(home, combined(plan, y, T, np.float32))


def test_agrees_with_the_simulated_network():
    rng = np.random.default_rng(2)
    plan = random_plan(rng, W, S, T, 2)
    x = rng.normal(size=(W, T, 4)).astype(np.float32)
    capacity = capacity_of(plan)
    perfect = orchestrate_simulate(x, np.zeros((W, capacity, 4), np.float32), Metadata(**plan))
    np.testing.assert_array_equal(run_dispatch(plan, x, capacity), perfect)


def test_forward_then_reverse_returns_every_sent_row():
    rng = np.random.default_rng(3)
    seq_len = rng.integers(0, 6, (W, S)).astype(np.int32)
    destinations = rng.integers(-1, W, (W, S)).astype(np.int32)
    forward, reverse = compute_metadata(seq_len, destinations)
    num_tokens = int(seq_len.sum(1).max())
    capacity = int(np.max(forward.num_total_recv_tokens))
    x = rng.normal(size=(W, num_tokens, 4)).astype(np.float32)

    def there_and_back(x, forward, reverse):
        y = dispatch(x, forward, axis_name=AXIS, capacity=capacity)
        return dispatch(y, reverse, axis_name=AXIS, capacity=num_tokens)

    got = np.asarray(on_ranks(there_and_back, mesh_of(W))(x, forward, reverse))
    for r in range(W):
        sent = np.repeat(destinations[r] >= 0, seq_len[r])
        np.testing.assert_array_equal(got[r, : len(sent)][sent], x[r, : len(sent)][sent])
        assert not got[r, : len(sent)][~sent].any()


def test_combine_sums_the_returned_replicas_of_keys():
    """The reverse KV plan fills a buffer (C, T) of copies; `combine` is the sum over its C."""
    num_documents, degree, num_tokens = 3, 4, 48
    _, _, forward, reverse, _ = create_qkv_dispatch(
        jax.random.key(0), W, num_tokens, num_documents, degree
    )
    num_replicas = forward.dst_rank.shape[-1]
    capacity = int(np.max(forward.num_total_recv_tokens))
    x = np.random.default_rng(4).integers(-8, 9, (W, num_tokens, 4)).astype(np.float32)

    def there_and_back(x, forward, reverse):
        keys = dispatch(x, forward, axis_name=AXIS, capacity=capacity)
        copies = dispatch(keys, reverse, axis_name=AXIS, capacity=num_replicas * num_tokens)
        return copies, combine(keys, forward, axis_name=AXIS, num_tokens=num_tokens)

    copies, total = on_ranks(there_and_back, mesh_of(W))(x, forward, reverse)
    copies = np.asarray(copies).reshape(W, num_replicas, num_tokens, 4)
    for r in range(W):
        lengths = np.asarray(reverse.recv_seq_lens[r])
        exists = np.repeat(np.asarray(reverse.seq_recv_mask[r]), lengths, axis=0).T
        np.testing.assert_array_equal(copies[r][exists], np.stack([x[r]] * num_replicas)[exists])
        assert not copies[r][~exists].any()
    np.testing.assert_array_equal(total, copies.sum(1))


def test_groups_of_a_larger_mesh_exchange_separately():
    """On mesh (data 2, cp 4) each index of data is a separate group with its own plan."""
    rng = np.random.default_rng(5)
    plans = [random_plan(rng, 4, S, T) for _ in range(2)]
    capacity = max(map(capacity_of, plans))
    x = rng.normal(size=(2, 4, T, 3)).astype(np.float32)
    metadata = jax.tree.map(lambda *a: np.stack(a), *(Metadata(**plan) for plan in plans))

    def local(x, m):
        m = jax.tree.map(lambda a: a[0, 0], m)
        return dispatch(x[0, 0], m, axis_name=AXIS, capacity=capacity)[None, None]

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", AXIS))
    spec = P("data", AXIS)
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(x, metadata)
    for group in range(2):
        expected = dispatched(plans[group], x[group], capacity)
        np.testing.assert_array_equal(got[group], expected)


@pytest.mark.parametrize("implementation", ["in_process", "xla"])
def test_two_mesh_axes_can_be_one_axis_of_ranks(implementation):
    rng = np.random.default_rng(6)
    plan = random_plan(rng, W, S, T)
    capacity = capacity_of(plan)
    x = rng.normal(size=(W, T, 3)).astype(np.float32)
    names = ("pod", "data")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), names)

    def local(x, m):
        options: Any = {"axis_name": names, "implementation": implementation}
        return dispatch(x[0], m, capacity=capacity, **options)[None]

    move = jax.shard_map(local, mesh=mesh, in_specs=(P(names), P()), out_specs=P(names))
    got = jax.jit(move)(x, Metadata(**plan))
    np.testing.assert_array_equal(got, dispatched(plan, x, capacity))


@pytest.mark.parametrize("form", ["global", "leading one", "slice"])
def test_metadata_may_be_global_or_this_ranks_slice(form):
    rng = np.random.default_rng(8)
    plan = random_plan(rng, W, S, T, 2)
    capacity = capacity_of(plan)
    x = rng.normal(size=(W, T, 3)).astype(np.float32)

    def local(x, m):
        m = m.get_slice(jax.lax.axis_index(AXIS)) if form == "slice" else m
        return dispatch(x[0], m, axis_name=AXIS, capacity=capacity)[None]

    specs = (P(AXIS), P(AXIS) if form == "leading one" else P())
    move = jax.shard_map(local, mesh=mesh_of(W), in_specs=specs, out_specs=P(AXIS))
    got = jax.jit(move)(x, Metadata(**plan))
    np.testing.assert_array_equal(got, dispatched(plan, x, capacity))


def test_source_offsets_can_skip_rows_and_name_a_row_twice():
    rng = np.random.default_rng(9)
    plan = random_plan(rng, W, S, T, 2)
    plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
    capacity = capacity_of(plan)
    x = rng.normal(size=(W, T, 3)).astype(np.float32)
    y = rng.normal(size=(W, capacity, 3)).astype(np.float32)
    np.testing.assert_array_equal(run_dispatch(plan, x, capacity), dispatched(plan, x, capacity))
    np.testing.assert_array_equal(run_combine(plan, y, T), combined(plan, y, T, np.float32))


def test_rows_may_be_named_by_many_slots_by_xla():
    """One program serves every multiplicity: disjoint shards, chains, all slots on one row."""
    capacity = 2 * W * T

    def local(y, m):
        return combine(y, m, axis_name=AXIS, num_tokens=T, implementation="xla")

    run = on_ranks(local, mesh_of(W), check_vma=False)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        plan = random_plan(rng, W, S, T, 2)
        free = T - plan["seq_len"] + 1
        plan["src_offset"] = (0 * free if seed == 0 else rng.integers(0, free)).astype(np.uint32)
        y = rng.normal(size=(W, capacity, 3)).astype(np.float32)
        np.testing.assert_array_equal(run(y, Metadata(**plan)), combined(plan, y, T, np.float32))


@pytest.mark.parametrize("kind", ["all to one", "one rank is empty"])
def test_uneven_plans(kind):
    rng = np.random.default_rng(10)
    seq_len = rng.integers(0, 6, (W, S)).astype(np.int32)
    destinations = rng.integers(-1, W, (W, S)).astype(np.int32)
    if kind == "all to one":
        destinations[:] = 2
    else:
        seq_len[5] = 0
        destinations[destinations == 5] = 4
    forward, _ = compute_metadata(seq_len, destinations)
    plan = {f.name: getattr(forward, f.name) for f in dataclasses.fields(forward)}
    plan = {name: v for name, v in plan.items() if v is not None}
    capacity = capacity_of(plan)
    x = rng.normal(size=(W, 6 * S, 3)).astype(np.float32)
    got = run_dispatch(plan, x, capacity)
    np.testing.assert_array_equal(got, dispatched(plan, x, capacity))


@pytest.mark.parametrize(
    "slots, num_tokens, capacity", [((0,), 5, 4), ((3,), 0, 0), ((2, 0), 5, 4)]
)
def test_nothing_to_move(slots, num_tokens, capacity):
    plan = dict(
        dst_rank=np.full((W, *slots), -1, np.int32),
        dst_offset=np.zeros((W, *slots), np.uint32),
        seq_len=np.zeros((W, slots[0]), np.uint32),
        num_recv_tokens=np.zeros((W, W + 1), np.uint32),
        num_seqs=np.zeros(W, np.int32),
        num_total_recv_tokens=np.zeros(W, np.uint32),
        world_size=W,
    )
    got = run_dispatch(plan, np.ones((W, num_tokens, 3), np.float32), capacity)
    np.testing.assert_array_equal(got, np.zeros((W, capacity, 3)))
    got = run_combine(plan, np.ones((W, capacity, 3), np.float32), num_tokens)
    np.testing.assert_array_equal(got, np.zeros((W, num_tokens, 3)))


def test_donated_storage_is_written_in_place():
    rng = np.random.default_rng(13)
    plan = random_plan(rng, W, S, T)
    capacity = capacity_of(plan) + 2
    x = rng.normal(size=(W, T, 4)).astype(np.float32)

    def local(x, out, m):
        moved = dispatch(x[0], m, axis_name=AXIS, capacity=capacity, out=out[0])
        return moved[None]

    move = jax.jit(
        jax.shard_map(local, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS)),
        donate_argnums=1,
    )
    sharding = jax.sharding.NamedSharding(mesh_of(W), P(AXIS))
    # Created by XLA: a device array that shares memory with NumPy cannot be donated.
    poison = jax.jit(lambda: jnp.full((W, capacity, 4), jnp.nan), out_shardings=sharding)
    storage = poison()
    before = [shard.data.unsafe_buffer_pointer() for shard in storage.addressable_shards]
    got = move(x, storage, Metadata(**plan))
    np.testing.assert_array_equal(got, dispatched(plan, x, capacity))
    assert [s.data.unsafe_buffer_pointer() for s in got.addressable_shards] == before


SMAPS = pathlib.Path("/proc/self/smaps")
HUGE_PAGES = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_large_results_use_huge_pages():
    """If the system grants them on request: with small pages, fresh memory costs several copies."""
    rows = 16 << 20
    m, _ = compute_metadata(np.array([[rows]], np.int32), np.zeros((1, 1), np.int32))
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
