"""Runs a layer on every rank: on this rank's rows inside `shard_map`, or on global arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._ranks.options import is_on_rank, vary_alike
from jax_cp_dispatch.documents.documents import (
    Documents,
    check_call_ranks,
    read_given_tokens,
    read_whole,
    trusted,
    with_segment_ids,
)
from jax_cp_dispatch.documents.segment_ids import check_documents, is_on_host
from jax_cp_dispatch.global_call import (
    GivenAxes,
    MeshAxes,
    cut_tokens,
    explicit_axes,
    find_axes,
    on_all_ranks,
    pad_tokens,
    refuse_explicit_axes,
)
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.planning import Plan
from jax_cp_dispatch.planning.plan import check_groups, is_of_all, is_stack
from jax_cp_dispatch.sequence.chains import Carried, check_order, state_of_all
from jax_cp_dispatch.sequence.pieces import (
    Options,
    Pieces,
    confirmed,
    only_if_right,
    pieces_from_ids,
    pieces_from_plan,
)


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh and its axes, as the caller named them; None: inferred."""

    mesh: Any = None
    batch: Any = None
    heads: Any = None


@dataclasses.dataclass(frozen=True)
class Where:
    """The documents of a call, as the caller passed them; `documents` may be the `Pieces`."""

    documents: Any = None
    segment_ids: Any = None
    positions: Any = None


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer as a hashable object.

    Attributes:
      options: of the call.
      run: the function of one rank, of (options, pieces, tokens, weights, carried); it returns the
        result, and its contribution to the state that is returned.
      num_heads: of the output; None: there are no groups of heads.
      grouped: names of arrays with fewer heads, each of which serves several.
      like_tokens: whether the result, and the state, have the structure of the tokens; else the
        result is one array.
      moves: whether it exchanges anything between several ranks.
    """

    options: Options
    run: Callable[..., Any]
    num_heads: int | None = None
    grouped: tuple[str, ...] = ()
    like_tokens: bool = False
    moves: bool = True


def call_layer(
    layer: Layer, tokens: Any, weights: Any, where: Where, axes: Axes, carried: Carried
) -> Any:
    """Computes the layer; returns its result, or (result, state).

    Args:
      layer: what to compute.
      tokens: arrays [B, T, ...] of this rank, or of all; the heads, if any, are axis 2.
      weights: arrays that all ranks have; the last axis is that of the heads.
      where: the documents.
      axes: the mesh.
      carried: the state before and behind, read.
    """
    op, leaves = layer.options.op, jax.tree.leaves(tokens)
    names, shape = layer.options.exchange.axis_names, leaves[0].shape[:2]
    on_rank = is_on_rank(op, names)
    if isinstance(where.documents, Pieces):
        if not on_rank:
            raise ValueError(
                f"{op}: got the pieces of one rank as documents, but global arrays. Pass "
                f"Documents, or call {op} inside jax.shard_map over {names[0]!r}."
            )
        if carried.is_used and where.documents.row_ends is None:
            raise ValueError(
                f"{op}: initial_state and return_state need packed order, but the pieces are of "
                "documents in another one. Pass document_pieces of packed documents."
            )
        refuse_explicit_axes(op, (tokens, weights, carried))
        return _on_rank(layer, tokens, weights, carried, where.documents)
    given = read_given_tokens(op, where.documents, where.segment_ids, where.positions)
    check_documents(op, given.segment_ids, given.positions, shape, "the tokens have B, T =")
    layer = dataclasses.replace(
        layer,
        options=dataclasses.replace(
            layer.options, order=given.order, finds_row_ends=carried.is_used
        ),
    )
    if carried.is_used:
        check_order(op, given.order)
    if not on_rank:
        return _on_global_arrays(layer, tokens, weights, carried, given, axes)
    num_ranks = jax.lax.axis_size(layer.options.axis_name)
    ranks = f"axis {layer.options.axis_name!r} has {num_ranks} ranks"
    check_call_ranks(op, given, shape[1] * num_ranks, num_ranks, ranks)
    leaves = _by_heads(layer, tokens)
    others, covers_batch = (weights, carried, given), is_of_all(given.plan)
    found = explicit_axes(op, *leaves, others=others, covers_batch=covers_batch)
    if found is None:
        return _on_rank(layer, tokens, weights, carried, given)
    documents = given.segment_ids, given.positions
    tokens = _repeat_heads(layer, tokens, found)
    return _program(tokens, weights, carried, given.plan, documents, layer=layer, axes=found)


def _on_rank(
    layer: Layer, tokens: Any, weights: Any, carried: Carried, given: Documents | Pieces
) -> Any:
    """Computes this rank's part."""
    options, leaves = layer.options, jax.tree.leaves(tokens)
    shape = leaves[0].shape[:2]
    is_placed = not isinstance(given, Pieces) and given.plan is not None
    if 0 in shape and not is_placed:  # no placement is of no tokens
        return _of_no_tokens(layer, tokens, weights, carried)
    if isinstance(given, Pieces):
        pieces = given
        if shape != (pieces.batch, pieces.num_tokens):
            raise ValueError(
                f"{options.op}: the tokens have B, T = {shape} but the pieces are of "
                f"{(pieces.batch, pieces.num_tokens)}. Pass those of these tokens."
            )
    elif given.plan is not None:
        documents = given.segment_ids, given.positions
        pieces = pieces_from_plan(options, given.plan, documents, shape)
    else:
        segment_ids, positions = given.segment_ids, given.positions
        if positions is not None and segment_ids is None:
            segment_ids = jnp.ones(shape, jnp.int32)
        pieces = pieces_from_ids(options, segment_ids, positions, shape)
    # Each result of a layer `like_tokens` varies as its array does.
    alike = [[x] for x in leaves] if layer.like_tokens else [leaves]
    leaves = [x for group in alike for x in vary_alike(group, also=options.exchange.axis_names)]
    tokens = jax.tree.unflatten(jax.tree.structure(tokens), leaves)
    alike = leaves if layer.like_tokens else [leaves] * len(jax.tree.leaves(carried.initial))
    carried = carried.varying_like(alike, options.exchange.axis_names)
    out = layer.run(options, pieces, tokens, weights, carried)
    out, contribution = _checked(layer, pieces, out, is_placed)
    if not carried.is_returned:
        return out
    return out, state_of_all(contribution, options.exchange.axis_names)


