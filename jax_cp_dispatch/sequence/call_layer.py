"""Runs a layer on every rank: on this rank's rows inside `shard_map`, or on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Names
from functools import partial
from typing import Any, Required, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import only_if_right
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import (
    CollectiveOptions,
    is_on_rank,
    read_options,
    vary_alike,
    varying_axes,
)
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import (
    read_given_tokens,
    trusted,
)
from jax_cp_dispatch.documents.fingerprint import confirmed
from jax_cp_dispatch.documents.segment_ids import check_documents
from jax_cp_dispatch.global_call import (
    MeshAxes,
    cut_tokens,
    find_axes,
    fit_documents,
    on_all_ranks,
    pad_tokens,
    refuse_explicit_axes,
)
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.sequence.pieces import Pieces, find_pieces


class LayerOptions(TypedDict, total=False):
    """Keywords of every layer, as its caller passed them; see `causal_conv`."""

    axis_name: Required[AxisName]
    documents: Documents | Pieces | None
    segment_ids: Integer[HostOrDevice, "B T"] | None
    positions: Integer[HostOrDevice, "B T"] | None
    mesh: Mesh | AbstractMesh | None
    batch_axis: str | Names[str] | None
    head_axis: str | Names[str] | None
    implementation: str | None
    deadline: float | None


def exchange_of(op: str, call: LayerOptions) -> CollectiveOptions:
    given = (call.get(name) for name in ("mesh", "implementation", "deadline"))
    return read_options(op, call["axis_name"], *given)


# ---- What a document takes from one call to the next: `initial_state`, `return_state`.
#
# A rank contributes what it holds of the state behind the last document of each batch row, zeros
# elsewhere; the sum over the ranks is returned.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    # Before the first document of each batch row, [B, ...]; None: documents begin here
    initial: Any = None
    # Whether the call returns that behind the last ones (static)
    is_returned: bool = dataclasses.field(default=False, metadata={"static": True})
    # Of its arrays (static)
    head_axis: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def is_used(self) -> bool:
        return self.is_returned or self.initial is not None


def check_state(op: str, state: Any, like: Any, next_step: str) -> None:
    """Requires an initial state with the shapes and dtypes of `like`; a float may be any other."""
    if state is None:
        return
    kind = lambda x: jnp.floating if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    described = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    is_alike = jax.tree.structure(state) == jax.tree.structure(like) and all(
        x.shape == y.shape and kind(x) == kind(y)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True)
    )
    if not is_alike:
        raise ValueError(
            f"{op}: initial_state has shapes {described(state)}; it needs {described(like)}. "
            f"{next_step}"
        )


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as a hashable object."""

    exchange: CollectiveOptions  # the op, its axis, and how to move
    # The function of one rank, of (exchange, pieces, tokens, weights, carried); it returns the
    # result, and its contribution to the state that is returned
    run: Callable[..., Any]
    num_heads: int | None = None  # of the output; None: there are no groups of heads
    grouped: tuple[str, ...] = ()  # names of arrays with fewer heads, each of which serves several
    # Whether the result, and the state, have the structure of the tokens; else the result is one
    # array
    like_tokens: bool = False
    moves: bool = True  # whether it exchanges anything between several ranks
    # Whether the ranks check the order of the documents; not if the host has
    checks_order: bool = True


