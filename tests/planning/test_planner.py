"""`plan_attention`: every query gets exactly its keys, and capacities suffice."""

import pickle
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P
from planner_oracle import check_plan
from properties import examples
from random_lengths import EXTREMES

from jax_cp_dispatch import PlanConfig, plan_attention
from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.masks import BlockCausal, Chunked, Full, SlidingWindow

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


def assert_same(plan, other):
    assert plan.q_capacity == other.q_capacity
    assert plan.kv_capacity == other.kv_capacity
    for x, y in zip(jax.tree.leaves(plan), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@partial(jax.jit, static_argnames=("world_size", "block", "mask"))
def plan_inside(segment_ids, positions, *, world_size, block, mask):
    return plan_attention(
        segment_ids, positions, world_size=world_size, mask=mask, config=PlanConfig(block=block)
    )


@examples(20)
@given(data=st.data())
def test_plan_attention_is_exact_for_any_packing(data):
    """Made on the host and inside a program; of one shape with a mask."""
    batch, world_size, columns, block = data.draw(st.sampled_from(SHAPES))
    length = st.integers(-6, 12) | st.integers(20, 60)
    rows = [data.draw(st.lists(length, max_size=20)) for _ in range(batch)]
    segment_ids = np.stack([pack(row, world_size * columns) for row in rows])
    positions = np.broadcast_to(np.arange(world_size * columns), segment_ids.shape)
    if data.draw(st.booleans()):
        segment_ids, positions = told_apart_by_positions(segment_ids)
    mask = SlidingWindow(5, 8) if batch == 3 else None
    tolerance = data.draw(st.sampled_from([0.0, 0.01, 0.5]))
    num_kv_heads = data.draw(st.sampled_from([8, 32]))
    config = PlanConfig(block, balance_tolerance=tolerance, num_kv_heads=num_kv_heads)
    arguments = segment_ids, positions
    plan = plan_attention(*arguments, world_size=world_size, mask=mask, config=config)
    check_plan(plan, *arguments, mask)
    inside = plan_inside(*arguments, world_size=world_size, block=block, mask=mask)
    check_plan(jax.device_get(inside), *arguments, mask)
    assert inside.q_metadata.num_total_recv_tokens.max() <= 2 * batch * columns + block


EXTREME_MASKS = [
    *(None, SlidingWindow(1), SlidingWindow(7), SlidingWindow(1000), Chunked(5)),
    *(Full(), BlockCausal(6), SlidingWindow(3, 9)),
]


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("turn", range(2))
def test_extreme_batches(name, turn):
    """From lengths, each with two of the masks; capacities are what the plan needs, rounded up."""
    number = (3 * list(EXTREMES).index(name) + 4 * turn) % len(EXTREME_MASKS)
    lengths, block, mask = EXTREMES[name], 4, EXTREME_MASKS[number]
    world_size = (1, 3, 8)[(number + list(EXTREMES).index(name)) % 3]
    options = {"world_size": world_size, "mask": mask, "config": PlanConfig(block)}
    plan = plan_attention(lengths=lengths, columns=96, **options)
    segment_ids = np.stack([pack(row, 96) for row in lengths])
    check_plan(plan, segment_ids, None, mask)
    assert_same(plan, plan_attention(segment_ids, **options))
    slots = (x.dst_rank.shape[-1] for x in (plan.q_metadata, plan.kv_metadata))
    capacities = (plan.q_capacity, plan.kv_capacity, *slots, plan.run_row.shape[1])
    units = (8 * block, 8 * block, 8, 8, 8)
    for need, capacity, step in zip(plan.largest_needs[0], capacities, units, strict=True):
        assert need <= capacity <= max(need + step, need * 9 // 8)


def test_slices_and_pickles():
    """A rank's slice is what it needs; a plan from a loader arrives as it was made."""
    segment_ids = pack([50, 3, 20], 96)[None]
    options = {"world_size": 4, "config": PlanConfig(block=8)}
    plan = plan_attention(segment_ids, **options)
    assert_same(plan, pickle.loads(pickle.dumps(plan)))
    for rank in range(4):
        part = plan.slice_of(rank)
        assert_same(part, plan_attention(segment_ids, rank=rank, **options))
        assert all(len(x) == 1 for x in jax.tree.leaves(part)) and part.fits
        for x, y in zip(part.local_ranges(rank), plan.local_ranges(rank), strict=True):
            np.testing.assert_array_equal(x, y)
        view = part.kv_metadata.local_view(rank)
        np.testing.assert_array_equal(view.num_recv_tokens, plan.kv_metadata.num_recv_tokens[rank])
    with pytest.raises(ValueError, match="slice_of: got rank 0 with 1 of 4 ranks"):
        plan.slice_of(3).slice_of(0)


def test_all_padding_moves_nothing():
    plan = plan_attention(np.zeros((1, 96), np.int32), world_size=4, config=PlanConfig(block=8))
    assert plan.num_q_tokens_moved == plan.num_kv_tokens_moved == 0
    assert plan.imbalance == plan.imbalance_before == 1


def test_constants_inside_jit_get_exact_capacities():
    segment_ids = pack([50, 3, 20], 96)[None]
    eager = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))

    @jax.jit
    def program(x):
        inside = plan_attention(segment_ids, None, world_size=4, config=PlanConfig(block=8))
        assert inside.kv_capacity == eager.kv_capacity
        return x + inside.run_row.sum()

    assert program(0) == eager.run_row.sum()


def test_inside_shard_map_every_rank_computes_the_same_plan():
    segment_ids = pack([3, 50, -5, 9, 1, 20], 96)[None]
    mesh = jax.make_mesh((4,), ("cp",), devices=jax.devices()[:4])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P("cp"))
    def plans(segment_ids):
        plan = plan_attention(segment_ids, world_size=4, config=PlanConfig(block=8))
        rank = jax.lax.axis_index("cp")
        part = plan.q_metadata.get_slice(rank), *plan.local_ranges(rank)
        return jax.tree.map(lambda x: x[None], (plan, part))

    of_ranks, (metadata, kv_start, kv_end) = jax.device_get(plans(segment_ids))
    whole, *others = (jax.tree.map(lambda x, rank=rank: x[rank], of_ranks) for rank in range(4))
    for other in others:
        assert_same(whole, other)
    check_plan(whole, segment_ids)
    np.testing.assert_array_equal(metadata.dst_rank, whole.q_metadata.dst_rank)
    np.testing.assert_array_equal(metadata.num_recv_tokens, whole.q_metadata.num_recv_tokens)
    for rank in range(4):
        start, end = whole.local_ranges(rank)
        np.testing.assert_array_equal(kv_start[rank], start)
        np.testing.assert_array_equal(kv_end[rank], end)


def test_traced_plan_beyond_its_capacity_reports_the_need():
    config = PlanConfig(8, 8, 8, 1, 1, 1)
    make = jax.jit(partial(plan_attention, world_size=4, config=config))
    plan = make(np.ones((1, 96), np.int32))
    assert plan.run_row.shape == plan.q_metadata.dst_rank.shape == (4, 1) and not plan.fits
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


def test_attention_flops_and_rows_bytes_count_products():
    pairs = 8192 * 8193 / 2
    forward = attention_flops(pairs, num_heads=8, head_size=64)
    assert forward == 4 * pairs * 8 * 64
    assert attention_flops(pairs, num_heads=8, head_size=64, backward=True) == 2.5 * forward
    assert attention_flops(10, num_heads=1, head_size=4, value_head_size=2) == 2 * 10 * (4 + 2)
    assert rows_bytes(3, num_heads=2, head_size=64, itemsize=2) == 768
