"""Meshes over the devices of all processes, their arrays, and checks of this process's part."""

import pathlib
import sys
from typing import Any

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("contract", "oracles", "support")
)

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import random_plan

AXIS = "cp"
RANKS = P(AXIS)
S, T = 5, 16


def all_devices():
    """Shuffles equally in all processes: rank, device and process numbers all differ."""
    devices = np.array(jax.devices())
    return devices[np.random.default_rng(0).permutation(len(devices))]


def mesh_of_all():
    return Mesh(all_devices(), (AXIS,))


def place(x, mesh, spec=RANKS):
    """Places an array that every process has on the devices of all."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def place_all(arrays, mesh, specs: Any = RANKS):
    """Places trees of arrays by one spec, or by trees of specs."""
    of_spec = lambda spec, part: jax.tree.map(lambda x: place(x, mesh, spec), part)
    return jax.tree.map(of_spec, specs, arrays, is_leaf=lambda x: isinstance(x, P))


def check(got, want):
    """Compares the part of the ranks of this process."""
    assert got.shape == want.shape, (got.shape, want.shape)
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), want[shard.index])


def on_ranks(fn, mesh, spec=RANKS, **options):
    """Runs `fn(local...)` per rank, from and to arrays with a leading rank axis."""

    def local(*args):
        return jax.tree.map(lambda a: a[None], fn(*jax.tree.map(lambda a: a[0], args)))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **options))


def draw(seed, num_ranks, *shape, dtype: Any = np.float32):
    """Returns small integers, whose sums are exact."""
    return np.random.default_rng(seed).integers(0, 9, (num_ranks, T, *shape)).astype(dtype)


def plan_of(seed, num_ranks, replicas=1):
    plan = random_plan(np.random.default_rng(seed), num_ranks, S, T, replicas)
    return plan, int(plan["num_total_recv_tokens"].max()) + 2
