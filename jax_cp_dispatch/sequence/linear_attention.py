"""`linear_attention`: Mamba-2, RetNet and GLA along documents, in chunks of matrix products."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.chains import Carried, CutPieces, Links, read
from jax_cp_dispatch.sequence.chunks import (
    Chunks,
    Steps,
    decayed_scores,
    default_chunk,
    make_decays,
    same_piece,
)
from jax_cp_dispatch.sequence.pieces import Cuts, Options, Pieces
from jax_cp_dispatch.sequence.recurrence import (
    STEPS_OF_HEADS,
    Recur,
    check_decay,
    check_heads,
    chunks_of,
    heads_first,
)

_OP = "linear_attention"


@door(_OP, **STEPS_OF_HEADS)
def linear_attention(
    q: Float[HostOrDevice, "B T K H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T N Hv"],
    log_decay: Float[HostOrDevice, "B T N *H"],
    *,
    scale: float | None = None,
    axis_name: AxisName,
    documents: Documents | Pieces | None = None,
    segment_ids: Integer[HostOrDevice, "B T"] | None = None,
    positions: Integer[HostOrDevice, "B T"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    batch_axis: str | Names[str] | None = None,
    head_axis: str | Names[str] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    initial_state: Float[HostOrDevice, "B N H Hv"] | None = None,
    return_state: bool = False,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes linear attention with decay along each document: Mamba-2 (SSD), RetNet, or GLA.

        S_t = exp(log_decay_t) S_(t-1) + k_t v_t^T    [H, Hv]
        out_t = scale * S_t^T q_t

    As `gated_delta_rule`, but a map has only H Hv numbers per head and its decay, one number or H.

    Args:
      q, k: queries and keys (in Mamba-2, C and B); K divides N.
      v: values (in Mamba-2, the inputs times their step).
      log_decay: at most 0, per head [B, T, N], or per channel of the key [B, T, N, H]; -inf resets
        the state.
      scale: factor on the output; None is 1, as in Mamba-2, not the `1 / sqrt(H)` of other layers.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents, segment_ids, positions: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state, return_state: see `gated_delta_rule`.
    Returns:
      The output, in v's dtype; or (output, state), the state in float32 (float64 for float64), on
      all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    check_heads(_OP, k, v)
    kernel = LinearAttention(1.0 if scale is None else float(scale), default_chunk())
    tokens = {"v": v, "q": q, "k": k, "log_decay": log_decay}
    layer = Layer(options, Recur(kernel), num_heads=v.shape[2], grouped=("q", "k"))
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    check_decay(_OP, log_decay, where)
    return call_layer(layer, tokens, (), where, axes, Carried(initial_state, return_state))


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """Linear attention with decay on one rank."""

    scale: float
    chunk: int

    def __call__(
        self,
        inputs: dict[str, Array],
        ids: Int32[Array, "G L"],
        cuts: CutPieces | None,
        initial: Any,
    ) -> tuple[Float[Array, "G L N V"], Any]:
        chunks, initial = chunks_of(inputs, ids, self.chunk, initial)
        u, kd, into, q, scores, log = chunks.apply(self._prepare, inputs)
        decays = None if cuts is None else self._decays(chunks, cuts.earlier, log)
        links = Links.of(cuts, chunks, decays)
        out, state = read(Steps(u, None, kd, into), q, scores, chunks, links, initial)
        return out.astype(inputs["v"].dtype), state

    def _prepare(self, rows: dict[str, Array], ids: Int32[Array, "n G C"]) -> tuple[Array, ...]:
        q, k, v, log = heads_first(rows, self.scale)
        same = same_piece(ids, k.dtype)
        decays = make_decays(log, same)
        (scores,) = decayed_scores((q,), k, decays)
        return v, k * decays.out, decays.into, q * decays.into, scores * same, log

    def _decays(self, chunks: Chunks, cuts: Cuts, log: Array) -> Float[Array, "P N F"]:
        """Returns the decay over each cut piece."""
        rows = chunks.rows_between(cuts.row, cuts.row + cuts.length - 1).astype(log.dtype)
        return jnp.exp(jnp.einsum("pngc,ngmcf->pmf", rows, log, precision="highest"))
