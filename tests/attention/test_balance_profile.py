"""Balance profiles: each rank's program computes its part of dense attention, alone on a device."""

import importlib
import time
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import attention, attention_gradients
from movement_oracle import combined, dispatched
from sequences import attended

from jax_cp_dispatch import Hamilton, PlanConfig, Ring, place_tokens, plan_attention
from jax_cp_dispatch._rank_times import time_ranks
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, Shape
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.documents.table import document_table
from jax_cp_dispatch.masks import SlidingWindow
from jax_cp_dispatch.profiling import BalanceProfile, balance_profile

module = importlib.import_module("jax_cp_dispatch.attention.profile.balance")

W, T = 3, 8  # ranks, and columns of each
LENGTHS = [[13, 2, 7], [21, 3]]
IDS = np.array([[1] * 13 + [2] * 2 + [3] * 7 + [0] * 2, [1] * 21 + [2] * 3])
MASK = SlidingWindow(9)
HEADS: Any = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}
QKV = [Shape((2, T, n, 8), np.dtype("float32")) for n in (4, 2, 2)]
TOLERANCE = 1e-5  # of float32, relative to the largest entry


def program_of(algorithm) -> Any:
    options = AttentionOptions(read_options("test", "ranks"))
    batch = Batch(W, PackedMask(MASK, documents().numbers()), QKV)
    algorithm, batch = module._read(algorithm, batch)
    program = algorithm.rank_program(options, batch, backward=True)
    compiled = jax.jit(program.run)
    return program, lambda rank, *qkv: compiled(np.int32(rank), *qkv, program.ranges[rank])


def documents():
    return document_table("test", world_size=W, lengths=LENGTHS, columns=W * T)


def drawn():
    """Returns q, k, v of the batch, and their dense output and gradients, whose dout is out."""
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(2, W * T, n, 8)).astype("f") for n in (4, 2, 2)]
    return qkv, *dense(qkv)


def dense(qkv, live=None):
    """Returns the pairs of each token, and output and gradients, of all or the `live` queries."""
    start, end = attended(IDS.shape, IDS, None, MASK)
    if live is not None:
        end = np.where(live, end, start)
    q, k, v = qkv
    out, lse = attention(q, k, v, start, end)
    return end - start, [out, *attention_gradients(q, k, v, start, end, out, np.zeros(lse.shape))]


def of_ranks(x):
    """Returns the rows that each rank holds: those of its columns, one batch row after another."""
    return np.stack([part.reshape(-1, *x.shape[2:]) for part in np.split(x, W, axis=1)])


def check(got, want):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def planned(kind) -> Any:
    """Returns the plan, what it moves of queries and of keys, and the order of rows."""
    if kind == "balanced":
        config = PlanConfig(q_capacity=24, kv_capacity=48)
        plan = plan_attention(IDS, world_size=W, mask=MASK, config=config)
        return plan, vars(plan.q_metadata), vars(plan.kv_metadata), lambda x: x
    placement = place_tokens(segment_ids=IDS, world_size=W, mask=MASK)
    return placement.plan, None, vars(placement.plan.kv_metadata), placement.apply


@pytest.mark.parametrize("kind", ["balanced", "placed"])
def test_a_program_by_a_plan_computes_the_rows_of_its_rank(kind):
    """Output and dq are those of its queries; dk and dv of all ranks sum to the dense ones."""
    (plan, queries, keys, apply), (qkv, pairs, want) = planned(kind), drawn()
    program, run = program_of(plan)
    rows = [of_ranks(apply(x)) for x in qkv]
    want = [of_ranks(apply(x)) for x in want]
    pairs = of_ranks(apply(pairs))

    def moved(x):
        return x if queries is None else dispatched(queries, x, plan.q_capacity)

    received = moved(rows[0]), *(dispatched(keys, x, plan.kv_capacity) for x in rows[1:])
    got = [run(rank, *(x[rank][None] for x in received)) for rank in range(W)]
    out, dq, *dkv = (
        np.stack([np.asarray(x)[0] for x in parts]) for parts in zip(*got, strict=True)
    )
    check(out, moved(want[0]))
    check(dq, moved(want[1]))
    for x, y in zip(dkv, want[2:], strict=True):
        check(combined(keys, x, 2 * T), y)
    assert program.num_pairs.tolist() == moved(pairs).sum(1).tolist()


