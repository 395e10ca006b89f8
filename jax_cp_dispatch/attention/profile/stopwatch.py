"""Runs programs of one rank on a whole mesh, and measures when each rank is ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._ranks.communicator import check_axis_name, check_mesh

_POLL = 20e-6  # seconds


class Stopwatch:
    """Times programs over one axis of a mesh whose devices all belong to this process."""

    def __init__(self, mesh: Mesh, axis_name: str, repeats: int):
        self.mesh, self.axis_name, self._repeats = mesh, axis_name, repeats
        axis = mesh.axis_names.index(axis_name)
        self._rank = {device: place[axis] for place, device in np.ndenumerate(mesh.devices)}

    @property
    def num_ranks(self) -> int:
        return self.mesh.shape[self.axis_name]

    def program(self, fn: Callable, in_axes: Sequence[Any], out_axes: Any) -> Callable:
        """Compiles `fn` of one rank; axes are those that ranks share in each array, or None."""
        as_spec = lambda axis: P() if axis is None else P(*[None] * axis, self.axis_name)
        to_specs = lambda axes: jax.tree.map(as_spec, axes, is_leaf=lambda x: x is None)
        mapped = jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=to_specs(tuple(in_axes)),
            out_specs=to_specs(out_axes),
            check_vma=False,
        )
        return jax.jit(mapped)

    def run(self, program: Callable, *operands: Any) -> tuple[list[float], Any]:
        """Returns median seconds until each rank was ready, and the result; warms up first."""
        result = jax.block_until_ready(program(*operands))
        runs = []
        for _ in range(self._repeats):
            begin = time.perf_counter()
            runs.append(self._until_ready(program(*operands), begin))
        return [statistics.median(seconds) for seconds in zip(*runs, strict=True)], result

    def _until_ready(self, result: Any, begin: float) -> list[float]:
        seconds = [0.0] * self.num_ranks
        pending = [
            (self._rank[shard.device], shard.data)
            for leaf in jax.tree.leaves(result)
            for shard in leaf.addressable_shards
        ]
        while pending:
            now = time.perf_counter() - begin
            for rank, data in pending:
                if data.is_ready():
                    seconds[rank] = max(seconds[rank], now)
            pending = [entry for entry in pending if not entry[1].is_ready()]
            time.sleep(_POLL)
        return seconds


def stopwatch_over(op: str, mesh: Mesh, axis_name: str, repeats: int) -> Stopwatch:
    """Returns a stopwatch for the arguments of a profile.

    Raises:
      TypeError, ValueError: the mesh does not have the axis, or `repeats` is not positive.
    """
    if mesh is None:
        raise TypeError(f"{op}: mesh is None; it needs to be a jax.sharding.Mesh.")
    check_mesh(op, mesh)
    check_axis_name(op, axis_name)
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"{op}: axis_name is {axis_name!r} but the mesh has axes {tuple(mesh.axis_names)}. "
            "Name one of these."
        )
    check_positive(op, repeats=repeats)
    return Stopwatch(mesh, axis_name, repeats)


def check_tokens(op: str, num_tokens: int, stopwatch: Stopwatch) -> None:
    """Requires tokens that the ranks can share equally."""
    if num_tokens % stopwatch.num_ranks:
        raise ValueError(
            f"{op}: T is {num_tokens} but {stopwatch.axis_name!r} has {stopwatch.num_ranks} "
            "devices, which need to divide it. Pad the arrays; segment 0 is padding."
        )
