"""Runs a function of one rank where it is called: on this rank, or on all ranks' arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax

from jax_cp_dispatch._dispatch.checks import rows_per_rank
from jax_cp_dispatch._ranks.call_context import is_on_rank
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._ranks.varying import whole_rows
from jax_cp_dispatch.global_call.mesh_axes import GivenAxes, MeshAxes, find_axes
from jax_cp_dispatch.global_call.on_all_ranks import on_all_ranks


def ranks_of(options: CollectiveOptions, tokens: Any) -> tuple[bool, MeshAxes | None, int]:
    """Returns whether the arrays are those of one rank, else the axes; and the number of ranks.

    `tokens` are the first array of the call, whose rows all ranks share equally.
    """
    op, names = options.op, options.axis_names
    if is_on_rank(op, names):
        return True, None, jax.lax.axis_size(options.axis_name)
    given = GivenAxes(options.mesh, options.axis_name, (), ())
    axes = find_axes(op, tokens, given=given, covers_batch=False)
    rows_per_rank(op, "the first array", tokens.shape[0], axes.num_ranks)
    return False, axes, axes.num_ranks


def on_ranks(
    run: Callable[..., Any],
    config: Hashable,
    operands: tuple[Any, ...],
    *,
    axes: MeshAxes | None,
    **specs: Any,
) -> Any:
    """Returns `run(config, *operands)` of this rank; with axes `on_all_ranks`.

    As one function of the program, which equal calls share.
    """
    if axes is None:
        return _part(run, config, *whole_rows(operands))
    return _program(run, config, axes, tuple(specs.items()), *operands)


@partial(jax.jit, static_argnums=(0, 1))
def _part(run, config, *operands):
    return run(config, *operands)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _program(run, config, axes, specs, *operands):
    return on_all_ranks(partial(run, config), operands, axes=axes, **dict(specs))
