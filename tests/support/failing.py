"""Programs of 8 ranks that fail: what every rank says, and that the next program succeeds."""

import re

import jax
import numpy as np
import pytest
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import (
    Metadata,
    combine,
    dispatch,
)

W, S, T, F = 8, 3, 8, 2
CAPACITY = W * T
DEADLINE = 2.0
RNG = np.random.default_rng(0)
PLAN = random_plan(RNG, W, S, T)
METADATA = Metadata(**PLAN)
X = RNG.integers(-8, 9, (W, T, F)).astype(np.float32)
Y = RNG.integers(-8, 9, (W, CAPACITY, F)).astype(np.float32)


def send(x, m, **options):
    return dispatch(x, m, **{"axis_name": AXIS, "capacity": CAPACITY, **options})


def combine_rows(y, m, **options):
    return combine(y, m, axis_name=AXIS, num_tokens=T, **options)


good = on_ranks(send, mesh_of(W))


def spoiled(plan=PLAN, rank=6):
    """Returns a plan that promises `rank` one token too many, and its error."""
    counts = plan["num_recv_tokens"].copy()
    counts[rank, 1] += 1
    message = f"rank {rank} expects {counts[rank, 1]} tokens from rank 1 .num_recv_tokens. but"
    return Metadata(**{**plan, "num_recv_tokens": counts}), message


def errors_of(fn, *args):
    """Returns each device's error for a result of `fn`, which fails; the next program succeeds."""
    result = jax.tree.leaves(fn(*args))[0]
    errors = []
    for shard in result.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            np.asarray(shard.data)
        errors.append(str(error.value))
    np.testing.assert_array_equal(good(X, METADATA), dispatched(PLAN, X, CAPACITY))
    return errors


def all_say(fn, *args, match):
    """Every device gets the same error."""
    errors = errors_of(fn, *args)
    assert len(errors) == len(jax.devices())
    assert len(set(errors)) == 1
    assert re.search(match, errors[0]), errors[0]
