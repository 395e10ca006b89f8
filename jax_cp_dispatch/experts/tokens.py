"""`dispatch_tokens` and `combine_tokens`: tokens to the ranks of their experts, and sums back.

On CPU, each token is copied to its rows from where it is, and its rows are summed where they are
read. Elsewhere a rank first collects the tokens for each rank, which then are one piece: XLA's
`ragged_all_to_all` sends pieces, and few of them. Both give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Inexact, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_type
from jax_cp_dispatch._arrays import only_if_right, sum_dtype
from jax_cp_dispatch._dispatch.arguments import (
    Argument,
    check_movable,
    outgoing,
    returning,
    rows_per_rank,
)
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._dispatch.primitives import name_of_transpose
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.implementations import IMPLEMENTATIONS
from jax_cp_dispatch._ranks.options import (
    CollectiveOptions,
    is_on_rank,
    vary_alike,
    whole_on_explicit_axes,
)
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.global_call import MeshAxes, find_axes, on_all_ranks
from jax_cp_dispatch.scaling import ScalingMode, check_blocks, dequantize, quantize

# ---- Runs a function of one rank where it is called: on this rank, or on all ranks' arrays.


def ranks_of(options: CollectiveOptions, tokens: Any) -> tuple[MeshAxes | None, int]:
    """Returns the mesh and its axes, None for the arrays of one rank; and the number of ranks.

    `tokens` are the first array of the call, whose rows all ranks share equally.
    """
    op, names = options.op, options.axis_names
    if is_on_rank(op, names):
        return None, jax.lax.axis_size(options.axis_name)
    axes = find_axes(options, tokens, batch_axis=(), head_axis=())
    num_ranks = axes.num_devices(names)
    rows_per_rank(op, "the first array", tokens.shape[0], num_ranks)
    return axes, num_ranks


def on_ranks(
    run: Callable[..., Any], config: Hashable, operands: Any, axes: MeshAxes | None, **specs: Any
) -> Any:
    """Returns `run(config, *operands)` of this rank; with axes `on_all_ranks`.

    As one function of the program, which equal calls share.
    """
    operands = whole_on_explicit_axes(operands, 1) if axes is None else operands
    return _program(run, config, axes, tuple(specs.items()), *operands)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _program(run, config, axes, specs, *operands):
    if axes is None:
        return run(config, *operands)
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
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    if mode not in (ScalingMode.NO_SCALING, ScalingMode.MXFP8_1D_SCALING):
        raise ValueError(
            f"{op}: scaling_mode is {mode}, whose scales are those of whole tensors; tokens travel "
            "with their own. Use MXFP8_1D_SCALING, or NO_SCALING."
        )
    for leaf in jax.tree.leaves(x) if mode != ScalingMode.NO_SCALING else ():
        check_blocks(op, "an array of x", leaf.shape, "row")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{op}: an array of x is {leaf.dtype}; {mode} needs floats. Cast it.")
    return _call(op, mode, x, routing)


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
    return _call("combine_tokens", None, y, weights, routing)


def _call(op: str, mode: ScalingMode | None, arrays: Any, *others: Any) -> Any:
    """Checks what annotations cannot say; moves the arrays by the routing, the last argument."""
    *weights, routing = others
    check_type(op, "routing", routing, Routing, "Pass the result of route.")
    options = dataclasses.replace(routing.options, op=op)
    name, what = ("x", "tokens") if mode is not None else ("y", "rows of the experts' buffers")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(arrays)]
    check_movable(op, name, leaves)
    axes, num_ranks = ranks_of(options, leaves[0])
    held, num_held = 1 if axes is None else num_ranks, len(routing.num_recv_tokens)
    if routing.world_size != num_ranks or num_held != held:
        raise ValueError(
            f"{op}: routing is of {num_held} of {routing.world_size} ranks but the call is on "
            f"{held} of {num_ranks}. Pass it into jax.shard_map with in_specs=P(axis_name), or "
            "call route on these ranks."
        )
    needed = len(routing.row) if mode is not None else held * routing.capacity
    if len(leaves[0]) != needed:
        raise ValueError(
            f"{op}: {name} has {len(leaves[0])} rows but routing is of {needed} {what}. Pass the "
            f"{what} of that routing. route takes the experts of each token, [T, k]; where experts "
            "choose tokens, pass all experts, with -1 for those that do not choose the token."
        )
    for x in weights:
        if x is not None and x.shape != routing.row.shape:
            raise ValueError(
                f"{op}: weights is {list(x.shape)} but routing is of choices "
                f"{list(routing.row.shape)}. {_OF_CHOICES}"
            )
    operands, rows = (arrays, *others), P(options.axis_names)
    return on_ranks(
        _on_rank,
        (options, mode),
        operands,
        axes,
        in_specs=(rows,) * len(operands),
        out_specs=rows,
        num_differentiable=len(others),
    )


@jax.named_scope("cpd.experts")
def _on_rank(config: tuple[CollectiveOptions, ScalingMode | None], *operands: Any) -> Any:
    """Moves tokens to their experts; without a mode, rows back."""
    options, mode = config
    arrays, *weights, routing = vary_alike(operands, also=options.axis_names)
    leaves, tree = jax.tree.flatten(arrays)
    if mode is not None:
        return tree.unflatten(send_to_rows(options, mode, routing, leaves))
    return tree.unflatten(sum_rows(options, routing, *weights, leaves))


# ---- Rows of received tokens and rows grouped by expert: one from the other, by gathers alone.
#
# A token has a row for each of its choices on this rank. It is taken there; `weighted_sum` adds
# these rows up. Sums are float32 (float64 for float64, complex for complex), in the order of
# the choices.


class Places(NamedTuple):
    """Which row belongs to which choice of which token, both ways."""

    row: Int32[Array, "R k"]  # the grouped row of each choice; M if it has none here
    choice: Int32[Array, " M"]  # token * k + choice of each grouped row; R * k if there is none

    @classmethod
    def of_rows(cls, row: Int32[Array, "R k"], capacity: int) -> Places:
        """Makes it from the row of each choice, in [0, capacity) if it has one here."""
        row = jnp.where((row >= 0) & (row < capacity), row, capacity)
        number = jnp.arange(row.size, dtype=jnp.int32)
        none = jnp.full(capacity, row.size, jnp.int32)
        # Choices without a row all write to the same place outside, so they are not unique.
        return cls(row, none.at[row.reshape(-1)].set(number, mode="drop"))

    @property
    def token(self) -> Int32[Array, " M"]:
        return self.choice // self.row.shape[1]


def take(x: Shaped[Array, "n ..."], index: Int32[Array, " m"]) -> Shaped[Array, "m ..."]:
    """Returns these rows; zeros for those outside."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def weighted_sum(
    y: Inexact[Array, "M ..."], weights: Float[Array, "R k"] | None, places: Places
) -> Inexact[Array, "R ..."]:
    """Adds up the rows of each token, times the weights of its choices if there are any."""
    total = jnp.zeros((len(places.row), *y.shape[1:]), sum_dtype(y.dtype))
    for i in range(places.row.shape[1]):
        total = _add(total, y, places.row[:, i], None if weights is None else weights[:, i])
    return total.astype(y.dtype)


