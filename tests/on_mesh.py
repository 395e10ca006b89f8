"""Meshes of one axis of ranks, functions of one rank run on all of it, and one held back."""

import re
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


def collectives_over(compiled, mesh, axis) -> list[str]:
    """The collectives of a compiled program that join devices at different places on an axis."""
    found = []
    pattern = r" (all-\w+|reduce-scatter|collective-broadcast)(?:-start)?\(.*replica_groups=(\S+)"
    for kind, groups in re.findall(pattern, compiled.as_text()):
        places = np.unravel_index(_replica_groups(groups), mesh.axis_sizes)
        of_axis = places[mesh.axis_names.index(axis)]
        if (of_axis != of_axis[:, :1]).any():
            found.append(kind)
    return found


def _replica_groups(text):
    """`{{0,1},{2,3}}`, or `[2,2]<=[2,2]T(1,0)`: devices counted along the mesh, one row a group."""
    if text.startswith("{"):
        groups = re.findall(r"\{([\d,]+)\}", text)
        return np.array([[int(device) for device in group.split(",")] for group in groups])
    shape, order, *turned = re.findall(r"[\[(]([\d,]+)[\])]", text)
    numbers = lambda x: tuple(map(int, x.split(",")))
    devices = np.arange(np.prod(numbers(order))).reshape(numbers(order))
    if turned:
        devices = devices.transpose(numbers(turned[0]))
    return devices.reshape(numbers(shape))


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
