"""Recurrences along documents: with the caller's kernel, elementwise, and with matrices.

`gated_delta_rule` (Gated DeltaNet and KDA) and `linear_attention` (Mamba-2, RetNet and GLA) have a
state [H, Hv] per head, in chunks of matrix products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, is_on_host
from jax_cp_dispatch._arrays import chosen, run_begins, sum_dtype, where_or_zero
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.sequence.call_layer import (
    Carried,
    Layer,
    LayerOptions,
    call_layer,
    check_state,
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
from jax_cp_dispatch.sequence.pieces import Cuts, Pieces

_OP = "recurrence"
_STATE = "Pass a state as return_state=True returns it."


@door(_OP, **STEPS_OF_DOCUMENTS, initial_state=_STATE)
def recurrence(
    inputs: PyTree[Shaped[HostOrDevice, "B T ..."]],
    local: Any,
    *,
    initial_state: PyTree[Shaped[HostOrDevice, "B ..."]] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
) -> PyTree[Shaped[Array, "B T ..."]] | Any:
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
      axis_name, documents, segment_ids, positions, mesh, batch_axis, implementation, deadline: see
        `causal_conv`.
      head_axis: for global arrays: the mesh axis that shards axis 2 of each array, and of the
        outputs, which then have one.
      initial_state, return_state: see `gated_delta_rule`; a state is what `apply` returns, with a
        first axis B, and `head_axis` shards axis 1.
    Returns:
      What `run` returns, zero for padding; or (outputs, state).
    Raises:
      As `causal_conv`.
    """
    missing = [x for x in ("summary", "apply", "run") if not callable(getattr(local, x, None))]
    if missing:
        raise TypeError(
            f"{_OP}: local is of type {type(local).__name__}, without {', '.join(missing)}. Pass "
            "an object with the functions summary, apply and run."
        )
    layer = Layer(exchange_of(_OP, call), Recur(OfUser(local)))
    return call_layer(layer, inputs, (), Carried(initial_state, return_state), call)


