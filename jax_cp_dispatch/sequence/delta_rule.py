"""`gated_delta_rule`: Gated DeltaNet and KDA along documents, in chunks of matrix products."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.chains import Carried, CutPieces, Links, read
from jax_cp_dispatch.sequence.chunks import (
    Steps,
    decayed_scores,
    default_chunk,
    dot,
    invert_unit_lower,
    make_decays,
    same_piece,
)
from jax_cp_dispatch.sequence.pieces import Options, Pieces
from jax_cp_dispatch.sequence.recurrence import (
    STEPS_OF_HEADS,
    Recur,
    check_decay,
    check_heads,
    chunks_of,
    heads_first,
)

_OP = "gated_delta_rule"


@door(_OP, **STEPS_OF_HEADS)
def gated_delta_rule(
    q: Float[HostOrDevice, "B T K H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T N Hv"],
    log_decay: Float[HostOrDevice, "B T N *H"],
    beta: Float[HostOrDevice, "B T N"],
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
    """Computes the gated delta rule along each document: Gated DeltaNet, or KDA.

        S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_(t-1) + beta_t k_t v_t^T    [H, Hv]
        out_t = scale * S_t^T q_t

    The state of each head starts from zero in each document. Call inside `jax.shard_map` over
    `axis_name`, on every rank, or on global arrays. Differentiable in reverse mode. Computes in
    float32 (float64 for float64), in chunks of tokens. Nothing moves for documents that are whole
    on a rank; of a cut one, each piece but the last sends its map, H (H + Hv) numbers per head (H
    Hv of the first piece), to the ranks that hold later pieces: one exchange, and one for the
    derivative. Padding is not read and its output is zero.

    Args:
      q, k: queries and keys; K divides N. They are not normalised here: the recurrence diverges
        unless `beta` times the squared norm of k is at most 2.
      v: values.
      log_decay: at most 0, per head [B, T, N], or per channel of the key [B, T, N, H]; -inf resets
        the state.
      beta: how far a token's value replaces what the state holds for its key.
      scale: factor on the output; None is `1 / sqrt(H)`.
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents, segment_ids, positions: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state: for documents that continue: the state S of each head before the first document
        of each batch row, the same on all ranks; zeros in a row that begins a document. Only in
        packed order.
      return_state: also return the state behind the last document of each batch row, for the next
        call. Padding does not count; a row without tokens keeps its state.
    Returns:
      The output, in v's dtype; or (output, state), the state in float32 (float64 for float64), on
      all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    check_heads(_OP, k, v)
    kernel = DeltaRule(q.shape[-1] ** -0.5 if scale is None else float(scale), default_chunk())
    tokens = {"v": v, "q": q, "k": k, "log_decay": log_decay, "beta": beta}
    layer = Layer(options, Recur(kernel), num_heads=v.shape[2], grouped=("q", "k"))
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    check_decay(_OP, log_decay, where)
    return call_layer(layer, tokens, (), where, axes, Carried(initial_state, return_state))


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule on one rank, by the WY form in each chunk.

    References: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length", section 3; "Gated Delta Networks", section 3.3.
    """

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
        u, w, kd, into, q, scores = chunks.apply(self._prepare, inputs)
        links = Links.of(cuts, chunks)
        out, state = read(Steps(u, w, kd, into), q, scores, chunks, links, initial)
        return out.astype(inputs["v"].dtype), state

    def _prepare(self, rows: dict[str, Array], ids: Int32[Array, "n G C"]) -> tuple[Array, ...]:
        q, k, v, log, beta = heads_first(rows, self.scale)
        same, lower = same_piece(ids, k.dtype), np.tri(ids.shape[-1], k=-1, dtype=k.dtype)
        decays, weighted = make_decays(log, same), k * beta
        own, scores = decayed_scores((weighted, q), k, decays)
        inverse = invert_unit_lower(own * (same * lower[None, None, None]))
        u, w = dot(inverse, v * beta), dot(inverse, weighted * decays.into)
        return u, w, k * decays.out, decays.into, q * decays.into, scores * same
