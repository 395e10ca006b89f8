"""`dispatch_start`, `combine_start`, `exchange_done`: an exchange beside other work."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike, Num, PyTree, Shaped

from jax_cp_dispatch._dispatch.arguments import Argument, Rows, outgoing, returning
from jax_cp_dispatch._dispatch.exchange import SCOPE, Prepared, finish_results, prepare
from jax_cp_dispatch._dispatch.pair import PairValues, done_p, num_held, start_p
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.metadata import Metadata


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