@pytest.mark.parametrize("algorithm", [Ring(), Hamilton()], ids=lambda x: x.name)
def test_a_program_of_rotating_keys_computes_the_rows_of_its_rank(algorithm):
    """If all ranks hold the same keys, then also those that would arrive from another rank.

    The gradients of keys are those of the rank's own queries, summed over the ranks that hold them.
    """
    program, run = program_of(algorithm)
    order = np.arange(W * T)
    if algorithm.name != "ring":  # rank r has blocks r and 2 * W - 1 - r of 2 * W
        block = order.reshape(2 * W, T // 2)
        order = np.concatenate([[block[r], block[-1 - r]] for r in range(W)]).reshape(-1)
    tokens = order.reshape(W, T)
    (q, *kv), *_ = drawn()
    is_padding = (IDS == 0)[:, tokens].any(1)  # on some rank, which zeroes its keys there
    kv = [np.where(is_padding[..., None, None], 0, x[:, :T]) for x in kv]
    kv = [x[:, np.argsort(order) % T] for x in kv]
    pairs, (out, *_) = dense([q, *kv])
    assert program.num_pairs.tolist() == [pairs[:, x].sum() for x in tokens]
    for rank, own in enumerate(tokens):
        got = run(rank, q[:, own], *(x[:, own] for x in kv))
        _, (_, dq, *dkv) = dense([q, *kv], live=np.isin(np.arange(W * T), own))
        dkv = [x[:, tokens].sum(1) for x in dkv]
        for x, y in zip(got, (out[:, own], dq[:, own], *dkv), strict=True):
            check(np.asarray(x), y)


def test_documents_have_numbers():
    """Counted over the batch, unlike segment ids; 0 is padding."""
    assert documents().numbers().tolist() == np.where(IDS > 0, np.add(IDS, [[0], [3]]), 0).tolist()


def test_profiles_count_the_pairs_of_each_rank():
    algorithms = "ring", place_tokens(LENGTHS, world_size=W, columns=W * T, mask=MASK).plan
    given = {"columns": W * T, "mask": MASK, "repeats": 1, "backward": False, **HEADS}
    got = balance_profile(iter(LENGTHS), world_size=W, algorithms=algorithms, **given)
    pairs = of_ranks(drawn()[1]).sum(1).tolist()
    assert [x.name for x in got] == ["ring", "placed"]
    assert list(got[0].work) == pairs and sum(got[1].work) == sum(pairs)
    assert all(len(x.seconds) == W and min(x.seconds) > 0 for x in got)


def test_profiles_count_the_pairs_of_masks_of_arrays():
    make, arrays, seen = random_mask("tree", np.random.default_rng(), np.array(IDS))
    ids = np.array(IDS)
    seen &= (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    of_tokens = seen.sum((0, 2))
    given = {"columns": W * T, "mask": make(*arrays), "repeats": 1, "backward": False, **HEADS}
    algorithms = "ring", "placed"
    ring, placed = balance_profile(LENGTHS, world_size=W, algorithms=algorithms, **given)
    assert list(ring.work) == of_tokens.reshape(W, T).sum(1).tolist()
    assert sum(placed.work) == of_tokens.sum()


def test_ranks_and_programs_take_turns(monkeypatch):
    """By a fake clock: after one run of each program to compile, each rank once in each round."""
    ran, clock = [], [0.0]
    seconds = {("a", 0): [5, 1, 3], ("a", 1): [2, 2, 9], ("b", 0): [7, 7, 7]}
    ranks = {"a": 2, "b": 1}

    def run_of(name):
        def run(rank):
            ran.append((name, rank))
            rounds = ran.count((name, rank)) - 1 - (rank == 0)
            clock[0] += 100 if rounds < 0 else seconds[name, rank][rounds]

        return run

    monkeypatch.setattr(time, "process_time", lambda: clock[0])
    assert time_ranks([run_of(name) for name in ranks], [2, 1], 3) == [(3, 2), (7,)]
    assert ran == [("a", 0), ("b", 0)] + 3 * list(seconds)


def test_text():
    profile = BalanceProfile("ring", seconds=(0.001, 0.003), work=(10, 40), unit="pairs")
    assert (profile.busiest, profile.imbalance, profile.work_imbalance) == (0.003, 1.5, 1.6)
    assert str(profile).splitlines() == [
        "ring: busiest rank 3.00 ms, 1.500 of the mean; in pairs 1.600",
        "  rank    ms  pairs",
        "  0     1.00     10",
        "  1     3.00     40",
    ]
    assert BalanceProfile("ring", seconds=(1.0, 1.0), work=(0, 0), unit="pairs").work_imbalance == 1