def call_layer(
    layer: Layer, tokens: Any, weights: Any, carried: Carried, call: LayerOptions
) -> Any:
    """Computes the layer; returns its result, or (result, state).

    Tokens are arrays [B, T, ...] of this rank, or of all; the heads, if any, are axis 2. All ranks
    have the weights, whose last axis is that of the heads.
    """
    op, names, given = layer.exchange.op, layer.exchange.axis_names, call.get("documents")
    shape = jax.tree.leaves(tokens)[0].shape[:2]
    axes, missing = None, 0
    if isinstance(given, Pieces):
        if not is_on_rank(op, names):
            raise ValueError(
                f"{op}: got the pieces of one rank as documents, but global arrays. Pass "
                f"Documents, or call {op} inside jax.shard_map over {names[0]!r}."
            )
        if carried.is_used and given.row_ends is None:
            raise ValueError(
                f"{op}: initial_state and return_state need packed order, but the pieces are of "
                "documents in another one. Pass document_pieces of packed documents."
            )
        refuse_explicit_axes(op, (tokens, weights, carried))
    else:
        given = read_given_tokens(op, given, call.get("segment_ids"), call.get("positions"))
        check_documents(op, given.segment_ids, given.positions, shape, "the tokens have B, T =")
        if carried.is_used and given.order != PACKED:
            raise ValueError(
                f"{op}: the documents are in {given.order}; initial_state and return_state need "
                "packed order, in which a row's last tokens are its latest. Pass packed documents "
                "and tokens, or whole documents in this order."
            )
        has_all = lambda x: x.ndim > 2 and layer.num_heads in (None, x.shape[2])
        axes = find_axes(  # first the arrays whose axis 2 is that of all heads
            *(layer.exchange, *sorted(jax.tree.leaves(tokens), key=lambda x: not has_all(x))),
            batch_axis=call.get("batch_axis"),
            head_axis=call.get("head_axis"),
            others=(weights, carried, given),
            plan=given.plan,
        )
        given, missing, checks_order = fit_documents(op, given, axes, shape)
        layer = dataclasses.replace(layer, checks_order=checks_order)
    if axes is None or not axes.manual:
        out, state = _on_rank(layer, tokens, weights, carried, given)
    else:
        tokens = pad_tokens(tokens, missing)
        if axes.sequence and all(x.ndim < 3 for x in jax.tree.leaves(tokens)):
            axes = dataclasses.replace(axes, heads=())  # no array has such an axis
        out, state = _program(layer, axes, tokens, weights, carried, given)
        out = cut_tokens(out, shape[1], axes.mesh) if missing else out
    return (out, state) if carried.is_returned else out


def _on_rank(
    layer: Layer, tokens: Any, weights: Any, carried: Carried, given: Documents | Pieces
) -> tuple[Any, Any]:
    """Computes this rank's part, and the state of all ranks, if it is returned."""
    exchange, leaves = layer.exchange, jax.tree.leaves(tokens)
    names, shape = exchange.axis_names, leaves[0].shape[:2]
    is_placed = not isinstance(given, Pieces) and given.plan is not None
    if 0 in shape and not is_placed:  # no placement is of no tokens
        return _of_no_tokens(layer, tokens, weights, carried)
    if not isinstance(given, Pieces):
        pieces = find_pieces(exchange, given, shape, layer.checks_order, carried.is_used)
    elif shape == (given.batch, given.num_tokens):
        pieces = given
    else:
        raise ValueError(
            f"{exchange.op}: the tokens have B, T = {shape} but the pieces are of "
            f"{(given.batch, given.num_tokens)}. Pass those of these tokens."
        )
    # Each result of a layer `like_tokens` varies as its array does, and so does its state.
    alike = [[x] for x in leaves] if layer.like_tokens else [leaves]
    leaves = [x for group in alike for x in vary_alike(group, also=names)]
    tokens = jax.tree.unflatten(jax.tree.structure(tokens), leaves)
    states, tree = jax.tree.flatten(carried.initial)
    beside = [[x] for x in leaves] if layer.like_tokens else [leaves] * len(states)
    axes = [frozenset(names).union(*map(varying_axes, arrays)) for arrays in beside]
    states = [vary_alike([x], also=own)[0] for x, own in zip(states, axes, strict=False)]
    carried = dataclasses.replace(carried, initial=tree.unflatten(states))
    out = layer.run(exchange, pieces, tokens, weights, carried)
    if pieces.fingerprint is not None:
        expected, seen = pieces.fingerprint[1::2], pieces.fingerprint[2::2]
        is_right, has_others = (expected == seen).all(), pieces.world_size > 1
        if not (has_others and layer.moves) and (has_others or is_placed):
            is_right &= confirmed(exchange, pieces.fingerprint)
        out = only_if_right(is_right, out)
    out, contribution = out

    def summed(x: Any) -> Any:  # each number is of one rank, and zero on the others
        total = jax.lax.psum(x.astype(jnp.uint8) if x.dtype == bool else x, names)
        return total.astype(x.dtype)

    return out, jax.tree.map(summed, contribution)