def _checked(layer: Layer, pieces: Pieces, out: Any, is_placed: bool) -> Any:
    """Returns the result if the documents are those of the plan, or in their order."""
    if pieces.fingerprint is None:
        return out
    expected, seen = pieces.fingerprint[1::2], pieces.fingerprint[2::2]
    is_right = (expected == seen).all()
    has_others = pieces.world_size > 1
    if not (has_others and layer.moves) and (has_others or is_placed):
        is_right &= confirmed(layer.options.exchange, pieces.fingerprint)
    return only_if_right(is_right, out)


def _of_no_tokens(layer: Layer, tokens: Any, weights: Any, carried: Carried) -> Any:
    """Computes a row of padding and removes it, so the result has its shapes and dtypes."""
    batch, num_tokens = jax.tree.leaves(tokens)[0].shape[:2]
    missing = [(0, int(n == 0)) for n in (batch, num_tokens)]
    pad = lambda x: jnp.pad(x, missing + [(0, 0)] * (x.ndim - 2))
    rows = jax.tree.map(pad, tokens)
    one_row = lambda x: jnp.pad(x, [missing[0]] + [(0, 0)] * (x.ndim - 1))
    initial = jax.tree.map(one_row, carried.initial)
    padding = jnp.zeros(jax.tree.leaves(rows)[0].shape[:2], jnp.int32)
    packed = dataclasses.replace(layer.options, order=PACKED, finds_row_ends=carried.is_used)
    layer = dataclasses.replace(layer, options=packed)
    carried = dataclasses.replace(carried, initial=initial)
    out = _on_rank(layer, rows, weights, carried, trusted(padding))
    out, *states = out if carried.is_returned else (out,)
    out = jax.tree.map(lambda x: x[:batch, :num_tokens], out)
    return (out, *jax.tree.map(lambda x: x[:batch], states)) if states else out


def _on_global_arrays(
    layer: Layer,
    tokens: Any,
    weights: Any,
    carried: Carried,
    given: Documents,
    axes: Axes,
) -> Any:
    """Pads the tokens, finds the axes, and runs one program on all ranks."""
    options, op = layer.options, layer.options.op
    plan = given.plan
    leaves = _by_heads(layer, tokens)
    found = find_axes(
        op,
        *leaves,
        given=GivenAxes(axes.mesh, options.axis_name, axes.batch, axes.heads),
        covers_batch=is_of_all(plan),
    )
    num_tokens = leaves[0].shape[1]
    check_call_ranks(op, given, num_tokens, found.num_ranks, found.described)
    missing = -num_tokens % found.num_ranks
    if plan is not None:
        _check_plan(op, plan, found, num_tokens)
    else:
        given = read_whole(op, given, found.num_ranks)
        if all(map(is_on_host, jax.tree.leaves(given))):  # checked above
            layer = dataclasses.replace(
                layer, options=dataclasses.replace(options, checks_order=False)
            )
        if missing:
            given = with_segment_ids(given, leaves[0].shape[:2])
    documents = given.segment_ids, given.positions
    tokens, documents = pad_tokens((tokens, documents), missing)
    if leaves[0].ndim < 3:
        found = dataclasses.replace(found, heads=())  # of one device: no array has such an axis
    tokens = _repeat_heads(layer, tokens, found)
    out = _program(tokens, weights, carried, plan, documents, layer=layer, axes=found)
    if not missing:
        return out
    out, *states = out if carried.is_returned else (out,)
    out = cut_tokens(out, num_tokens, found.mesh)
    return (out, *states) if states else out


