"""Plans and placements of any batch: each query once, with its keys, within all constraints.

On the host and inside `jit`, of all ranks and of one, saved and read again. Of how good they are:
test_balance.py.
"""

import dataclasses
import pickle
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from any_mask import any_mask
from array_masks import ALL_KINDS, pack_for, random_mask
from hypothesis import given, strategies as st
from mask_oracle import batch_visible
from packed_batches import pack
from planner_oracle import check_placement, check_plan, deliver
from properties import examples
from random_lengths import EXTREMES

from jax_cp_dispatch import Plan, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch.cost import Hardware
from jax_cp_dispatch.masks import BlockCausal, Chunked, Full, PrefixLM, SharedPrefix, SlidingWindow
from jax_cp_dispatch.planning import needs_inside_jit

COLUMNS = 96
EXTREME_MASKS = [
    *(None, SlidingWindow(1), SlidingWindow(7), SlidingWindow(1000), Chunked(5)),
    *(Full(), BlockCausal(6), SlidingWindow(3, 9)),
]


def ids_of(lengths, columns=COLUMNS):
    """Segment ids of rows of lengths; negative lengths are padding; the last length is cut."""
    rows = np.zeros((len(lengths), columns), np.int32)
    for row, of_row in zip(rows, lengths, strict=True):
        column = 0
        for number, length in enumerate(of_row, start=1):
            row[column : column + abs(length)] = number if length > 0 else 0
            column += abs(length)
    return rows


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), a, b)


def plans_of(made) -> tuple[Plan, ...]:
    return (made,) if isinstance(made, Plan) else made.plans


def rows_of(metadata):
    return int(np.max(metadata.num_total_recv_tokens))


def check_part(make, made, rank, **call):
    """Requires that the part of a rank is the same however it is made; reads both again."""
    part, sliced = make(rank=rank, **call), made.slice_of(rank)
    for one, other, whole in zip(*map(plans_of, (part, sliced, made)), strict=True):
        same(one, other)
        same(one, whole.slice_of(rank))
        same(one.local_ranges(rank), whole.local_ranges(rank))
        assert all(len(x) == 1 for x in jax.tree.leaves(one)) and one.fits
        counts = whole.kv_metadata.num_recv_tokens[rank]
        np.testing.assert_array_equal(one.kv_metadata.local_view(rank).num_recv_tokens, counts)
    for x in (part, made):
        for plan, read in zip(plans_of(x), plans_of(pickle.loads(pickle.dumps(x))), strict=True):
            same(read, plan)
    if isinstance(made, Plan):
        return
    assert part.needs == sliced.needs == made.needs
    tokens = np.arange(made.batch * made.columns).reshape(made.batch, -1)
    own = np.split(made.apply(tokens), made.world_size, axis=1)[rank]
    np.testing.assert_array_equal(part.apply(tokens), own)
    np.testing.assert_array_equal(sliced.apply(tokens), own)


# ---- Any lengths, constraints and masks of numbers.

LENGTHS = st.sampled_from([*EXTREMES.values()]) | st.lists(
    st.lists(st.integers(0, 24), max_size=4), min_size=1, max_size=2
)
ROWS = st.none() | st.integers(1, 150)


SLOW_LINKS = Hardware(1e12, 1e10, 0, "nvswitch", rail_bandwidth=1e9)


def draw_config(data, world_size, **others):
    return PlanConfig(
        hardware=data.draw(st.sampled_from([None, SLOW_LINKS])),
        block=data.draw(st.sampled_from([None, 4])),
        kv_capacity=data.draw(ROWS),
        ranks_per_node=data.draw(st.sampled_from([None, 1, 2 - world_size % 2])),
        rank_speeds=data.draw(st.none() | st.just(tuple(1.0 + r % 3 for r in range(world_size)))),
        balance_tolerance=data.draw(st.sampled_from([0.0, 0.01, 0.5])),
        **others,
    )


