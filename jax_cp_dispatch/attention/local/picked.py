"""Attention of local queries over the keys that each has picked: its two passes.

Queries are computed in chunks, in one of two ways. If picks are tokens or small blocks, each query
gathers its own rows, `[chunk, matrices, keys, H]`, and products are per query. If they are larger
blocks, the queries of a chunk read the union of their blocks, a few at a time, and each sees only
those that it has picked. So memory grows with the tokens alone. The backward pass reads the rows
again. It adds the gradients of keys chunk after chunk, each time to distinct rows, and so in a
fixed order on all platforms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32, Integer, Shaped

from jax_cp_dispatch._arrays import in_chunks, sum_dtype
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch.attention.local.passes import add_sink, local_pass
from jax_cp_dispatch.attention.local.ranges import PassOptions, SoftmaxGradients, soft_capped
from jax_cp_dispatch.masks import Selected

# Elements of the rows that a chunk of queries gathers: 1 MB of float32, as a core's cache.
_GATHERED = 2**18
# The smallest blocks that are read as a union; rows of heads of its queries, and keys of a step.
_SHARED, _TILE_ROWS, _STEP = 16, 512, 256
_NOWHERE = np.iinfo(np.int32).max
_ZERO = np.int32(0)  # 0 would be int64 under jax_enable_x64, and indices need to be of one dtype


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


def add_in_order(
    table: Shaped[Array, "rows F"], place: Integer[Array, "Q W"], found: Shaped[Array, "Q W F"]
) -> Shaped[Array, "rows F"]:
    """Adds rows to those of a table, query after query; places behind it do not count.

    Only the places of one query are distinct, and GPUs add to equal places in no fixed order.
    """
    one = lambda to, x: (to.at[x[0]].add(x[1], mode="drop", unique_indices=True), None)
    return lax.scan(one, table, (place, found))[0]


class _Queries(NamedTuple):
    """The queries of a chunk.

    Attributes:
      picks: of all groups, or of one.
      rows: of their documents, `[C]`, among the rows of all batch rows.
      head: the first KV head that they read.
    """

    picks: Int32[Array, "C picks"]
    rows: DocumentRows
    head: Int32[Array, ""]


class _Alone(NamedTuple):
    """Each query reads its own picks: products of `[C, M, ...]`.

    Tables are `[b * S * K, F]`.
    """

    num_groups: int  # of picks
    num_heads: int  # of keys; M is the larger of both
    block: int

    @property
    def num_matrices(self) -> int:
        return max(self.num_groups, self.num_heads)

    def table(self, x):
        return x.reshape(-1, x.shape[3])

    def by_matrix(self, x):
        """Returns rows of heads, `[C, N, F]`, by the matrix that they read: `[C, M, N / M, F]`."""
        return x.reshape(x.shape[0], self.num_matrices, -1, x.shape[2])

    def by_head(self, x, size: int):
        """The inverse."""
        return x.reshape(size, -1, x.shape[-1])

    def each(self, queries: _Queries, num_rows: int, step, carry):
        """Returns `step(place, is_seen, carry)` of all keys: `is_seen` is `[C, M, keys, 1]`."""
        picks = queries.picks.reshape(len(queries.picks), self.num_groups, -1)
        of_groups = DocumentRows(*(x[:, None] for x in queries.rows))
        row, is_seen = picked_rows(picks, of_groups, self.block)
        head = np.arange(self.num_matrices, dtype=np.int32) * self.num_heads // self.num_matrices
        place = row * self.num_heads + head[None, :, None]
        place = jnp.where(is_seen, place, num_rows).astype(jnp.uint32)  # that row does not exist
        return step(place, jnp.broadcast_to(is_seen, place.shape)[..., None], carry)

    def take(self, table, place):
        return table.at[place].get(mode="clip")

    def add(self, table, place, found):
        """Adds rows `[C, M, keys, F]` of gradients to those of a table."""
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        return add_in_order(table, flat(place), flat(found))


class _Together(NamedTuple):
    """Queries of a group read the union of their blocks: products of `[M, ...]`, for M KV heads.

    Tables are `[b * S, K, F]`. Gradients are added block after block.
    """

    num_matrices: int
    block: int

    def table(self, x):
        return x.reshape(-1, *x.shape[2:])

    def by_matrix(self, x):
        """Returns rows of heads, `[C, N, F]`, by the matrix that they read: `[M, C * N / M, F]`."""
        x = x.reshape(x.shape[0], self.num_matrices, -1, x.shape[2])
        return jnp.swapaxes(x, 0, 1).reshape(self.num_matrices, -1, x.shape[3])

    def by_head(self, x, size: int):
        """The inverse."""
        x = x.reshape(self.num_matrices, size, -1, x.shape[-1])
        return jnp.swapaxes(x, 0, 1).reshape(size, -1, x.shape[-1])

    def each(self, queries: _Queries, num_rows: int, step, carry):
        """Returns the carry after `step(place, is_seen, carry)` of a few blocks after others.

        `is_seen` is `[1, keys, C]`; a place is the first row of each block, and the first KV head.
        """
        (start, end, origin, _), picks = queries.rows, queries.picks
        size, of_step = min(self.block, num_rows), _STEP // self.block or 1
        first = origin[:, None] + picks * self.block
        first = jnp.where((picks >= 0) & (start < end)[:, None], first, _NOWHERE)
        union = lax.sort(first.reshape(-1))
        is_new = jnp.pad(union[1:] != union[:-1], (1, 0), constant_values=True)
        union = lax.sort(jnp.where(is_new, union, _NOWHERE))
        count = jnp.sum(union < _NOWHERE, dtype=jnp.int32)
        union = jnp.pad(union, (0, -len(union) % of_step), constant_values=_NOWHERE)

        def some_blocks(i, carry):
            block = lax.dynamic_slice_in_dim(union, i * of_step, of_step)[:, None, None]
            # A block at the end of the table, or before its start, is read with rows beside it.
            place = jnp.clip(block, 0, num_rows - size)
            row = place + np.arange(size, dtype=np.int32)[None, :, None]
            is_seen = (block == first[None]).any(-1)[:, None]
            is_seen &= (start[None, None] <= row) & (row < end[None, None])
            is_seen &= (block <= row) & (row - block < self.block)
            place = place.reshape(-1), queries.head
            return step(place, is_seen.reshape(1, -1, len(start)), carry)

        return lax.fori_loop(0, -(-count // of_step), some_blocks, carry)

    def take(self, table, place):
        blocks, head = place
        sizes = min(self.block, len(table)), self.num_matrices, table.shape[2]
        rows = [lax.dynamic_slice(table, (x, head, _ZERO), sizes) for x in blocks]
        return jnp.swapaxes(jnp.concatenate(rows), 0, 1)

    def add(self, table, place, found):
        blocks, head = place
        found = jnp.swapaxes(found, 0, 1)
        for x, y in zip(blocks, jnp.split(found, len(blocks)), strict=True):
            at = x, head, _ZERO
            y = y + lax.dynamic_slice(table, at, y.shape)
            table = lax.dynamic_update_slice(table, y, at)
        return table


class _Chunks(NamedTuple):
    """The queries in chunks.

    Attributes:
      reads: how a chunk reads keys.
      num_rows: b and R.
      apart: the groups whose queries are in chunks of their own; or 1.
      size: queries of a chunk, C.
    """

    reads: _Alone | _Together
    num_rows: tuple[int, int]
    apart: int
    size: int

    @classmethod
    def of(cls, options: PassOptions, q, keys, picks) -> _Chunks:
        (b, R, N, _), K, (_, _, G, k) = q.shape, keys[0].shape[2], picks.shape
        block, apart = options.pick_block, 1
        if block >= _SHARED:
            reads, apart = _Together(max(1, K // G), block), G
            size = max(8, _TILE_ROWS // (N // G))
        else:
            reads = _Alone(G, K, block)
            held = max(G, K) * k * block * sum(x.shape[3] for x in keys)
            size = max(1, _GATHERED // max(1, held))
        # A power of two divides the rows of most calls, which then need no padding.
        return cls(reads, (b, R), apart, min(b * R, 1 << (size.bit_length() - 1)))

    def queries(self, picked: PickedRows, S: int, K: int) -> _Queries:
        """Returns those of each chunk."""
        b, R = self.num_rows
        before = jnp.arange(b, dtype=jnp.int32)[:, None] * S
        start, end, origin, position = picked.rows
        rows = DocumentRows(start + before, end + before, origin + before, position)
        of_chunks = lambda x: jnp.repeat(in_chunks(x.reshape(-1), self.size), self.apart, axis=0)
        rows = jax.tree.map(of_chunks, rows)
        head = jnp.arange(len(rows.start), dtype=jnp.int32) % self.apart * K // self.apart
        if self.apart == 1:
            picks = in_chunks(picked.picks.reshape(b * R, -1), self.size)
        else:
            picks = self.cut(picked.picks)[:, :, 0]
        return _Queries(picks, rows, head)

    def cut(self, x):
        """Returns arrays `[b, R, N, F]` in chunks, `[chunks, C, heads, F]`."""
        _, _, apart, size = self
        if apart == 1:  # XLA would copy what this transpose leaves as it is
            return in_chunks(x.reshape(-1, *x.shape[2:]), size)
        x = in_chunks(x.reshape(-1, apart, x.shape[2] // apart, x.shape[3]), size)
        return jnp.swapaxes(x, 1, 2).reshape(-1, size, *x.shape[3:])

    def whole(self, x):
        """The inverse."""
        _, (b, R), apart, size = self
        if apart > 1:
            x = jnp.swapaxes(x.reshape(-1, apart, size, *x.shape[2:]), 1, 2)
        return x.reshape(-1, *x.shape[-2:])[: b * R * apart].reshape(b, R, -1, x.shape[-1])


def _product(x, y, contract):
    """Multiplies matrices, arrays `[..., rows, columns]`; `contract`: axis of x, axis of y."""
    lead = tuple(range(x.ndim - 2))
    x_axis, y_axis = (len(lead) + axis for axis in contract)
    dimensions = (((x_axis,), (y_axis,)), (lead, lead))
    return lax.dot_general(x, y, dimensions, precision=lax.Precision.HIGHEST)


def _read(reads, tables, place, is_seen, like):
    """Returns keys and values of a step, `[..., keys, F]`, and which are seen, by rows of heads."""
    used = is_seen.any(-1, keepdims=True)
    k, *v = (jnp.where(used, reads.take(x, place), 0).astype(like.dtype) for x in tables)
    is_seen = jnp.repeat(is_seen, like.shape[-2] // is_seen.shape[-1], axis=-1)
    return k, v[0] if v else k, is_seen


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
    dtype, chunks = sum_dtype(q.dtype), _Chunks.of(options, q, keys, picked.picks)
    reads, queries = chunks.reads, chunks.queries(picked, *keys[0].shape[1:3])
    tables = [reads.table(x) for x in keys]

    def one(_, of_chunk):
        q, queries = of_chunk
        num = len(q)
        q = options.scale * reads.by_matrix(q.astype(dtype))

        def step(place, is_seen, softmax):
            peak, total, acc = softmax
            k, v, is_seen = _read(reads, tables, place, is_seen, q)
            logits, _ = soft_capped(options.logit_soft_cap, _product(k, q, (1, 1)))
            logits = jnp.where(is_seen, logits, -jnp.inf)
            higher = jnp.maximum(peak, jnp.max(logits, axis=-2))
            p = jnp.exp(logits - higher[..., None, :])
            keep = jnp.exp(peak - higher)
            acc = acc * keep[..., None] + _product(p, v, (0, 0))
            return higher, total * keep + jnp.sum(p, axis=-2), acc

        # A finite first peak keeps exp(-inf - peak) = 0 for queries without keys.
        peak = jnp.full_like(q[..., 0], jnp.finfo(dtype).min)
        acc = jnp.zeros((*peak.shape, keys[-1].shape[3]), dtype)
        nothing = vary_alike((peak, jnp.zeros_like(peak), acc), like=q)
        peak, total, acc = reads.each(queries, len(tables[0]), step, nothing)
        acc = acc[..., : options.value_size or None] / jnp.where(total == 0, 1, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, peak + jnp.log(total))
        peak = jnp.where(total == 0, -jnp.inf, peak)
        by_head = lambda x: reads.by_head(x, num)
        return None, (by_head(acc), by_head(lse[..., None]), by_head(peak[..., None]))

    _, found = lax.scan(one, None, (chunks.cut(q), queries))
    out, lse, peak = map(chunks.whole, found)
    lse, peak = (jnp.swapaxes(x[..., 0], 1, 2) for x in (lse, peak))
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
    dtype, chunks = sum_dtype(q.dtype), _Chunks.of(options, q, keys, picked.picks)
    reads, queries = chunks.reads, chunks.queries(picked, *keys[0].shape[1:3])
    tables = [reads.table(x) for x in keys]
    lse, dlse = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2)[..., None], (lse, dlse))

    def one(gradients, of_chunk):
        arrays, queries = of_chunk
        used = (queries.rows.start < queries.rows.end)[:, None, None]
        num = len(used)
        arrays = jax.tree.map(lambda x: jnp.where(used, x, 0).astype(dtype), arrays)
        q, out, lse, dout, dlse = jax.tree.map(reads.by_matrix, arrays)
        delta = jnp.sum(dout * out, axis=-1, keepdims=True)
        delta = delta if dlse is None else delta - dlse
        lse, delta = (jnp.swapaxes(x, -1, -2) for x in (lse, delta))
        # Features of keys that are no values have cotangents of zero.
        more = keys[-1].shape[3] - dout.shape[-1]
        q, dout = options.scale * q, jnp.pad(dout, (*((0, 0),) * (dout.ndim - 1), (0, more)))

        def step(place, is_seen, carry):
            dq, gradients = carry
            k, v, is_seen = _read(reads, tables, place, is_seen, q)
            logits, slope = soft_capped(options.logit_soft_cap, _product(k, q, (1, 1)))
            # An lse of -inf is that of a query without keys, none of which is seen.
            p = jnp.exp(jnp.where(is_seen, logits - lse, -jnp.inf))
            ds = p * (_product(v, dout, (1, 1)) - delta) * slope
            dq = dq + options.scale * _product(ds, k, (0, 0))
            if len(tables) == 1:  # the values are in the keys: one product
                of_rows = jnp.concatenate([q, dout], axis=-2)
                found = [_product(jnp.concatenate([ds, p], axis=-1), of_rows, (1, 0))]
            else:
                found = [_product(ds, q, (1, 0)), _product(p, dout, (1, 0))]
            both = zip(gradients, found, strict=True)
            return dq, tuple(reads.add(x, place, y) for x, y in both)

        carry = jnp.zeros_like(q), gradients
        dq, gradients = reads.each(queries, len(tables[0]), step, carry)
        return gradients, reads.by_head(dq, num)

    zeros = vary_alike(tuple(jnp.zeros(x.shape, dtype) for x in tables), like=q)
    cut = jax.tree.map(chunks.cut, (q, out, lse, dout, dlse)), queries
    gradients, dq = lax.scan(one, zeros, cut)
    found = chunks.whole(dq), *(x.reshape(y.shape) for x, y in zip(gradients, keys, strict=True))
    return tuple(x.astype(to) for x, to in zip(found, options.gradient_dtypes, strict=False))
