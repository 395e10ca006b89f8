"""`recurrence`: a linear recurrence along documents, from the map of a piece and a local kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Int32, Integer, PyTree, Shaped

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.attention.check_arguments import HostOrDevice
from jax_cp_dispatch.planner import PlacedPlan
from jax_cp_dispatch.sequence.chains import states_before
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Pieces
from jax_cp_dispatch.sequence.ranks import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.recurrence_arrays import check_rows

_OP = "recurrence"


class Ends(NamedTuple):
    """Pieces of this rank that later ones continue.

    Attributes:
      first, last: their first and last row, counted over all groups of rows.
      used: whether there is such a piece.
      follows: whether it continues an earlier piece itself.
    """

    first: Int32[Array, " P"]
    last: Int32[Array, " P"]
    used: Bool[Array, " P"]
    follows: Bool[Array, " P"]


class Entry(NamedTuple):
    """Pieces of this rank that continue earlier ones.

    Attributes:
      first: their first row, counted over all groups of rows.
      used: whether there is such a piece.
      state: the state before it.
    """

    first: Int32[Array, " Q"]
    used: Bool[Array, " Q"]
    state: PyTree[Shaped[Array, "Q ..."]]


@runtime_checkable
class Kernel(Protocol):
    """A recurrence on one rank, in two steps between which states are exchanged; hashable."""

    def prepare(self, inputs: Any, piece_ids: Any) -> Any:
        """Computes what needs no state, from rows [G, L, ...]."""
        ...

    def summaries(self, prepared: Any, ends: Ends) -> tuple[Any, Any]:
        """Returns the state after each piece that begins a document, and the maps of the others."""
        ...

    def apply(self, map_: Any, state: Any) -> Any:
        """Returns the state after a piece."""
        ...

    def finish(self, prepared: Any, entry: Entry | None) -> Any:
        """Returns the outputs [G, L, ...]; without `entry`, all pieces start from zero."""
        ...


def recurrence(
    inputs: PyTree[Shaped[HostOrDevice, "B T ..."]],
    local: Any,
    *,
    axis_name: AxisName,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    plan: PlacedPlan | Pieces | None = None,
    layout: str = "contiguous",
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> PyTree[Shaped[Array, "B T ..."]]:
    """Computes a recurrence along each document with the caller's kernel.

    Over a piece of a document, the state changes by an affine map. The map of each piece goes to
    the ranks that hold later pieces of the document, in one exchange; each rank then computes its
    pieces from the states that result. A first piece sends its state instead, and a last one
    nothing. No rank waits for the outputs of another.

    Call inside `jax.shard_map` over `axis_name`, on every rank, or on global arrays. Differentiable
    if `local` is; the derivative is one exchange.

    Args:
      inputs: the kernel gets them with rows of zeros for padding, which must leave the state as it
        is.
      local: a hashable object with the functions
        `summary(inputs) -> map`, the map of one piece: inputs [1, rows, ...], zero outside of it;
        `apply(map, state) -> state`, in which the state None is zero;
        `run(inputs, states, piece_ids) -> outputs`: `piece_ids` i32 [G, rows] is 0 for padding, and
        different for each piece, whose first row follows the state `states[i]`. Leaves of `states`
        are [P + 1, ...]; pieces with i >= P start from zero, as `states[P]` does, so
        `states[jnp.minimum(i, P)]` serves all. G counts batch rows, or their halves in zigzag
        order; it is 1 in placed order.
        Maps are applied one by one, so a function that composes them is not needed.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      segment_ids, positions, plan, layout: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards axis 2 of each array, and of the outputs, which then have one.
      implementation, deadline: of the exchange, see `dispatch`.
    Returns:
      What `run` returns, zero for padding.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, layout, implementation, deadline)
    missing = [x for x in ("summary", "apply", "run") if not callable(getattr(local, x, None))]
    if missing:
        raise TypeError(
            f"{_OP}: local is of type {type(local).__name__}, without {', '.join(missing)}. Pass "
            "an object with the functions summary, apply and run."
        )
    check_rows(_OP, "inputs", inputs)
    layer = Layer(options, Recur(OfUser(local)))
    where, axes = Where(segment_ids, positions, plan), Axes(mesh, batch_axis, head_axis)
    return call_layer(layer, inputs, (), where, axes)


@dataclasses.dataclass(frozen=True)
class Recur:
    """The recurrence of one rank's rows, with any kernel; hashable."""

    kernel: Kernel

    @jax.named_scope("cpd.recurrence")
    def __call__(self, options: Options, pieces: Pieces, inputs: Any, weights: tuple[()]) -> Any:
        kernel = self.kernel
        inert = lambda x: jnp.where(_rows_like(pieces.is_token, x), x, 0)
        inputs = jax.tree.map(inert, pieces.arrange(inputs))
        later, earlier = pieces.own_later, pieces.own_earlier
        slot, fresh = pieces.slots(later), pieces.begin + pieces.num_slots + 1
        ids = jnp.where(slot > 0, slot, jnp.where(pieces.is_token, fresh, 0))
        prepared, entry = kernel.prepare(inputs, ids), None
        if pieces.world_size > 1:
            last = earlier.row + earlier.length - 1
            ends = Ends(earlier.row, last, earlier.used, earlier.start > 0)
            first, maps = kernel.summaries(prepared, ends)
            states = states_before(options.exchange, pieces, first, maps, kernel.apply)
            entry = Entry(later.row, later.used, states)
        return pieces.restore(jax.tree.map(inert, kernel.finish(prepared, entry)))


def _rows_like(rows: Array, x: Array) -> Array:
    return rows.reshape(*rows.shape, *[1] * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class OfUser:
    """The kernel of a user's `local`: the summary of each piece reads its group of rows."""

    local: Any

    def prepare(self, inputs: Any, piece_ids: Array) -> Any:
        return inputs, piece_ids

    def summaries(self, prepared: Any, ends: Ends) -> tuple[Any, Any]:
        inputs, ids = prepared
        rows = jnp.arange(ids.shape[1], dtype=jnp.int32)

        def summary(first: Array, last: Array, used: Array) -> Any:
            group = first // ids.shape[1]
            row = group * ids.shape[1] + rows
            inside = (used & (row >= first) & (row <= last))[None]

            def cut(x: Array) -> Array:
                own = jax.lax.dynamic_index_in_dim(x, group)
                return jnp.where(_rows_like(inside, own), own, 0)

            return self.local.summary(jax.tree.map(cut, inputs))

        maps = jax.vmap(summary)(ends.first, ends.last, ends.used)
        return jax.vmap(lambda x: self.local.apply(x, None))(maps), maps

    def apply(self, map_: Any, state: Any) -> Any:
        return self.local.apply(map_, state)

    def finish(self, prepared: Any, entry: Entry | None) -> Any:
        inputs, ids = prepared
        if entry is not None:
            states = entry.state
        else:
            one = jax.tree.map(lambda x: x[:1], inputs)
            state = jax.eval_shape(lambda x: self.local.apply(self.local.summary(x), None), one)
            states = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), state)
        edge = lambda x: jnp.pad(x, [(1, 1)] + [(0, 0)] * (x.ndim - 1))
        out = self.local.run(inputs, jax.tree.map(edge, states), ids)
        shapes = [jnp.shape(x) for x in jax.tree.leaves(out)]
        if any(shape[:2] != ids.shape for shape in shapes):
            raise ValueError(
                f"{_OP}: local.run returned arrays of shapes {shapes} for rows {ids.shape}. Return "
                "[G, rows, ...], an output for each row."
            )
        return out
