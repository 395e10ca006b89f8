"""Attention of local queries over the keys that each has picked: its two passes.

Queries are computed in chunks. The picked rows of a chunk are gathered, `[chunk, heads, keys, H]`,
so both passes are matrix products per query, and memory grows with the tokens alone. The backward
pass gathers them again, and adds the gradients of the gathered rows to those of the keys, chunk
after chunk. A row of zeros behind the keys stands for what a query does not see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from jax_cp_dispatch._arrays import in_chunks, sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.attention.local.passes import add_sink, local_pass
from jax_cp_dispatch.attention.local.ranges import PassOptions, SoftmaxGradients, soft_capped
from jax_cp_dispatch.masks import Selected

# Elements of the rows that a chunk gathers: 4 MB of float32, which a core's caches hold.
_GATHERED = 2**20


class DocumentRows(NamedTuple):
    """Where the keys of each query are: rows [start, end) of the received keys, int32 `[b, R]`.

    The key at position p of the query's document is row `origin + p`, if the query sees it.

    Attributes:
      start, end: the keys that its mask shows; empty without keys.
      origin: the row of the document's first key; if that is not here, maybe a negative one.
      position: of the query in its document.
    """

    start: Int32[Array, "b R"]
    end: Int32[Array, "b R"]
    origin: Int32[Array, "b R"]
    position: Int32[Array, "b R"]

    def are_picks(self, picks: Int32[Array, "b R G k"], block: int) -> Bool[Array, ""]:
        """Whether each query's picks ascend, -1 after the last, and each has a key that it sees.

        So picks of another batch are found where one of them is of a key that the query does not
        see. Others cannot be told from its own.
        """
        picks = lax.optimization_barrier(picks)  # XLA takes long to fold this for constant picks
        is_pick = picks >= 0
        start, end, origin, _ = (x[..., None, None] for x in self)
        # Compared in blocks: positions times the block may exceed 32 bits.
        first, last = (start - origin) // block, (end - 1 - origin) // block
        is_seen = (start < end) & (first <= picks) & (picks <= last)
        follows = jnp.where(is_pick[..., 1:], picks[..., 1:] > picks[..., :-1], True)
        follows &= is_pick[..., :-1] | ~is_pick[..., 1:]
        is_right = jnp.where(is_pick, is_seen, picks == -1)
        is_padding = self.start >= self.end
        return (is_padding | is_right.all((2, 3)) & follows.all((2, 3))).all()


def read_picks(op: str, mask: Selected, shape: tuple[int, ...], num_kv_heads: int) -> Any:
    """Returns the picks of a mask for q `[B, T, N, ...]`, `[B, T, G, k]`."""
    picks, (B, T, N, *_) = mask.picks, shape
    picks = picks[:, :, None] if picks.ndim == 3 else picks
    if picks.shape[:2] != (B, T) or picks.shape[2] not in (1, num_kv_heads, N):
        raise ValueError(
            f"{op}: picks have shape {list(mask.picks.shape)}; [{B}, {T}] tokens with {N} query "
            f"heads and {num_kv_heads} KV heads need [{B}, {T}, k] or [{B}, {T}, G, k], with G one "
            f"of 1, {num_kv_heads} and {N}. Pass picks of these tokens and heads."
        )
    return picks


class PickedRows(NamedTuple):
    """What attended queries have picked, `[b, R, G, k]`, and where these keys are."""

    picks: Int32[Array, "b R G k"]
    rows: DocumentRows


def picked_rows(
    picks: Int32[Array, "*lead k"], rows: DocumentRows, block: int
) -> tuple[Int32[Array, "*lead keys"], Bool[Array, "*lead keys"]]:
    """Returns the row of each picked key, `block` for each pick, and whether its query sees it."""
    start, end, origin, _ = (x[..., None, None] for x in rows)
    offset = np.arange(block, dtype=np.int32).reshape(*(1,) * picks.ndim, block)
    row = origin + picks[..., None] * block + offset
    is_seen = (picks[..., None] >= 0) & (row >= start) & (row < end)
    row, is_seen = (x.reshape(*x.shape[:-2], -1) for x in (row, is_seen))
    return row, is_seen


class _Table(NamedTuple):
    """Rows of all matrices of keys, one after another, each with a row of zeros at its end."""

    rows: Array  # [matrices * (S + 1), F]
    num_keys: int

    @classmethod
    def of(cls, x) -> _Table:
        b, S, K, F = x.shape
        x = jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, 1), (0, 0)))
        return cls(x.reshape(b * K * (S + 1), F), S)

    def gradients(self, rows, shape):
        """Returns gradients `[b, S, K, F]` of the arrays, from those of the rows of the table."""
        b, _, K, _ = shape
        rows = rows.reshape(b, K, self.num_keys + 1, -1)[:, :, :-1]
        return jnp.swapaxes(rows, 1, 2)


class _Chunks(NamedTuple):
    """The queries in chunks, with their picks.

    Attributes:
      picks: `[chunks, C, G, k]`.
      rows: `DocumentRows` of each, `[chunks, C]`.
      first: the first row in the table of each query's batch row, `[chunks, C]`.
      num_rows: b and R.
      matrices: of keys in a batch row, K.
      block: tokens of a pick.
    """

    picks: Array
    rows: DocumentRows
    first: Array
    num_rows: tuple[int, int]
    matrices: int
    block: int

    @classmethod
    def of(cls, options: PassOptions, shape, keys, picked: PickedRows) -> _Chunks:
        picks, (b, R, *_), K = picked.picks, shape, keys[0].shape[2]
        G = picks.shape[2]
        held = max(G, K) * picks.shape[3] * options.pick_block * sum(x.shape[3] for x in keys)
        # A power of two divides the rows of most calls, which then need no padding.
        size = min(b * R, 1 << (max(1, _GATHERED // max(1, held)).bit_length() - 1))
        first = jnp.arange(b, dtype=jnp.int32) * (K * (keys[0].shape[1] + 1))
        first = jnp.broadcast_to(first[:, None], (b, R))
        cut = lambda x: in_chunks(x.reshape(-1, *x.shape[2:]), size)
        picks, rows, first = jax.tree.map(cut, (*picked, first))
        return cls(picks, rows, first, (b, R), K, options.pick_block)

    def cut(self, x):
        """Returns arrays `[b, R, ...]` in chunks, and padding after the last query."""
        return in_chunks(x.reshape(-1, *x.shape[2:]), self.first.shape[1])

    def whole(self, x):
        """The inverse: `[b, R, ...]`."""
        b, R = self.num_rows
        return x.reshape(-1, *x.shape[2:])[: b * R].reshape(b, R, *x.shape[2:])


class _Chunk(NamedTuple):
    picks: Array  # [C, G, k]
    rows: DocumentRows  # [C]
    first: Array  # [C]

    def places(self, num_keys: int, matrices: int, block: int) -> tuple[Array, Array]:
        """Returns the rows in the table of picked keys `[C, M, keys]`, and which are seen.

        M is the larger of the groups of picks and of the KV heads.
        """
        of_groups = DocumentRows(*(x[:, None] for x in self.rows))
        row, is_seen = picked_rows(self.picks, of_groups, block)
        num_matrices = max(row.shape[1], matrices)
        matrix = np.arange(num_matrices, dtype=np.int32) // (num_matrices // matrices)
        row = jnp.where(is_seen, row, num_keys) + (matrix * (num_keys + 1))[None, :, None]
        is_seen = jnp.broadcast_to(is_seen, row.shape)
        return row + self.first[:, None, None], is_seen


def _product(x, y, contract):
    """Multiplies per query and matrix, arrays `[C, M, ...]`; `contract`: axis of x, axis of y."""
    dimensions = ((contract[:1], contract[1:]), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


def _gathered(options: PassOptions, tables, chunk: _Chunk, matrices: int, dtype):
    """Returns the places of a chunk's keys, which are seen, and their keys and values."""
    place, is_seen = chunk.places(tables[0].num_keys, matrices, options.pick_block)
    take = lambda x: x.rows.at[place].get(mode="promise_in_bounds").astype(dtype)
    k, *v = map(take, tables)
    return place, is_seen, k, (v[0] if v else k[..., : options.value_size])


