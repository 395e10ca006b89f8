"""`plan_attention`: every query gets exactly its keys, work is balanced, capacities suffice."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from planner_oracle import check_plan

from jax_cp_dispatch import PlanConfig, plan_attention
from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.planner.balance import balance_blocks

# (B, W, T, block); blocks need not divide T, and a block may be longer than T.
SHAPES = [(1, 1, 24, 8), (3, 3, 10, 4), (2, 8, 3, 4)]


def pack(lengths, columns):
    """Returns one batch row; negative lengths are padding; the last length is cut or padded."""
    row = np.zeros(columns, np.int32)
    column = 0
    for number, length in enumerate(lengths, start=1):
        if length > 0:
            row[column : column + length] = number
        column += abs(length)
    return row


def told_apart_by_positions(segment_ids):
    """Gives adjacent documents one segment id, and positions with gaps that separate them."""
    live = segment_ids > 0
    starts = np.diff(live.astype(np.int32), axis=1, prepend=0) == 1
    column = np.arange(segment_ids.shape[1])
    first = np.diff(segment_ids, axis=1, prepend=-1) != 0
    positions = column - np.maximum.accumulate(np.where(first, column, 0), axis=1)
    return np.where(live, starts.cumsum(1), 0), 3 * positions + 2


def roomy(batch, world_size, columns, block):
    """Returns sufficient capacities, so all plans of one shape share one compiled program."""
    rows = batch * world_size * columns
    return PlanConfig(
        block=block, q_capacity=rows, kv_capacity=rows, max_kv_destinations=world_size
    )


def assert_same(plan, other):
    assert plan.q_capacity == other.q_capacity
    assert plan.kv_capacity == other.kv_capacity
    for x, y in zip(jax.tree.leaves(plan), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_plan_is_exact_for_any_packing(data):
    batch, world_size, columns, block = data.draw(st.sampled_from(SHAPES))
    length = st.integers(-6, 12) | st.integers(20, 60)
    rows = [data.draw(st.lists(length, max_size=20)) for _ in range(batch)]
    segment_ids = np.stack([pack(row, world_size * columns) for row in rows])
    positions = np.broadcast_to(np.arange(world_size * columns), segment_ids.shape)
    if data.draw(st.booleans()):
        segment_ids, positions = told_apart_by_positions(segment_ids)
    window = data.draw(st.sampled_from([None, 7])) if batch == 3 else None  # uses another program
    plan = plan_attention(
        segment_ids,
        positions,
        world_size=world_size,
        window=window,
        config=roomy(batch, world_size, columns, block),
    )
    check_plan(plan, segment_ids, positions, window)
    slots = batch * -(-columns // min(block, columns))
    assert plan.q_metadata.seq_len.shape == (world_size, slots)
    assert plan.q_metadata.num_total_recv_tokens.max() <= 2 * batch * columns + block


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([-96], id="all padding"),
        pytest.param([96], id="one giant document"),
        pytest.param([1] * 96, id="one token each"),
        pytest.param([-70, 1], id="one token in all"),
        pytest.param([2, 90, 1, 1, 1, 1], id="mostly one document"),
    ],
)
def test_capacities_are_what_the_plan_needs(lengths):
    world_size, block, segment_ids = 4, 8, pack(lengths, 96)[None]
    rows = segment_ids.size // world_size
    plan = plan_attention(segment_ids, None, world_size=world_size, config=PlanConfig(block=block))
    check_plan(plan, segment_ids)
    for metadata, capacity in (
        (plan.q_metadata, plan.q_capacity),
        (plan.kv_metadata, plan.kv_capacity),
    ):
        need = int(metadata.num_total_recv_tokens.max())
        assert need <= capacity <= max(need + 8 * block, need * 17 // 16)
        assert capacity <= world_size * rows
    copies = (np.asarray(plan.kv_metadata.dst_rank) >= 0).sum(-1).max()
    destinations = plan.kv_metadata.dst_rank.shape[-1]
    assert copies <= destinations <= max(1, 2 * copies - 1)


def test_all_padding_moves_nothing():
    plan = plan_attention(
        np.zeros((1, 96), np.int32), None, world_size=4, config=PlanConfig(block=8)
    )
    assert plan.num_q_tokens_moved == plan.num_kv_tokens_moved == 0
    assert plan.imbalance == plan.imbalance_before == 1


def test_equal_local_documents_do_not_move():
    segment_ids = np.repeat(np.arange(1, 5, dtype=np.int32), 24)[None]
    plan = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))
    assert plan.num_q_tokens_moved == plan.num_kv_tokens_moved == 0
    np.testing.assert_array_equal(plan.pairs_before, plan.pairs_after)


def test_a_document_over_all_ranks_is_balanced():
    segment_ids = np.ones((1, 1024), np.int32)
    plan = plan_attention(segment_ids, None, world_size=8, config=PlanConfig(block=8))
    assert plan.imbalance_before > 1.8
    assert plan.imbalance <= 1.03
    check_plan(plan, segment_ids)


# Plans of any 96 columns: by default, and with capacities that are too small.
_traced = jax.jit(
    lambda segment_ids: [
        plan_attention(segment_ids, None, world_size=4, config=config)
        for config in (PlanConfig(block=8), PlanConfig(block=8, q_capacity=8, kv_capacity=8))
    ]
)


def test_inside_jit_the_plan_is_the_same_and_defaults_fit():
    segment_ids = pack([3, 70, -5, 9, 1], 96)[None]
    bounds = PlanConfig(block=8, q_capacity=2 * 24 + 8, kv_capacity=4 * 24, max_kv_destinations=4)
    plan = partial(plan_attention, world_size=4, config=bounds)
    eager = plan(segment_ids)
    assert_same(eager, plan(jnp.asarray(segment_ids)))
    assert_same(eager, _traced(segment_ids)[0])


def test_constants_inside_jit_get_exact_capacities():
    segment_ids = pack([50, 3, 20], 96)[None]
    eager = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))

    @jax.jit
    def program(x):
        inside = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))
        assert inside.kv_capacity == eager.kv_capacity
        return x + inside.kv_end.sum()

    assert program(0) == eager.kv_end.sum()


def test_inside_shard_map_every_rank_computes_the_same_plan():
    segment_ids = pack([3, 50, -5, 9, 1, 20], 96)[None]
    config = roomy(1, 4, 24, 8)
    mesh = jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P("cp"))
    def plans(segment_ids):
        plan = plan_attention(segment_ids, None, world_size=4, config=config)
        rank = jax.lax.axis_index("cp")
        return jax.tree.map(lambda x: x[None], (plan.q_metadata.get_slice(rank), plan.kv_end[rank]))

    eager = plan_attention(segment_ids, None, world_size=4, config=config)
    metadata, kv_end = plans(segment_ids)
    np.testing.assert_array_equal(metadata.dst_rank, eager.q_metadata.dst_rank)
    np.testing.assert_array_equal(metadata.num_recv_tokens, eager.q_metadata.num_recv_tokens)
    np.testing.assert_array_equal(kv_end, eager.kv_end)


def test_traced_plan_beyond_its_capacity_reports_the_need():
    plan = _traced(np.ones((1, 96), np.int32))[1]
    assert plan.kv_start.shape == (4, 8)
    assert plan.q_metadata.num_total_recv_tokens.sum() == 96
    assert plan.q_metadata.num_total_recv_tokens.max() > 8
    assert plan.kv_metadata.num_total_recv_tokens.max() > 8


def test_64_bit_inputs():
    segment_ids = pack([3, 50, -5, 9, 1], 96)[None]
    narrow = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))
    with jax.enable_x64(True):
        wide = plan_attention(
            segment_ids.astype(np.int64), None, world_size=4, config=PlanConfig(block=8)
        )
    assert_same(narrow, wide)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_balancer_bounds_rows_for_any_costs(data):
    shape = (2, 4, 5)
    length = np.broadcast_to(np.array([8, 8, 8, 8, 3], np.int32), shape)
    seed = data.draw(st.integers(0, 2**32 - 1))
    weight = data.draw(st.sampled_from([1, 2, 4, 6]))
    rng = np.random.default_rng(seed)
    cost = (10.0 ** rng.uniform(0, weight, shape)).astype(np.int32)
    cost[rng.random(shape) < data.draw(st.sampled_from([0, 0.5, 0.95]))] = 0
    rows = np.where(cost > 0, length, 0)
    limit = 2 * 2 * 35 + 8
    assigned = np.asarray(_balance(jnp.asarray(cost), jnp.asarray(rows), row_limit=limit))
    assert assigned.min() >= 0 and assigned.max() < 4
    load = np.bincount(assigned.ravel(), weights=cost.ravel(), minlength=4)
    assert np.bincount(assigned.ravel(), weights=rows.ravel(), minlength=4).max() <= limit
    assert load.max() <= max(cost.sum((0, 2)).max(), load.mean() + cost.max())


_balance = jax.jit(balance_blocks, static_argnames="row_limit")


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(segment_ids=np.zeros((2, 4))), TypeError, "segment_ids has dtype float64"),
        (dict(positions=np.zeros((1, 96), bool)), TypeError, "positions has dtype bool"),
        (dict(segment_ids=np.zeros(8, int)), ValueError, r"pass segment_ids\[None\]"),
        (dict(segment_ids=np.zeros((1, 0), int)), ValueError, "not empty"),
        (dict(positions=np.zeros((1, 8), int)), ValueError, "Pass equal shapes"),
        (dict(world_size=5), ValueError, "96 columns cannot be split over world_size=5"),
        (dict(world_size=0), ValueError, "world_size=0"),
        (dict(segment_ids=np.array([[1, 2, -3, 0]])), ValueError, r"segment_ids\[0, 2\] is -3"),
        (dict(positions=np.full((1, 96), 2**40)), ValueError, "beyond 32 bits"),
        (
            dict(segment_ids=np.array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 0, 0, 2, 3, 3]])),
            ValueError,
            "segment 2 occurs in separate runs of batch row 1",
        ),
        (dict(q_capacity=3), ValueError, "rank 0 would receive 32 rows but q_capacity is 3"),
        (dict(kv_capacity=1), ValueError, r"Pass kv_capacity>=\d+ or None in PlanConfig"),
        (dict(max_kv_destinations=1), ValueError, "goes to 4 ranks but max_kv_destinations is 1"),
        (dict(block=0), ValueError, "block is 0; it needs to be at least 1"),
    ],
)
def test_errors_name_the_cause_and_the_remedy(change, error, message):
    arguments = dict(segment_ids=np.ones((1, 96), int), positions=None, world_size=4)
    config = {name: change.pop(name) for name in list(change) if name not in arguments}
    with pytest.raises(error, match=message):
        plan_attention(**(arguments | change), config=PlanConfig(**({"block": 8} | config)))


def test_cost_counts_products():
    pairs = 8192 * 8193 / 2
    forward = attention_flops(pairs, num_heads=8, head_size=64)
    assert forward == 4 * pairs * 8 * 64
    assert attention_flops(pairs, num_heads=8, head_size=64, backward=True) == 2.5 * forward
    assert attention_flops(10, num_heads=1, head_size=4, value_head_size=2) == 2 * 10 * (4 + 2)
    assert rows_bytes(3, num_heads=2, head_size=64, itemsize=2) == 768
