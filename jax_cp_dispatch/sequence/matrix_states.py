"""Recurrences with a state [H, Hv] per head, in chunks of matrix products along documents.

`gated_delta_rule`: Gated DeltaNet and KDA. `linear_attention`: Mamba-2, RetNet and GLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._door import door
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.sequence.call_layer import (
    Carried,
    Layer,
    LayerOptions,
    call_layer,
    exchange_of,
)
from jax_cp_dispatch.sequence.chains import ChainPieces, Links, read
from jax_cp_dispatch.sequence.chunks import (
    Steps,
    cut_into_chunks,
    decayed_scores,
    default_chunk,
    dot,
    invert_unit_lower,
    make_decays,
    same_piece,
)
from jax_cp_dispatch.sequence.recurrence import Recur, check_decay, widened

_STEPS = {
    **STEPS_OF_DOCUMENTS,
    "q": "Pass heads as axis 2.",
    "k": "Pass heads as axis 2, as many as q has.",
    "v": "Pass heads as axis 2.",
    "log_decay": "Pass one number per head, [B, T, N], or per channel of the key, [B, T, N, H].",
    "beta": "Pass one number per head.",
    "initial_state": "Pass a state for each batch row and head.",
}


@door("gated_delta_rule", **_STEPS)
def gated_delta_rule(
    q: Float[HostOrDevice, "B T K H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T N Hv"],
    log_decay: Float[HostOrDevice, "B T N *H"],
    beta: Float[HostOrDevice, "B T N"],
    *,
    scale: float | None = None,
    initial_state: Float[HostOrDevice, "B N H Hv"] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
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
      axis_name, documents, segment_ids, positions, mesh, batch_axis, implementation, deadline: see
        `causal_conv`.
      head_axis: for global arrays: the mesh axis that shards the heads.
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
    factor = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    kernel = _Kernel(_delta_rule, factor, default_chunk())
    tokens = {"v": v, "q": q, "k": k, "log_decay": log_decay, "beta": beta}
    return _call("gated_delta_rule", kernel, tokens, Carried(initial_state, return_state), call)


@door("linear_attention", **_STEPS)
def linear_attention(
    q: Float[HostOrDevice, "B T K H"],
    k: Float[HostOrDevice, "B T K H"],
    v: Float[HostOrDevice, "B T N Hv"],
    log_decay: Float[HostOrDevice, "B T N *H"],
    *,
    scale: float | None = None,
    initial_state: Float[HostOrDevice, "B N H Hv"] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
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
      axis_name, documents, segment_ids, positions, mesh, batch_axis, implementation, deadline: see
        `causal_conv`.
      head_axis: for global arrays: the mesh axis that shards the heads.
      initial_state, return_state: see `gated_delta_rule`.
    Returns:
      The output, in v's dtype; or (output, state), the state in float32 (float64 for float64), on
      all ranks.
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    kernel = _Kernel(_linear_attention, 1.0 if scale is None else float(scale), default_chunk())
    tokens = {"v": v, "q": q, "k": k, "log_decay": log_decay}
    return _call("linear_attention", kernel, tokens, Carried(initial_state, return_state), call)


def _call(
    op: str, kernel: Any, tokens: dict[str, Any], carried: Carried, call: LayerOptions
) -> Any:
    k, v = tokens["k"], tokens["v"]
    if not k.shape[2] or not v.shape[2] or v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: v has {v.shape[2]} heads but k has {k.shape[2]}, which must divide them. Pass "
            "one key head for each group of value heads, at least one."
        )
    if not k.shape[3]:
        raise ValueError(
            f"{op}: heads of q and k have size 0; they need at least one feature. Pass those of a "
            "state with rows."
        )
    check_decay(op, tokens["log_decay"], call)
    layer = Layer(exchange_of(op, call), Recur(kernel), num_heads=v.shape[2], grouped=("q", "k"))
    return call_layer(layer, tokens, (), carried, call)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A recurrence of matrices on one rank."""

    # Returns the steps of chunks, their queries, scores and log decays; see `_delta_rule`
    prepare: Callable[..., tuple[Steps, Array, Array, Array | None]]
    scale: float  # factor on the output
    chunk: int  # rows of a chunk

    def __call__(
        self,
        inputs: dict[str, Array],
        ids: Int32[Array, "G L"],
        cuts: ChainPieces | None,
        initial: Any,
    ) -> tuple[Float[Array, "G L N V"], Any]:
        v = inputs["v"]
        dtype = sum_dtype(*(x.dtype for x in inputs.values()))
        chunks = cut_into_chunks(ids, self.chunk, v.shape[2], dtype)
        initial = None if initial is None else initial.astype(dtype)
        prepare = lambda rows, ids: self.prepare(_heads_first(rows, self.scale), ids)
        steps, q, scores, log = chunks.apply(prepare, inputs)
        decays = None
        if cuts is not None and log is not None:  # over each cut piece
            first = cuts.earlier.row
            rows = chunks.rows_between(first, first + cuts.earlier.length - 1).astype(log.dtype)
            decays = jnp.exp(jnp.einsum("pngc,ngmcf->pmf", rows, log, precision="highest"))
        out, state = read(steps, q, scores, chunks, Links.of(cuts, chunks, decays), initial)
        return out.astype(v.dtype), state


def _delta_rule(rows: list[Array], ids: Int32[Array, "n G C"]) -> tuple[Steps, Array, Array, None]:
    """Prepares the gated delta rule, by the WY form in each chunk.

    References: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length", section 3; "Gated Delta Networks", section 3.3.
    """
    q, k, v, log, beta = rows
    same, lower = same_piece(ids, k.dtype), np.tri(ids.shape[-1], k=-1, dtype=k.dtype)
    (into, out), weighted = make_decays(log, same), k * beta
    own, scores = decayed_scores((weighted, q), k, log)
    inverse = invert_unit_lower(own * (same * lower[None, None, None]))
    u, w = dot(inverse, v * beta), dot(inverse, weighted * into)
    return Steps(u, w, k * out, into), q * into, scores * same, None


def _linear_attention(
    rows: list[Array], ids: Int32[Array, "n G C"]
) -> tuple[Steps, Array, Array, Array]:
    """Prepares linear attention, whose rows read nothing, so that cut pieces only decay states."""
    q, k, v, log = rows
    same = same_piece(ids, k.dtype)
    into, out = make_decays(log, same)
    (scores,) = decayed_scores((q,), k, log)
    return Steps(v, None, k * out, into), q * into, scores * same, log


def _heads_first(rows: dict[str, Array], scale: float) -> list[Float[Array, "n G N C F"]]:
    """Returns scaled q, k, v, log decay and, if given, beta of rows in chunks [n, G, C, N, ...].

    Each head has queries and keys of its own. Log decays are finite: instead of -inf, a number
    whose exponential is zero, so that no product with it is NaN.
    """
    rows = widened(rows)
    q, k, v, log = (rows[name] for name in ("q", "k", "v", "log_decay"))
    q, k = (jnp.repeat(x, v.shape[3] // k.shape[3], axis=3) for x in (q * scale, k))
    log = jnp.maximum(log, -120.0 if log.dtype == jnp.float32 else -800.0)
    per_head = [log, *([rows["beta"]] if "beta" in rows else [])]
    log, *beta = (x if x.ndim == 5 else x[..., None] for x in per_head)
    return [x.swapaxes(2, 3) for x in (q, k, v, log, *beta)]