def _grouped(x, num_matrices: int):
    """Returns rows `[C, N, F]` by the matrix of keys that each head reads, `[C, M, N / M, F]`."""
    return x.reshape(x.shape[0], num_matrices, -1, x.shape[-1])


def _shapes(options: PassOptions, q, keys, *_):
    b, R, N, _ = q.shape
    size = options.value_size or keys[-1].shape[3]
    out = q.update(shape=(b, R, N, size), dtype=options.out_dtype, weak_type=False)
    sharding = q.sharding.update(spec=P(None, None, None))
    row = q.update(shape=(b, N, R), dtype=sum_dtype(q.dtype), weak_type=False, sharding=sharding)
    return [out, row, *[row] * options.return_max_logits]


@local_pass("picked_attention", "cpd.attention", _shapes)
def picked_attention(options: PassOptions, q, keys, picked: PickedRows, sink):
    """Returns out `[b, R, N, Hv]` in `options.out_dtype`, and lse `[b, N, R]`.

    With `options.return_max_logits`, also the largest logit of each row, like lse.

    Args:
      options: with the `pick_block`, and the `value_size` of values that are in the keys.
      q: `[b, R, N, H]`.
      keys: k `[b, S, K, H]` and v `[b, S, K, Hv]`; or k alone, whose first features are the values.
      picked: what each query has picked.
      sink: `[b, N]`, or None.
    """
    dtype, tables = sum_dtype(q.dtype), [_Table.of(x) for x in keys]
    chunks = _Chunks.of(options, q.shape, keys, picked)
    num_matrices = max(chunks.picks.shape[2], chunks.matrices)

    def one(_, of_chunk):
        q, *chunk = of_chunk
        _, is_seen, k, v = _gathered(options, tables, _Chunk(*chunk), chunks.matrices, dtype)
        q = options.scale * _grouped(q.astype(dtype), num_matrices)
        logits, _ = soft_capped(options.logit_soft_cap, _product(q, k, (3, 3)))
        logits = jnp.where(is_seen[:, :, None], logits, -jnp.inf)
        peak = jnp.max(logits, axis=3, initial=-jnp.inf)
        # A finite peak keeps exp(-inf - peak) = 0 for queries without keys.
        p = jnp.exp(logits - jnp.where(peak > -jnp.inf, peak, 0)[..., None])
        total = jnp.sum(p, axis=3)
        acc = _product(p, v, (3, 2)) / jnp.where(total == 0, 1, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(total))
        by_head = lambda x: x.reshape(x.shape[0], -1, *x.shape[3:])
        return None, tuple(map(by_head, (acc, lse, peak)))

    cut = chunks.cut(q), *chunks[:3]
    _, (out, lse, peak) = lax.scan(one, None, cut)
    out, lse, peak = map(chunks.whole, (out, lse, peak))
    lse, peak = (jnp.swapaxes(x, 1, 2) for x in (lse, peak))
    out, lse = add_sink(out, lse, sink)
    return out.astype(options.out_dtype), lse, *([peak] if options.return_max_logits else [])


