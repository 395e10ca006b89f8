"""Profiles of attention: its steps by rank with their trace, and the balance of all ranks."""

import importlib
import json
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import random_mask
from attention_oracle import masked_attention
from calls import check_qkv, dense_qkv, draw_qkv
from mask_oracle import batch_pairs, batch_visible, shared_prefix_pairs
from movement_oracle import combined, dispatched
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents, Hamilton, PlanConfig, place_tokens, plan_attention
from jax_cp_dispatch._rank_times import time_ranks  # inner: what is timed
from jax_cp_dispatch._ranks.options import read_options  # inner: what is timed
from jax_cp_dispatch.attention.algorithms.rank_program import Batch, Shape  # inner: the same
from jax_cp_dispatch.attention.call_options import AttentionOptions  # inner: what is timed
from jax_cp_dispatch.documents.ranges import PackedMask  # inner: what is timed
from jax_cp_dispatch.documents.table import document_table  # inner: what is timed
from jax_cp_dispatch.masks import SharedPrefix, SlidingWindow
from jax_cp_dispatch.profiling import (
    BalanceProfile,
    Span,
    balance_profile,
    hamilton_attention_profile,
)
from jax_cp_dispatch.timeline import write_chrome_trace

W = 3


def profile(*operands, **options):
    options = {"mesh": mesh_of(W, [1, 2, 0]), "axis_name": AXIS, "repeats": 2, **options}
    return hamilton_attention_profile(*operands, **options)