@door(
    "linear_recurrence",
    **STEPS_OF_DOCUMENTS,
    log_decay="Pass jnp.broadcast_to(log_decay, x.shape).",
    initial_state="Pass the last h of each running document.",
)
def linear_recurrence(
    x: Float[HostOrDevice, "B T *F"],
    log_decay: Float[HostOrDevice, "B T *F"],
    *,
    initial_state: Float[HostOrDevice, "B *F"] | None = None,
    return_state: bool = False,
    **call: Unpack[LayerOptions],
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
      axis_name, documents, segment_ids, positions, mesh, batch_axis, implementation, deadline: see
        `causal_conv`.
      head_axis: for global arrays: the mesh axis that shards axis 2.
      initial_state, return_state: see `gated_delta_rule`; `head_axis` shards axis 1 of a state.
    Returns:
      h, in the dtype of x; or (h, state), the state in float32 (float64 for float64), on all ranks.
    Raises:
      As `causal_conv`.
    """
    op = "linear_recurrence"
    check_decay(op, log_decay, call)
    layer = Layer(exchange_of(op, call), Recur(_linear_recurrence))
    tokens, carried = {"x": x, "log_decay": log_decay}, Carried(initial_state, return_state)
    return call_layer(layer, tokens, (), carried, call)


def check_decay(op: str, log_decay: Any, call: LayerOptions) -> None:
    """Requires at most 0, or NaN, of tokens that are known here; padding may have any value."""
    documents = call.get("documents")
    ids = documents.segment_ids if isinstance(documents, Documents) else call.get("segment_ids")
    if isinstance(documents, Pieces) or not all(is_on_host(x) for x in (log_decay, ids)):
        return
    known = np.asarray(log_decay)
    is_token = True
    if ids is not None and ids.shape == known.shape[:2]:
        is_token = (np.asarray(ids) != 0).reshape(ids.shape + (1,) * (known.ndim - 2))
    wrong = np.argwhere((known > 0) & is_token)
    if len(wrong):
        at = ", ".join(map(str, wrong[0]))
        raise ValueError(
            f"{op}: log_decay[{at}] is {known[tuple(wrong[0])]:g}; it needs to be at most 0, the "
            "logarithm of a decay in [0, 1], or states grow without bound. Pass jnp.log of decays, "
            "or -jax.nn.softplus(x)."
        )


@dataclasses.dataclass(frozen=True)
class Recur:
    """The recurrence of one rank's rows; hashable."""

    # `(inputs, ids, cuts, initial) -> (outputs, states)`, of rows [G, L, ...] whose pieces have
    # these ids [G, L]. Without `cuts`, all pieces start from zero. The initial states [P, ...]
    # enter the opening ones; the states are those behind the closing ones, [P, ...].
    kernel: Callable[..., tuple[Any, Any]]

    @jax.named_scope("cpd.recurrence")
    def __call__(
        self,
        exchange: CollectiveOptions,
        pieces: Pieces,
        inputs: Any,
        weights: tuple[()],
        carried: Carried,
    ) -> tuple[Any, Any]:
        inert = partial(where_or_zero, pieces.is_token)
        inputs = jax.tree.map(inert, pieces.arrange(inputs))
        cuts = ChainPieces.of(exchange, pieces, carried)
        is_cut = pieces.world_size > 1 or carried.is_used
        initial = carried.initial
        outputs, behind = self.kernel(inputs, cuts.ids(), cuts if is_cut else None, initial)
        state = None
        if carried.is_returned:  # the rank with the end of a last document contributes its state
            state = jax.tree.map(lambda x: where_or_zero(cuts.closing, x), behind)
        if carried.is_returned and initial is not None:  # it stays in rows without tokens
            stays = (pieces.row_ends.last_end == 0) & (pieces.rank == 0)
            keep = lambda x, y: chosen(stays, y.astype(x.dtype), x)
            state = jax.tree.map(keep, state, initial)
        return pieces.restore(jax.tree.map(inert, outputs)), state


@dataclasses.dataclass(frozen=True)
class OfUser:
    """The kernel of a user's `local`: the summary of each piece reads its group of rows."""

    local: Any

    def __call__(
        self, inputs: Any, ids: Int32[Array, "G L"], cuts: ChainPieces | None, initial: Any
    ) -> tuple[Any, Any]:
        behind = None
        if cuts is not None:
            apply, maps = self.local.apply, self._maps(inputs, ids, cuts.earlier)
            first = jax.vmap(lambda x: apply(x, None))(maps)
            pick = lambda use, x, y: jax.tree.map(partial(chosen, use), x, y)
            if initial is not None:
                check_state(_OP, initial, first, _STATE)
                initial = jax.tree.map(lambda x, y: x.astype(y.dtype), initial, first)
                entered = jax.vmap(apply)(maps, cuts.initial(initial))
                first = pick(cuts.opening & cuts.follows, entered, first)
            states = cuts.states_before(first, maps, apply, initial)
            if cuts.closing is not None:
                behind = pick(cuts.follows, jax.vmap(apply)(maps, states), first)
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
        return out, behind

    def _maps(self, inputs: Any, ids: Int32[Array, "G L"], cuts: Cuts) -> Any:
        rows = jnp.arange(ids.shape[1], dtype=jnp.int32)

        def summary(cut: Cuts) -> Any:
            group = cut.row // ids.shape[1]
            row = group * ids.shape[1] + rows
            inside = (cut.used & (row >= cut.row) & (row < cut.row + cut.length))[None]

            def own(x: Array) -> Array:
                here = jax.lax.dynamic_index_in_dim(x, group)
                return where_or_zero(inside, here)

            return self.local.summary(jax.tree.map(own, inputs))

        return jax.vmap(summary)(cuts)


def _linear_recurrence(
    inputs: dict[str, Array], ids: Int32[Array, "G L"], cuts: ChainPieces | None, initial: Any
) -> tuple[Array, Any]:
    """Computes the elementwise recurrence on one rank, by one associative scan."""
    dtype, inputs = inputs["x"].dtype, widened(inputs)
    x, decay = inputs["x"], jnp.exp(inputs["log_decay"])
    new = run_begins(ids).reshape(*ids.shape, *[1] * (x.ndim - 2))

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
            added += product * where_or_zero(cuts.opening & cuts.follows, initial)
        state = jnp.asarray(cuts.states_before(added, (product, added), _apply, initial))
        index = jnp.where(ids <= len(state), ids, 0)  # pieces 1, ..., P are entered
        h = h + decay * jnp.pad(state, [(1, 0)] + [(0, 0)] * (state.ndim - 1))[index]
        behind = None if cuts.closing is None else at_last(h)
    return h.astype(dtype), behind


def _apply(map_: Any, state: Any) -> Any:
    decay, added = map_
    return decay * state + added


def widened(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays in the dtype in which they are computed: float32, or float64 if one has it."""
    dtype = sum_dtype(*(x.dtype for x in inputs.values()))
    return {name: x.astype(dtype) for name, x in inputs.items()}


# ---- Recurrences of matrices.

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
      As `causal_conv`.
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
      scale: factor on the output; None is 1, as in Mamba-2, not the `1 / sqrt(H)` of other layers.
      log_decay, initial_state, return_state and all others: see `gated_delta_rule`.
    Returns:
      As `gated_delta_rule`.
    Raises:
      As `causal_conv`.
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
