"""dispatch and combine of a plan of NumPy arrays, run on every rank of a mesh."""

import jax
import numpy as np
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import Metadata, combine, dispatch


def capacity_of(plan):
    return int(plan["num_total_recv_tokens"].max())


def bits(x):
    """Compares bytes, so NaN and -0.0 count."""
    return np.ascontiguousarray(x).view(np.uint8)


def run_dispatch(plan, x, capacity, mesh=None, **options):
    move = on_ranks(
        lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=capacity),
        mesh or mesh_of(plan["world_size"]),
        **options,
    )
    return jax.tree.map(np.asarray, move(x, Metadata(**plan)))


def run_combine(plan, y, num_tokens, mesh=None, **kwargs):
    combine_rows = on_ranks(
        lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=num_tokens, **kwargs),
        mesh or mesh_of(plan["world_size"]),
    )
    return jax.tree.map(np.asarray, combine_rows(y, Metadata(**plan)))