@jax.jit  # one function of the program, called for each choice; XLA fuses the calls
def _add(total, y, row, weight):
    added = take(y, row).astype(total.dtype)
    if weight is not None:  # that of a choice without a row may be anything
        weight = jnp.where(row < len(y), weight, 0).astype(total.dtype)
        added = added * for_rows(weight, y)
    return total + added


def for_rows(x: Any, like: Array) -> Array:
    """Returns a number of each row in the dimensions of the rows."""
    return x.reshape(-1, *[1] * (like.ndim - 1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send_to_rows(
    options: CollectiveOptions,
    mode: ScalingMode,
    routing: Routing,
    arrays: list[Shaped[Array, "T ..."]],
) -> list[Shaped[Array, "M ..."]]:
    """Sends tokens to the rows of their experts, also in 8 bits; gradients return as they are."""
    return _to_rows(options, mode, routing, arrays)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_rows(
    options: CollectiveOptions,
    routing: Routing,
    weights: Float[Array, "T k"] | None,
    arrays: list[Float[Array, "M ..."]],
) -> list[Float[Array, "T ..."]]:
    """Returns the sums of the rows of each token, times the weights of its choices."""
    return _sum_rows_forward(options, routing, weights, arrays)[0]


def _move(
    options: CollectiveOptions, routing: Routing, parts: list[Argument], kind: str = "experts"
) -> list[Any]:
    """Makes one exchange. Errors then speak of experts; see csrc/dispatch/messages.cc."""
    name = f"{kind}:{routing.capacity}"
    return move(options, [part._replace(capacity_name=name) for part in parts])


# ---- By choice: one exchange from and to the rows of the experts.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_choices(
    options: CollectiveOptions, routing: Routing, weights: Array | None, arrays: list[Array]
) -> list[Array]:
    wide = jnp.finfo(sum_dtype(*(x.dtype for x in arrays))).dtype  # real, also of complex rows
    given = jnp.ones(routing.row.shape, wide) if weights is None else weights.astype(wide)
    more = {"num_tokens": len(routing.row), "weights": given}
    part = returning(arrays, routing.by_choice, **more)
    return _move(options, routing, [part])[0]


def _sum_choices_backward(options, residuals, gradients):
    routing, weights, arrays = residuals
    options, capacity, plan = _transposed(options), routing.capacity, routing.by_choice
    parts = [outgoing(gradients, plan, capacity=capacity)]
    if weights is None:
        return None, None, _move(options, routing, parts)[0]
    # The plan that sends a number of each choice, [T * k], to its row.
    each = dataclasses.replace(
        plan,
        dst_rank=plan.dst_rank.reshape(-1),
        dst_offset=plan.dst_offset.reshape(-1),
        seq_len=np.ones(weights.size, np.int32),
        num_seqs=np.int32(weights.size),
    )
    parts.append(outgoing(weights.reshape(-1), each, capacity=capacity))
    rows, own = _move(options, routing, parts)
    products, dys = _weighted_backward(arrays, rows, own)
    part = returning(products, each, num_tokens=weights.size)
    return None, _move(options, routing, [part])[0].reshape(weights.shape), dys


_sum_choices.defvjp(lambda *x: (_sum_choices(*x), x[1:]), _sum_choices_backward)


def _weighted_backward(
    arrays: list[Array], gradients: list[Array], weights: Array
) -> tuple[Array, list[Array]]:
    """Returns the gradients of the weight of each row, and of the rows.

    `gradients` are, at each row, those of the sum that it is part of.
    """
    products, dys = [], []
    for y, dy in zip(arrays, gradients, strict=True):
        wide = sum_dtype(y.dtype, weights.dtype)
        product = (dy.astype(wide) * y.astype(wide)).sum(tuple(range(1, y.ndim)))
        products.append(product.astype(weights.dtype))
        dys.append((dy.astype(wide) * for_rows(weights.astype(wide), y)).astype(y.dtype))
    return functools.reduce(jnp.add, reversed(products)), dys


# ---- By rank: each token once to each of its ranks, and copies and sums there.


def _send_tokens(
    options: CollectiveOptions, routing: Routing, arrays: Sequence[Array], places: Any = None
) -> tuple[list[Array], Places]:
    """Sends tokens once to each of their ranks; and the rows of their choices, if not known."""
    collected = _collected(routing)
    # Plus one, so that a row that no rank writes is none.
    sent = [*arrays, routing.row + 1] if places is None else arrays
    rows = [take(x, collected.token) for x in sent]
    part = outgoing(rows, routing.by_rank, capacity=_most_tokens(routing))
    received = _move(options, routing, [part], "experts by rank")[0]
    if places is None:
        *received, row = received
        first = 1 + rank_index(options.axis_names) * routing.capacity
        places = Places.of_rows(row - first, routing.capacity)
    return received, places


def _return_sums(options: CollectiveOptions, routing: Routing, sums: list[Array]) -> list[Array]:
    """Returns the sums of each token from all of its ranks, and adds them up."""
    collected = _collected(routing)
    part = returning(sums, routing.by_rank, num_tokens=len(collected.choice))
    rows = _move(options, routing, [part], "experts by rank")[0]
    return only_if_right(routing.is_valid[0], [weighted_sum(x, None, collected) for x in rows])


def _collected(routing: Routing) -> Places:
    """Returns the rows of this rank's tokens where those for one rank are one piece."""
    num_tokens, num_choices = routing.dst_rank.shape
    return Places.of_rows(routing.send_row, num_tokens * min(num_choices, routing.world_size))


def _most_tokens(routing: Routing) -> int:
    """A rank receives each token at most once, and has a row for it."""
    return max(1, min(routing.capacity, routing.world_size * len(routing.row)))


def _nothing(
    routing: Routing, arrays: Sequence[Array], weights: Array | None = None
) -> tuple[Array | None, Places]:
    """Returns received weights and places of the right shapes, which nothing reads."""
    shape = _most_tokens(routing), routing.row.shape[1]
    none = [jnp.zeros(shape, jnp.int32), jnp.zeros(routing.capacity, jnp.int32)]
    given = [routing.row, *arrays]
    if weights is not None:
        none.append(jnp.zeros(shape, weights.dtype))
        given.append(weights)
    row, choice, *received = vary_alike([*none, *given])[: len(none)]
    return received[0] if received else None, Places(row, choice)


# ---- The choice of one of both ways.


def _where_it_runs(
    options: CollectiveOptions,
    by_choice: Callable[..., Any],
    by_rank: Callable[..., Any],
    *operands: Any,
    summed: Sequence[Array],
) -> Any:
    """Calls one of two; `summed` are arrays that it sums, or whose gradients are summed."""
    # Those of SumWeightedRows in csrc/numerics; complex numbers are pairs of real ones.
    served = jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128
    if any(jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype not in served for x in summed):
        return by_rank(*operands)
    if options.implementation is None:
        return lax.platform_dependent(*operands, cpu=by_choice, default=by_rank)
    is_cpu = IMPLEMENTATIONS[options.implementation].platform == "cpu"
    return by_choice(*operands) if is_cpu else by_rank(*operands)


# ---- Tokens to rows.


def _to_rows(options, mode, routing, arrays, with_places=False):
    is_narrow = mode == ScalingMode.MXFP8_1D_SCALING
    leaves, tree = jax.tree.flatten([quantize(x, mode) for x in arrays] if is_narrow else arrays)

    def by_choice(leaves):
        part = outgoing(leaves, routing.by_choice, capacity=routing.capacity)
        places = _nothing(routing, leaves)[1] if with_places else None
        return _move(options, routing, [part])[0], places

    def by_rank(leaves):
        received, places = _send_tokens(options, routing, leaves)
        rows = only_if_right(routing.is_valid[0], [take(x, places.token) for x in received])
        return rows, places if with_places else None

    summed = arrays if with_places else ()
    rows, places = _where_it_runs(options, by_choice, by_rank, leaves, summed=summed)
    rows = tree.unflatten(rows)
    if is_narrow:
        rows = [dequantize(row, x.dtype) for row, x in zip(rows, arrays, strict=True)]
    return rows, (routing, places)


def _to_rows_backward(options, mode, residuals, gradients):
    routing, places = residuals
    real = [g for g in gradients if g.dtype != jax.dtypes.float0]  # integers have none
    sums: list[Array] = []
    if real:
        sums, _ = _sum_rows_forward(_transposed(options), routing, None, real, places)
    rest = iter(sums)
    return None, [None if g.dtype == jax.dtypes.float0 else next(rest) for g in gradients]


# ---- Rows to sums.


def _sum_rows_forward(options, routing, weights, arrays, places=None):
    """Returns the sums; on the way back of `_to_rows`, places are known."""

    def by_choice(weights, arrays, _):
        sums = _sum_choices(options, routing, weights, arrays)
        return sums, *_nothing(routing, arrays, weights)

    def by_rank(weights, arrays, places):
        received = []
        if places is None:
            sent = [] if weights is None else [weights]
            received, places = _send_tokens(options, routing, sent)
        own = received[0] if received else None
        sums = [weighted_sum(y, own, places) for y in arrays]
        return _return_sums(options, routing, sums), own, places

    operands = weights, arrays, places
    sums, *received = _where_it_runs(options, by_choice, by_rank, *operands, summed=arrays)
    return sums, (routing, weights, arrays, *received)


def _sum_rows_backward(options, residuals, gradients):
    routing, *rest = residuals

    def by_choice(gradients, weights, arrays, *_):
        return _sum_choices_backward(options, (routing, weights, arrays), gradients)[1:]

    def by_rank(gradients, weights, arrays, received, places):
        back = _transposed(options)
        rows, _ = _send_tokens(back, routing, gradients, places)
        rows = [take(x, places.token) for x in rows]
        if weights is None:
            return None, rows
        own = take(received.reshape(-1), places.choice)
        products, dys = _weighted_backward(arrays, rows, own)
        of_tokens = take(products, places.row.reshape(-1)).reshape(places.row.shape)
        return _return_sums(back, routing, [of_tokens])[0], dys

    summed = residuals[2]
    return None, *_where_it_runs(options, by_choice, by_rank, gradients, *rest, summed=summed)


def _transposed(options: CollectiveOptions) -> CollectiveOptions:
    return dataclasses.replace(options, op=name_of_transpose(options.op))


send_to_rows.defvjp(partial(_to_rows, with_places=True), _to_rows_backward)
sum_rows.defvjp(_sum_rows_forward, _sum_rows_backward)
