"""Runs the function of one rank on all ranks, from global arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, reshard

from jax_cp_dispatch._ranks.varying import can_check_varying
from jax_cp_dispatch.global_call.mesh_axes import MeshAxes
from jax_cp_dispatch.global_call.nested import shard_map_inside, varies_outside


def on_all_ranks(
    run: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    axes: MeshAxes,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    num_differentiable: int,
) -> Any:
    """Returns `run(*operands)` of every rank, in a `shard_map` over all axes not yet manual.

    Args:
      run: the part of one rank.
      operands: pytrees of global arrays.
      axes: of the mesh.
      in_specs: for each operand; a spec is for one array, or for all of a pytree.
      out_specs: of the result.
      num_differentiable: how many operands, the first ones, have derivatives.
    """
    shard_map = partial(jax.shard_map, check_vma=can_check_varying())
    if varies_outside(operands, axes.manual):
        shard_map = partial(shard_map_inside, num_differentiable=num_differentiable)
    mapped = shard_map(
        run, mesh=axes.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes.manual
    )
    if AxisType.Explicit in axes.mesh.axis_types:  # over explicit axes shard_map does not reshard
        put = lambda spec: partial(reshard, out_shardings=NamedSharding(axes.mesh, spec))
        put_all = lambda spec, part: jax.tree.map(put(spec), part)
        operands = jax.tree.map(put_all, in_specs, operands, is_leaf=lambda x: isinstance(x, P))
    return mapped(*operands)
