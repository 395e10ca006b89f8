"""The choice of an algorithm: `choose_algorithm`, "auto", and algorithms as values."""

import copy
import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from array_masks import random_mask
from calls import check_qkv, draw_qkv
from mask_oracle import batch_visible
from on_mesh import AXIS, mesh_of, permuted_mesh

from jax_cp_dispatch import (
    Auto,
    Balanced,
    Documents,
    Halo,
    Hamilton,
    Placed,
    PlanConfig,
    Ring,
    Ulysses,
    Zigzag,
    choose_algorithm,
    context_parallel_attention,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.attention import Algorithm
from jax_cp_dispatch.cost import HARDWARE, Moves, Workload, rank_pairs, rows_by_link
from jax_cp_dispatch.documents import document_lengths
from jax_cp_dispatch.masks import Chunked, SlidingWindow

SIZES: dict[str, Any] = {
    "tokens_per_rank": 8192,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "itemsize": 2,
}


@pytest.fixture
def without_ulysses(monkeypatch):
    """As with heads that the ranks do not divide."""
    monkeypatch.setattr(Ulysses, "candidates", lambda *_, **__: ())


def choose(lengths, num_ranks=8, hardware="h100", **options):
    hardware = HARDWARE[hardware]
    return choose_algorithm(lengths, num_ranks=num_ranks, hardware=hardware, **SIZES, **options)


@pytest.mark.parametrize(
    "lengths, options, expected",
    [
        ([[512] * 128], {}, Balanced()),
        (None, {"mask": SlidingWindow(256)}, Halo()),
        (None, {"layout": "zigzag"}, Zigzag()),
        (None, {"layout": "zigzag", "hardware": "mi300x"}, Hamilton()),
        (None, {"mask": "full"}, Ring()),
        (None, {"mask": SlidingWindow(257, 3)}, Halo()),
        ([[24_000, 18_000, *[1000] * 20]], {"mask": "full"}, Ulysses()),
        ([[65536]], {"mask": "full", "hardware": "cpu"}, Ring()),
        (None, {"hardware": "cpu"}, Zigzag()),
    ],
)
def test_choose_algorithm(lengths, options, expected):
    choice = choose(lengths, **options)
    assert choice.algorithm == expected, choice.reason
    name = choice.algorithm.name
    assert choice.reason.startswith(f"{name}: predicted times, forward and backward: ")


@pytest.mark.parametrize(
    "lengths, options, share",
    [
        ([[512] * 128], {}, "50%"),  # (127 * 513 + 512 * 381) / 2 wasted, 512 * 513 / 2 not
        ([[65536]], {"mask": SlidingWindow(256)}, "50%"),
        ([[65536]], {}, None),
        ([[4096] * 16], {}, None),
    ],
)
def test_short_documents_are_not_promised_the_gain_of_pairs(lengths, options, share):
    reason = choose(lengths, **options).reason
    assert ("balance saves less time than pair counts suggest" in reason) == (share is not None)
    assert share is None or f"{share} of the pairs in computed tiles" in reason


LENGTHS = [[24_000, 12_000, 9000, *[1000] * 17, 3536]]


@pytest.mark.parametrize(
    "with_backward, mask",
    [
        *itertools.product([False, True], [None, SlidingWindow(1024), Chunked(2048)]),
        (False, "full"),  # forward and backward, "balanced" is within 3 %
    ],
)
@pytest.mark.usefixtures("without_ulysses")
def test_tokens_that_can_be_placed(with_backward, mask):
    """By the keys that the placement of these documents moves; only if the caller can place."""
    options = {"with_backward": with_backward, "mask": mask}
    choice = choose(LENGTHS, can_place=True, **options)
    assert choice.algorithm == Placed(), choice.reason
    assert choice.reason.endswith(
        "Place the tokens of every batch with place_tokens, and pass its documents."
    )
    placed = choice.predictions["placed"]
    config = PlanConfig(hardware="h100", backward=True)
    plan = place_tokens(LENGTHS, world_size=8, mask=mask, config=config).plan
    moved = plan.num_kv_tokens_moved / 8
    row_bytes = 2 * 8 * 128 * (2 + 4 * with_backward)
    assert placed.bytes_per_rank == pytest.approx(moved * row_bytes)
    assert placed.total < choice.predictions["balanced"].total

    unable = choose(LENGTHS, **options)
    assert unable.algorithm != Placed() and "placed" not in unable.reason
    assert unable.predictions == {k: v for k, v in choice.predictions.items() if k != "placed"}
    assert "placed" not in choose(LENGTHS, can_place=True, layout="zigzag").predictions


@pytest.mark.usefixtures("without_ulysses")
def test_best_balance_wins_among_close_times(monkeypatch):
    """Close means within 3 %; among equally balanced algorithms, the simplest wins."""

    predict = Algorithm.predict

    def predicted(*of_ring_zigzag_hamilton):
        given = dict(zip((Ring(), Zigzag(), Hamilton()), of_ring_zigzag_hamilton, strict=True))

        def near(algorithm, workload, **options):
            total, imbalance = given.get(algorithm, (9.0, 1.0))
            found = predict(algorithm, workload, **options)
            return dataclasses.replace(found, total=total, imbalance=imbalance)

        monkeypatch.setattr(Algorithm, "predict", near)
        choice = choose(None, mask="full")
        return choice.algorithm.name, "is within 3% of the fastest" in choice.reason

    assert predicted((1.0, 1.0), (1.0, 1.0), (0.98, 1.0)) == ("ring", True)
    assert predicted((1.0, 1.2), (1.02, 1.0), (1.02, 1.0)) == ("zigzag", True)
    assert predicted((1.0, 1.2), (1.04, 1.0), (1.05, 1.0)) == ("ring", False)


def test_predictions_follow_the_plans_of_these_documents():
    """On 2 nodes: the rows of the plans for these heads and nodes, and the slowest rank decides."""
    rows = [[60_000, 5000] + [300] * 200]
    choice = choose(rows, num_ranks=16, can_place=True)
    sizes: dict[str, Any] = {"world_size": 16, "columns": 16 * 8192}
    plan = plan_attention(lengths=rows, **sizes, config=PlanConfig(ranks_per_node=8))
    by_time = PlanConfig(ranks_per_node=8, hardware="h100", backward=True)
    placed = place_tokens(rows, **sizes, config=by_time).plan
    links = lambda metadata, capacity: rows_by_link(
        metadata.rows_between_ranks(), ranks_per_node=8, capacity=capacity
    )
    moves = {
        Balanced(): Moves(
            links(plan.q_metadata, plan.q_capacity),
            links(plan.kv_metadata, plan.kv_capacity),
            plan.pairs.astype(float),
        ),
        Placed(): Moves(
            0, links(placed.kv_metadata, placed.kv_capacity), placed.pairs.astype(float)
        ),
    }
    workload = Workload(16, **SIZES, lengths=tuple(map(tuple, rows)))
    options: dict[str, Any] = {"hardware": HARDWARE["h100"], "with_backward": True}
    for algorithm, moved in moves.items():
        predicted = algorithm.predict(workload, moves=moved, **options)
        assert choice.predictions[algorithm.name] == predicted
        assert predicted.bytes_between_nodes > 0


def test_ranks_that_share_cores():
    """Better balance does not shorten a step there, so the reason does not speak of it."""
    reason = choose(LENGTHS, hardware="cpu").reason
    assert reason.endswith(
        "All ranks share 2 cores: a step takes as long as the work of all of them, so better "
        "balance hardly shortens it."
    )
    assert "slowest ranks" not in reason and "slowest ranks" in choose(LENGTHS).reason


def test_document_lengths():
    """Padding is left out, also in the middle; positions separate documents."""
    ids = np.array([[1, 1, 2, 0, 0, 4], [3, 3, 3, 0, 0, 5], [0, 0, 7, 7, 0, 0]])
    assert document_lengths(ids) == ((2, 1, 1), (3, 1), (2,))
    positions = np.array([[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 1]])
    assert document_lengths(ids, positions) == ((2, 1, 1), (2, 1, 1), (2,))
    assert document_lengths(np.zeros((1, 4), int)) == ((),)


# ---- Algorithms are values.

ROWS = np.array([[0, 1]])
MAPS = [[-1, 0], [0, -1]]
EQUAL = [
    ("balanced", Balanced(PlanConfig())),
    ("hamilton", Hamilton()),
    (Hamilton(cycles=ROWS), Hamilton(cycles=ROWS.tolist())),
    (Hamilton(maps=(MAPS, MAPS)), Hamilton(maps=(np.array(MAPS), np.array(MAPS)))),
    ("auto", Auto(hardware=None)),
]


@pytest.fixture
def attended(monkeypatch):
    """Algorithm and plan of each trace of a rank's part."""
    seen: list[Any] = []
    for kind in (Ring, Zigzag, Halo, Hamilton, Ulysses, Balanced, Placed):

        def recorded(algorithm, *operands, run=kind.run):
            seen.append((algorithm, operands[-1].plan))
            return run(algorithm, *operands)

        monkeypatch.setattr(kind, "run", recorded)
    jax.clear_caches()
    return seen


@pytest.mark.parametrize("one, other", EQUAL, ids=str)
def test_equal_algorithms_share_a_program(one, other, attended):
    """Objects compare by value: an equal object causes no new trace."""
    x = jax.ShapeDtypeStruct((1, 8, 1, 4), np.float32)
    attend = partial(context_parallel_attention, mesh=mesh_of(2), axis_name=AXIS)
    trace = lambda algorithm: jax.eval_shape(partial(attend, algorithm=algorithm), x, x, x)
    trace(one)
    num_traces = len(attended)
    assert num_traces > 0
    trace(other)
    assert len(attended) == num_traces
    trace(Hamilton(cycles="direct"))
    assert len(attended) > num_traces


def test_algorithms_are_values():
    algorithms = [x for pair in EQUAL for x in pair if not isinstance(x, str)]
    assert len(set(algorithms)) == len(EQUAL)
    assert Hamilton(cycles=ROWS).cycles == ((0, 1),)
    assert all(copy.deepcopy(x) == x and hash(copy.deepcopy(x)) == hash(x) for x in algorithms)


def test_a_choice_can_be_passed_on():
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 4, "itemsize": 4}
    hardware = dataclasses.replace(HARDWARE["mi300x"], ranks_per_node=2, rail_bandwidth=1e9)
    options = {"num_ranks": 4, "tokens_per_rank": 2**14, "layout": "zigzag", **sizes}
    choice = choose_algorithm(None, hardware=hardware, **options)
    assert choice.algorithm == Hamilton(nodes=2)
    x = jax.ShapeDtypeStruct((1, 16, 1, 4), np.float32)
    where = {"mesh": mesh_of(4), "axis_name": AXIS, "algorithm": choice.algorithm}
    assert jax.eval_shape(partial(context_parallel_attention, **where), x, x, x).shape == x.shape