@local_pass(
    "picked_gradients",
    "cpd.attention_backward",
    lambda options, q, keys, *_: [
        x.update(dtype=jnp.dtype(dtype), weak_type=False)
        for x, dtype in zip((q, *keys), options.gradient_dtypes, strict=False)
    ],
)
def picked_gradients(options: PassOptions, q, keys, picked: PickedRows, whole: SoftmaxGradients):
    """Returns dq, and the gradients of the keys, in `options.gradient_dtypes`."""
    out, lse, dout, dlse = whole
    dtype, tables = sum_dtype(q.dtype), [_Table.of(x) for x in keys]
    chunks = _Chunks.of(options, q.shape, keys, picked)
    num_matrices = max(chunks.picks.shape[2], chunks.matrices)
    lse, dlse = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[..., None], (lse, dlse))

    def one(gradients, of_chunk):
        arrays, *chunk = of_chunk
        place, is_seen, k, v = _gathered(options, tables, _Chunk(*chunk), chunks.matrices, dtype)
        used = (chunk[1].start < chunk[1].end)[:, None, None]
        arrays = jax.tree.map(lambda x: jnp.where(used, x, 0).astype(dtype), arrays)
        q, out, lse, dout, dlse = jax.tree.map(lambda x: _grouped(x, num_matrices), arrays)
        delta = jnp.sum(dout * out, axis=-1, keepdims=True)
        delta = delta if dlse is None else delta - dlse
        q = options.scale * q
        logits, slope = soft_capped(options.logit_soft_cap, _product(q, k, (3, 3)))
        # An lse of -inf is that of a query without keys, none of which is seen.
        p = jnp.exp(jnp.where(is_seen[:, :, None], logits - lse, -jnp.inf))
        ds = p * (_product(dout, v, (3, 3)) - delta) * slope
        dq = options.scale * _product(ds, k, (3, 2))
        dk, dv = _product(ds, q, (2, 2)), _product(p, dout, (2, 2))
        found = [dk, dv]
        if len(tables) == 1:
            found = [jnp.concatenate([dk[..., : v.shape[3]] + dv, dk[..., v.shape[3] :]], -1)]
        # On CPU the rows of a scatter are added one after another; on GPUs in no fixed order.
        add = lambda x, y: x.at[place].add(y, mode="promise_in_bounds")
        gradients = tuple(map(add, gradients, found))
        return gradients, dq.reshape(dq.shape[0], -1, dq.shape[3])

    zeros = vary_alike(tuple(jnp.zeros(x.rows.shape, dtype) for x in tables), like=q)
    cut = jax.tree.map(chunks.cut, (q, out, lse, dout, dlse)), *chunks[:3]
    gradients, dq = lax.scan(one, zeros, cut)
    of_keys = [x.gradients(g, k.shape) for x, g, k in zip(tables, gradients, keys, strict=True)]
    found = chunks.whole(dq), *of_keys
    return tuple(x.astype(to) for x, to in zip(found, options.gradient_dtypes, strict=False))
