"""Runs the function of one rank on all ranks, from global arrays; also in a `shard_map`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

from jax_cp_dispatch._ranks.call_context import retype
from jax_cp_dispatch._ranks.varying import can_check_varying, varying_axes
from jax_cp_dispatch.global_call.mesh_axes import MeshAxes


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
        put_all = lambda spec, part: jax.tree.map(lambda x: retype(x, axes.mesh, spec), part)
        operands = jax.tree.map(put_all, in_specs, operands, is_leaf=lambda x: isinstance(x, P))
    return mapped(*operands)


def pad_tokens(tree: Any, missing: int) -> Any:
    """Appends zeros to arrays [B, T, ...]: tokens of segment 0."""

    def pad(x):
        append = np.pad if isinstance(x, np.ndarray) else jnp.pad  # known values stay known in jit
        return append(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, tree) if missing else tree


def cut_tokens(tree: Any, num_tokens: int, mesh: Any) -> Any:
    """Removes what `pad_tokens` has appended.

    Explicit mesh axes shard equal parts only, so none of them shards the remaining tokens.
    """

    def cut(x):
        if AxisType.Explicit in mesh.axis_types:
            batch, _, *others = jax.typeof(x).sharding.spec
            x = retype(x, mesh, P(batch, None, *others))
        return x[:, :num_tokens]

    return jax.tree.map(cut, tree)


def varies_outside(operands: Any, manual: set[str]) -> bool:
    """Whether an operand varies over an axis that a surrounding `shard_map` has made manual."""
    return any(varying_axes(x) - manual for x in jax.tree.leaves(operands))


def shard_map_inside(
    attend: Callable[..., Any],
    *,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axis_names: set[str],
    num_differentiable: int,
) -> Callable[..., Any]:
    """Returns `jax.shard_map(attend, ...)`, for use inside another.

    Differentiable in the first `num_differentiable` operands, in reverse mode.

    JAX 0.10.2 splits a `shard_map` into two, one for values needed first and one for the rest, in a
    derivative, in a loop with constant operands, and for a checkpoint policy. What the first hands
    to the second it shards over every axis over which it varies, also over those that the
    surrounding `shard_map` has made manual (`nospec` in `core.py`), which XLA rejects. So here the
    forward pass returns its residuals as outputs that are sharded over the inner axes only, and no
    pass is split: JAX does not look into a `custom_vmap`.
    """
    shard_map = partial(_whole_shard_map, mesh=mesh, axis_names=axis_names)
    inner = [name for name in mesh.axis_names if name in axis_names]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(inner, size) for size in range(len(inner) + 1)
    )
    residual_specs = {axes: P(axes) for axes in subsets}

    def with_residuals(pulls, *operands):
        """Returns the output, and residuals by the axes over which they vary; adds their use."""
        wrt, others = operands[:num_differentiable], operands[num_differentiable:]
        out, pull_back = jax.vjp(lambda *wrt: attend(*wrt, *others), *wrt)
        leaves, treedef = jax.tree.flatten(pull_back)
        axes = [tuple(name for name in inner if name in varying_axes(x)) for x in leaves]
        residuals = {
            subset: [x[None] for x, own in zip(leaves, axes, strict=True) if own == subset]
            for subset in residual_specs
        }
        pulls.append(partial(_pull, treedef, axes))
        return out, residuals

    @jax.custom_vjp
    def call(*operands):
        return shard_map(attend, in_specs=in_specs, out_specs=out_specs)(*operands)

    def forward(*operands):
        pulls, specs = [], (out_specs, residual_specs)
        fn = partial(with_residuals, pulls)
        out, residuals = shard_map(fn, in_specs=in_specs, out_specs=specs)(*operands)
        # `jax.vmap` calls `fn` again, for the same residuals.
        return out, (residuals, jax.tree_util.Partial(pulls[0]), len(operands))

    def backward(kept, dout):
        residuals, pull, num_operands = kept
        specs = (residual_specs, out_specs)
        gradients = shard_map(pull, in_specs=specs, out_specs=in_specs[:num_differentiable])(
            residuals, dout
        )
        return *gradients, *(None,) * (num_operands - num_differentiable)

    call.defvjp(forward, backward)
    return call


def _whole_shard_map(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a `jax.shard_map` that JAX does not split."""
    mapped = jax.shard_map(fn, **options)
    whole = custom_vmap(mapped)

    @whole.def_vmap
    def _(axis_size, is_batched, *operands):
        in_axes = jax.tree.map(lambda x: 0 if x else None, is_batched)
        out = jax.vmap(mapped, in_axes=tuple(in_axes), axis_size=axis_size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return whole


def _pull(treedef: Any, axes: list[tuple[str, ...]], residuals: dict[Any, list[Any]], dout: Any):
    """Returns the gradients of one rank from its residuals."""
    left = {subset: iter(arrays) for subset, arrays in residuals.items()}
    leaves = [next(left[own])[0] for own in axes]
    return jax.tree.unflatten(treedef, leaves)(dout)
