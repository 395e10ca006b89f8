"""`linear_attention`: Mamba-2, RetNet and GLA along documents, in chunks of matrix products."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.attention.check_arguments import HostOrDevice
from jax_cp_dispatch.planner import PlacedPlan
from jax_cp_dispatch.sequence.chunks import chunks_of, default_chunk, lower
from jax_cp_dispatch.sequence.decays import decayed_scores, decays_of
from jax_cp_dispatch.sequence.options import Options
from jax_cp_dispatch.sequence.pieces import Pieces
from jax_cp_dispatch.sequence.ranks import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.recurrence import Ends, Entry, Recur
from jax_cp_dispatch.sequence.recurrence_arrays import check_heads, heads_first, wide_dtype
from jax_cp_dispatch.sequence.states import Prepared, Steps, read
from jax_cp_dispatch.sequence.summaries import states_of_pieces

_OP = "linear_attention"


def linear_attention(
    q: Float[HostOrDevice, "B T K H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T N Hv"],
    log_decay: Float[HostOrDevice, "B T N *H"],
    *,
    scale: float | None = None,
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
) -> Float[Array, "B T N Hv"]:
    """Computes linear attention with decay along each document: Mamba-2 (SSD), RetNet, or GLA.

        S_t = exp(log_decay_t) S_(t-1) + k_t v_t^T    [H, Hv]
        out_t = scale * S_t^T q_t

    As `gated_delta_rule`, but a map has only H Hv numbers per head and its decay, one number or H.

    Args:
      q, k: queries and keys (in Mamba-2, C and B); K divides N.
      v: values (in Mamba-2, the inputs times their step).
      log_decay: at most 0, per head [B, T, N], or per channel of the key [B, T, N, H]; -inf resets
        the state.
      scale: factor on the output; None is 1.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      segment_ids, positions, plan, layout: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
    Returns:
      The output, in v's dtype.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, layout, implementation, deadline)
    check_heads(_OP, q, k, v, log_decay)
    kernel = LinearAttention(1.0 if scale is None else float(scale), default_chunk())
    tokens = {"v": v, "q": q, "k": k, "log_decay": log_decay}
    layer = Layer(options, Recur(kernel), num_heads=v.shape[2], grouped=("q", "k"))
    where, axes = Where(segment_ids, positions, plan), Axes(mesh, batch_axis, head_axis)
    return call_layer(layer, tokens, (), where, axes)


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """Linear attention with decay on one rank."""

    scale: float
    chunk: int

    def prepare(
        self, inputs: dict[str, Array], piece_ids: Int32[Array, "G L"]
    ) -> tuple[Prepared, Float[Array, "n G N C F"]]:
        """Also returns the log decays of the rows."""
        dtype, num_heads = inputs["v"].dtype, inputs["v"].shape[2]
        chunks = chunks_of(piece_ids, self.chunk, num_heads, wide_dtype(inputs))
        u, kd, into, q, scores, log = chunks.apply(self._prepare, inputs)
        return Prepared(Steps(u, None, kd, into, chunks), q, scores, dtype), log

    def _prepare(self, rows: dict[str, Array], ids: Int32[Array, "n G C"]) -> tuple[Array, ...]:
        q, k, v, log = heads_first(rows, self.scale)
        decays = decays_of(log, ids)
        (scores,) = decayed_scores((q,), k, decays)
        scores = scores * lower(ids, k.dtype)
        return v, k * decays.out, decays.into, q * decays.into, scores, log

    def summaries(self, prepared: Any, ends: Ends) -> tuple[Any, Any]:
        (steps, *_), log = prepared
        added = states_of_pieces(steps, ends)
        rows = steps.chunks.rows_between(ends.first, ends.last).astype(log.dtype)
        total = jnp.einsum("pngc,ngmcf->pmf", rows, log, precision="highest")
        return added, (jnp.exp(total), added)

    def apply(self, map_: Any, state: Any) -> Any:
        decay, added = map_
        return decay[..., None] * state + added

    def finish(self, prepared: Any, entry: Entry | None) -> Float[Array, "G L N V"]:
        return read(prepared[0], entry)
