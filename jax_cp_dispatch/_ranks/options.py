"""The options of a collective call, checked where it is called; and its ranks, found by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._ranks.call_context import CallContext, find_context
from jax_cp_dispatch._ranks.communicator import (
    AxisName,
    Communicator,
    check_axis_name,
    check_deadline,
    check_mesh,
    in_milliseconds,
    other_axes,
)
from jax_cp_dispatch._ranks.implementations import check_groups, check_implementation, refuse_here


@dataclasses.dataclass(frozen=True)
class CollectiveOptions:
    """The checked options of one call; static. Make it with `read_options`.

    Attributes:
      op: the function that was called, for error messages.
      axis_names: the mesh axes whose devices are the ranks, the major one first; () without ranks.
      mesh: of global arrays, if given.
      implementation: the caller's choice; None selects one.
      deadline: seconds that a rank waits for another; None is the default.
      num_comm_sm: multiprocessors of a GPU that an exchange uses; None is the default.
    """

    op: str
    axis_names: tuple[str, ...]
    mesh: Any = None
    implementation: str | None = None
    deadline: float | None = None
    num_comm_sm: int | None = None

    def communicator(self, **ranks: Any) -> Communicator:
        """Returns the ranks, without `ranks` none, with these options."""
        deadline_ms = in_milliseconds(self.deadline)
        return Communicator(implementation=self.implementation, deadline_ms=deadline_ms, **ranks)

    @property
    def axis_name(self) -> AxisName:
        """The same for JAX, which is much faster with one name than with a tuple."""
        return self.axis_names if len(self.axis_names) != 1 else self.axis_names[0]


def read_options(
    op: str,
    axis_name: AxisName,
    mesh: Any = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> CollectiveOptions:
    """Checks the options of a call of `op` over a mesh axis.

    Raises:
      TypeError, ValueError: an argument is invalid.
      RuntimeError: this process cannot make collective calls.
    """
    names = check_axis_name(op, axis_name)
    check_mesh(op, mesh)
    alone = read_options_alone(op, implementation=implementation, deadline=deadline)
    if num_comm_sm is not None:
        check_positive(op, num_comm_sm=num_comm_sm)
    return dataclasses.replace(alone, axis_names=names, mesh=mesh, num_comm_sm=num_comm_sm)


def read_options_alone(
    op: str, *, implementation: str | None = None, deadline: float | None = None
) -> CollectiveOptions:
    """Checks the options of a call without ranks: it does not communicate."""
    check_implementation(op, implementation)
    if deadline is not None:
        check_deadline(op, deadline)
    return CollectiveOptions(op, (), None, implementation, deadline)


def find_ranks(
    options: CollectiveOptions, arrays: Sequence[Any]
) -> tuple[Communicator, CallContext]:
    """Finds the ranks of a call, and its context.

    Args:
      options: of the call.
      arrays: of the call; their types may determine the mesh.
    Returns:
      The ranks and the context. If the mesh is not known yet, the number of ranks is 0.
    Raises:
      ValueError, NotImplementedError: the call is not possible here.
    """
    op, names = options.op, options.axis_names
    refuse_here(op)  # the process that traces a derivative may be another one
    context = find_context(op, names, options.mesh, arrays)
    if context.is_global and not context.open_axes:  # otherwise the lowering knows them
        check_groups(op, options.implementation, context.groups(names))
    groups = ()
    if not context.is_global:
        groups = tuple(x for x in other_axes(context.mesh, names) if x not in context.open_axes)
    return options.communicator(
        axis_names=names,
        num_ranks=context.num_ranks(names) or 0,
        group_axes=groups,
        open_axes=context.open_axes,
    ), context