@pytest.mark.parametrize(
    "zigzag, mask, options", [(False, "causal", {}), (True, SlidingWindow(5), {"cycles": "direct"})]
)
def test_hamilton_attention_profile(zigzag, mask, options, tmp_path):
    """Tokens in packed order are rearranged first and last."""
    operands = draw_qkv(0, 1, 7 * W)
    documents = Documents(operands[4])
    documents = documents.zigzag(W) if zigzag else documents
    stored = documents.apply(operands[:3])
    got = profile(*stored, documents=documents, mask=mask, **options)
    check_qkv([documents.restore(np.asarray(got.out))], operands, mask)

    names = [f"step {step}" for step in range(W)]
    assert [step.name for step in got.steps] == (
        names if zigzag else ["to zigzag", *names, "from zigzag"]
    )
    for step in got.steps:
        assert (step.computation > 0) == step.name.startswith("step")
        assert (step.communication > 0) == (step.name != names[-1])
    assert got.total > 0
    check_times(got)
    events = json.loads(got.write_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    check_trace(events, got)


def test_masks_of_arrays():
    """Keys rotate with the queries that may see them. In zigzag order nothing is rearranged."""
    T = W * 8
    completions = np.arange(T)[None] % (T // 2) // 4
    *arrays, _ = draw_qkv(1, 1, T)
    operands = *arrays, np.repeat([[1, 2]], T // 2, axis=1)
    documents = Documents(operands[4]).zigzag(W)
    *stored, of_order = documents.apply((*arrays[:3], SharedPrefix(completions)))
    got = profile(*stored, documents=documents, mask=of_order)
    pairs = batch_visible(operands[4], shared_prefix_pairs(completions))
    check_qkv([documents.restore(np.asarray(got.out))], operands, pairs=pairs)


def check_times(got):
    """Steps take as long as their slowest rank; the text has a row per step and per rank."""
    assert [x.rank for x in got.ranks] == list(range(W))
    for kind in ("communication", "computation"):
        total = getattr(got, kind)
        assert total == pytest.approx(sum(getattr(step, kind) for step in got.steps))
        of_ranks = [getattr(x, kind) for x in got.ranks]
        assert max(of_ranks) <= total * (1 + 1e-9)
        spans = [
            sum(s.duration for s in got.spans if (s.rank, s.kind) == (r, kind)) for r in range(W)
        ]
        assert of_ranks == pytest.approx(spans)
    names = [line.split("  ")[0] for line in str(got).splitlines()]
    steps, ranks = [step.name for step in got.steps], [f"rank {r}" for r in range(W)]
    assert names[2:] == [*steps, "all", "All steps, by rank, ms:", "", *ranks]


def check_trace(events, got):
    """A process for each rank, a thread for each kind; spans that start together form one step."""
    labels = Counter((e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M")
    kinds = ("computation", "communication")
    assert labels == Counter(
        [("process_name", rank, f"rank {rank}") for rank in range(W)]
        + [("thread_name", rank, kind) for rank in range(W) for kind in kinds]
    )
    spans = [e for e in events if e["ph"] == "X"]
    assert (
        len(spans)
        == len(got.spans)
        == W * sum((step.computation > 0) + (step.communication > 0) for step in got.steps)
    )
    now = 0.0
    for step in got.steps:
        of_step = [e for e in spans if e["name"] == step.name]
        assert {e["pid"] for e in of_step} == set(range(W))
        for kind, thread in zip(kinds, range(2), strict=True):
            longest = max((e["dur"] for e in of_step if e["tid"] == thread), default=0)
            assert longest == pytest.approx(1e6 * getattr(step, kind))
            assert all(e["cat"] == kind for e in of_step if e["tid"] == thread)
        assert [e["ts"] for e in of_step] == pytest.approx([1e6 * now] * len(of_step))
        now += max(step.computation, step.communication)


def test_trace_of_any_spans(tmp_path):
    spans = [Span(1, "communication", "b", 2e-6, 1e-6), Span(0, "computation", "a", 0.0, 3e-6)]
    path = write_chrome_trace(spans, tmp_path / "trace.json")
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"]) for e in events] == [("a", 0, 0), ("b", 1, 1)]
    assert [e["ts"] for e in events] == pytest.approx([0, 2])
    assert [e["dur"] for e in events] == pytest.approx([3, 1])


# ---- Balance: the program of each rank computes its part of dense attention, alone on a device.


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
    pairs = batch_pairs(MASK, IDS)
    if live is not None:
        pairs = pairs & live[:, None]
    out, _ = masked_attention(*qkv, allowed=pairs)
    return pairs.sum(2), dense_qkv((*qkv, out, IDS), pairs=pairs)


def of_ranks(x):
    """Returns the rows that each rank holds: those of its columns, one batch row after another."""
    return np.stack([part.reshape(-1, *x.shape[2:]) for part in np.split(x, W, axis=1)])


def check(got, want):
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


def test_a_program_by_a_plan_computes_the_rows_of_its_rank():
    """Output and dq are those of its queries; dk and dv of all ranks sum to the dense ones."""
    config = PlanConfig(q_capacity=24, kv_capacity=48)
    plan = plan_attention(IDS, world_size=W, mask=MASK, config=config)
    queries, keys = vars(plan.q_metadata), vars(plan.kv_metadata)
    qkv, pairs, want = drawn()
    program, run = program_of(plan)
    rows, want = ([of_ranks(x) for x in arrays] for arrays in (qkv, want))
    moved = lambda x: dispatched(queries, x, plan.q_capacity)
    received = moved(rows[0]), *(dispatched(keys, x, plan.kv_capacity) for x in rows[1:])
    got = [run(rank, *(x[rank][None] for x in received)) for rank in range(W)]
    out, dq, *dkv = (
        np.stack([np.asarray(x)[0] for x in parts]) for parts in zip(*got, strict=True)
    )
    check(out, moved(want[0]))
    check(dq, moved(want[1]))
    for x, y in zip(dkv, want[2:], strict=True):
        check(combined(keys, x, 2 * T), y)
    assert program.num_pairs.tolist() == moved(of_ranks(pairs)).sum(1).tolist()


def test_a_program_of_rotating_keys_computes_the_rows_of_its_rank():
    """If all ranks hold the same keys, then also those that would arrive from another rank.

    The gradients of keys are those of the rank's own queries, summed over the ranks that hold them.
    """
    program, run = program_of(Hamilton())
    block = np.arange(W * T).reshape(2 * W, T // 2)  # rank r has blocks r and 2 * W - 1 - r
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


def test_text_of_a_balance_profile():
    profile = BalanceProfile("ring", seconds=(0.001, 0.003), work=(10, 40), unit="pairs")
    assert (profile.busiest, profile.imbalance, profile.work_imbalance) == (0.003, 1.5, 1.6)
    assert str(profile).splitlines() == [
        "ring: busiest rank 3.00 ms, 1.500 of the mean; in pairs 1.600",
        "  rank    ms  pairs",
        "  0     1.00     10",
        "  1     3.00     40",
    ]
    assert BalanceProfile("ring", seconds=(1.0, 1.0), work=(0, 0), unit="pairs").work_imbalance == 1