@pytest.mark.parametrize("make", [plan_attention, place_tokens])
@given(data=st.data())
@examples(25)
def test_constraints_are_kept_or_refused(make, data):
    """The capacities, nodes, speeds and blocks of a config, beside any mask; in parts, too."""
    lengths, world_size = data.draw(LENGTHS), data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    others: dict[str, Any] = {}
    if make is plan_attention:
        others["num_kv_heads"] = data.draw(st.sampled_from([8, 32]))
        others["q_capacity"], others["backward"] = data.draw(ROWS), data.draw(st.booleans())
    config, mask = draw_config(data, world_size, **others), data.draw(any_mask(40))
    options: Any = {"world_size": world_size, "columns": COLUMNS, "mask": mask, "config": config}
    try:
        made: Any = make(lengths=lengths, **options)
    except ValueError as error:
        assert "_capacity" in str(error) and "Pass " in str(error), error
        assert config.q_capacity is not None or config.kv_capacity is not None
        return
    check_part(make, made, data.draw(st.integers(0, world_size - 1)), lengths=lengths, **options)
    (plan,) = plans_of(made)
    assert config.kv_capacity in (None, plan.kv_capacity)
    assert rows_of(plan.kv_metadata) <= plan.kv_capacity
    if make is plan_attention:
        check_plan(plan, ids_of(lengths), None, mask)
        assert config.q_capacity in (None, plan.q_capacity)
        return
    check_placement(made, ids_of(lengths), None, mask)
    speeds = np.array(config.rank_speeds or [1.0] * world_size)
    if plan.pairs.sum():
        share = plan.pairs.sum() * speeds / speeds.sum()
        assert made.imbalance == pytest.approx((plan.pairs / share).max(), rel=1e-6)


