"""Meshes of one axis of ranks, functions of one rank run on all of it, and one held back."""

import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P

AXIS = "cp"


def mesh_of(num_ranks, order=None):
    """A one-axis mesh; `order` permutes the devices, so that rank and device number differ."""
    devices = np.array(jax.devices()[:num_ranks])
    return Mesh(devices if order is None else devices[np.asarray(order)], (AXIS,))


def permuted_mesh(shape, names, kinds=AxisType.Auto):
    """A mesh of several axes over shuffled devices; `kinds` are those of its axes, or of all."""
    order = np.random.default_rng(len(shape)).permutation(np.prod(shape))
    devices = np.array(jax.devices())[order].reshape(shape)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return Mesh(devices, names, axis_types=kinds)


def on_ranks(fn, mesh, *, jit=True, check_vma=True) -> Any:
    """`fn(local...)` per rank, from and to arrays with a leading rank axis [W, ...]."""

    def local(*args):
        squeezed = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], fn(*squeezed))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )
    return jax.jit(mapped) if jit else mapped


class Gate:
    """Holds one rank back inside a program until the test lets it go."""

    def __init__(self, rank):
        self.rank = rank
        self.has_come = threading.Event()
        self.may_go = threading.Event()

    def wait_at(self, x):
        """`x`, of this rank of `AXIS`."""

        def passed(x, rank):
            if rank == self.rank:
                self.has_come.set()
                assert self.may_go.wait(30), "nobody opened the gate"
            return x

        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(passed, like, x, jax.lax.axis_index(AXIS))