def _check_plan(op: str, plan: Plan, axes: MeshAxes, num_tokens: int) -> None:
    if plan.world_size != axes.num_ranks:
        raise ValueError(
            f"{op}: the plan is for world_size={plan.world_size} but {axes.described}. Place the "
            "tokens again with that world_size."
        )
    if num_tokens % axes.num_ranks:
        raise ValueError(
            f"{op}: T is {num_tokens} but {axes.described}, which must divide it with a plan. Pass "
            "the tokens of the placement."
        )
    check_groups(op, plan, num_groups=axes.num_groups, batch=axes.batch)


def _by_heads(layer: Layer, tokens: Any) -> list[Any]:
    """Returns the arrays, first those whose axis 2 is that of all heads."""
    has_all = lambda x: x.ndim > 2 and layer.num_heads in (None, x.shape[2])
    return sorted(jax.tree.leaves(tokens), key=lambda x: not has_all(x))


def _repeat_heads(layer: Layer, tokens: Any, axes: MeshAxes) -> Any:
    """Returns the tokens with heads that the devices of the heads divide."""
    op, num_devices = layer.options.op, axes.num_devices(axes.heads)
    num_heads = layer.num_heads
    if num_heads is not None:
        repeated = lambda x: axes.repeat_kv_heads(x, num_heads)
        tokens = {**tokens, **{name: repeated(tokens[name]) for name in layer.grouped}}
    for x in jax.tree.leaves(tokens):
        if x.ndim > 2 and x.shape[2] % num_devices:
            raise ValueError(
                f"{op}: an array has shape {x.shape} but head_axis {axes.heads!r} has "
                f"{num_devices} devices, which must divide its axis 2. Pass head_axis=(), and each "
                "of them computes all of it; or name an axis of fewer devices."
            )
    return tokens


@partial(jax.jit, static_argnames=("layer", "axes"))
def _program(tokens, weights, carried, plan, documents, *, layer: Layer, axes: MeshAxes):
    sequence = axes.rows
    rows = jax.tree.map(lambda x: P(*sequence, axes.heads) if x.ndim > 2 else sequence, tokens)
    shared = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), axes.heads), weights)
    of_plan = sequence if is_stack(plan) else P(axes.sequence)
    of_heads = P(*sequence, axes.heads) if axes.heads else sequence
    before_heads = [axes.batch] + [None] * (carried.head_axis - 1)
    state = lambda ndim: P(*before_heads, axes.heads) if ndim > len(before_heads) else P(axes.batch)
    initial = jax.tree.map(lambda x: state(x.ndim), carried.initial)
    out_specs = rows if layer.like_tokens else of_heads
    if carried.is_returned:
        states = jax.tree.map(lambda x: state(x.ndim), tokens)
        out_specs = out_specs, states if layer.like_tokens else state(3 if axes.heads else 1)
    return on_all_ranks(
        partial(_local, layer, axes.heads),
        (tokens, weights, carried, plan, documents),
        axes=axes,
        in_specs=(rows, shared, dataclasses.replace(carried, initial=initial), of_plan, sequence),
        out_specs=out_specs,
        num_differentiable=3,
    )


def _local(layer: Layer, heads: tuple[str, ...], tokens, weights, carried, plan, documents):
    plans = () if plan is None else (plan,)
    given = trusted(*documents, plans=plans, order=layer.options.order)
    out = _on_rank(layer, tokens, weights, carried, given)
    first, *states = out if carried.is_returned else (out,)
    if heads and not layer.like_tokens and any(x.ndim < 3 for x in jax.tree.leaves(first)):
        raise ValueError(
            f"{layer.options.op}: an output is [B, T] but head_axis {heads!r} shards axis 2 of the "
            "inputs, so each of its devices has an output of its own. Return [B, T, heads], or "
            "pass head_axis=()."
        )
    if heads and any(x.ndim < 2 for x in jax.tree.leaves(states)):
        raise ValueError(
            f"{layer.options.op}: a state is [B] but head_axis {heads!r} shards axis 1 of states. "
            "Use states [B, heads], or pass head_axis=()."
        )
    return out
