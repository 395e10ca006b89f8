"""`index_loss`: how far the scores of an index are from the probabilities of attention.

Of a query t, over the keys s that it sees, or has picked: with the scores I of the index, and the
target p, the mean over the query heads of the probabilities of attention, divided by its sum,

    loss = sum_s p[s] (log p[s] - log softmax(I)[s]),    dloss / dI = softmax(I) - p.

Both passes compute chunks of queries by tiles of keys: all tiles that the queries of a chunk see,
or one of the rows that each has picked. Three loops over the tiles are enough: the denominators of
both softmaxes, the sum, and the derivative. Nothing flows into attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._arrays import are_covered, in_chunks, sum_dtype
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import named_context
from jax_cp_dispatch.attention.algorithms.exchange_once import (
    Gathered,
    Movement,
    only_of_own_picks,
    rows_to_expand,
)
from jax_cp_dispatch.attention.local.passes import forbid_second_derivative
from jax_cp_dispatch.attention.local.picked import (
    DocumentRows,
    PickedRows,
    picked_rows,
    read_picks,
)
from jax_cp_dispatch.attention.local.ranges import check_softmax, soft_capped
from jax_cp_dispatch.attention.operands import (
    LocalWork,
    Operands,
    Outputs,
    key_shapes,
    read_operands,
    rounded,
)
from jax_cp_dispatch.documents.segment_ids import STEPS_OF_DOCUMENTS
from jax_cp_dispatch.masks import Selected
from jax_cp_dispatch.selected.call import IndexOptions, read_index, run_index
from jax_cp_dispatch.selected.pick import TILE, head_scores, weighted, without_negative

_OP = "index_loss"
# Elements of the logits of a chunk and a tile, and of the rows that a chunk gathers.
_PAIRS = 2**20


@door(_OP, sink="Pass one logit per query head.", **STEPS_OF_DOCUMENTS)
def index_loss(
    q_index: Float[HostOrDevice, "B T *G J d"],
    k_index: Float[HostOrDevice, "B T *Gk d"],
    weights: Float[HostOrDevice, "B T *G J"] | None,
    q: Float[HostOrDevice, "B T N H"],
    k: Float[HostOrDevice, "B T K H"] | PyTree[HostOrDevice],
    *,
    relu: bool = True,
    sink: Float[Array, " N"] | None = None,
    expand: Callable[..., Any] | None = None,
    expand_weights: PyTree[HostOrDevice] = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    **options: Unpack[IndexOptions],
) -> Float[Array, "B T"]:
    """Returns the Kullback-Leibler divergence of an index from attention, of each token.

        loss[t] = KL(p[t] || softmax(score[t])),   p[t] = mean over heads of attention's weights

    over all keys that the mask shows (the warm-up, with the rest of the model frozen), or with
    `mask=Selected(picks, ...)` over the picked keys alone. p sums to 1 there, also with a sink.
    Scores are those of `select_keys`, of keys: blocks select, but each key has a score of its own.

    Call where `context_parallel_attention` may be called. Differentiable once, in reverse mode, in
    q_index, k_index and weights; the gradients of all other arrays are zero. The keys of the index
    move with those of attention in one exchange, and only the gradients of the former return. What
    remains for the backward pass: the received arrays, and one number per query and head.

    Args:
      q_index, k_index, weights, relu: as in `select_keys`. G groups divide the query heads: the
        target of a group is of its own heads, and the loss is the mean of the groups.
      q, k, sink, expand, scale, logit_soft_cap: those of attention. In the absorbed form, k are the
        latents. Of `expand`, the values are not used.
      expand_weights: attention's `weights`.
      mask: a mask of numbers that sees one range of keys, or `Selected` within one.
      axis_name, algorithm, mesh, documents, segment_ids, positions, batch_axis: as in
        `select_keys`. Devices of other axes repeat the work.
      implementation, deadline, num_comm_sm: as in `select_keys`.
    Returns:
      The loss, float32 (float64 for float64), sharded as q; 0 for padding. Average it over the
      tokens of all ranks and micro-batches that count.
    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError: as `context_parallel_attention`.
    References:
      DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.1.
    """
    q_index, k_index, weights = read_index(_OP, q_index, k_index, weights, relu)
    check_softmax(_OP, scale, logit_soft_cap)
    stopped = jax.tree.map(lax.stop_gradient, (q, k, sink, expand_weights))
    q, k, sink, expand_weights = stopped
    keys_alone = q.shape[-1] if expand is None else None
    expanding = expand, expand_weights, None
    attended, expansion = read_operands(q, k, None, sink, expanding, keys_alone, _OP)
    N, K, G = q.shape[2], key_shapes(expansion, attended)[0].shape[2], q_index.shape[2]
    if N % G or (K % G and G % K):
        raise ValueError(
            f"{_OP}: the index has {G} groups, but attention has {N} query heads and {K} KV heads, "
            "which the groups need to divide. Pass one group, one for each KV head, or one for "
            "each query head."
        )
    mask = options.get("mask")
    picks = read_picks(_OP, mask, q.shape, K) if isinstance(mask, Selected) else None
    if picks is not None and picks.shape[2] not in (1, G):
        raise ValueError(
            f"{_OP}: the picks are of {picks.shape[2]} groups, but the index has {G}. Pass the "
            "picks of this index."
        )
    block = mask.block if isinstance(mask, Selected) else 0
    task = _Loss(relu, block, scale, logit_soft_cap)
    operands = Operands(
        (q_index, weights, q),
        (k_index, *attended.k),
        *(None, sink, attended.weights, picks),
    )
    return run_index(task, operands, options, expansion)[..., 0, 0]


@dataclasses.dataclass(frozen=True)
class _Loss(LocalWork):
    """What a rank computes; see `Call.local`.

    Attributes:
      relu: see `select_keys`.
      pick_block: tokens of a pick; 0: over all keys that the mask shows.
      scale, logit_soft_cap: of attention.
    """

    op: ClassVar[str] = _OP
    relu: bool
    pick_block: int
    scale: float | None
    logit_soft_cap: float | None

    def __call__(self, movement: Movement, operands: Operands, gathered: Gathered) -> Outputs:
        loss: Any = _gather_loss(self, movement, operands, gathered)
        return Outputs(loss[:, None, None])

    def shape(self, operands: Operands) -> Any:
        q = operands.q[0]
        return jax.ShapeDtypeStruct((*q.shape[:2], 1, 1), sum_dtype(q.dtype))


class _Rows(NamedTuple):
    """What a rank has received, of one list of rows.

    Attributes:
      of_index: q_index `[R, G, J, d]`, weights `[R, G, J]` or None, and k_index `[S, G or 1, d]`.
      q, k: of attention, `[R, N, H]` and `[S, K, H]`.
      sink: `[N]`, or None.
      picks: `[R, G or 1, k]`, or None.
      rows: of the queries' documents, `[R]`.
    """

    of_index: tuple[Array, Array | None, Array]
    q: Array
    k: Array
    sink: Array | None
    picks: Array | None
    rows: DocumentRows


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_loss(task: _Loss, movement: Movement, operands: Operands, gathered: Gathered) -> Array:
    return _forward(task, movement, operands, gathered)[0]


def _forward(task: _Loss, movement: Movement, operands: Operands, gathered: Gathered):
    call = movement.call
    operands = forbid_second_derivative(call.op, operands)
    received = movement.send(gathered, operands).completed(call.exchange)
    kept = received, operands.sink, operands.weights, gathered
    rows = _received(task, movement.call, *kept)
    loss, *lse = named_context(_losses(task, rows))
    if rows.picks is not None:
        picked = PickedRows(rows.picks[None], gathered.rows)
        loss = only_of_own_picks(call.exchange, picked, task.pick_block, loss)
    back = movement.give_back(gathered, loss[None], jnp.zeros(()))
    return back.completed(call.exchange)[0], (kept, lse)


def _backward(task: _Loss, movement: Movement, residuals, dloss: Array):
    kept, lse = residuals
    gathered, exchange = kept[-1], movement.call.exchange
    dloss = forbid_second_derivative(_OP, dloss)
    came = movement.send_cotangents(gathered, Outputs(dloss)).completed(exchange)
    rows = _received(task, movement.call, *kept)
    dloss = jnp.where(rows.rows.start < rows.rows.end, came.out[0], 0)  # others have any values
    dq, dweights, dk = _gradients(task, rows, (*lse, dloss))
    q, weights, k = rows.of_index
    both = (dq, q), (dweights, weights)
    of_queries = [x.astype(y.dtype) for x, y in both if x is not None and y is not None]
    of_queries = jax.tree.map(lambda x: x[None], of_queries)
    back = movement.give_back_gradients(gathered, of_queries, [dk[None]])
    (dq, *dweights), dk = back.completed(exchange)
    dk = rounded(dk, [k])
    others = len(kept[0][1]) - 1
    of_weights = dweights[0] if dweights else None
    return Operands((dq, of_weights, None), (*dk, *(None,) * others), None), None


_gather_loss.defvjp(_forward, _backward)


def _received(task: _Loss, call: Any, came: Any, sink: Any, weights: Any, gathered: Any) -> _Rows:
    """Returns what came to this rank, with the keys of attention expanded."""
    of_queries, (k_index, *latents) = came
    start, end, *_ = gathered.rows
    if task.pick_block:
        of_queries, picks = of_queries[0], of_queries[1][0]
    else:
        picks = None
    q_index, of_heads, q = jax.tree.map(lambda x: x[0], of_queries)
    used = (start < end)[0]
    cut = lambda x: jnp.where(used.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)
    q_index, of_heads, q = jax.tree.map(cut, (q_index, of_heads, q))
    k, _ = call.expansion(weights, rows_to_expand(latents, gathered.ranges))
    is_key = are_covered(start, end, k_index.shape[1])[0]
    k_index = jnp.where(is_key[:, None, None], k_index[0], 0)
    rows = DocumentRows(*(x[0] for x in gathered.rows))
    return _Rows((q_index, of_heads, k_index), q, k, sink, picks, rows)


# ---- One group of heads: chunks of queries, and tiles of keys.


class _Chunk(NamedTuple):
    """The queries of a chunk, of one group.

    Attributes:
      q_index, weights, q: `[C, J, d]`, `[C, J]` or None, and `[C, heads, H]`.
      picks: `[C, k]`, or None.
      rows: of the queries' documents, `[C]`.
    """

    q_index: Array
    weights: Array | None
    q: Array
    picks: Array | None
    rows: DocumentRows


class _Keys(NamedTuple):
    """The keys of a group, with a row of zeros behind them, or more.

    Attributes:
      of_index: `[S, d]`.
      k: `[S, KV heads, H]`.
      last: the row of zeros.
    """

    of_index: Array
    k: Array
    last: int


class _Tile(NamedTuple):
    """The terms of a chunk with a tile of keys.

    Attributes:
      products: of the index, not cut, `[C, J, W]`.
      scores: of the index, `[C, W]`; -inf for keys that are not seen.
      logits: of attention, `[C, heads, W]`; likewise.
    """

    products: Array
    scores: Array
    logits: Array


def _tile(task: _Loss, chunk: _Chunk, keys: _Keys, number: Any) -> tuple[_Tile, Any, Any]:
    """Returns a tile, its rows of the index, and their places: first, or `[C, W]` if picked."""
    dtype, is_picked = chunk.q_index.dtype, chunk.picks is not None
    if chunk.picks is not None:
        place, is_seen = picked_rows(chunk.picks, chunk.rows, task.pick_block)
        place = jnp.where(is_seen, place, keys.last)
        k_index, k = (x.at[place].get(mode="promise_in_bounds") for x in keys[:2])
    else:
        place = number * TILE
        k_index, k = (lax.dynamic_slice_in_dim(x, place, TILE) for x in keys[:2])
        row = place + jnp.arange(TILE, dtype=jnp.int32)[None]
        is_seen = (row >= chunk.rows.start[:, None]) & (row < chunk.rows.end[:, None])
    k_index, k = k_index.astype(dtype), k.astype(dtype)
    products = head_scores(chunk.q_index, k_index, relu=False, per_query=is_picked)
    cut = without_negative(products) if task.relu else products
    scores = jnp.where(is_seen, weighted(cut, chunk.weights), -jnp.inf)
    (C, heads, H), num_kv = chunk.q.shape, k.shape[-2]
    scale = H**-0.5 if task.scale is None else task.scale
    q = scale * chunk.q.reshape(C, num_kv, heads // num_kv, H)
    names = "ckgh,cwkh->ckgw" if is_picked else "ckgh,wkh->ckgw"
    logits = jnp.einsum(names, q, k, precision=lax.Precision.HIGHEST).reshape(C, heads, -1)
    logits = jnp.where(is_seen[:, None], soft_capped(task.logit_soft_cap, logits)[0], -jnp.inf)
    return _Tile(products, scores, logits), k_index, place


def _tiles(chunk: _Chunk) -> tuple[Any, Any]:
    """Returns the first tile that a chunk sees, and one past the last."""
    if chunk.picks is not None:
        return 0, 1
    start, end, *_ = chunk.rows
    used = start < end
    first = jnp.min(jnp.where(used, start, jnp.iinfo(jnp.int32).max)) // TILE
    last = -(-jnp.max(jnp.where(used, end, 0)) // TILE)
    return jnp.minimum(first, last), last


def _losses_of_chunk(task: _Loss, keys: _Keys, sink: Any, chunk: _Chunk) -> tuple[Array, ...]:
    """Returns the loss `[C]`, and the lse of logits, for a target of sum 1, and of scores."""
    first, last = _tiles(chunk)
    rows = chunk.q[..., 0], chunk.q_index[:, 0, 0]  # [C, heads] and [C]: a softmax each

    def add_tile(i, sums):
        tile, *_ = _tile(task, chunk, keys, i)
        return [_added(*x) for x in zip(sums, (tile.logits, tile.scores), strict=True)]

    lowest = lambda x: jnp.full_like(x, jnp.finfo(x.dtype).min)
    nothing = [(lowest(x), jnp.zeros_like(x)) for x in rows]
    sums = lax.fori_loop(first, last, add_tile, vary_alike(nothing, like=rows[0]))
    has_keys = sums[1][1] > 0
    lse, of_scores = (
        jnp.where(total > 0, peak + jnp.log(jnp.where(total > 0, total, 1)), 0)
        for peak, total in sums
    )
    # A sink takes a share of each head, so the heads with more of it count less.
    whole = lse if sink is None else jnp.logaddexp(lse, sink[None].astype(lse.dtype))
    lse = whole + jnp.log(jnp.sum(jnp.exp(lse - whole), axis=1, keepdims=True))

    def add_terms(i, loss):
        tile, *_ = _tile(task, chunk, keys, i)
        p = jnp.sum(jnp.exp(tile.logits - lse[..., None]), axis=1)
        terms = p * (jnp.log(jnp.where(p > 0, p, 1)) - tile.scores + of_scores[:, None])
        return loss + jnp.sum(jnp.where(p > 0, terms, 0), axis=1)

    loss = lax.fori_loop(first, last, add_terms, jnp.zeros_like(of_scores))
    return jnp.where(has_keys, loss, 0), lse, of_scores


def _added(softmax: tuple[Array, Array], logits: Array) -> tuple[Array, Array]:
    """Adds logits `[..., W]` to the peak and the total of an online softmax."""
    peak, total = softmax
    higher = jnp.maximum(peak, jnp.max(logits, axis=-1))
    raised = jnp.sum(jnp.exp(logits - higher[..., None]), axis=-1)
    return higher, total * jnp.exp(peak - higher) + raised


def _gradients_of_chunk(task: _Loss, keys: _Keys, dk: Array, of_chunk: Any) -> tuple[Array, Any]:
    """Adds to the gradients of the index keys; returns these, and those of queries and weights."""
    chunk, lse, of_scores, dloss = of_chunk

    def add_tile(i, gradients):
        dq, dweights, dk = gradients
        tile, k_index, place = _tile(task, chunk, keys, i)
        p = jnp.sum(jnp.exp(tile.logits - lse[..., None]), axis=1)
        dscores = dloss[:, None] * (jnp.exp(tile.scores - of_scores[:, None]) - p)
        cut = without_negative(tile.products) if task.relu else tile.products
        product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        of_products = jnp.broadcast_to(dscores[:, None], cut.shape)
        if dweights is not None:
            dweights = dweights + product("cw,cjw->cj", dscores, cut)
            of_products = of_products * chunk.weights[..., None]
        if task.relu:
            of_products = jnp.where(tile.products > 0, of_products, 0)
        if chunk.picks is None:
            dq = dq + product("cjw,wd->cjd", of_products, k_index)
            of_keys = product("cjw,cjd->wd", of_products, chunk.q_index)
            of_keys += lax.dynamic_slice_in_dim(dk, place, TILE)
            return dq, dweights, lax.dynamic_update_slice_in_dim(dk, of_keys, place, 0)
        dq = dq + product("cjw,cwd->cjd", of_products, k_index)
        of_keys = product("cjw,cjd->cwd", of_products, chunk.q_index)
        return dq, dweights, dk.at[place].add(of_keys, mode="promise_in_bounds")

    nothing = jax.tree.map(jnp.zeros_like, (chunk.q_index, chunk.weights))
    dq, dweights, dk = lax.fori_loop(*_tiles(chunk), add_tile, (*nothing, dk))
    return dk, (dq, dweights)


# ---- All groups of a rank, one after another.


class _Groups(NamedTuple):
    """The chunks of each group, `[G, chunks, C, ...]`; its keys; and its sinks, `[G, heads]`."""

    chunks: _Chunk
    sinks: Array | None
    keys_of: Callable[[Any], _Keys]

    def whole(self, x: Array, num_rows: int) -> Array:
        """Returns rows `[R, G, ...]`, of `[G, chunks, C, ...]`."""
        return jnp.moveaxis(x.reshape(len(x), -1, *x.shape[3:])[:, :num_rows], 0, 1)


def _groups(task: _Loss, rows: _Rows) -> tuple[_Groups, Callable[[Array], Array]]:
    """Returns the groups, and a function that cuts rows `[R, G, ...]` as theirs."""
    q_index, weights, k_index = rows.of_index
    (R, G, J, d), (S, K, H), dtype = q_index.shape, rows.k.shape, sum_dtype(q_index.dtype)
    num_kv, heads = max(1, K // G), rows.q.shape[1] // G
    width = TILE
    if rows.picks is not None:
        width = rows.picks.shape[2] * task.pick_block
    held = width * max(heads, J, 0 if rows.picks is None else num_kv * H + d)
    size = min(R, max(1, _PAIRS // max(1, held)))

    def cut(x):
        x = jnp.moveaxis(jnp.broadcast_to(x, (R, G, *x.shape[2:])), 1, 0)
        return jax.vmap(lambda x: in_chunks(x, size))(x)

    q = rows.q.reshape(R, G, heads, H).astype(dtype)
    q_index, weights = jax.tree.map(lambda x: x.astype(dtype), (q_index, weights))
    places = DocumentRows(*(x[:, None] for x in rows.rows))
    chunks = jax.tree.map(cut, _Chunk(q_index, weights, q, rows.picks, places))
    more = -S % TILE if rows.picks is None else 1
    behind = lambda x: jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))
    k_index, k = behind(k_index), behind(rows.k)

    def keys_of(group):
        own = jnp.minimum(group, k_index.shape[1] - 1)
        index = lax.dynamic_index_in_dim(k_index, own, 1, keepdims=False)
        return _Keys(index, lax.dynamic_slice_in_dim(k, group * K // G, num_kv, 1), S)

    sinks = None if rows.sink is None else rows.sink.reshape(G, heads)
    return _Groups(chunks, sinks, keys_of), cut


def _losses(task: _Loss, rows: _Rows) -> tuple[Array, Array, Array]:
    """Returns the loss `[R]`, and both lse, `[R, G, heads]` and `[R, G]`."""
    groups, _ = _groups(task, rows)
    (R, G), num = rows.of_index[0].shape[:2], jnp.arange(rows.of_index[0].shape[1], dtype=jnp.int32)

    def of_group(x):
        number, sink, chunks = x
        of_chunk = partial(_losses_of_chunk, task, groups.keys_of(number), sink)
        return lax.map(of_chunk, chunks)

    found = lax.map(of_group, (num, groups.sinks, groups.chunks))
    loss, lse, of_scores = (groups.whole(x, R) for x in found)
    return jnp.sum(loss, axis=1) / G, lse, of_scores


def _gradients(task: _Loss, rows: _Rows, of_rows: tuple[Array, Array, Array]):
    """Returns the gradients of q_index, weights and k_index; `of_rows` are both lse, and dloss."""
    groups, cut = _groups(task, rows)
    (q_index, weights, k_index), (lse, of_scores, dloss) = rows.of_index, of_rows
    (R, G), (S, num_keys, d) = q_index.shape[:2], k_index.shape
    dloss = jnp.broadcast_to(dloss[:, None] / G, (R, G))
    num = jnp.arange(G, dtype=jnp.int32)

    def of_group(total, x):
        number, *of_chunks = x
        keys = groups.keys_of(number)
        zeros = vary_alike([jnp.zeros(keys.of_index.shape, lse.dtype)], like=lse)[0]
        dk, found = lax.scan(partial(_gradients_of_chunk, task, keys), zeros, tuple(of_chunks))
        own = jnp.minimum(number, num_keys - 1)
        return total.at[:, own].add(dk[:S]), found

    zeros = vary_alike([jnp.zeros((S, num_keys, d), lse.dtype)], like=lse)[0]
    given = num, groups.chunks, *map(cut, (lse, of_scores, dloss))
    dk, (dq, dweights) = lax.scan(of_group, zeros, given)
    of_weights = None if weights is None else groups.whole(dweights, R)
    return groups.whole(dq, R), of_weights, dk
