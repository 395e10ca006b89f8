"""Meshes of one or more axes, functions of one rank run on all ranks, their errors, a gate."""

import re
import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

AXIS = "cp"


def mesh_of(num_ranks, order=None):
    """A one-axis mesh; `order` permutes the devices, so rank and device number differ."""
    devices = np.array(jax.devices()[:num_ranks])
    return Mesh(devices if order is None else devices[np.asarray(order)], (AXIS,))


def permuted_mesh(shape, names, kinds: Any = AxisType.Auto):
    """A mesh of several axes over shuffled devices; `kinds` is one axis type, or one per axis."""
    order = np.random.default_rng(len(shape)).permutation(np.prod(shape))
    devices = np.array(jax.devices())[order].reshape(shape)
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return Mesh(devices, names, axis_types=kinds)


def all_fail(out, match):
    """Requires the same error of every device."""
    errors = set()
    for shard in out.addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError, match=match) as error:
            np.asarray(shard.data)
        errors.add(str(error.value))
    assert len(out.addressable_shards) == out.sharding.num_devices and len(errors) == 1


def on_ranks(fn, mesh, *, jit=True, check_vma=True) -> Any:
    """Runs `fn(local...)` per rank, from and to arrays with a leading rank axis [W, ...]."""

    def local(*args):
        squeezed = jax.tree.map(lambda a: a[0], args)
        return jax.tree.map(lambda a: a[None], fn(*squeezed))

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )
    return jax.jit(mapped) if jit else mapped


def collectives_over(compiled, mesh, axis) -> list[str]:
    """Returns the collectives of a compiled program between devices at different axis indices."""
    found = []
    pattern = r" (all-\w+|reduce-scatter|collective-broadcast)(?:-start)?\(.*replica_groups=(.*)"
    for kind, groups in re.findall(pattern, compiled.as_text()):
        places = np.unravel_index(_replica_groups(groups), mesh.axis_sizes)
        of_axis = places[mesh.axis_names.index(axis)]
        if (of_axis != of_axis[:, :1]).any():
            found.append(kind)
    return found


def _replica_groups(text):
    """Parses replica groups, one per row, of device indices; XLA writes them in three ways."""
    numbers = lambda part: [int(number) for number in re.findall(r"\d+", part)]
    if lists := re.match(r"\{\{(.*?)\}\}", text):  # {{0,1},{2,3}}
        return np.array([numbers(group) for group in lists[1].split("},{")])
    if iota := re.match(
        r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    ):  # [2,2]<=[2,2]T(1,0)
        devices = np.arange(np.prod(numbers(iota[2]))).reshape(numbers(iota[2]))
        turned = devices.transpose(numbers(iota[3])) if iota[3] else devices
        return turned.reshape(numbers(iota[1]))
    axes = re.match(r"mesh\[([^]]*)\] \{([^}]*)\},", text)  # mesh['a'=2,'b'=2] {'a'}, dimensions
    assert axes and ":" not in axes[2], f"an unknown kind of replica groups: {text}"
    names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", axes[1]), strict=True)
    devices = np.arange(np.prod(list(map(int, sizes)))).reshape(list(map(int, sizes)))
    joined = [names.index(name) for name in re.findall(r"'(\w+)'", axes[2])]
    devices = np.moveaxis(devices, joined, range(-len(joined), 0))
    return devices.reshape(-1, np.prod([int(sizes[axis]) for axis in joined]))


class Gate:
    """Holds one rank back inside a program until the test lets it go."""

    def __init__(self, rank):
        self.rank = rank
        self.has_come = threading.Event()
        self.may_go = threading.Event()

    def wait_at(self, x):
        """Returns `x` of this rank of `AXIS`, once the gate is open."""

        def passed(x, rank):
            if rank == self.rank:
                self.has_come.set()
                assert self.may_go.wait(600), "the gate was not opened"
            return x

        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(passed, like, x, jax.lax.axis_index(AXIS))
