"""The KV heads that each device expands from latent rows, if the heads are sharded."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch.attention.latents import Expansion, expanded_shapes, key_shapes
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.global_call.kv_heads import OwnHeads, kv_copies
from jax_cp_dispatch.global_call.mesh_axes import MeshAxes


def check_specs(
    op: str,
    expansion: Expansion,
    weights: tuple[Any, ...],
    axes: MeshAxes,
    sharing: tuple[str, ...],
) -> None:
    """Requires weights sharded evenly over the axes of the heads, or the first of these.

    The axes of the sequence over which the algorithm shares heads, `sharing`, come after those of
    the mesh for heads.
    """
    all_heads = (*axes.heads, *sharing)
    axes = _with_shared_heads(expansion, axes, sharing)
    for spec, x in zip(expansion.specs, weights, strict=True):
        names = _names(spec)
        for name in names:
            if name not in axes.heads:
                step = "Pass it as head_axis, or remove it"
                if name in (*axes.sequence, *axes.batch):  # which cannot be head_axis
                    step = "Remove it"
                raise ValueError(
                    f"{op}: weight_specs shard weights over axis {name!r}, but heads are sharded "
                    f"over {all_heads}. {step} from weight_specs; weights are gathered over "
                    "other axes."
                )
        if names != axes.heads[: len(names)]:
            raise ValueError(
                f"{op}: weight_specs shard weights over {names}, but q is sharded by heads over "
                f"{axes.heads}, so a device would expand the heads of others. Shard weights over "
                "the same axes in the same order, or over the first of them."
            )
        if len(spec) > x.ndim:
            raise ValueError(
                f"{op}: weight_specs has {spec} for weights of shape {list(x.shape)}. Pass at most "
                "one entry for each dimension."
            )
        for size, part in zip(x.shape, spec, strict=False):
            devices = axes.num_devices(_names(part))
            if size % devices:
                raise ValueError(
                    f"{op}: weight_specs shard a dimension of {size} of weights over {devices} "
                    f"devices, which must divide it. Omit {part!r} there: each device then expands "
                    "all heads, and keeps those of its query heads."
                )


def with_own_heads(
    op: str, expansion: Expansion, operands: Operands, axes: MeshAxes, sharing: tuple[str, ...]
) -> Expansion:
    """Returns the expansion of each device, for its query heads.

    Weights that are whole give all KV heads, of which each device keeps its own.

    Args:
      op: for messages.
      expansion: of whole weights.
      operands: whole.
      axes: of the mesh.
      sharing: see `check_specs`.
    """
    axes = _with_shared_heads(expansion, axes, sharing)
    shared = max((_names(spec) for spec in expansion.specs), key=len, default=())
    others = axes.heads[len(shared) :]
    N, K = operands.q.shape[2], key_shapes(expansion, operands)[0].shape[2]
    parts = axes.num_devices(shared)
    _check_parts(op, expansion, operands, axes, K / parts)
    devices, K = axes.num_devices(others), K // parts
    if devices == 1 or K == 1:
        return expansion
    copies = kv_copies(N // parts, K, devices)
    own = OwnHeads(others, copies, K * copies // devices)
    return dataclasses.replace(expansion, own_heads=(own,))


def _with_shared_heads(expansion: Expansion, axes: MeshAxes, sharing: tuple[str, ...]) -> MeshAxes:
    """Returns the axes of the heads, with those that also share them if weights name one."""
    named = {x for spec in expansion.specs for x in _names(spec)}
    also = sharing if named.intersection(sharing) else ()
    return dataclasses.replace(axes, heads=(*axes.heads, *also))


def _check_parts(
    op: str, expansion: Expansion, operands: Operands, axes: MeshAxes, num_heads: float
) -> None:
    """Requires that a device's part of the weights gives its part of the KV heads."""

    def part(spec: Any, x: Any):
        entries = (*spec, *(None,) * (x.ndim - len(spec)))
        sizes = (n // axes.num_devices(_names(e)) for n, e in zip(x.shape, entries, strict=True))
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    parts = tuple(map(part, expansion.specs, operands.weights))
    found = [x.shape[1] for x in expanded_shapes(expansion, operands._replace(weights=parts))]
    if found != [num_heads] * 2:
        raise ValueError(
            f"{op}: expand returns {found[0]} heads of k and {found[1]} of v from a device's part "
            f"of the weights, but that part needs to give {num_heads:g} of the KV heads of all. "
            "Pass weight_specs that shard the dimension of the heads, in all weights that have one."
        )


def _names(entries: Any) -> tuple[str, ...]:
    """Returns the axes of a `PartitionSpec`, or of one of its entries."""
    return tuple(jax.tree.leaves(tuple(entries) if isinstance(entries, P) else entries))
