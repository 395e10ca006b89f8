"""`dispatch_start`, `combine_start`, `exchange_done`: an exchange beside other work."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters.mlir import ir
from jax.sharding import PartitionSpec as P
from jaxtyping import DTypeLike, Num, PyTree, Shaped

from jax_cp_dispatch._dispatch import lowering
from jax_cp_dispatch._dispatch.arguments import (
    Argument,
    Exchange,
    ExchangeOperands,
    Rows,
    outgoing,
    read_operands,
    returning,
    select_arrays,
    summable,
)
from jax_cp_dispatch._dispatch.movement import SCOPE, Prepared, finish_results, prepare
from jax_cp_dispatch._dispatch.primitives import (
    adjoint_move,
    combine_p,
    dispatch_p,
    register,
    result_shapes,
    transposed,
)
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.implementations import (
    ON_GPU,
    Operation,
    choose_on_one_device,
    register_lowering,
)
from jax_cp_dispatch._ranks.lowering import Chosen, choose, lower_opened, one_after_another
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.metadata import Metadata

# ---- Lowers an exchange in two calls, or as one call at its start.

register_lowering(Operation.EXCHANGE_START, lowering.start_on_gpu, on=ON_GPU)
register_lowering(Operation.EXCHANGE_DONE, lowering.done_on_gpu, on=ON_GPU)


def lower_start(
    ctx: Any, *operands: Any, exchange: Exchange, num_beside: int, num_held: int
) -> Any:
    """Lowers the first call; it is the whole exchange where an implementation has one call."""
    choice = _choice(ctx, exchange)
    if choice is None:
        params = {"exchange": exchange, "num_beside": num_beside, "num_held": num_held}
        return lower_opened(functools.partial(_whole, **params), ctx, *operands)
    params = {"exchange": exchange, "num_beside": num_beside}
    return choice.lower(Operation.EXCHANGE_START, ctx, *operands, **params)


def lower_done(ctx: Any, *operands: Any, exchange: Exchange) -> Any:
    """Lowers the second call; nothing is left to do after a whole exchange.

    A first call in another loop, branch or function is the whole exchange, because the runtime
    finds no second call for it.
    """
    choice = _choice(ctx, exchange)
    first, n = exchange.num_before_arrays, exchange.num_arrays
    if choice is None or not all(map(_is_result_here, operands[first : first + 2 * n])):
        return [*operands[first : first + n], *operands[first + 2 * n + 1 :]]
    return choice.lower(Operation.EXCHANGE_DONE, ctx, *operands, exchange=exchange)


def _is_result_here(value: Any) -> bool:
    """Whether a value is the result of a custom call in the block that is being lowered."""
    owner: Any = value.owner
    if isinstance(owner, ir.Block):  # an argument
        return False
    current: Any = ir.InsertionPoint.current
    return owner.name == "stablehlo.custom_call" and owner.operation.block == current.block


def _choice(ctx: Any, exchange: Exchange) -> Chosen | None:
    """Returns the implementation, if it has two calls for this program."""
    op, comm, module = exchange.op, exchange.comm, ctx.module_context
    if comm.open_axes or (exchange.is_global and module.axis_context.num_devices != 1):
        return None  # the arrays of other devices are here too, until the program is partitioned
    if lowering.what_gpus_lack(exchange):
        return None  # the whole exchange says so
    if exchange.is_global:
        row = choose_on_one_device(op, comm.implementation, module.platforms, comm.num_ranks)
        choice = Chosen(row, None)
    else:
        choice = choose(ctx, op, comm)
    return choice if Operation.EXCHANGE_START in choice.implementation.lowerings else None


def _whole(*operands: Any, exchange: Exchange, num_beside: int, num_held: int) -> list[Any]:
    num_moving = len(operands) - num_beside
    moving, beside = operands[:num_moving], operands[num_moving:]
    primitive = dispatch_p if exchange.sums is None else combine_p
    moved = primitive.bind(*moving, exchange=exchange)
    held = jnp.zeros(num_held, jnp.float32)
    return [*moved, *moving[exchange.num_before_arrays :], held, *beside]


# ---- `start_p` and `done_p`: one exchange in two calls, with other work of the program between
# them.
#
#     start:  fields, arrays, beside -> results, arrays, held, beside
#     done:   fields, results, arrays, held, beside -> results, beside
#
# `results` are unfinished until `done`. `arrays` and `held` (copies of the fields) are what the
# exchange reads meanwhile: `done` takes them, so that they stay. `beside` are inputs of the work,
# then its outputs; both calls return them unchanged. The work depends on the first call through its
# inputs, and the second call on the work through its outputs. Where an implementation has no such
# calls, `start` is the whole exchange.
#
# As linear functions, `start` passes its arrays on, and `done` moves them. The transpose of `done`
# therefore starts the adjoint exchange: its unfinished results are the cotangents of `arrays`, and
# the rows that it reads are those of `results`. The transpose of `start` ends it.

start_p = Primitive("exchange_start")
done_p = Primitive("exchange_done")


class PairValues(NamedTuple):
    """The results of `start_p`, the operands of `done_p` without fields, or values of each.

    Attributes:
      results, arrays: one for each array that moves.
      held: f32 [num_held].
      beside: of any number.
    """

    results: list[Any]
    arrays: list[Any]
    held: Any
    beside: list[Any]

    @classmethod
    def read(cls, values: Sequence[Any], exchange: Exchange) -> "PairValues":
        n, values = exchange.num_arrays, list(values)
        return cls(values[:n], values[n : 2 * n], values[2 * n], values[2 * n + 1 :])

    def flat(self) -> list[Any]:
        return [*self.results, *self.arrays, self.held, *self.beside]


def num_held(fields: Iterable[Any]) -> int:
    """Returns the floats that hold copies of the rank and the fields; see kernels/prepare.h."""
    return 4 + sum(-(-x.size * x.dtype.itemsize // 16) * 4 for x in fields)


def _split_start(operands: Sequence[Any], num_beside: int) -> tuple[list[Any], list[Any]]:
    """Separates the operands of the exchange from those of the work."""
    num_moving = len(operands) - num_beside
    return list(operands[:num_moving]), list(operands[num_moving:])


def _split_done(operands: Sequence[Any], exchange: Exchange) -> tuple[list[Any], PairValues]:
    num_fields = exchange.num_before_arrays
    return list(operands[:num_fields]), PairValues.read(operands[num_fields:], exchange)


# ---- Shapes.


def _start_shapes(*operands, exchange: Exchange, num_beside: int, num_held: int):
    moving, beside = _split_start(operands, num_beside)
    arrays = [x.update(weak_type=False) for x in read_operands(moving, exchange).arrays]
    held = arrays[0].update(
        shape=(num_held,),
        dtype=np.dtype(np.float32),
        sharding=arrays[0].sharding.update(spec=P(None)),
    )
    return PairValues(result_shapes(moving, exchange), arrays, held, beside).flat()


def _done_shapes(*operands, exchange: Exchange):
    _, values = _split_done(operands, exchange)
    return [*values.results, *values.beside]


# ---- Batching. A batch axis of an array moves behind its rows, as in one call. Fields that differ
# per example need one exchange per example; these are whole, in a loop of their own.


def _batch_start(operands, dims, *, exchange: Exchange, num_beside: int, num_held: int):
    params = {"exchange": exchange, "num_beside": num_beside, "num_held": num_held}
    n = exchange.num_before_arrays
    if any(dim is not None for dim in dims[:n]):
        return one_after_another(start_p, operands, dims, **params)
    moving, beside = _split_start(operands, num_beside)
    dims_moving, dims_beside = _split_start(dims, num_beside)
    arrays = [
        x if dim is None else jnp.moveaxis(x, dim, 1)
        for x, dim in zip(moving[n:], dims_moving[n:], strict=True)
    ]
    outs = start_p.bind(*moving[:n], *arrays, *beside, **params)
    dims_arrays = [None if dim is None else 1 for dim in dims_moving[n:]]
    return outs, PairValues(dims_arrays, dims_arrays, None, dims_beside).flat()


def _batch_done(operands, dims, *, exchange: Exchange):
    _, of_each = _split_done(dims, exchange)
    if of_each.held is not None:
        return one_after_another(done_p, operands, dims, exchange=exchange)
    outs = done_p.bind(*operands, exchange=exchange)
    return outs, [*of_each.results, *of_each.beside]


# ---- Derivatives.


def _is_nonzero(values: Iterable[Any]) -> list[bool]:
    return [type(x) is not ad.Zero for x in values]


def _spread(values: Iterable[Any], keep: Iterable[bool], otherwise: Iterable[Any]) -> list[Any]:
    """Returns the next value where it was kept, and the other value elsewhere."""
    rest = iter(values)
    return [next(rest) if kept else other for kept, other in zip(keep, otherwise, strict=True)]


def _select(
    fields: Sequence[Any], exchange: Exchange, arrays: Sequence[Any], keep: Sequence[bool]
) -> tuple[ExchangeOperands, Exchange]:
    operands = read_operands([*fields, *arrays], exchange)
    return select_arrays(operands, exchange, keep)


def _jvp_start(primals, tangents, *, exchange: Exchange, num_beside: int, num_held: int):
    outs = start_p.bind(*primals, exchange=exchange, num_beside=num_beside, num_held=num_held)
    zeros = PairValues.read([ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs], exchange)
    moving, beside = _split_start(tangents, num_beside)
    fields, arrays = primals[: exchange.num_before_arrays], moving[exchange.num_before_arrays :]
    keep, work = _is_nonzero(arrays), _is_nonzero(beside)
    if not any(keep):
        return outs, zeros._replace(beside=beside).flat()
    linear, kept = _select(fields, exchange, arrays, keep)
    besides = list(itertools.compress(beside, work))
    moved = start_p.bind(
        *linear.flat(), *besides, exchange=kept, num_beside=len(besides), num_held=num_held
    )
    moved = PairValues.read(moved, kept)
    out_tangents = PairValues(
        _spread(moved.results, keep, zeros.results),
        _spread(moved.arrays, keep, zeros.arrays),
        moved.held,
        _spread(moved.beside, work, beside),
    )
    return outs, out_tangents.flat()


def _jvp_done(primals, tangents, *, exchange: Exchange):
    outs = done_p.bind(*primals, exchange=exchange)
    _, given = _split_done(tangents, exchange)
    keep, work = _is_nonzero(given.results), _is_nonzero(given.beside)
    if not any(keep):
        return outs, [*given.results, *given.beside]
    fields = primals[: exchange.num_before_arrays]
    linear, kept = _select(fields, exchange, given.arrays, keep)
    values = PairValues(
        list(itertools.compress(given.results, keep)),
        [ad.instantiate_zeros(x) for x in linear.arrays],
        ad.instantiate_zeros(given.held),
        list(itertools.compress(given.beside, work)),
    )
    moved = done_p.bind(*linear._replace(arrays=[]).flat(), *values.flat(), exchange=kept)
    return outs, [
        *_spread(moved[: kept.num_arrays], keep, given.results),
        *_spread(moved[kept.num_arrays :], work, given.beside),
    ]


def _adjoint(exchange: Exchange, results: Sequence[Any], arrays: Sequence[Any]) -> Exchange | None:
    """Returns the adjoint, if it can be two calls: nothing may be cast between them."""
    for x, y in zip(results, arrays, strict=True):
        if x.dtype != y.dtype or summable(x.dtype) != x.dtype:
            return None
    names = tuple(x.dtype.name for x in results) if exchange.sums is None else None
    return transposed(exchange)._replace(sums=names)


def _transpose_done(cotangents, *operands, exchange: Exchange):
    fields, values = _split_done(operands, exchange)
    n = exchange.num_arrays
    cts, beside = list(cotangents[:n]), list(cotangents[n:])
    keep, work = _is_nonzero(cts), _is_nonzero(beside)
    zeros = PairValues.read([*map(_zero_like, values.flat())], exchange)._replace(beside=beside)
    out = zeros
    if any(keep):
        linear, kept = _select(fields, exchange, cts, keep)
        avals = [x.aval for x in itertools.compress(values.arrays, keep)]
        adjoint = _adjoint(kept, linear.arrays, avals)
        if adjoint is None:
            moved = adjoint_move(kept)(linear, [x.dtype for x in avals], transposed(kept))
            out = out._replace(arrays=_spread(moved, keep, zeros.arrays))
        else:
            besides = list(itertools.compress(beside, work))
            outs = start_p.bind(
                *linear.flat(),
                *besides,
                exchange=adjoint,
                num_beside=len(besides),
                num_held=values.held.aval.size,
            )
            moved = PairValues.read(outs, adjoint)
            out = PairValues(
                _spread(moved.arrays, keep, zeros.results),
                _spread(moved.results, keep, zeros.arrays),
                moved.held,
                _spread(moved.beside, work, beside),
            )
    return [None] * len(fields) + _linear_only(out.flat(), values.flat())


def _transpose_start(cotangents, *operands, exchange: Exchange, num_beside: int, num_held: int):
    moving, beside = _split_start(operands, num_beside)
    fields, arrays = (
        moving[: exchange.num_before_arrays],
        moving[exchange.num_before_arrays :],
    )
    cts = PairValues.read(cotangents, exchange)
    keep, work = _is_nonzero(cts.results), _is_nonzero(cts.beside)
    outs = [*cts.arrays, *cts.beside]
    if any(keep):  # the adjoint exchange has been started
        linear, kept = _select(fields, exchange, cts.results, keep)
        adjoint = _adjoint(kept, linear.arrays, linear.arrays)
        values = PairValues(
            [ad.instantiate_zeros(x) for x in itertools.compress(cts.arrays, keep)],
            linear.arrays,
            ad.instantiate_zeros(cts.held),
            list(itertools.compress(cts.beside, work)),
        )
        moved = done_p.bind(*linear._replace(arrays=[]).flat(), *values.flat(), exchange=adjoint)
        outs = [
            *_spread(moved[: sum(keep)], keep, cts.arrays),
            *_spread(moved[sum(keep) :], work, cts.beside),
        ]
    return [None] * len(fields) + _linear_only(outs, [*arrays, *beside])


def _zero_like(x: Any) -> Any:
    return ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None


def _linear_only(cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    return [
        ct if ad.is_undefined_primal(x) else None
        for ct, x in zip(cotangents, operands, strict=True)
    ]


# ---- The primitives.

register(start_p, _start_shapes, lower_start)
register(done_p, _done_shapes, lower_done, cacheable=False)  # it looks at their origin
batching.primitive_batchers[start_p] = _batch_start
batching.primitive_batchers[done_p] = _batch_done
ad.primitive_jvps[start_p] = _jvp_start
ad.primitive_jvps[done_p] = _jvp_done
ad.primitive_transposes[start_p] = _transpose_start
ad.primitive_transposes[done_p] = _transpose_done


class StartedExchange:
    """An exchange between `dispatch_start` or `combine_start` and `exchange_done`.

    Not a pytree: both calls belong to one traced function.
    """

    def __init__(self, op: str, call: Prepared, values: PairValues | None):
        self.op = op
        self._call, self._values = call, values
        self._is_done = False

    def done(self, beside: Any) -> tuple[list[Any], Any]:
        """Returns the results of all arguments, and `beside`, a pytree."""
        if self._is_done:
            raise ValueError(
                f"exchange_done: this exchange of {self.op} is done. Start another one for each "
                "call."
            )
        self._is_done = True
        exchange, moved = self._call.exchange, []
        if exchange is not None and self._values is not None:
            fields = self._call.operands[: exchange.num_before_arrays]
            leaves, tree = _flatten(beside)
            values = self._values._replace(beside=leaves)
            with jax.named_scope(SCOPE):
                outs = done_p.bind(*fields, *values.flat(), exchange=exchange)
            moved, leaves = outs[: exchange.num_arrays], outs[exchange.num_arrays :]
            beside = jax.tree.unflatten(tree, leaves)
        return finish_results(self._call.results, moved), beside


def start(
    options: CollectiveOptions, arguments: Sequence[Argument], beside: Any
) -> tuple[StartedExchange, Any]:
    """Starts one exchange of all arguments; returns it and `beside`, a pytree."""
    call, values = prepare(options, arguments), None
    exchange = call.exchange
    if exchange is not None:
        fields = call.operands[: exchange.num_before_arrays]
        leaves, tree = _flatten(beside)
        with jax.named_scope(SCOPE):
            outs = start_p.bind(
                *call.operands,
                *leaves,
                exchange=exchange,
                num_beside=len(leaves),
                num_held=num_held(fields),
            )
        values = PairValues.read(outs, exchange)
        beside = jax.tree.unflatten(tree, values.beside)
    return StartedExchange(options.op, call, values), beside


def dispatch_start(
    x: PyTree[Shaped[Rows, "T ..."]],
    metadata: Metadata,
    *,
    beside: Any = None,
    axis_name: AxisName,
    capacity: int | None = None,
    buffer: int | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> tuple[StartedExchange, Any]:
    """Starts a `dispatch` that moves rows beside other work of the program.

        exchange, x = dispatch_start((k, v), metadata, beside=x, axis_name="cp", capacity=c)
        q = x @ wq
        (k, v), q = exchange_done(exchange, beside=q)

    Between GPUs, rows move while the GPU computes what depends on the returned `beside`. Elsewhere,
    and on arrays of all ranks that are split over several devices, this call is the whole exchange.
    Call where `dispatch` can be called, and call `exchange_done` in the same traced function: not
    in another `jit`, loop or branch.

    Linear in `x` and `beside`. The transpose is such a pair too: the adjoint exchange moves rows
    beside the transpose of the work.

    Args:
      beside: any arrays, the inputs of the work. Use the returned ones in it.
      x, metadata, axis_name, capacity, buffer: see `dispatch`.
      mesh, implementation, deadline, num_comm_sm: see `dispatch`.
    Returns:
      The exchange, for `exchange_done`; and `beside`, unchanged.
    Raises:
      As `dispatch`. On GPUs, `exchange_done` or a later call raises the errors of run time; see
      docs/gpu.md.
    """
    op = "dispatch_start"
    argument = outgoing(op, "x", x, metadata, capacity=capacity, buffer=buffer)
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    return start(options, [argument], beside)


def combine_start(
    y: PyTree[Num[Rows, "capacity ..."]],
    metadata: Metadata,
    *,
    beside: Any = None,
    axis_name: AxisName,
    num_tokens: int,
    preferred_element_type: DTypeLike | None = None,
    buffer: int | None = None,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> tuple[StartedExchange, Any]:
    """Starts a `combine` that returns rows beside other work of the program.

    See `dispatch_start`. Linear in `y` and `beside`.

    Args:
      beside: any arrays, the inputs of the work. Use the returned ones in it.
      y, metadata, axis_name, num_tokens, preferred_element_type, buffer: see `combine`.
      mesh, implementation, deadline, num_comm_sm: see `dispatch`.
    Returns:
      The exchange, for `exchange_done`; and `beside`, unchanged.
    Raises:
      As `combine`.
    """
    op = "combine_start"
    argument = returning(
        op, "y", y, metadata, num_tokens=num_tokens, dtype=preferred_element_type
    ).in_buffer(op, buffer)
    options = read_options(op, axis_name, mesh, implementation, deadline, num_comm_sm)
    return start(options, [argument], beside)


def exchange_done(exchange: Any, *, beside: Any = None) -> tuple[Any, Any]:
    """Ends an exchange: returns what `dispatch` or `combine` returns.

    Call once for each `dispatch_start` and `combine_start`, in the same traced function. Its
    derivative is that of the pair.

    Args:
      exchange: of `dispatch_start` or `combine_start`.
      beside: any arrays, the outputs of the work. The exchange ends after they are computed.
    Returns:
      The rows, in the structure of `x` or `y`; and `beside`, unchanged.
    Raises:
      TypeError: `exchange` is not a started exchange.
      ValueError: it is done.
    """
    if not isinstance(exchange, StartedExchange):
        raise TypeError(
            f"exchange_done: got {type(exchange).__name__}; it needs the first result of "
            "dispatch_start or combine_start."
        )
    (rows,), beside = exchange.done(beside)
    return rows, beside


def _flatten(beside: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(beside)
    return [jnp.asarray(x) for x in leaves], tree
