"""`linear_recurrence`: elementwise recurrences along documents, as in RG-LRU and S4D."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import only_where
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.chains import Carried, CutPieces
from jax_cp_dispatch.sequence.pieces import Options, Pieces
from jax_cp_dispatch.sequence.recurrence import Recur, check_decay, wide

_OP = "linear_recurrence"


@door(
    _OP,
    **STEPS_OF_DOCUMENTS,
    log_decay="Pass jnp.broadcast_to(log_decay, x.shape).",
    initial_state="Pass the last h of each running document.",
)
def linear_recurrence(
    x: Float[HostOrDevice, "B T *F"],
    log_decay: Float[HostOrDevice, "B T *F"],
    *,
    axis_name: AxisName,
    documents: Documents | Pieces | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    initial_state: Float[HostOrDevice, "B *F"] | None = None,
    return_state: bool = False,
) -> Float[Array, "B T *F"] | Any:
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
      documents, segment_ids, positions: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state, return_state: see `gated_delta_rule`; `head_axis` shards axis 1 of a state.
    Returns:
      h, in the dtype of x; or (h, state), the state in float32 (float64 for float64), on all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    check_decay(_OP, log_decay, where)
    layer = Layer(options, Recur(LinearRecurrence()))
    tokens, carried = {"x": x, "log_decay": log_decay}, Carried(initial_state, return_state)
    return call_layer(layer, tokens, (), where, axes, carried)


@dataclasses.dataclass(frozen=True)
class LinearRecurrence:
    """The elementwise recurrence on one rank, by one associative scan."""

    def __call__(
        self,
        inputs: dict[str, Array],
        ids: Int32[Array, "G L"],
        cuts: CutPieces | None,
        initial: Any,
    ) -> tuple[Array, Any]:
        dtype, inputs = inputs["x"].dtype, wide(inputs)
        x, decay = inputs["x"], jnp.exp(inputs["log_decay"])
        new = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        new = new.reshape(*new.shape, *[1] * (x.ndim - 2))

        def join(left: Any, right: Any) -> Any:
            (new0, decay0, h0), (new1, decay1, h1) = left, right
            decay = jnp.where(new1, decay1, decay0 * decay1)
            return new0 | new1, decay, jnp.where(new1, h1, decay1 * h0 + h1)

        _, decay, h = jax.lax.associative_scan(join, (new, decay, x), axis=1)
        behind = None
        if cuts is not None:
            last = jnp.maximum(cuts.earlier.row + cuts.earlier.length - 1, 0)
            at_last = lambda x: jax.lax.collapse(x, 0, 2)[last]
            added, product = at_last(h), at_last(decay)
            if initial is not None:
                initial = initial.astype(x.dtype)
                added += product * only_where(cuts.opening & cuts.follows, initial)
            state = jnp.asarray(cuts.states_before(added, (product, added), _apply, initial))
            index = jnp.where(ids <= len(state), ids, 0)  # pieces 1, ..., P are entered
            h = h + decay * jnp.pad(state, [(1, 0)] + [(0, 0)] * (state.ndim - 1))[index]
            behind = None if cuts.closing is None else at_last(h)
        return h.astype(dtype), behind


def _apply(map_: Any, state: Any) -> Any:
    decay, added = map_
    return decay * state + added
