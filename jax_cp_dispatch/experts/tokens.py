"""`dispatch_tokens` and `combine_tokens`: tokens to the ranks of their experts, and sums back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_type
from jax_cp_dispatch._dispatch.arguments import check_movable, rows_per_rank
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import CollectiveOptions, is_on_rank, vary_alike, whole_rows
from jax_cp_dispatch.experts.exchange import send_to_rows, sum_rows
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.global_call import GivenAxes, MeshAxes, find_axes, on_all_ranks
from jax_cp_dispatch.scaling import ScalingMode, check_blocks

# ---- Runs a function of one rank where it is called: on this rank, or on all ranks' arrays.


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


_OF_CHOICES = "Pass a weight for each choice."


@door("dispatch_tokens")
def dispatch_tokens(
    x: PyTree[Shaped[HostOrDevice, "T ..."]],
    routing: Routing,
    *,
    scaling_mode: ScalingMode | str = ScalingMode.NO_SCALING,
) -> PyTree[Shaped[Array, "capacity ..."]]:
    """Sends each token to its experts: once to each rank that holds one of them.

    There it is copied to a row for each of its choices, grouped by expert; the first
    `routing.group_sizes.sum()` rows are in use. All arrays of `x` move in one exchange, bit for
    bit, such as your own 8-bit rows and their scales.

    Call where `route` may be called, on the same ranks. Linear in `x`, with a derivative in reverse
    mode: the gradients of a token's rows are summed on each rank in float32 and rounded, and then
    those of the ranks.

    Args:
      x: the tokens for which `routing` was made.
      routing: from `route`.
      scaling_mode: "MXFP8_1D_SCALING": rows, which then need to be `[T, D]`, D a multiple of 32,
        move in 8 bits with a scale for each block of 32 (see `quantize`), and are made wide again
        where they arrive; gradients, as if nothing was rounded, return in the dtype of `x`.
    Returns:
      The rows of this rank's experts, in the structure of `x`; rows after the last group are zero.
    Raises:
      TypeError, ValueError: an argument is invalid, or the number of tokens is another.
      jax.errors.JaxRuntimeError: at run time, on every rank, before anything moves: a rank needs
        more rows than `capacity`, an expert does not exist; or see `dispatch`. With
        `implementation="xla"`, floating-point rows are then NaN.
    """
    op = "dispatch_tokens"
    leaves, tree = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    check_movable(op, "x", leaves)
    mode = _read_mode(op, scaling_mode, leaves)
    operands = tree.unflatten(leaves), routing
    return _call(op, _dispatch_on_rank, operands, leaves, more=(mode,))


@door("combine_tokens", weights=_OF_CHOICES)
def combine_tokens(
    y: PyTree[Float[HostOrDevice, "capacity ..."]],
    weights: Float[HostOrDevice, "T k"] | None,
    routing: Routing,
) -> PyTree[Float[Array, "T ..."]]:
    """Returns the sum of the rows of each token's experts, times their weights.

    Rows of one rank are summed in the order of the choices and rounded to the dtype of `y`, then
    those sums of all ranks; both in float32 (float64 for float64). Between CPU devices the exchange
    sums rows as it reads them; elsewhere each rank sums its own, and sums move once.
    A choice that is -1 or was dropped adds zero. Call where `route` may be called, on the same
    ranks. Linear in `y` and in the weights, in reverse mode.

    Args:
      y: what the experts made of the rows of `dispatch_tokens`; rows after the last group are not
        read.
      weights: of each choice; None: one.
      routing: from `route`.
    Returns:
      The sums, for each token of this rank, in the structure and with the dtypes of `y`.
    Raises:
      As `dispatch_tokens`.
    """
    op = "combine_tokens"
    leaves, tree = jax.tree.flatten(y)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    check_movable(op, "y", leaves)
    operands = tree.unflatten(leaves), weights, routing
    return _call(op, _combine_on_rank, operands, leaves)


def _read_mode(op: str, scaling_mode: Any, leaves: Sequence[Array]) -> ScalingMode:
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    if mode == ScalingMode.NO_SCALING:
        return mode
    if mode != ScalingMode.MXFP8_1D_SCALING:
        raise ValueError(
            f"{op}: scaling_mode is {mode}, whose scales are those of whole tensors; tokens travel "
            "with their own. Use MXFP8_1D_SCALING, or NO_SCALING."
        )
    for leaf in leaves:
        check_blocks(op, "an array of x", leaf.shape, "row")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{op}: an array of x is {leaf.dtype}; {mode} needs floats. Cast it.")
    return mode


def _call(
    op: str,
    run: Callable[..., Any],
    operands: tuple[Any, ...],
    leaves: Sequence[Array],
    more: tuple[Any, ...] = (),
) -> Any:
    """Checks what both calls share, and runs one on the ranks."""
    *_, routing = operands
    check_type(op, "routing", routing, Routing, "Pass the result of route.")
    options = dataclasses.replace(routing.options, op=op)
    on_rank, axes, num_ranks = ranks_of(options, leaves[0])
    _check_rows(op, routing, leaves[0], 1 if on_rank else num_ranks, num_ranks)
    if len(operands) == 3 and operands[1] is not None:
        _check_weights(op, operands[1], routing)
    rows = P(options.axis_names)
    return on_ranks(
        run,
        (options, *more) if more else options,
        operands,
        axes=axes,
        in_specs=(rows,) * len(operands),
        out_specs=rows,
        num_differentiable=len(operands) - 1,
    )


def _check_rows(op: str, routing: Routing, array: Array, held: int, num_ranks: int) -> None:
    if routing.world_size != num_ranks or len(routing.num_recv_tokens) != held:
        raise ValueError(
            f"{op}: routing is of {len(routing.num_recv_tokens)} of {routing.world_size} ranks but "
            f"the call is on {held} of {num_ranks}. Pass it into jax.shard_map with "
            "in_specs=P(axis_name), or call route on these ranks."
        )
    is_dispatch = op == "dispatch_tokens"
    needed = len(routing.row) if is_dispatch else held * routing.capacity
    if len(array) != needed:
        name, what = ("x", "tokens") if is_dispatch else ("y", "rows of the experts' buffers")
        raise ValueError(
            f"{op}: {name} has {len(array)} rows but routing is of {needed} {what}. Pass the "
            f"{what} of that routing. route takes the experts of each token, [T, k]; where experts "
            "choose tokens, pass all experts, with -1 for those that do not choose the token."
        )


def _check_weights(op: str, weights: Any, routing: Routing) -> None:
    if weights.shape != routing.row.shape:
        raise ValueError(
            f"{op}: weights is {list(weights.shape)} but routing is of choices "
            f"{list(routing.row.shape)}. {_OF_CHOICES}"
        )


@jax.named_scope("cpd.experts")
def _dispatch_on_rank(config: tuple[CollectiveOptions, ScalingMode], x: Any, routing: Any) -> Any:
    options, mode = config
    leaves, tree = jax.tree.flatten(x)
    leaves, routing = _varying(options, leaves, routing)
    rows = send_to_rows(options, mode, routing, leaves)
    return tree.unflatten(rows)


@jax.named_scope("cpd.experts")
def _combine_on_rank(options: CollectiveOptions, y: Any, weights: Any, routing: Any) -> Any:
    leaves, tree = jax.tree.flatten((y, weights))
    leaves, routing = _varying(options, leaves, routing)
    y, weights = tree.unflatten(leaves)
    leaves, tree = jax.tree.flatten(y)
    return tree.unflatten(sum_rows(options, routing, weights, leaves))


def _varying(
    options: CollectiveOptions, arrays: Sequence[Array], routing: Routing
) -> tuple[list[Array], Routing]:
    """Makes everything vary over the ranks, and over all axes over which any array does."""
    leaves, tree = jax.tree.flatten(routing)
    everything = vary_alike([*arrays, *leaves], also=options.axis_names)
    return everything[: len(arrays)], tree.unflatten(everything[len(arrays) :])
