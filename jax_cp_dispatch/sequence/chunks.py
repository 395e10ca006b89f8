"""Recurrences in chunks of rows: products in a chunk, decays, walks from chunk to chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

from jax_cp_dispatch._arrays import At
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._residuals import PAIRS, named_pairs
from jax_cp_dispatch.global_call import pad_tokens
from jax_cp_dispatch.sequence.pieces import Cuts


def dot(
    a: Float[Array | np.ndarray, "*#batch M K"], b: Float[Array | np.ndarray, "*#batch K N"]
) -> Float[Array, "..."]:
    """Returns products of matrices; batch axes may be 1 in one of them.

    Float32 inside: without a precision, TPUs and GPUs round the factors.
    """
    if a.shape[:-2] != b.shape[:-2] or a.dtype != b.dtype:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    batch = tuple(range(a.ndim - 2))  # directly, which is one operation
    contracted = (a.ndim - 1,), (a.ndim - 2,)
    return lax.dot_general(a, b, (contracted, (batch, batch)), precision=lax.Precision.HIGHEST)


def across(x: Array) -> Array:
    return x.swapaxes(-1, -2)


class ChunkSpan(NamedTuple):
    """Pieces of this rank in chunks, [P]."""

    # The first and last chunk of each piece
    first: Int32[Array, " P"]
    last: Int32[Array, " P"]
    # The one of them where a state enters or leaves it, and its group of rows
    places: Int32[Array, "P 2"]
    row: Int32[Array, " P"]  # its last row, in its chunk
    used: Bool[Array, " P"]  # whether there is such a piece
    mask: Float[Array, "P 1 C 1"]  # 1 for its rows in that chunk

    def chunk(self) -> At:
        """Returns where arrays [n, G, ...] have what belongs to the chunk of each piece."""
        return At(self.places, (0, 1))

    def last_row(self) -> At:
        """Returns where arrays [n, G, N, C, ...] have what belongs to the last row of each piece.

        If the chunk in `places` is the last one.
        """
        return At(jnp.concatenate([self.places, self.row[:, None]], 1), (0, 1, 3))

    def is_active(self, num_chunks: int) -> Bool[Array, " n"]:
        """Returns which chunks hold rows of these pieces."""
        chunk = np.arange(num_chunks, dtype=np.int32)[:, None]
        used, first, last = (x[None] for x in (self.used, self.first, self.last))
        return (used & (first <= chunk) & (chunk <= last)).any(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of rows [G, L]: n for each group, of C rows; the last is padded."""

    num_rows: int = dataclasses.field(metadata={"static": True})  # L (static)
    # Chunks that are computed together, a divisor of n (static)
    in_slice: int = dataclasses.field(metadata={"static": True})
    ids: Any  # i32 [n, G, C]; the piece of each row
    # [n, G, 1, C, 1]; 1 for the rows of a piece that entered the chunk from the one before, else 0
    into: Any
    last: Any  # [n, G, 1, C, 1]; 1 for the rows of the piece of the last row, else 0

    @property
    def size(self) -> int:
        return self.ids.shape[2]

    def apply(self, fn: Callable[..., Any], inputs: PyTree[Shaped[Array, "G L ..."]]) -> Any:
        """Returns `fn(rows, ids)` of all chunks: arrays [n, ...], from rows [n, G, C, ...].

        Computed for one slice of chunks after another, and again by the derivative, which keeps
        `named_pairs`. So memory holds what `fn` returns, and caches what it needs meanwhile.
        """
        split_rows = lambda x: jax.tree.map(partial(split, size=self.size), x)
        count = self.in_slice
        if len(self.ids) == count:
            return fn(split_rows(inputs), self.ids)
        slices = jax.tree.map(partial(split, size=count * self.size), inputs)
        ids = self.ids.reshape(len(self.ids) // count, count, *self.ids.shape[1:])
        of_slice = jax.checkpoint(
            lambda x, ids: fn(split_rows(x), ids),
            prevent_cse=False,
            policy=jax.checkpoint_policies.save_only_these_names(PAIRS),
        )
        out = lax.map(lambda x: of_slice(*x), (slices, ids))
        return jax.tree.map(lambda x: lax.collapse(x, 0, 2), out)

    def join(self, x: Float[Array, "n G N C V"]) -> Float[Array, "G L N V"]:
        """Puts rows in chunks back."""
        x = x.transpose(1, 0, 3, 2, 4)  # [G, n, C, N, V]
        return lax.collapse(x, 1, 3)[:, : self.num_rows]

    def span(self, own: Cuts, ids: Int32[Array, " P"], *, at_last: bool) -> ChunkSpan:
        """Finds cut pieces of this rank, by their slots, in chunks; their rows have these ids."""
        groups, size = self.ids.shape[1:]
        number = np.arange(len(ids), dtype=np.int32)
        group = number if groups > 1 else 0 * number
        # Unsigned division would be several operations: chunks have a power of two of rows.
        first = jnp.maximum(own.row - group * self.num_rows, 0)  # 0 in unused slots
        last = jnp.maximum(first + own.length - 1, 0)
        first, end = (x >> int(size).bit_length() - 1 for x in (first, last))
        places = jnp.stack([end if at_last else first, group], 1)
        mask = (At(places, (0, 1)).take(self.ids) == ids[:, None]) & own.used[:, None]
        mask = mask[:, None, :, None].astype(self.into.dtype)
        return ChunkSpan(first, end, places, last & size - 1, own.used, mask)

    def rows_between(
        self, first: Int32[Array, " P"], last: Int32[Array, " P"]
    ) -> Bool[Array, "P n G C"]:
        """Returns which rows lie between two rows of one group, both included."""
        n, groups, size = self.ids.shape
        place = np.arange(n * size, dtype=np.int32).reshape(1, n, 1, size)
        row = np.arange(groups, dtype=np.int32)[None, None, :, None] * self.num_rows + place
        first, last = (x[:, None, None, None] for x in (first, last))
        return jnp.asarray(place < self.num_rows) & (first <= row) & (row <= last)


def cut_into_chunks(
    piece_ids: Int32[Array, "G L"], size: int, num_heads: int, dtype: Any
) -> Chunks:
    """Returns the chunks of rows with these pieces; 0 is padding."""
    num_chunks, matrices = -(-piece_ids.shape[1] // size), piece_ids.shape[0] * num_heads
    in_slice = 64 if jax.default_backend() == "cpu" else 1024  # matrices: a few MB on CPUs
    num_slices = -(-num_chunks // max(1, in_slice // matrices))
    in_slice = -(-num_chunks // num_slices)
    ids = split(piece_ids, size, multiple=in_slice)
    before = jnp.pad(ids[:-1, :, -1:], ((1, 0), (0, 0), (0, 0)), constant_values=-1)
    mask = lambda x: x[:, :, None, :, None].astype(dtype)
    into, last = mask(ids == before), mask(ids == ids[:, :, -1:])
    return Chunks(piece_ids.shape[1], in_slice, ids, into, last)


def split(
    x: Shaped[Array, "G L ..."], size: int, *, multiple: int = 1
) -> Shaped[Array, "n G C ..."]:
    """Cuts rows into a multiple of so many chunks; the last ones are padded with zeros."""
    x = pad_tokens(x, -x.shape[1] % (size * multiple))
    return x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]).swapaxes(0, 1)


def same_piece(ids: Int32[Array, "n G C"], dtype: Any) -> Float[Array, "n G 1 C C"]:
    """Returns 1 for each two rows of one piece."""
    return (ids[:, :, None, :, None] == ids[:, :, None, None, :]).astype(dtype)


def default_chunk() -> int:
    """Rows of a chunk on this platform; see docs/sequence.md for the measurement."""
    return 32 if jax.default_backend() == "cpu" else 64


# Matrices below this size are multiplied as sums: XLA makes a call of each product of a batch.
_SMALL = 8


@jax.custom_jvp
def invert_unit_lower(a: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Returns (I + a)^-1 for strictly lower triangular `a`; C is a power of two.

    By diagonal blocks of size 2, 4, ...: each is the inverse of a diagonal block of I + a, so it
    stays as small as the result. (Products of powers, by doubling, lose all digits if keys repeat.)
    """
    below, diagonal = [], a[..., None, :, :]  # of blocks [..., n, size, size], n = 1, 2, 4, ...
    while (half := diagonal.shape[-1] // 2) > 1:
        below.append(diagonal[..., half:, :half])
        halves = diagonal[..., :half, :half], diagonal[..., half:, half:]
        diagonal = lax.collapse(jnp.stack(halves, -3), a.ndim - 2, a.ndim)
    eye = np.eye(diagonal.shape[-1], dtype=a.dtype)
    out = jnp.asarray(eye[(None,) * (diagonal.ndim - 2)]) - diagonal
    for block in reversed(below):
        pairs = out.reshape(*block.shape[:-2], 2, *out.shape[-2:])
        left, right = pairs[..., 0, :, :], pairs[..., 1, :, :]
        lower = -_product(_product(right, block), left)
        upper = jnp.concatenate([left, jnp.zeros_like(left)], -1)
        out = jnp.concatenate([upper, jnp.concatenate([lower, right], -1)], -2)
    return out[..., 0, :, :]


@invert_unit_lower.defjvp
def _jvp(primals, tangents):
    inverse = named_pairs(invert_unit_lower(*primals))  # here: the tangent reads it too
    return inverse, -dot(dot(inverse, tangents[0]), inverse)


def _product(a: Array, b: Array) -> Array:
    if a.shape[-1] < _SMALL:
        return (a[..., None] * b[..., None, :, :]).sum(-2)
    return dot(a, b)


# ---- Products of decays between two rows, as exponentials of sums over exactly the rows between.
#
# Sums of an interval are never differences of longer sums, which would lose the digits that matter
# after a strong decay; and a log decay of -inf is exact.


def make_decays(
    log: Float[Array, "n G N C F"], same: Float[Array, "n G 1 C C"]
) -> tuple[Float[Array, "n G N C F"], Float[Array, "n G N C F"]]:
    """Returns the decays of each row in its chunk, per head (F = 1) or channel (F = H).

    Into the row: from the start of its piece, or of the chunk, through the row itself. And out of
    it: from behind the row to the end of its piece, or of the chunk. Log decays are finite; `same`:
    1 for two rows of one piece.
    """
    lower = np.tri(log.shape[-2], dtype=log.dtype)[None, None, None]
    return jnp.exp(dot(same * lower, log)), jnp.exp(dot(same * (1 - lower), log))


def decayed_scores(
    rows: tuple[Float[Array, "n G N C H"], ...],
    k: Float[Array, "n G N C H"],
    log: Float[Array, "n G N C F"],
) -> tuple[Float[Array, "n G N C C"], ...]:
    """Returns sum_h rows[i, h] k[j, h] exp(sum of log decays of rows j + 1, ..., i), for j <= i.

    The sets of rows share the keys and decays. Values above the diagonal are zero.
    """
    shape, size = k.shape[:-2], k.shape[-2]
    flat = lambda x: lax.collapse(x, 0, x.ndim - 2)  # one batch axis: XLA's products are faster
    rows, k, log = tuple(map(flat, rows)), flat(k), flat(log)
    if log.shape[-1] > 1:
        scores = _channel_scores(rows, k, log)
    else:
        below = np.tri(size, dtype=k.dtype)
        between = dot(below, log * np.tri(size, k=-1, dtype=k.dtype)[None])  # sums over (j, i]
        decay = jnp.exp(between) * below[None]
        scores = tuple(dot(x, across(k)) * decay for x in rows)
    return tuple(named_pairs(x.reshape(*shape, size, size)) for x in scores)


@jax.custom_vjp
def _channel_scores(rows, k, log):
    """Halves intervals: both factors decay from the middle, so no exponential exceeds 1.

    The derivative computes the factors again: they are as large as the keys, for each level.
    """
    eye = np.eye(k.shape[-2], dtype=k.dtype)[None]
    start = [(x * k).sum(-1, keepdims=True) * eye for x in rows]

    def level(out: Any, x: Any) -> Any:
        inside, pairs = x
        decay = jnp.exp(_sums(inside, log))
        keys, pairs = across(k * decay), pairs[None]
        return [y + dot(x * decay, keys) * pairs for y, x in zip(out, rows, strict=True)], None

    return tuple(lax.scan(level, start, _levels(k.shape[-2], k.dtype))[0])


def _channel_scores_backward(saved, gradients):
    rows, k, log = saved
    on_diagonal = [jnp.diagonal(g, axis1=-2, axis2=-1)[..., None] for g in gradients]
    drows = [g * k for g in on_diagonal]
    dk = sum(g * x for g, x in zip(on_diagonal, rows, strict=True))

    def level(sums: Any, x: Any) -> Any:
        drows, dk, dlog = sums
        inside, pairs = x
        decay = jnp.exp(_sums(inside, log))
        keys, masked = k * decay, [g * pairs[None] for g in gradients]
        of_rows = [dot(g, keys) * decay for g in masked]
        of_keys = sum(dot(across(g), x * decay) for g, x in zip(masked, rows, strict=True))
        of_keys = of_keys * decay
        each = of_keys * k + sum(d * x for d, x in zip(of_rows, rows, strict=True))
        drows = [a + b for a, b in zip(drows, of_rows, strict=True)]
        return (drows, dk + of_keys, dlog + _sums(across(inside), each)), None

    start = drows, dk, jnp.zeros_like(log)
    (drows, dk, dlog), _ = lax.scan(level, start, _levels(k.shape[-2], k.dtype))
    return tuple(drows), dk, dlog


_channel_scores.defvjp(lambda *x: (_channel_scores(*x), x), _channel_scores_backward)


def _levels(size: int, dtype: Any) -> tuple[Float[Array, "n C C"], Float[Array, "n C C"]]:
    """Returns, for blocks of 2, 4, ... rows, the rows between the middle and each row, and pairs.

    The pairs have a row in the right half of a block and a key in its left half. Every pair below
    the diagonal is in one level.
    """
    row, column = np.indices((size, size))
    half = 2 ** np.arange(size.bit_length() - 1)[:, None, None]
    middle = row // (2 * half) * 2 * half + half
    right = (middle <= column) & (column <= row)
    inside = np.where(row >= middle, right, (row < column) & (column < middle))
    pairs = (row >= middle) & (column < middle) & (column >= middle - half)
    return jnp.asarray(inside, dtype), jnp.asarray(pairs, dtype)


def _sums(inside: Float[Array, "C C"], x: Float[Array, "batch C H"]) -> Float[Array, "batch C H"]:
    return dot(jnp.broadcast_to(inside, (len(x), *inside.shape)), x)


# ---- Walks through the chunks of a recurrence: the states, and from behind their gradients.


class Steps(NamedTuple):
    """How the state S [H, V] of a head changes over the rows of each chunk.

    new = u - w S    what the rows add, after what they read
    S'  = d S + kd^T new
    """

    u: Float[Array, "n G N C V"]  # what the rows add to a state of zero
    w: Float[Array, "n G N C H"] | None  # what they read; None if they read nothing
    kd: Float[Array, "n G N C H"]  # keys, decayed to the end of their piece or chunk
    # Decay from the start of the piece, or of the chunk, through each row
    into: Float[Array, "n G N C F"]


def walk(
    steps: Steps,
    chunks: Chunks,
    later: ChunkSpan | None,
    entering: Float[Array, "P N H V"] | None,
    *,
    active: Bool[Array, " n"] | None = None,
) -> tuple[Float[Array, "n G N H V"], Float[Array, "n G N C V"]]:
    """Walks through the chunks, in all groups and heads together.

    The pieces `later` start from the states `entering`, others from zero. Chunks that are not
    active are skipped; None: all are. Returns the state before each chunk, and what its rows add.
    """
    u, w, kd, _ = steps
    start = jnp.zeros((*kd.shape[1:3], kd.shape[-1], u.shape[-1]), u.dtype)
    at: Any = None
    group: Any = None
    born = start  # what remains of entering states behind their first chunks
    if later is not None and entering is not None:
        first, mask = later.chunk(), later.mask
        at, group = later.places[:, 0], later.places[:, 1]
        born = first.take(decay_over(steps)) * mask[:, :, -1:] * entering
        if w is not None:
            u = first.add(u, -dot(first.take(w), entering) * mask)
        at, group, born, *_ = vary_alike([at, group, born, u, kd])
    (start, *_) = vary_alike([start, u, kd, born])

    def step(state: Any, x: Any) -> Any:
        index, u, w, kd, decay, into, last = x
        new = u if w is None else u - dot(w * into, state)
        after = decay * state + dot(across(kd * last), new)
        if at is not None:
            here = at == index

            def enter(after: Array) -> Array:
                only_here = jnp.where(here, group, len(state)).astype(jnp.uint32)
                return after.at[only_here].add(born, mode="drop")

            after = lax.cond(here.any(), enter, lambda x: x, after)
        return after, (state, new)

    def skip(state: Any, x: Any) -> Any:
        return state, (state, jnp.zeros_like(x[1]))

    xs = u, w, kd, decay_over(steps, chunks), chunks.into, chunks.last
    return _scan(step, skip, active, start, xs)


def walk_back(steps, chunks, dstates, dnew, *, active=None):
    """Returns the gradients of the state behind each chunk, and of what its rows add."""
    w, kd = steps.w, steps.kd

    def step(after: Any, x: Any) -> Any:
        _, w, kd, decay, into, last, dstate, dnew = x
        dnew = dnew + dot(kd * last, after)
        before = decay * after + dstate
        if w is not None:
            before = before - dot(across(w * into), dnew)
        return before, (after, dnew)

    def skip(after: Any, x: Any) -> Any:  # no piece goes on behind active chunks
        return jnp.zeros_like(after), (after, x[-1])

    start = vary_alike(jnp.zeros_like(dstates[0]), like=dnew)
    xs = w, kd, decay_over(steps, chunks), chunks.into, chunks.last, dstates, dnew
    return _scan(step, skip, active, start, xs, reverse=True)


def _scan(step, skip, active, start, xs, *, reverse=False):
    """Scans over chunks and skips those that are not active; `step` gets the index too."""
    # Steps are branches of a condition, where nothing may begin to vary; see `_if_any`.
    xs = vary_alike(jnp.arange(len(xs[-1]), dtype=jnp.int32), like=xs[-1]), *xs
    if active is None:
        return lax.scan(step, start, xs, reverse=reverse)[1]
    chosen = lambda state, x: lax.cond(x[0], step, skip, state, x[1])
    return lax.scan(chosen, start, (active, xs), reverse=reverse)[1]


def decay_over(steps: Steps, chunks: Chunks | None = None) -> Float[Array, "n G N F 1"]:
    """Returns the decay over each chunk, of its last piece; with `chunks`, if that entered it."""
    decay = steps.into[..., -1, :]
    return (decay if chunks is None else decay * chunks.into[..., -1, :])[..., None]
