"""Movement accepts every plan that `Metadata.validate` accepts, and ignores summaries and gaps."""

import numpy as np
import pytest
from movement_oracle import combined, dispatched, random_plan
from moving import bits, capacity_of, run_combine, run_dispatch

from jax_cp_dispatch import Metadata

W, T = 3, 11


def plan_and_rows():
    rng = np.random.default_rng(0)
    plan = random_plan(rng, W, 4, T, num_replicas=2)
    return plan, rng.normal(size=(W, T, 2)).astype(np.float32)


def without(plan, *names):
    return {name: field for name, field in plan.items() if name not in names}


def changed(plan, **fields):
    return {**plan, **fields}


def unread(plan):
    """Yields the plan with each summary wrong or omitted."""
    counts = plan["num_recv_tokens"].copy()
    counts[:, -1] = 0  # only a sum above the capacity is rejected
    yield changed(plan, num_recv_tokens=counts)
    yield changed(plan, num_total_recv_tokens=plan["num_total_recv_tokens"] + 1)
    yield changed(plan, num_seqs=np.full(W, 99, np.int32))
    yield changed(plan, recv_seq_lens=np.full((W, 2), 5, np.uint32))
    yield without(plan, "num_seqs", "num_total_recv_tokens")


def test_movement_does_not_read_summaries():
    plan, x = plan_and_rows()
    capacity = capacity_of(plan)
    y = np.random.default_rng(1).normal(size=(W, capacity, 2)).astype(np.float32)
    for other in unread(plan):
        np.testing.assert_array_equal(
            bits(run_dispatch(other, x, capacity)), bits(dispatched(plan, x, capacity))
        )
        np.testing.assert_allclose(
            run_combine(other, y, T), combined(plan, y, T), rtol=1e-5, atol=1e-6
        )


def test_validate_checks_given_summaries():
    plan, _ = plan_and_rows()
    Metadata(**plan).validate()
    *wrong, left_out = unread(plan)
    for other in wrong:
        with pytest.raises(ValueError, match=r"^Metadata\.validate: "):
            Metadata(**other).validate()
    Metadata(**left_out).validate()


def test_a_plan_with_gaps_is_moved_and_its_gaps_are_zero():
    plan, x = plan_and_rows()
    gap = changed(plan, dst_offset=plan["dst_offset"] + 2)
    capacity = capacity_of(plan) + 2
    np.testing.assert_array_equal(run_dispatch(gap, x, capacity), dispatched(gap, x, capacity))
    with pytest.raises(ValueError, match=r"leaves a gap|ends outside"):
        Metadata(**gap).validate()
