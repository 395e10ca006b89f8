"""One plan, and the results of `dispatch`, `combine` and their derivatives in any context."""

import functools
import re
from typing import Any

import jax
import numpy as np
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, all_fail, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch

W, S, T, F = 4, 5, 8, 6
PLAN = random_plan(np.random.default_rng(0), W, S, T, 2)
METADATA = Metadata(**PLAN)
CAPACITY = int(PLAN["num_total_recv_tokens"].max()) + 2


def integers(*shape, seed=0):
    """Returns small integers as floats: sums are exact, so results compare without tolerance."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


X, Y = integers(W * T, F, seed=1), integers(W * CAPACITY, F, seed=2)
X_OF_RANKS, Y_OF_RANKS = X.reshape(W, T, F), Y.reshape(W, CAPACITY, F)
SENT, HOME = dispatched(PLAN, X_OF_RANKS, CAPACITY), combined(PLAN, Y_OF_RANKS, T)


def send(x, metadata, **options):
    """Dispatches the rows of one rank."""
    rows = {} if "buffer" in options else {"capacity": CAPACITY}
    given: dict[str, Any] = {"axis_name": AXIS, **rows, **options}
    return dispatch(x, metadata, **given)


def combine_rows(y, metadata, **options):
    return combine(y, metadata, axis_name=AXIS, num_tokens=T, **options)


@functools.cache
def _good():
    return on_ranks(send, mesh_of(W))


def check_next_program():
    np.testing.assert_array_equal(_good()(X_OF_RANKS, METADATA), SENT)


def fails(out, match):
    """Requires the same error of every device; the next program succeeds."""
    all_fail(jax.tree.leaves(out)[0], match)
    check_next_program()


def milliseconds_of(**options):
    """Returns the deadlines of the calls of a program."""
    run = on_ranks(lambda x, m: send(x, m, **options), mesh_of(W))
    return re.findall(r"deadline_ms = (\d+) : i64", run.lower(X_OF_RANKS, METADATA).as_text())


def moves(x, y, metadata, *, axis_name: Any = AXIS, **where):
    """Returns the results of dispatch and combine, on any number of rows."""
    options = {"axis_name": axis_name, **where}
    sent = dispatch(x, metadata, capacity=CAPACITY, **options)
    return sent, combine(y, metadata, num_tokens=T, **options)


def moves_and_gradients(x, y, metadata, **where):
    """Returns `moves`, and the vector-Jacobian product of each."""
    (sent, home), pull = jax.vjp(lambda x, y: moves(x, y, metadata, **where), x, y)
    return sent, home, *pull((2 * y, 2 * x))


def check_all_ranks(results, x=X, y=Y, plan=PLAN):
    """Checks `moves` of arrays of all ranks, or `moves_and_gradients`."""
    per_rank = lambda a: np.asarray(a).reshape(plan["world_size"], -1, *a.shape[1:])
    x, y = per_rank(x), per_rank(y)
    sent, home = dispatched(plan, x, CAPACITY), combined(plan, y, T)
    for got, want in zip(map(per_rank, results), (sent, home, 2 * home, 2 * sent)):  # noqa: B905
        np.testing.assert_array_equal(got, want)
