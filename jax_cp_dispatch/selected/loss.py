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
import numpy as np
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
    add_in_order,
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
_ZERO = np.int32(0)  # as in `picked.py`


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_loss(task: _Loss, movement: Movement, operands: Operands, gathered: Gathered) -> Array:
    return _forward(task, movement, operands, gathered)[0]


def _forward(task: _Loss, movement: Movement, operands: Operands, gathered: Gathered):
    call = movement.call
    operands = forbid_second_derivative(call.op, operands)
    received = movement.send(gathered, operands).completed(call.exchange)
    kept = received, operands.sink, operands.weights, gathered
    cut, keys, chunks = _chunks(task, call, *kept)
    loss, *lse = map(cut.whole, lax.map(partial(_losses_of_chunk, task, keys), chunks))
    loss, *lse = named_context((jnp.mean(loss, axis=1), *lse))
    if task.pick_block:
        picked = PickedRows(received[0][1], gathered.rows)
        loss = only_of_own_picks(call.exchange, picked, task.pick_block, loss)
    back = movement.give_back(gathered, loss[None], jnp.zeros(()))
    return back.completed(call.exchange)[0], (kept, lse)


def _backward(task: _Loss, movement: Movement, residuals, dloss: Array):
    kept, lse = residuals
    gathered, exchange = kept[-1], movement.call.exchange
    dloss = forbid_second_derivative(_OP, dloss)
    came = movement.send_cotangents(gathered, Outputs(dloss)).completed(exchange)
    cut, keys, chunks = _chunks(task, movement.call, *kept)
    start, end, *_ = gathered.rows
    dloss = jnp.where(start < end, came.out, 0)[0]  # others have any values
    given = chunks, *map(cut, (*lse, dloss[:, None] / keys.num_groups))
    zeros = vary_alike([jnp.zeros(keys.of_index.shape, dloss.dtype)], like=dloss)[0]
    dk, found = lax.scan(partial(_gradients_of_chunk, task, keys), zeros, given)
    of_queries, (k, *others) = kept[0]
    q, weights, _ = of_queries[0] if task.pick_block else of_queries
    found = jax.tree.map(lambda x, y: cut.whole(x)[None].astype(y.dtype), found, (q, weights))
    dk = [dk[None, : keys.last]]
    back = movement.give_back_gradients(gathered, jax.tree.leaves(found), dk)
    (dq, *dweights), dk = back.completed(exchange)
    dk = *rounded(dk, [k]), *(None for _ in others)
    return Operands((dq, dweights[0] if dweights else None, None), dk, None), None


_gather_loss.defvjp(_forward, _backward)


# ---- Chunks of queries, each of one group of heads, and tiles of keys.


class _Chunk(NamedTuple):
    """The queries of a chunk, of one group.

    Attributes:
      group: its number.
      q_index, weights, q: `[C, J, d]`, `[C, J]` or None, and `[C, heads, H]`.
      picks: `[C, k]`, or None.
      rows: of the queries' documents, `[C]`.
    """

    group: Array
    q_index: Array
    weights: Array | None
    q: Array
    picks: Array | None
    rows: DocumentRows


class _Keys(NamedTuple):
    """What all chunks read. Behind the keys is a row of zeros, or more.

    Attributes:
      of_index, k: `[S, G or 1, d]` and `[S, K, H]`.
      sinks: `[G, heads]`, or None.
      last: the first row of zeros.
      num_groups: G.
    """

    of_index: Array
    k: Array
    sinks: Array | None
    last: int
    num_groups: int

    def own(self, chunk: _Chunk) -> Array:
        """Returns the index key that a chunk reads."""
        return jnp.minimum(chunk.group, self.of_index.shape[1] - 1)


