"""`recurrence`: a linear recurrence along documents, from the map of a piece and a local kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Names
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float, Int32, Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, is_on_host
from jax_cp_dispatch._arrays import chosen, only_where, sum_dtype
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.sequence.call_layer import Axes, Layer, Where, call_layer
from jax_cp_dispatch.sequence.chains import Carried, CutPieces, check_state, last_states
from jax_cp_dispatch.sequence.chunks import Chunks, cut_into_chunks
from jax_cp_dispatch.sequence.pieces import Cuts, Options, Pieces

STEPS_OF_HEADS = {
    **STEPS_OF_DOCUMENTS,
    "q": "Pass heads as axis 2.",
    "k": "Pass heads as axis 2, as many as q has.",
    "v": "Pass heads as axis 2.",
    "log_decay": "Pass one number per head, [B, T, N], or per channel of the key, [B, T, N, H].",
    "beta": "Pass one number per head.",
    "initial_state": "Pass a state for each batch row and head.",
}


def check_heads(op: str, k: Any, v: Any) -> None:
    """Requires matching numbers of heads, with features."""
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


def check_decay(op: str, log_decay: Any, where: Where) -> None:
    """Requires at most 0, or NaN, of tokens that are known here; padding may have any value."""
    documents = where.documents
    ids = documents.segment_ids if isinstance(documents, Documents) else where.segment_ids
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


def wide_dtype(inputs: dict[str, Any]) -> Any:
    """Returns the dtype in which arrays are computed: float32, or float64 if one has it."""
    return sum_dtype(*(x.dtype for x in inputs.values()))


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Widens the arrays."""
    dtype = wide_dtype(inputs)
    return {name: x.astype(dtype) for name, x in inputs.items()}


def chunks_of(
    inputs: dict[str, Array], ids: Int32[Array, "G L"], size: int, initial: Any
) -> tuple[Chunks, Any]:
    """Returns the chunks of these rows, and the state before them in the dtype of the sums."""
    dtype = wide_dtype(inputs)
    chunks = cut_into_chunks(ids, size, inputs["v"].shape[2], dtype)
    return chunks, None if initial is None else initial.astype(dtype)


def heads_first(rows: dict[str, Array], scale: float) -> list[Float[Array, "n G N C F"]]:
    """Returns scaled q, k, v, log decay and, if given, beta of rows in chunks [n, G, C, N, ...].

    Each head has queries and keys of its own. Log decays are finite: instead of -inf, a number
    whose exponential is zero, so that no product with it is NaN.
    """
    rows = wide(rows)
    q, k, v, log = (rows[name] for name in ("q", "k", "v", "log_decay"))
    q, k = (jnp.repeat(x, v.shape[3] // k.shape[3], axis=3) for x in (q * scale, k))
    log = jnp.maximum(log, -120.0 if log.dtype == jnp.float32 else -800.0)
    per_head = [log, *([rows["beta"]] if "beta" in rows else [])]
    log, *beta = (x if x.ndim == 5 else x[..., None] for x in per_head)
    return [x.swapaxes(2, 3) for x in (q, k, v, log, *beta)]


_OP = "recurrence"
_STATE = "Pass a state as return_state=True returns it."


@runtime_checkable
class Kernel(Protocol):
    """A recurrence on one rank; hashable."""

    def __call__(
        self, inputs: Any, ids: Int32[Array, "G L"], cuts: CutPieces | None, initial: Any
    ) -> tuple[Any, Any]:
        """Returns the outputs [G, L, ...] of rows [G, L, ...], whose pieces have these ids.

        Without `cuts`, all pieces start from zero. The initial states [P, ...] enter the opening
        ones; the second result has the states behind the closing ones, [P, ...].
        """
        ...


@door(_OP, **STEPS_OF_DOCUMENTS, initial_state=_STATE)
def recurrence(
    inputs: PyTree[Shaped[HostOrDevice, "B T ..."]],
    local: Any,
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
    initial_state: PyTree[Shaped[HostOrDevice, "B ..."]] | None = None,
    return_state: bool = False,
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
      axis_name: the mesh axis over which the sequence is sharded, or several, major axis first.
      documents, segment_ids, positions: see `causal_conv`.
      mesh, batch_axis, head_axis: for global arrays, see `context_parallel_attention`; `head_axis`
        shards axis 2 of each array, and of the outputs, which then have one.
      implementation, deadline: of the exchange, see `dispatch`.
      initial_state, return_state: see `gated_delta_rule`; a state is what `apply` returns, with a
        first axis B, and `head_axis` shards axis 1.
    Returns:
      What `run` returns, zero for padding; or (outputs, state).
    Raises:
      TypeError, ValueError: an argument is invalid; the message says how to fix it.
      jax.errors.JaxRuntimeError: at run time, see `dispatch`.
    """
    options = Options.of_call(_OP, axis_name, implementation, deadline)
    missing = [x for x in ("summary", "apply", "run") if not callable(getattr(local, x, None))]
    if missing:
        raise TypeError(
            f"{_OP}: local is of type {type(local).__name__}, without {', '.join(missing)}. Pass "
            "an object with the functions summary, apply and run."
        )
    layer = Layer(options, Recur(OfUser(local)))
    where, axes = Where(documents, segment_ids, positions), Axes(mesh, batch_axis, head_axis)
    return call_layer(layer, inputs, (), where, axes, Carried(initial_state, return_state))


@dataclasses.dataclass(frozen=True)
class Recur:
    """The recurrence of one rank's rows, with any kernel; hashable."""

    kernel: Kernel

    @jax.named_scope("cpd.recurrence")
    def __call__(
        self, options: Options, pieces: Pieces, inputs: Any, weights: tuple[()], carried: Carried
    ) -> tuple[Any, Any]:
        inert = partial(only_where, pieces.is_token)
        inputs = jax.tree.map(inert, pieces.arrange(inputs))
        cuts, initial = CutPieces.of(options.exchange, pieces, carried), carried.initial
        is_cut = pieces.world_size > 1 or carried.is_used
        outputs, behind = self.kernel(inputs, cuts.ids(), cuts if is_cut else None, initial)
        state = None
        if carried.is_returned:
            state = last_states(pieces, behind, cuts.closing, initial)
        return pieces.restore(jax.tree.map(inert, outputs)), state


@dataclasses.dataclass(frozen=True)
class OfUser:
    """The kernel of a user's `local`: the summary of each piece reads its group of rows."""

    local: Any

    def __call__(
        self, inputs: Any, ids: Int32[Array, "G L"], cuts: CutPieces | None, initial: Any
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
                return only_where(inside, here)

            return self.local.summary(jax.tree.map(own, inputs))

        return jax.vmap(summary)(cuts)
