"""A plan knows its rank and itself: parts on other ranks, and parts of other plans, are refused."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from on_mesh import AXIS, all_fail, mesh_of

from jax_cp_dispatch import (
    Documents,
    PlanConfig,
    context_parallel_attention,
    place_tokens,
    plan_attention,
)
from jax_cp_dispatch.masks import Chunked, SlidingWindow

W, T = 2, 128
FIXED = {"q_capacity": 128, "kv_capacity": 256, "max_q_transfers": 32, "max_kv_transfers": 32}
FIXED["max_pieces"] = 32
PLACED: dict[str, Any] = {"kv_capacity": 256, "max_kv_transfers": 32, "max_pieces": 32}
PLACED |= {"max_cut_pieces": 32, "max_linked_pieces": 64}


def balanced(lengths, *, rank=None, **choices):
    config = PlanConfig(**FIXED, **choices)
    return plan_attention(lengths=lengths, world_size=W, config=config, rank=rank)


def placed(lengths, *, rank=None, **choices):
    config = PlanConfig(**PLACED, **choices)
    return place_tokens(lengths, world_size=W, config=config, rank=rank).plan


def of_parts(parts):
    """The plan as a program receives it if each device has the part of its process."""
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


def document_table(lengths, algorithm, plan):
    """The documents of these lengths, with this plan; in placed order, without choices."""
    documents = Documents(np.repeat([np.arange(1, 1 + len(lengths))], lengths, axis=1))
    if algorithm == "balanced":
        return documents.with_plan(plan)
    config = PlanConfig(**PLACED)
    placement = place_tokens(lengths, world_size=W, config=config).documents
    arrays = placement.segment_ids, placement.positions, (plan,)
    return Documents.in_order(*arrays, order=placement.order, columns=placement.columns)


@partial(jax.jit, static_argnames=("algorithm", "implementation"))
def attend(qkv, documents, algorithm, implementation=None):
    return context_parallel_attention(
        *qkv,
        mesh=mesh_of(W),
        axis_name=AXIS,
        algorithm=algorithm,
        documents=documents,
        implementation=implementation,
    )


def rows(num_tokens):
    rng = np.random.default_rng()
    return [rng.normal(size=(1, num_tokens, n, 8)).astype(np.float32) for n in (2, 1, 1)]


ALGORITHMS = [("balanced", balanced), ("placed", placed)]


@pytest.mark.parametrize(("algorithm", "plan_of"), ALGORITHMS)
@pytest.mark.parametrize("made", ["rank=", "slice_of"])
def test_parts_of_processes_in_another_order(algorithm, plan_of, made):
    """Documents of equal length: each rank sends what another one expects."""
    lengths = [T // W] * W
    whole, order = plan_of(lengths), [1, 0]
    part = (lambda r: plan_of(lengths, rank=r)) if made == "rank=" else whole.slice_of
    right, wrong = (of_parts([part(r) for r in ranks]) for ranks in (range(W), order))
    qkv = rows(T)
    right, wrong, whole = (document_table(lengths, algorithm, x) for x in (right, wrong, whole))
    np.testing.assert_array_equal(attend(qkv, right, algorithm), attend(qkv, whole, algorithm))
    all_fail(attend(qkv, wrong, algorithm), "this is the part of rank 1, on rank 0")
    assert np.isnan(attend(qkv, wrong, algorithm, implementation="xla")).all()


# Of the first, both plans send the same counts.
OTHER_CONFIGS = [
    ("balanced", balanced, {"num_heads": 8, "backward": True}),
    ("balanced", balanced, {"balance_tolerance": 0.3}),
    ("placed", placed, {"balance_tolerance": 0.3}),
    ("placed", placed, {"rank_speeds": (1.0, 1.5)}),
]


@pytest.mark.parametrize(("algorithm", "plan_of", "choices"), OTHER_CONFIGS)
def test_ranks_that_follow_plans_of_different_configs(algorithm, plan_of, choices):
    lengths = [20, 4, 17, 19, 9, 59]
    ours, others = plan_of(lengths), plan_of(lengths, **choices)
    mixed = of_parts([ours.slice_of(0), others.slice_of(1)])
    mixed = document_table(lengths, algorithm, mixed)
    run = partial(attend, rows(T), mixed, algorithm)
    all_fail(run(), "rank 1 follows the plan with checksum .* but rank 0 follows another one")
    assert np.isnan(run(implementation="xla")).all()


def test_every_choice_and_the_mask_are_in_the_checksum():
    """Also inside a program, whose plan has no pieces to compare."""
    segment_ids = np.repeat(np.arange(1, W + 1, dtype=np.int32), T // W)[None]
    choices = [{}, {"backward": True}, {"balance_tolerance": 0.2}, {"block": 8}]

    masks = SlidingWindow(3), SlidingWindow(4), Chunked(4)

    def checksum(ids, **options):
        fingerprint = plan_attention(ids, world_size=W, **options).fingerprint
        assert fingerprint.shape == (W, 4)
        return fingerprint[0, 0]

    configs: list[dict[str, Any]] = [{"config": PlanConfig(**x)} for x in choices]
    options = [*configs, *({"mask": x} for x in masks)]
    of_each = lambda ids: [checksum(ids, **x) for x in options]
    of_some = lambda ids: [checksum(ids, **options[i]) for i in (0, 1, 4)]
    for run, number in ((of_each, 7), (jax.jit(of_some), 3)):
        assert len({int(x) for x in run(segment_ids)}) == number
        assert list(map(int, run(segment_ids))) == list(map(int, run(segment_ids)))
    # The estimate of a sample changes no plan.
    estimate = PlanConfig(expected_overflow=0.1)
    assert checksum(segment_ids, config=estimate) == checksum(segment_ids)


@pytest.mark.parametrize(("algorithm", "plan_of"), ALGORITHMS)
def test_equal_numbers_of_a_config_are_equal(algorithm, plan_of):
    """A process may read its config as NumPy's numbers."""
    plans = [plan_of([T], balance_tolerance=x) for x in (0.125, np.float64(0.125))]
    assert len({plan.fingerprint.tobytes() for plan in plans}) == 1