@pytest.mark.parametrize("number, name", list(enumerate(EXTREMES)))
def test_extreme_batches(number, name):
    """With half of the masks each; capacities of plans are what they need, rounded up."""
    lengths, block = EXTREMES[name], 4
    for turn, mask in list(enumerate(EXTREME_MASKS))[number % 2 :: 2]:
        world_size = (1, 2, 3, 4, 8)[(turn + number) % 5]
        options: Any = {"world_size": world_size, "mask": mask}
        placement = place_tokens(lengths, columns=COLUMNS, **options)
        check_placement(placement, ids_of(lengths), None, mask)
        if (turn + 3 * number) % 4:
            continue
        options["config"] = PlanConfig(block)
        plan = plan_attention(lengths=lengths, columns=COLUMNS, **options)
        check_plan(plan, ids_of(lengths), None, mask)
        same(plan, plan_attention(ids_of(lengths), **options))
        slots = (x.dst_rank.shape[-1] for x in (plan.q_metadata, plan.kv_metadata))
        capacities = (plan.q_capacity, plan.kv_capacity, *slots, plan.run_row.shape[1])
        units = (8 * block, 8 * block, 8, 8, 8)
        for need, capacity, step in zip(plan.largest_needs[0], capacities, units, strict=True):
            assert need <= capacity <= max(need + step, need * 9 // 8)
        if name == "all padding":
            assert plan.num_q_tokens_moved == plan.num_kv_tokens_moved == 0
            assert plan.imbalance == plan.imbalance_before == 1


# ---- Inside a program.

# (B, W, T, block); blocks need not divide T, and a block may be longer than T.
SHAPES = [(3, 3, 10, 4), (2, 8, 3, 4)]


def told_apart_by_positions(segment_ids):
    """Gives adjacent documents one segment id, and positions with gaps that separate them."""
    live = segment_ids > 0
    starts = np.diff(live.astype(np.int32), axis=1, prepend=0) == 1
    column = np.arange(segment_ids.shape[1])
    first = np.diff(segment_ids, axis=1, prepend=-1) != 0
    positions = column - np.maximum.accumulate(np.where(first, column, 0), axis=1)
    return np.where(live, starts.cumsum(1), 0), 3 * positions + 2


@partial(jax.jit, static_argnames=("world_size", "block", "mask"))
def plan_inside(segment_ids, positions, *, world_size, block, mask):
    return plan_attention(
        segment_ids, positions, world_size=world_size, mask=mask, config=PlanConfig(block=block)
    )


@examples(15)
@given(data=st.data())
def test_plans_of_any_packing_are_exact_on_the_host_and_inside_jit(data):
    batch, world_size, columns, block = data.draw(st.sampled_from(SHAPES))
    length = st.integers(-6, 12) | st.integers(20, 60)
    lengths = [data.draw(st.lists(length, max_size=20)) for _ in range(batch)]
    segment_ids = ids_of(lengths, world_size * columns)
    positions = np.broadcast_to(np.arange(world_size * columns), segment_ids.shape)
    if data.draw(st.booleans()):
        segment_ids, positions = told_apart_by_positions(segment_ids)
    mask = SlidingWindow(5, 8) if batch == 3 else None
    arguments, options = (segment_ids, positions), {"world_size": world_size, "mask": mask}
    check_plan(plan_attention(*arguments, **options, config=PlanConfig(block)), *arguments, mask)
    inside = plan_inside(*arguments, **options, block=block)
    check_plan(jax.device_get(inside), *arguments, mask)
    assert rows_of(inside.q_metadata) <= 2 * batch * columns + block


def test_constants_inside_jit_get_exact_capacities():
    options: Any = {"world_size": 4, "config": PlanConfig(block=8)}
    eager = plan_attention(ids_of([[50, 3, 20]]), **options)

    @jax.jit
    def program(x):
        inside = plan_attention(ids_of([[50, 3, 20]]), **options)
        assert inside.kv_capacity == eager.kv_capacity
        return x + inside.run_row.sum()

    assert program(0) == eager.run_row.sum()


# ---- Masks of arrays.


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_any_mask_of_arrays(kind):
    """A plan, and a placement beside a window; also the part of one rank."""
    rng = np.random.default_rng()
    for _ in range(2):
        world_size = int(rng.integers(1, 5))
        columns, longest = world_size * int(rng.integers(4, 20)), int(rng.choice([6, 60]))
        segment_ids, _ = pack_for(kind, rng, 2, columns, max_length=longest)
        constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
        mask, visible = constructor(*arrays), batch_visible(segment_ids, pairs)
        last, options = world_size - 1, {"segment_ids": segment_ids, "world_size": world_size}

        block, tolerance = (None, 0.01) if rng.random() < 0.5 else (4, 0.3)
        of_plan = {"mask": mask, "config": PlanConfig(block=block, balance_tolerance=tolerance)}
        plan = plan_attention(**of_plan, **options)
        check_plan(plan, segment_ids, pairs=visible)
        check_part(plan_attention, plan, last, **of_plan, **options)

        alone = place_tokens(mask=mask, **options)
        check_placement(alone, segment_ids, pairs=visible)
        alone.plan.validate(alone.apply(segment_ids), mask=alone.apply(mask))

        column = np.arange(columns)
        distance = column[:, None] - column
        window = batch_visible(segment_ids, (distance >= 0) & (distance < 5))
        options |= {"masks": (SlidingWindow(5), mask), "layers": (3, 1)}
        two = place_tokens(**options)
        for number, (of_mask, seen) in enumerate(((SlidingWindow(5), window), (mask, visible))):
            check_placement(two, segment_ids, pairs=seen, number=number)
            same(two.plan_for(of_mask), two.plans[number])
        assert two.pairs_before.sum() == 3 * window.sum() + visible.sum()
        check_part(place_tokens, two, last, **options)
        part = place_tokens(rank=last, **options)
        same(part.plan_for(SlidingWindow(5)), part.plans[0])


@jax.jit
def plan_arrays_inside(segment_ids, mask):
    return plan_attention(segment_ids, world_size=4, mask=mask, config=PlanConfig(block=3))


def test_masks_of_arrays_inside_jit():
    """Blocks do not divide the columns of a rank. Of other kinds: test_values.py."""
    rng = np.random.default_rng()
    for number in range(6):
        segment_ids, _ = pack(rng, 2, 4 * 10, max_length=int(rng.choice([6, 40])))
        constructor, arrays, pairs = random_mask("ranges_of_keys", rng, segment_ids)
        options: Any = {"world_size": 4, "mask": constructor(*arrays)}
        plan = jax.device_get(plan_arrays_inside(segment_ids, options["mask"]))
        check_plan(plan, segment_ids, pairs=batch_visible(segment_ids, pairs))
        plan.validate(segment_ids, None, options["mask"])
        assert plan.mask == plan_attention(segment_ids, **options).mask
        if number == 0:
            needs = needs_inside_jit(segment_ids, config=PlanConfig(block=3), **options)
            assert plan.needs == dataclasses.replace(needs, block=None)


def test_a_shared_prompt_moves_once_to_a_rank():
    """However many completions it has, and no completion moves that is not seen."""
    for prompt, size, number, padding in ((300, 50, 7, 150), (16, 8, 6, 0)):
        num_tokens = prompt + size * number
        ids = np.repeat(np.arange(number + 1), [prompt] + number * [size])
        ids = np.pad(ids, (0, padding)).astype(np.int32)
        segment_ids = (np.arange(len(ids)) < num_tokens).astype(np.int32)[None]
        plan = plan_attention(segment_ids, world_size=4, mask=SharedPrefix(ids[None]))
        assert plan.imbalance <= 1.01001 or not padding
        rows = np.arange(len(ids)).reshape(4, -1)
        queries, keys = (
            deliver(x, rows, n)
            for x, n in ((plan.q_metadata, plan.q_capacity), (plan.kv_metadata, plan.kv_capacity))
        )
        for rank in range(4):
            held = keys[rank][keys[rank] >= 0]
            assert len(np.unique(held)) == len(held)
            seen = np.unique(ids[queries[rank][queries[rank] >= 0]])
            assert np.isin(ids[held], [0, *seen]).all()

    ids = np.repeat([np.arange(9)], [768] + 8 * [32], axis=1)
    ones = np.ones_like(ids)
    placement = place_tokens(segment_ids=ones, world_size=8, mask=SharedPrefix(ids))
    placed = placement.permutation.reshape(8, -1)
    keys = deliver(placement.plan.kv_metadata, placed + 1, placement.plan.kv_capacity)
    for rank, received in enumerate(keys):
        tokens, count = np.unique(received[received > 0], return_counts=True)
        assert (count == 1).all() and np.isin(placed[rank] + 1, tokens).all()
    last = placed[(ids[0, placed] > 0).any(1)]  # the ranks of completions have the whole prompt
    moved = sum(768 - (ids[0, tokens] == 0).sum() for tokens in last)
    assert moved <= placement.plan.num_kv_tokens_moved <= 7 * 768 + 8 * 32


# ---- Saved plans, and the parts of ranks.

IN_PREFIX = np.isin(np.arange(32), [0, 1, 2, 20, 21])[None]


def made(kind) -> Any:
    if kind == "traced":
        return plan_inside(
            ids_of([[15] * 2] * 3, 30), np.arange(30) + np.zeros((3, 1), int),
            world_size=3, block=4, mask=SlidingWindow(5, 8),
        )  # fmt: skip
    if kind == "moved":
        return plan_attention(lengths=[20, 12], world_size=2)
    return place_tokens([20, 12], world_size=2, masks=["full", PrefixLM(IN_PREFIX)])


@pytest.mark.parametrize("kind", ["traced", "placement"])
def test_a_saved_plan_is_read_again(kind):
    plan = made(kind)
    if kind == "placement":
        plan.inverse  # noqa: B018 - is cached, and not saved
    read = pickle.loads(pickle.dumps(plan))
    fields = lambda x: (x.plans, x.source) if kind == "placement" else x
    same(fields(read), fields(plan))
    assert "inverse" not in vars(read)


@pytest.mark.parametrize(
    "kind, was, then, says",
    [
        ("moved", b"K\x02", b"K\x63", "in format 99 of plans, but this version .* reads format 2"),
        ("moved", b"run_row", b"row_run", "run"),  # a field
        ("moved", b"jax_cp_dispatch.metadata", b"jax_cp_dispatch.datameta", "datameta"),  # a module
        ("placement", b"K\x02", b"K\x63", "in format 99 of plans"),
        ("placement", b"PlanConfig", b"PlanChoice", "PlanChoice"),  # a class
    ],
)
def test_a_plan_of_another_version_is_refused_in_words(kind, was, then, says):
    plan = made(kind)
    saved = pickle.dumps(plan)
    assert was in saved
    advice = "Plan the batch again, with this version of jax_cp_dispatch"
    with pytest.raises(ValueError, match=rf"(?s)^{type(plan).__name__}: .*{says}.*{advice}"):
        pickle.loads(saved.replace(was, then, 1))