# ---- "auto": what it knows of a call, and that it plans once.


@pytest.fixture
def predicted(monkeypatch):
    """Workload, options and algorithm of each prediction; `totals` may replace the times."""
    seen: list[Any] = []
    totals: dict[Any, float] = {}
    predict = Algorithm.predict

    def recorded(algorithm, workload, **options):
        seen.append((workload, options, algorithm))
        found = predict(algorithm, workload, **options)
        return dataclasses.replace(found, total=totals.get(algorithm, found.total))

    monkeypatch.setattr(Algorithm, "predict", recorded)
    return seen, totals


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("told_by", ["segments", "positions"])
def test_auto_sees_the_documents(layout, told_by, predicted):
    """In sequence order, for one group of the batch, with the mask."""
    lengths = ((5, 1, 6), (3, 9))
    rows = [[(n, at) for n, length in enumerate(row) for at in range(length)] for row in lengths]
    segment_ids, positions = np.tile(np.moveaxis(np.array(rows), -1, 0), (1, 2, 1))
    if told_by == "segments":
        given: dict[str, Any] = {"segment_ids": segment_ids + 1}
    else:
        given = {"positions": positions}
    if layout == "zigzag":
        given = {"documents": Documents(**{"segment_ids": 0 * segment_ids + 1, **given}).zigzag(2)}
    x = np.ones((4, 12, 2, 8), np.float32)
    mesh = permuted_mesh((2, 2), ("data", AXIS))
    options = {"mask": SlidingWindow(4), "batch_axis": "data", "head_axis": (), **given}
    attend = partial(context_parallel_attention, mesh=mesh, axis_name=AXIS, algorithm="auto")
    jax.eval_shape(partial(attend, **options), x, x, x)
    workload = predicted[0][0][0]
    assert workload.lengths == lengths and workload.mask == SlidingWindow(4)
    assert workload.tokens_per_rank == 6
    compared = {type(algorithm) for _, _, algorithm in predicted[0]}
    assert (Balanced in compared) == (layout == "contiguous")  # it needs packed order