def _of_no_tokens(layer: Layer, tokens: Any, weights: Any, carried: Carried) -> tuple[Any, Any]:
    """Computes a row of padding and removes it, so the result has its shapes and dtypes."""
    batch, num_tokens = jax.tree.leaves(tokens)[0].shape[:2]
    missing = [(0, int(n == 0)) for n in (batch, num_tokens)]
    pad = lambda x, dims: jnp.pad(x, missing[:dims] + [(0, 0)] * (x.ndim - dims))
    rows = jax.tree.map(lambda x: pad(x, 2), tokens)
    initial = jax.tree.map(lambda x: pad(x, 1), carried.initial)
    padding = jnp.zeros(jax.tree.leaves(rows)[0].shape[:2], jnp.int32)
    carried = dataclasses.replace(carried, initial=initial)
    out, state = _on_rank(layer, rows, weights, carried, trusted(padding))
    out = jax.tree.map(lambda x: x[:batch, :num_tokens], out)
    return out, jax.tree.map(lambda x: x[:batch], state)


@partial(jax.jit, static_argnums=(0, 1))
def _program(layer: Layer, axes: MeshAxes, tokens, weights, carried, given):
    op, num_devices = layer.exchange.op, axes.num_devices(axes.heads)
    if layer.num_heads is not None:  # those that the devices of the heads divide
        repeated = {x: axes.repeat_kv_heads(tokens[x], layer.num_heads) for x in layer.grouped}
        tokens = {**tokens, **repeated}
    for x in jax.tree.leaves(tokens):
        if x.ndim > 2 and x.shape[2] % num_devices:
            raise ValueError(
                f"{op}: an array has shape {x.shape} but head_axis {axes.heads!r} has "
                f"{num_devices} devices, which must divide its axis 2. Pass head_axis=(), and each "
                "of them computes all of it; or name an axis of fewer devices."
            )
    sequence = axes.rows
    rows = jax.tree.map(lambda x: P(*sequence, axes.heads) if x.ndim > 2 else sequence, tokens)
    shared = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), axes.heads), weights)
    documents = given.specs(axes.sequence, axes.batch)
    of_heads = P(*sequence, axes.heads) if axes.heads else sequence
    before_heads = [axes.batch] + [None] * (carried.head_axis - 1)
    state = lambda ndim: P(*before_heads, axes.heads) if ndim > len(before_heads) else P(axes.batch)
    initial = jax.tree.map(lambda x: state(x.ndim), carried.initial)
    states = None
    if carried.is_returned:
        states = state(3 if axes.heads else 1)
        if layer.like_tokens:
            states = jax.tree.map(lambda x: state(x.ndim), tokens)

    def of_rank(tokens, weights, carried, given):
        out, states = _on_rank(layer, tokens, weights, carried, given)
        heads = axes.heads
        if heads and not layer.like_tokens and any(x.ndim < 3 for x in jax.tree.leaves(out)):
            raise ValueError(
                f"{op}: an output is [B, T] but head_axis {heads!r} shards axis 2 of the inputs, "
                "so each of its devices has an output of its own. Return [B, T, heads], or pass "
                "head_axis=()."
            )
        if heads and any(x.ndim < 2 for x in jax.tree.leaves(states)):
            raise ValueError(
                f"{op}: a state is [B] but head_axis {heads!r} shards axis 1 of states. Use states "
                "[B, heads], or pass head_axis=()."
            )
        return out, states

    return on_all_ranks(
        of_rank,
        (tokens, weights, carried, given),
        axes=axes,
        in_specs=(rows, shared, dataclasses.replace(carried, initial=initial), documents),
        out_specs=(rows if layer.like_tokens else of_heads, states),
        num_differentiable=3,
    )
