"""Dispatch and combine by XLA's collectives, as the programs of tests."""

import functools

import jax
import numpy as np
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch._dispatch.xla_collectives import combine_with_xla, dispatch_with_xla
from jax_cp_dispatch._dispatch.xla_plan import XlaRanks

W, S, T, C = 8, 5, 24, 2
CAPACITY = W * T  # enough for every plan, so one program serves many plans


def ranks(axis_names, num_ranks):
    rank = jax.lax.axis_index(axis_names) if axis_names else None
    return XlaRanks(rank, axis_names, num_ranks)


def move(arrays, m, axis_names=(AXIS,), num_ranks=W, capacity=CAPACITY):
    return dispatch_with_xla(ranks(axis_names, num_ranks), m, arrays, capacity=capacity)


def move_back(arrays, m, axis_names=(AXIS,), num_ranks=W, num_tokens=T, dtypes=None):
    return combine_with_xla(
        ranks(axis_names, num_ranks),
        m,
        arrays,
        num_tokens=num_tokens,
        dtypes=dtypes or tuple(y.dtype.name for y in arrays),
    )


def both(x, y, m, **kwargs):
    return move([x], m, **kwargs)[0], move_back([y], m, **kwargs)[0]


def random_rows(rng, num_ranks=W, num_features=3):
    x = rng.normal(size=(num_ranks, T, num_features)).astype(np.float32)
    y = rng.normal(size=(num_ranks, CAPACITY, num_features)).astype(np.float32)
    return x, y


@functools.cache
def program():
    """Compiles once for all plans of W, S, C without `src_offset`."""
    return on_ranks(both, mesh_of(W))