def test_auto_counts_the_pairs_of_any_mask(predicted):
    """With padding between documents; the call is that of an algorithm that was predicted."""
    *arrays, segment_ids = operands = draw_qkv(None, 2, 48)
    constructor, of_mask, sees = random_mask("tree", np.random.default_rng(), segment_ids)
    pairs = batch_visible(segment_ids, sees)
    documents = Documents(segment_ids).zigzag(4)
    *stored, mask = documents.apply((*arrays[:3], constructor(*of_mask)))
    out = context_parallel_attention(
        *stored, mesh=mesh_of(4), axis_name=AXIS, documents=documents, mask=mask, algorithm="auto"
    )
    check_qkv([documents.restore(np.asarray(out))], operands, pairs=pairs)
    workload = predicted[0][0][0]
    sizes = {"num_ranks": 4, "tokens_per_rank": 12, "zigzag": False}
    of_row = lambda b: jax.tree.map(lambda x: x[b : b + 1], workload.mask)
    rows = enumerate(workload.rows)
    found = sum(rank_pairs(x, mask=of_row(b), **sizes).sum() for b, x in rows)
    assert pairs.sum() <= found <= pairs.sum() + (segment_ids == 0).sum()


@pytest.mark.parametrize(
    "config, times, algorithm",
    [
        (PlanConfig(block=2), {}, Balanced(PlanConfig(block=2))),
        (PlanConfig(), {Ring(): 1e-9}, Ring()),
        # A batch that does not fit the capacities of balanced attention gets another algorithm.
        (PlanConfig(max_pieces=1), {}, None),
    ],
)
def test_auto_plans_once(config, times, algorithm, predicted, attended, monkeypatch):
    """With its config; balanced attention follows the plan of the prediction."""
    plans, plan_before = [], Balanced.plan_before

    def plan(algorithm, *known):
        plans.append(algorithm.config)
        return plan_before(algorithm, *known)

    monkeypatch.setattr(Balanced, "plan_before", plan)
    seen, totals = predicted
    totals.update(times)
    # Short documents on 8 GPUs, for which balanced attention is predicted to be the fastest.
    q, k, v = (
        jax.ShapeDtypeStruct((1, 2**16, *shape), np.float16)
        for shape in ((32, 128), (8, 128), (8, 1))
    )
    options: dict[str, Any] = {"batch_axis": (), "head_axis": (), "mesh": mesh_of(8)}
    attend = partial(
        context_parallel_attention, axis_name=AXIS, **options,
        segment_ids=np.arange(2**16, dtype=np.int32)[None] // 512 + 1,
        algorithm=Auto(hardware=HARDWARE["h100"], config=config),
    )  # fmt: skip
    jax.eval_shape(attend, q, k, v)
    assert plans == [config]
    assert {options["hardware"] for _, options, _ in seen} == {HARDWARE["h100"]}
    [(chosen, followed)] = attended
    assert chosen == algorithm or (algorithm is None and not isinstance(chosen, Balanced))
    assert (followed is not None) == isinstance(algorithm, Balanced)
