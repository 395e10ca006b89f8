"""`choose_algorithm`, and the document lengths it receives."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_cp_dispatch import (
    Balanced,
    Halo,
    Hamilton,
    Placed,
    PlanConfig,
    Ring,
    Ulysses,
    Zigzag,
    choose_algorithm,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.attention import Algorithm
from jax_cp_dispatch.cost import HARDWARE, Moves, Workload, rows_by_link
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
        ([[20_000, *[100] * 455]], {"mask": Chunked(8192)}, Ulysses()),
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


def test_a_two_sided_window_is_counted():
    """Mirrored, it has the same pairs, and so nearly the same prediction."""
    one_sided = choose(None, mask=SlidingWindow(256))
    two_sided = choose(None, mask=SlidingWindow(1, 255))
    whole = choose(None, mask="full")
    compute = one_sided.predictions["ring"].compute
    assert two_sided.predictions["ring"].compute == pytest.approx(compute, rel=0.3)
    assert two_sided.predictions["ring"].compute < whole.predictions["ring"].compute / 50


PACKED = [[24_000, 18_000, *[1000] * 20, 3536]]


@pytest.mark.parametrize("mask", [None, SlidingWindow(1024), Chunked(2048)])
@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.usefixtures("without_ulysses")
def test_tokens_that_can_be_placed(with_backward, mask):
    """By the keys that the placement of these documents moves; only if the caller can place."""
    options = {"with_backward": with_backward, "mask": mask}
    choice = choose(PACKED, can_place=True, **options)
    assert choice.algorithm == Placed(), choice.reason
    assert choice.reason.endswith(
        "Place the tokens of every batch with place_tokens, and pass its documents."
    )
    placed = choice.predictions["placed"]
    moved = place_tokens(PACKED, world_size=8, mask=mask).plan.num_kv_tokens_moved / 8
    row_bytes = 2 * 8 * 128 * (2 + 4 * with_backward)
    assert placed.bytes_per_rank == pytest.approx(moved * row_bytes)
    assert placed.total < choice.predictions["balanced"].total

    unable = choose(PACKED, **options)
    assert unable.algorithm != Placed() and "placed" not in unable.reason
    assert unable.predictions == {k: v for k, v in choice.predictions.items() if k != "placed"}


def test_placement_is_for_tokens_in_order():
    assert "placed" not in choose(PACKED, can_place=True, layout="zigzag").predictions


def test_placement_for_full_attention():
    predictions = choose(PACKED, can_place=True, mask="full").predictions
    assert predictions["balanced"].total < predictions["ring"].total
    moved = place_tokens(PACKED, world_size=8, mask="full").plan.num_kv_tokens_moved / 8
    assert predictions["placed"].bytes_per_rank == pytest.approx(moved * 2 * 8 * 128 * 6)
    assert predictions["placed"].total < predictions["ring"].total


def test_short_times_are_readable():
    sizes: dict[str, Any] = SIZES | {"tokens_per_rank": 1}
    choice = choose_algorithm([[1]], num_ranks=1, hardware=HARDWARE["h100"], **sizes)
    time = choice.predictions["ring"].total
    assert 0 < time < 1e-6
    assert f"ring {1e9 * time:.2f} ns" in choice.reason


def test_rows_in_another_order_change_at_most_the_plan():
    rows = [[100, 8092, 20000], [65536], [1] * 500]
    one, other = choose(rows), choose(rows[::-1])
    assert one.algorithm == other.algorithm
    for name in ("ring", "zigzag", "hamilton"):
        assert one.predictions[name] == other.predictions[name]


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
    """On 2 nodes: the rows of the plans for these heads and nodes, and the busiest rank decides."""
    rows = [[60_000, 5000] + [300] * 200]
    choice = choose(rows, num_ranks=16, can_place=True)
    sizes: dict[str, Any] = {"world_size": 16, "columns": 16 * 8192}
    plan = plan_attention(lengths=rows, **sizes, config=PlanConfig(ranks_per_node=8))
    placed = place_tokens(rows, **sizes, config=PlanConfig(ranks_per_node=8)).plan
    links = lambda metadata, capacity: rows_by_link(
        metadata.rows_between_ranks(), ranks_per_node=8, capacity=capacity
    )
    moves = {
        Balanced(): Moves(
            links(plan.q_metadata, plan.q_capacity),
            links(plan.kv_metadata, plan.kv_capacity),
        ),
        Placed(): Moves(0, links(placed.kv_metadata, placed.kv_capacity)),
    }
    workload = Workload(16, **SIZES, lengths=tuple(map(tuple, rows)))
    options: dict[str, Any] = {"hardware": HARDWARE["h100"], "with_backward": True}
    for algorithm, moved in moves.items():
        predicted = algorithm.predict(workload, moves=moved, **options)
        assert choice.predictions[algorithm.name] == predicted
        assert predicted.bytes_between_nodes > 0


def test_ranks_that_share_cores():
    """Better balance does not shorten a step there, so the reason does not speak of it."""
    reason = choose(PACKED, hardware="cpu").reason
    assert reason.endswith(
        "All ranks share 2 cores: a step takes as long as the work of all of them, so better "
        "balance hardly shortens it."
    )
    assert "slowest ranks" not in reason and "slowest ranks" in choose(PACKED).reason


def test_document_lengths():
    """Padding is left out, also in the middle; positions separate documents."""
    ids = np.array([[1, 1, 2, 0, 0, 4], [3, 3, 3, 0, 0, 5], [0, 0, 7, 7, 0, 0]])
    assert document_lengths(ids) == ((2, 1, 1), (3, 1), (2,))
    positions = np.array([[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 1]])
    assert document_lengths(ids, positions) == ((2, 1, 1), (2, 1, 1), (2,))
    assert document_lengths(np.zeros((1, 4), int)) == ((),)


def test_hardware_is_not_a_name(unchecked_types):
    with pytest.raises(TypeError, match=r"hardware is of type str; .* an entry of cost.HARDWARE"):
        choose_algorithm([[1]], num_ranks=8, hardware="h100", **SIZES)  # pyright: ignore