class _Tile(NamedTuple):
    """The terms of a chunk with a tile of keys.

    Attributes:
      products: of the index, not cut, `[C, J, W]`.
      scores: of the index, `[C, W]`; -inf for keys that are not seen.
      logits: of attention, `[C, heads, W]`; likewise.
      k_index, place: the rows of the index; the first of them, or of picked ones all, `[C, W]`.
    """

    products: Array
    scores: Array
    logits: Array
    k_index: Array
    place: Any


def _tile(task: _Loss, chunk: _Chunk, keys: _Keys, number: Any) -> _Tile:
    dtype, (_, K, H), own = chunk.q_index.dtype, keys.k.shape, keys.own(chunk)
    is_picked = chunk.picks is not None
    num_kv, first = max(1, K // keys.num_groups), chunk.group * K // keys.num_groups
    if chunk.picks is not None:
        place, is_seen = picked_rows(chunk.picks, chunk.rows, task.pick_block)
        place = jnp.where(is_seen, place, keys.last)
        take = lambda x, *at: x.at[at].get(mode="promise_in_bounds")
        k_index = take(keys.of_index, place, own)
        heads = first + jnp.arange(num_kv, dtype=jnp.int32)[None, None]
        k = take(keys.k, place[..., None], heads)
    else:
        place = number * TILE
        sizes = TILE, 1, chunk.q_index.shape[2]
        k_index = lax.dynamic_slice(keys.of_index, (place, own, _ZERO), sizes)[:, 0]
        k = lax.dynamic_slice(keys.k, (place, first, _ZERO), (TILE, num_kv, H))
        row = place + jnp.arange(TILE, dtype=jnp.int32)[None]
        is_seen = (row >= chunk.rows.start[:, None]) & (row < chunk.rows.end[:, None])
    k_index, k = k_index.astype(dtype), k.astype(dtype)
    products = head_scores(chunk.q_index, k_index, relu=False, per_query=is_picked)
    cut = without_negative(products) if task.relu else products
    scores = jnp.where(is_seen, weighted(cut, chunk.weights), -jnp.inf)
    C, heads, _ = chunk.q.shape
    scale = H**-0.5 if task.scale is None else task.scale
    q = scale * chunk.q.reshape(C, num_kv, heads // num_kv, H)
    names = "ckgh,cwkh->ckgw" if is_picked else "ckgh,wkh->ckgw"
    logits = jnp.einsum(names, q, k, precision=lax.Precision.HIGHEST).reshape(C, heads, -1)
    logits = jnp.where(is_seen[:, None], soft_capped(task.logit_soft_cap, logits)[0], -jnp.inf)
    return _Tile(products, scores, logits, k_index, place)


def _tiles(chunk: _Chunk) -> tuple[Any, Any]:
    """Returns the first tile that a chunk sees, and one past the last."""
    if chunk.picks is not None:
        return 0, 1
    start, end, *_ = chunk.rows
    used = start < end
    first = jnp.min(jnp.where(used, start, jnp.iinfo(jnp.int32).max)) // TILE
    last = -(-jnp.max(jnp.where(used, end, 0)) // TILE)
    return jnp.minimum(first, last), last


def _losses_of_chunk(task: _Loss, keys: _Keys, chunk: _Chunk) -> tuple[Array, ...]:
    """Returns the loss `[C]`, and the lse of logits, for a target of sum 1, and of scores."""
    first, last = _tiles(chunk)
    rows = chunk.q[..., 0], chunk.q_index[:, 0, 0]  # [C, heads] and [C]: a softmax each

    def add_tile(i, sums):
        tile = _tile(task, chunk, keys, i)
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
    whole = lse
    if keys.sinks is not None:
        whole = jnp.logaddexp(lse, keys.sinks[chunk.group][None].astype(lse.dtype))
    lse = whole + jax.nn.logsumexp(lse - whole, axis=1, keepdims=True)

    def add_terms(i, loss):
        tile = _tile(task, chunk, keys, i)
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
    own = keys.own(chunk)

    def add_tile(i, gradients):
        dq, dweights, dk = gradients
        tile = _tile(task, chunk, keys, i)
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
        w = "w" if chunk.picks is None else "cw"  # keys of the tile, or of each query
        dq = dq + product(f"cjw,{w}d->cjd", of_products, tile.k_index)
        of_keys = product(f"cjw,cjd->{w}d", of_products, chunk.q_index)
        if chunk.picks is not None:
            rows = dk.reshape(-1, dk.shape[2])
            place = tile.place * dk.shape[1] + own
            place = jnp.where(tile.place < keys.last, place, len(rows))
            return dq, dweights, add_in_order(rows, place, of_keys).reshape(dk.shape)
        at, of_keys = (tile.place, own, _ZERO), of_keys[:, None]
        of_keys += lax.dynamic_slice(dk, at, of_keys.shape)
        return dq, dweights, lax.dynamic_update_slice(dk, of_keys, at)

    nothing = jax.tree.map(jnp.zeros_like, (chunk.q_index, chunk.weights))
    dq, dweights, dk = lax.fori_loop(*_tiles(chunk), add_tile, (*nothing, dk))
    return dk, (dq, dweights)


# ---- The chunks of a rank, one group after another.


class _Cut(NamedTuple):
    """How rows `[R, G, ...]`, or of one group for all, are cut in chunks `[G * chunks, C, ...]`."""

    shape: tuple[int, int]
    size: int

    def __call__(self, x: Array) -> Array:
        x = jnp.moveaxis(jnp.broadcast_to(x, (*self.shape, *x.shape[2:])), 1, 0)
        x = jax.vmap(lambda x: in_chunks(x, self.size))(x)
        return x.reshape(-1, *x.shape[2:])

    def whole(self, x: Array) -> Array:
        """The inverse."""
        R, G = self.shape
        return jnp.moveaxis(x.reshape(G, -1, *x.shape[2:])[:, :R], 0, 1)


def _chunks(
    task: _Loss, call: Any, came: Any, sink: Any, weights: Any, gathered: Gathered
) -> tuple[_Cut, _Keys, _Chunk]:
    """Returns what came to this rank in chunks, with the keys of attention expanded."""
    of_queries, (k_index, *latents) = came
    of_queries, picks = of_queries if task.pick_block else (of_queries, None)
    start, end, *_ = gathered.rows
    used = (start < end)[0]
    clear = lambda x: jnp.where(used.reshape(-1, *(1,) * (x.ndim - 2)), x[0], 0)
    q_index, of_heads, q = jax.tree.map(clear, of_queries)
    k, _ = call.expansion(weights, rows_to_expand(latents, gathered.ranges))
    is_key = are_covered(start, end, k_index.shape[1])[0]
    k_index = jnp.where(is_key[:, None, None], k_index[0], 0)
    (R, G, J, d), (S, K, H), dtype = q_index.shape, k.shape, sum_dtype(q_index.dtype)
    heads, more, held = q.shape[1] // G, -S % TILE, TILE * max(q.shape[1] // G, J)
    if picks is not None:
        picks, more = picks[0], 1
        held = picks.shape[2] * task.pick_block * max(heads, J, max(1, K // G) * H + d)
    cut = _Cut((R, G), min(R, max(1, _PAIRS // max(1, held))))
    k_index, k = (jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))) for x in (k_index, k))
    keys = _Keys(k_index, k, None if sink is None else sink.reshape(G, heads), S, G)
    q = q.reshape(R, G, heads, H)
    q_index, of_heads, q = jax.tree.map(lambda x: x.astype(dtype), (q_index, of_heads, q))
    rows = DocumentRows(*(x[0, :, None] for x in gathered.rows))
    chunks = jax.tree.map(cut, (q_index, of_heads, q, picks, rows))
    group = jnp.repeat(jnp.arange(G, dtype=jnp.int32), len(chunks[0]) // G)
    return cut, keys, _Chunk(group, *chunks)
