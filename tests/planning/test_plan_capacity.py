"""Capacities: of a sample of batches, of what plans need, and of what masks can need.

Whether a batch fits is known before a step, inside it, and from the error.
"""

import dataclasses
import pathlib
import re
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, all_fail, mesh_of

import jax_cp_dispatch as cp
from jax_cp_dispatch.documents.table import document_table  # inner: of the keys below
from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, PrefixLM, Ranges, SlidingWindow
from jax_cp_dispatch.planning import needs_inside_jit
from jax_cp_dispatch.planning.blocks import (  # inner: a bound without a batch
    BlockGrid,  # inner: of the bound below
    KeyLimit,
    balance_blocks,  # inner: any costs and keys
    kv_bound,
)
from jax_cp_dispatch.planning.request import query_table  # inner: the planner reads them in C++

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "plans.md"
W, T, BLOCK = 8, 128, 4
NAMES = ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces")
# By the documented step, short documents fit and a long one does not.
SHORT = np.repeat(np.arange(1, 1 + T // 8, dtype=np.int32), 8)[None]
LONG = np.ones((1, T), np.int32)


def attend(x, segment_ids, config):
    qkv = [x[..., None, :]] * 3
    options: Any = {"mesh": mesh_of(W), "axis_name": AXIS, "algorithm": cp.Balanced(config)}
    return cp.context_parallel_attention(*qkv, segment_ids=segment_ids, **options)


def test_the_documented_step_keeps_its_donated_state_if_the_batch_does_not_fit():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    (code,) = (x for x in blocks if "def train_step" in x)
    names: dict[str, Any] = {}
    exec(code, names)
    train_step = names["train_step"]
    rng = np.random.default_rng()
    before = rng.normal(size=(8, 8)).astype(np.float32)
    x = rng.normal(size=(1, T, 8)).astype(np.float32)
    state = jnp.array(before)
    kept, fits = train_step(state, x, LONG)
    assert not fits and state.is_deleted()
    assert np.asarray(kept).tobytes() == before.tobytes()
    changed, fits = train_step(kept, x, SHORT)
    assert fits and np.isfinite(changed).all()
    assert not np.array_equal(changed, before)


@pytest.mark.parametrize(
    "sizes, says",
    [
        ({"q_capacity": 17, "kv_capacity": 20}, r"Pass PlanConfig\.\w+>=\d+"),
        ({"max_pieces": 1}, "a static bound .*max_pieces"),  # without key ranges
    ],
    ids=["rows", "lists"],
)
def test_the_error_names_sufficient_capacities(sizes, says):
    """On all ranks: the largest needs of all, which fit, by the names of the arguments."""
    x = np.random.default_rng().normal(size=(1, T, 8)).astype(np.float32)
    # The last ranks have most local work, so the first rank's needs are not the largest.
    segment_ids = np.concatenate([SHORT[:, : T // 2], np.full((1, T // 2), 99, np.int32)], axis=1)
    config = cp.PlanConfig(BLOCK, **sizes)
    needs = needs_inside_jit(segment_ids, world_size=W, config=config)
    assert not config.fits(needs)
    out = jax.jit(lambda ids: attend(x, ids, config))(segment_ids)
    all_fail(out, says)
    if "max_pieces" in sizes:
        return
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(out)
    assert "plan 1" not in str(error.value)
    asked = re.findall(r"Pass PlanConfig\.(\w+)>=(\d+)", str(error.value))
    asked = {name: int(value) for name, value in asked}
    needed = {name: getattr(needs, name) for name in sizes}
    assert asked == {name: need for name, need in needed.items() if need > sizes[name]}
    assert dataclasses.replace(config, **asked).fits(needs)


# ---- Of a sample of batches.

WORLD_SIZE, COLUMNS = 4, 2048
OF_PLACED = "kv_capacity", "max_kv_transfers", "max_pieces", "max_cut_pieces", "max_linked_pieces"
CAPACITIES = {False: NAMES, True: OF_PLACED}
KINDS = pytest.mark.parametrize("placed", [False, True], ids=["moved", "placed"])


def draw(rng):
    """Lengths of one batch row, log-normal, the last one cut."""
    ends = rng.lognormal(4.5, 1.2, 200).astype(int).cumsum()
    return np.diff([0, *ends[ends < COLUMNS], COLUMNS]).tolist()


def plan_of(lengths, placed, config):
    """Static sizes and needs of the plan of a batch, in the order of the capacities."""
    options = {"world_size": WORLD_SIZE, "columns": COLUMNS, "config": config}
    made: Any = (cp.place_tokens if placed else cp.plan_attention)(lengths=lengths, **options)
    plan: Any = made.plan if placed else made
    sizes = [plan.kv_capacity, plan.kv_metadata.seq_len.shape[1], plan.run_row.shape[1]]
    if placed:
        sizes += [plan.max_cut_pieces, plan.cut_pieces.shape[1] - plan.max_cut_pieces]
    else:
        sizes = [plan.q_capacity, sizes[0], plan.q_metadata.seq_len.shape[1], *sizes[1:]]
    assert list(plan.capacities.values()) == sizes
    return sizes, [getattr(plan.needs, name) for name in CAPACITIES[placed]]


def fits(batch, placed, config):
    try:
        plan_of(batch, placed, config)
    except ValueError as error:
        assert any(name in str(error) for name in CAPACITIES[placed])
        return False
    return True


@KINDS
def test_needs_are_the_least_capacities(placed):
    batch = draw(np.random.default_rng(0))
    _, needs = plan_of(batch, placed, cp.PlanConfig())
    sizes: dict[str, Any] = dict(zip(CAPACITIES[placed], needs, strict=True))
    ignored = set(CAPACITIES[not placed]) - set(sizes)  # of the other kind of plan
    smallest = cp.PlanConfig(**sizes, **dict.fromkeys(ignored, cast(Any, 1)))
    assert plan_of(batch, placed, smallest) == (needs, needs)
    for name, need in sizes.items():
        if not name.endswith("_capacity"):  # these are kept by another plan if possible
            with pytest.raises(ValueError, match=name):
                plan_of(batch, placed, dataclasses.replace(smallest, **{name: need - 1}))


@KINDS
def test_with_what_a_plan_of_several_masks_needs_its_balance_is_kept(placed):
    """The search counts the keys of all masks together, but each plan receives its own."""
    of: dict[str, Any] = {"world_size": 3, "lengths": [39, 6], "columns": 48}
    of |= {"masks": (SlidingWindow(4), "causal"), "config": cp.PlanConfig(balance_tolerance=0.02)}
    if placed:
        of |= {"world_size": 8, "lengths": [60, 60], "columns": 120, "layers": (278528, 2)}
        of |= {"masks": ("causal", SlidingWindow(24, 3))}
        of |= {"config": cp.PlanConfig(balance_tolerance=0.3)}
    plan_with = cp.place_tokens if placed else cp.plan_attention
    made = plan_with(**of)
    sizes = {name: getattr(made.needs, name) for name in CAPACITIES[placed]}
    again = plan_with(**of | {"config": dataclasses.replace(of["config"], **sizes)})
    assert again.imbalance == made.imbalance


@KINDS
def test_the_expected_rate_is_kept(placed):
    rng = np.random.default_rng(1)
    sample = [draw(rng) for _ in range(12)]

    def config_for(overflow):
        sizes: Any = {"world_size": WORLD_SIZE, "columns": COLUMNS}
        config = cp.fit_plan_config(sample, placed=placed, overflow=overflow, **sizes)
        assert config.expected_overflow is not None and config.kv_capacity is not None
        return config, config.expected_overflow

    config, expected = config_for(0.02)
    assert 0 < expected <= 0.02
    assert all(fits(batch, placed, config) for batch in sample)
    rare, expected = config_for(1e-6)
    assert expected <= 1e-6
    assert all(getattr(rare, name) >= getattr(config, name) for name in CAPACITIES[placed])
    assert (rare.kv_capacity or 0) <= 3 * WORLD_SIZE * COLUMNS
    assert sum(not fits(draw(rng), placed, config) for _ in range(16)) <= 1


@KINDS
def test_other_choices_and_given_capacities_are_kept(placed):
    """Also from arrays: of ids, and of lengths in lists."""
    rng = np.random.default_rng(2)
    lengths = [draw(rng) for _ in range(5)]
    ids = [np.repeat(np.arange(1, len(x) + 1), x)[None] for x in lengths]
    given = cp.PlanConfig(balance_tolerance=0.2, max_pieces=99)
    options = {"placed": placed, "world_size": WORLD_SIZE, "config": given}
    config = cp.fit_plan_config(ids, **options)
    assert (config.balance_tolerance, config.max_pieces) == (0.2, 99)
    assert all(getattr(config, name) is not None for name in CAPACITIES[placed])
    assert config == dataclasses.replace(config, expected_overflow=None)
    for batches in (np.stack(ids[:1]), lengths[:1], [[np.array(lengths[0])]]):
        assert cp.fit_plan_config(batches, **options) == cp.fit_plan_config(ids[:1], **options)


@KINDS
def test_capacities_are_no_larger_than_any_batch_needs(placed):
    """A rank receives each row of the batch once at most; no range and no piece is empty."""
    world_size, columns = 4, 64
    sample = [[[64], [7, 50]], [[1] * 64, [1] * 64]]
    options = {"world_size": world_size, "columns": columns, "overflow": 1e-9, "placed": placed}
    config = cp.fit_plan_config(sample, **options)
    num_tokens = len(sample[0]) * columns
    most: dict[str, Any] = dict.fromkeys(CAPACITIES[placed], num_tokens)
    most["max_pieces" if placed else "max_q_transfers"] = num_tokens // world_size
    assert all(getattr(config, name) <= most[name] for name in most)
    assert config.kv_capacity == num_tokens
    del most["kv_capacity"]
    alone = cp.fit_plan_config(sample, **options, config=cp.PlanConfig(**most))
    assert (alone.kv_capacity, alone.expected_overflow) == (num_tokens, 0)  # every batch fits


@KINDS
def test_batches_of_different_shapes_warn(placed):
    with pytest.warns(UserWarning, match=r"a rank holds 2 to 5 tokens.*with lengths, columns="):
        cp.fit_plan_config([[4], [10]], placed=placed, world_size=2)


def test_capacities_from_masks_with_arrays_of_each_batch():
    rng = np.random.default_rng()
    batches = [np.repeat([1, 2], [size, 24 - size])[None] for size in (5, 20, 12)]
    of_batches = [PrefixLM(np.arange(24)[None] < rng.integers(1, 24)) for _ in batches]
    options: dict[str, Any] = {"world_size": 2}
    for placed in (False, True):
        fit = partial(cp.fit_plan_config, batches, placed=placed, **options)
        config = fit(mask=of_batches)
        for ids, mask in zip(batches, of_batches, strict=True):
            given = {"segment_ids": ids, "mask": mask, "config": config, **options}
            assert cp.place_tokens(**given).plan.fits if placed else cp.plan_attention(**given).fits
        with pytest.raises(ValueError, match=r"a list for 2 batches, but there are more\."):
            fit(mask=of_batches[:2])
    both = [("causal", mask) for mask in of_batches]
    assert fit(masks=both).kv_capacity
    with pytest.raises(ValueError, match=r"masks is a list for 4 batches.* Pass one el"):
        fit(masks=[*both, both[0]])


# ---- What a mask can need: plans inside `jit` reserve it, and no batch needs more.


def test_the_bound_of_published_sizes():
    """Blocks of 128 rows need 4 blocks before them for a window of 512: 5 times the rank's rows."""
    grid, everything = BlockGrid(1, W, 8192, 128), W * 8192
    assert kv_bound(grid, SlidingWindow(512)) == kv_bound(grid, Chunked(513)) == 5 * 8192
    assert kv_bound(grid, SlidingWindow(128, 128)) == 3 * 8192
    for mask in (Causal(), BlockCausal(4), SlidingWindow(9, None), SlidingWindow(4096)):
        assert kv_bound(grid, mask) == everything


def lengths(rng, num_tokens, size):
    """Documents of lengths that make blocks see far for little work, beside others."""
    kind = rng.integers(4)
    found = rng.integers(1, 4 * size, num_tokens)
    if kind == 0:
        found[rng.random(num_tokens) < 0.7] = 1
    elif kind == 1:
        found[:] = rng.integers(size, 2 * size)
    elif kind == 2:
        found[: rng.integers(num_tokens)] = 1
    return found


def test_no_batch_needs_more_and_needs_are_those_of_the_plan():
    """Of blocks of unequal length."""
    batch, rows = 2, 30
    options: dict[str, Any] = {"mask": SlidingWindow(6, 3), "config": cp.PlanConfig(4)}
    run, rng = jax.jit(partial(cp.plan_attention, world_size=W, **options)), np.random.default_rng()
    for number in range(20):
        ids = [np.repeat(np.arange(1, W * rows + 1), lengths(rng, W * rows, 17)) for _ in "ab"]
        ids = np.array([x[: W * rows] for x in ids], np.int32)
        for row in ids:
            row[rng.integers(W * rows // 2, 2 * W * rows) :] = 0
        plan = run(ids)
        assert plan.kv_capacity < W * batch * rows
        assert plan.fits and (plan.kv_metadata.num_total_recv_tokens <= plan.kv_capacity).all()
        if number < 5:
            needs = needs_inside_jit(ids, world_size=W, **options)
            assert plan.needs == dataclasses.replace(needs, block=None)
            assert needs.fits(needs) and options["config"].fits(needs)
            for name in NAMES:
                less = dataclasses.replace(needs, **{name: max(getattr(needs, name) - 1, 1)})
                assert less.fits(needs) == (less == needs)


@jax.jit
def _assigned(cost, rows):
    """Without room in the last step; with some; and as if the balance were good before it."""
    options: Any = [{"row_limit": 0, "tolerance": 0.01}, {"row_limit": 70, "tolerance": 0.01}]
    options.append({"row_limit": 10**6, "tolerance": 9.0})
    return [balance_blocks(cost, rows, **x) for x in options]


def test_an_assignment_bounds_rows_for_any_costs():
    """Its last step moves nothing to a rank that has its limit of rows."""
    rng, num_moved = np.random.default_rng(), 0
    length = np.broadcast_to(np.array([8, 8, 8, 8, 3], np.int32), (2, 4, 5))
    most = 2 * 2 * 35 + 8
    for number in range(40):
        cost = (10.0 ** rng.uniform(0, rng.choice([1, 2, 4, 6]), length.shape)).astype(np.int32)
        cost[rng.random(length.shape) < (0, 0.5, 0.95)[number % 3]] = 0
        rows = np.where(cost > 0, length, 0)
        before, after, loose = map(np.asarray, _assigned(cost, rows))
        np.testing.assert_array_equal(before, loose)
        num_moved += (before != after).sum()
        assert after.min() >= 0 and after.max() < 4
        held, then = (
            np.bincount(x.ravel(), weights=rows.ravel(), minlength=4) for x in (before, after)
        )
        assert held.max() <= most and (then <= np.maximum(held, 70)).all()
        load = np.bincount(after.ravel(), weights=cost.ravel(), minlength=4)
        assert load.max() <= max(cost.sum((0, 2)).max(), load.mean() + cost.max())
    assert num_moved


def test_an_assignment_keeps_its_limit_of_keys():
    """Of any costs and keys: receivers, and single moves, leave at home what exceeds it."""
    num_blocks, exceeded, rng = 12, 0, np.random.default_rng()

    @jax.jit
    def assign(cost, begin, limit):
        block = jnp.arange(W * num_blocks, dtype=jnp.int32)
        piece, rows = block // num_blocks, jnp.ones((1, W, num_blocks), jnp.int32)
        keys: Any = KeyLimit(begin, block + 1, cost.reshape(-1) > 0, piece, limit)
        options: Any = {"row_limit": 3 * num_blocks, "tolerance": 0.0}
        return [balance_blocks(cost, rows, keys=x, **options) for x in (keys, None)]

    for _ in range(40):
        cost = rng.integers(0, 100, (1, W, num_blocks)) ** rng.integers(1, 4)
        cost[rng.random(cost.shape) < rng.random()] = 0
        cost[:, rng.permutation(W)[: rng.integers(W)]] //= 50
        block = np.arange(W * num_blocks)
        reach = rng.integers(1, 6)
        begin = np.maximum.accumulate(np.maximum(block - rng.integers(0, reach + 1, block.size), 0))
        limit = num_blocks + reach + rng.integers(num_blocks)
        arrays = (np.asarray(x, np.int32) for x in (cost, begin, limit))
        ranks = [np.asarray(x).reshape(-1) for x in assign(*arrays)]
        most = []
        for rank in ranks:
            seen = np.zeros((W, block.size), bool)
            for i in np.flatnonzero(cost.reshape(-1)):
                seen[rank[i], begin[i] : i + 1] = True
            most.append(seen.sum(1).max())
        assert most[0] <= limit
        exceeded += most[1] > limit
    assert exceeded  # without the limit


def test_a_limit_of_keys_leaves_room_for_balance():
    """Ranks with few tokens take blocks of the others: keys count once, and those of a rank."""
    ids = np.ones((1, 4, 64), np.int32)
    ids[:, 2:, 16:] = 0
    options: Any = {"mask": SlidingWindow(8), "config": cp.PlanConfig(block=4)}
    plan = jax.jit(partial(cp.plan_attention, world_size=4, **options))(ids.reshape(1, -1))
    assert plan.imbalance <= 1.05


def test_running_keys_stay_in_their_document():
    """What queries from `start` on see first, and queries before `end` last."""
    rng = np.random.default_rng()
    lengths = rng.integers(1, 9, 6)
    mask = Ranges(*rng.integers(0, lengths.sum() + 1, (2, 1, lengths.sum()), np.int32))
    keys = query_table(mask, document_table("test", world_size=1, lengths=[lengths.tolist()]))
    first, last = keys.running_keys(lengths)
    for begin, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        of = slice(begin, begin + length)
        k_start, k_end = keys.ranges.k_start[of], keys.ranges.k_end[of]
        sees = k_start < k_end
        least, most = np.where(sees, k_start, length), np.where(sees, k_end, 0)
        np.testing.assert_array_equal(first[of], np.minimum.accumulate(least[::-1])[::-1])
        np.testing.assert_array_equal(last[of], np.maximum.accumulate(most))
