"""`recurrence`: a linear recurrence along documents, from the map of a piece and a local kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int32, Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import only_where
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.sequence.chains import CutPieces
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces
from jax_cp_dispatch.sequence.ranks import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.recurrence_arrays import check_rows

_OP = "recurrence"


@runtime_checkable
class Kernel(Protocol):
    """A recurrence on one rank; hashable."""

    def __call__(self, inputs: Any, ids: Int32[Array, "G L"], cuts: CutPieces | None) -> Any:
        """Returns the outputs [G, L, ...] of rows [G, L, ...], whose pieces have these ids.

        Without `cuts`, all pieces start from zero.
        """
        ...


def recurrence(
    inputs: PyTree[Shaped[HostOrDevice, "B T ..."]],
    local: Any,
    *,
    axis_name: AxisName,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    plan: Plan | Pieces | None = None,
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
        inert = partial(only_where, pieces.is_token)
        inputs = jax.tree.map(inert, pieces.arrange(inputs))
        cuts = CutPieces.of(options.exchange, pieces)
        outputs = self.kernel(inputs, cuts.ids(), cuts if pieces.world_size > 1 else None)
        return pieces.restore(jax.tree.map(inert, outputs))


@dataclasses.dataclass(frozen=True)
class OfUser:
    """The kernel of a user's `local`: the summary of each piece reads its group of rows."""

    local: Any

    def __call__(self, inputs: Any, ids: Int32[Array, "G L"], cuts: CutPieces | None) -> Any:
        if cuts is not None:
            maps = self._maps(inputs, ids, cuts.earlier)
            first = jax.vmap(lambda x: self.local.apply(x, None))(maps)
            states = cuts.states_before(first, maps, self.local.apply)
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

    def _maps(self, inputs: Any, ids: Int32[Array, "G L"], cuts: Cuts) -> Any:
        rows = jnp.arange(ids.shape[1], dtype=jnp.int32)

        def summary(cut: Cuts) -> Any:
            group = cut.row // ids.shape[1]
            row = group * ids.shape[1] + rows
            inside = (cut.used & (row >= cut.row) & (row < cut.row + cut.length))[None]

            def own(x: Array) -> Array:
                here = jax.lax.dynamic_index_in_dim(x, group)
                return only_where(inside, here)

            return self.local.summary(jax.tree.map(own, inputs))

        return jax.vmap(summary)(cuts)
