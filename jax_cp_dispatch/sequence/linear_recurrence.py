"""`linear_recurrence`: elementwise recurrences along documents, as in RG-LRU and S4D."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.attention.check_arguments import HostOrDevice
from jax_cp_dispatch.planner import PlacedPlan
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Pieces
from jax_cp_dispatch.sequence.ranks import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.recurrence import Ends, Entry, Recur
from jax_cp_dispatch.sequence.recurrence_arrays import check_elementwise, wide

_OP = "linear_recurrence"


def linear_recurrence(
    x: Float[HostOrDevice, "B T *F"],
    log_decay: Float[HostOrDevice, "B T *F"],
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
) -> Float[Array, "B T *F"]:
    """Computes an elementwise linear recurrence along each document: RG-LRU, LRU, S4D.

        h_t = exp(log_decay_t) h_(t-1) + x_t

    Call inside `jax.shard_map` over `axis_name`, on every rank, or on global arrays.
    Differentiable. Computes in float32 (float64 for float64). Nothing moves for documents that are
    whole on a rank; of a cut one, each piece but the last sends two rows (one, if it is the first)
    to the ranks that hold later pieces. Padding is not read and its output is zero.

    Args:
      x: inputs.
      log_decay: at most 0; -inf resets.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      segment_ids, positions, plan, layout: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
    Returns:
      h, in the dtype of x.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, layout, implementation, deadline)
    check_elementwise(_OP, x, log_decay)
    where, axes = Where(segment_ids, positions, plan), Axes(mesh, batch_axis, head_axis)
    layer = Layer(options, Recur(LinearRecurrence()))
    return call_layer(layer, {"x": x, "log_decay": log_decay}, (), where, axes)


class _Prepared(NamedTuple):
    """The recurrence from zero, and the decay since the start of each piece, [G, L, *F]."""

    h: Array
    decay: Array
    ids: Int32[Array, "G L"]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class LinearRecurrence:
    """The elementwise recurrence on one rank, by one associative scan."""

    def prepare(self, inputs: dict[str, Array], piece_ids: Int32[Array, "G L"]) -> _Prepared:
        dtype, inputs = inputs["x"].dtype, wide(inputs)
        x, decay = inputs["x"], jnp.exp(inputs["log_decay"])
        new = jnp.pad(piece_ids[:, 1:] != piece_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        new = new.reshape(*new.shape, *[1] * (x.ndim - 2))

        def join(left: Any, right: Any) -> Any:
            (new0, decay0, h0), (new1, decay1, h1) = left, right
            decay = jnp.where(new1, decay1, decay0 * decay1)
            return new0 | new1, decay, jnp.where(new1, h1, decay1 * h0 + h1)

        _, decay, h = jax.lax.associative_scan(join, (new, decay, x), axis=1)
        return _Prepared(h, decay, piece_ids, dtype)

    def summaries(self, prepared: _Prepared, ends: Ends) -> tuple[Any, Any]:
        at = lambda x: jax.lax.collapse(x, 0, 2)[ends.last]
        return at(prepared.h), (at(prepared.decay), at(prepared.h))

    def apply(self, map_: Any, state: Any) -> Any:
        decay, added = map_
        return decay * state + added

    def finish(self, prepared: _Prepared, entry: Entry | None) -> Array:
        h = prepared.h
        if entry is not None:  # pieces 1, ..., P are entered
            index = jnp.where(prepared.ids <= len(entry.used), prepared.ids, 0)
            state = jnp.asarray(entry.state)
            entering = jnp.pad(state, [(1, 0)] + [(0, 0)] * (state.ndim - 1))[index]
            h = h + prepared.decay * entering
        return h.astype(prepared.dtype)
