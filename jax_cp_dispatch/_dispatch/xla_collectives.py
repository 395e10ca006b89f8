"""Movement by XLA's collectives alone: `implementation="xla"`, on every platform.

Rows move by `ragged_all_to_all` where the caller allows it. Otherwise every rank gathers the rows
of all ranks and selects from them; for a combine of more than `MAX_GATHERED_BYTES` in turns. No
error can be raised at run time: a plan that the native handlers would reject fills the results of
all ranks, floating-point ones with NaN, others with zeros.

Rows move as unsigned integers where a float is narrower than 32 bits, because XLA may compute with
such types in float32, which changes the bits of a NaN.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._dispatch.exchange_operands import MetadataOperands
from jax_cp_dispatch._dispatch.xla_rows import (
    MAX_GATHERED_BYTES,
    gather_in_turns,
    return_rows,
    send_rows,
)
from jax_cp_dispatch._dispatch.xla_transfers import (
    Transfers,
    XlaRanks,
    find_sources,
    read_transfers,
)
from jax_cp_dispatch._ranks.varying import vary_alike


def dispatch_with_xla(
    ranks: XlaRanks,
    metadata: MetadataOperands,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    *,
    capacity: int,
    fingerprint: Int32[Array, " 9"] | None = None,
) -> list[Shaped[Array, "out_rows ..."]]:
    """Sends each shard to the ranks that `metadata` names, bit for bit.

    Call on every rank, with manual axes; or once if one device holds all ranks.

    Args:
      ranks: of the exchange.
      metadata: one rank's view, or that of all ranks.
      arrays: `[T, ...]`, or without axes `[W * T, ...]`.
      capacity: rows per rank of the results.
      fingerprint: for which batch the plan was made, and which this rank sees.
    Returns:
      `[capacity, ...]`, or without axes `[W * capacity, ...]`; rows that no rank writes are zero.
    """
    dtypes = [x.dtype for x in arrays]
    bits = [_to_bits(x) for x in arrays]
    num_tokens = ranks.rows_per_rank_in(bits[0])
    plan = read_transfers(
        metadata, ranks, num_tokens=num_tokens, capacity=capacity, fingerprint=fingerprint
    )
    if ranks.are_ragged(num_tokens, plan):
        received = send_rows(plan, ranks, bits, capacity=capacity)
    else:
        everyones = [ranks.gather(x) for x in bits]

        def receive(rank):
            src_rank, src_row = find_sources(plan, rank, capacity)
            return [_take_rows(x, src_rank, src_row) for x in everyones]

        received = _on_each(receive, ranks)
    return [_finish(x, dtype, plan) for x, dtype in zip(received, dtypes, strict=True)]


def combine_with_xla(
    ranks: XlaRanks,
    metadata: MetadataOperands,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    *,
    num_tokens: int,
    dtypes: Sequence[str],
    fingerprint: Int32[Array, " 9"] | None = None,
) -> list[Shaped[Array, "out_rows ..."]]:
    """Returns rows to their ranks and sums the replicas of each, by slots, then replicas 0 ... C-1.

    The adjoint of `dispatch_with_xla`, and called like it. Floats narrower than 32 bits accumulate
    in float32, everything else in its own type; rounds once. A row with one source keeps its bits;
    XLA determines the bits of a NaN that is a sum of several.

    Args:
      ranks: of the exchange.
      metadata: the forward metadata, one rank's view or that of all ranks.
      arrays: `[capacity, ...]`, or without axes `[W * capacity, ...]`.
      num_tokens: rows per rank T of the results.
      dtypes: of the results.
      fingerprint: as in `dispatch_with_xla`.
    Returns:
      `[T, ...]`, or without axes `[W * T, ...]`; rows that no shard names are zero.
    """
    dtypes_in, dtypes_out = [y.dtype for y in arrays], [np.dtype(dtype) for dtype in dtypes]
    bits = [_to_bits(y) for y in arrays]
    capacity = ranks.rows_per_rank_in(bits[0])
    plan = read_transfers(
        metadata, ranks, num_tokens=num_tokens, capacity=capacity, fingerprint=fingerprint
    )
    is_named_once = metadata.src_offset is None
    # What returns to a rank at most: all replicas of its rows, and no more than all ranks hold,
    # since a plan in which ranges overlap there is not valid.
    num_named = 1 if is_named_once else plan.num_rows.shape[1]
    num_home = min(num_tokens * num_named * plan.dst_rank.shape[2], ranks.num_ranks * capacity)
    num_bytes = ranks.num_ranks * sum(y.nbytes for y in bits)  # gathered
    num_at_once = max(1, MAX_GATHERED_BYTES * capacity // max(1, num_bytes))
    homes = begin = None
    if ranks.are_ragged(num_home, plan):
        homes, begin = return_rows(plan, ranks, bits, num_home=num_home)
    elif ranks.axis_names and num_at_once < capacity:
        homes, begin = gather_in_turns(plan, ranks, bits, num_home, num_at_once)
    if homes is None:
        held, dst_rank = [ranks.gather(y) for y in bits], plan.dst_rank
    else:
        held, dst_rank = [home[None] for home in homes], jnp.minimum(plan.dst_rank, 0)
    sources = [_Sources(*each) for each in zip(held, dtypes_in, dtypes_out, strict=True)]

    def bring_home(rank):
        dst_row = plan.dst_row[rank] if begin is None else begin
        sender = _Sender(dst_rank[rank], dst_row, plan.src_row[rank], plan.num_rows[rank])
        sum_shards = _sum_one_shard if is_named_once else _sum_every_shard
        sums = sum_shards(sender, sources, _no_sums(sources, num_tokens))
        return _round(sums, sources)

    totals = _on_each(bring_home, ranks)
    return [_finish(x, dtype, plan) for x, dtype in zip(totals, dtypes_out, strict=True)]


def combine_weighted_with_xla(
    ranks: XlaRanks,
    metadata: MetadataOperands,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    *,
    num_tokens: int,
    dtypes: Sequence[str],
    fingerprint: Int32[Array, " 9"] | None = None,
) -> list[Shaped[Array, "T ..."]]:
    """Returns rows to their ranks and sums the replicas of each, times `metadata.weights`.

    Those of one rank are summed first, in float32 (float64 for float64), and rounded to the dtype
    of the rows; then the ranks, in the order in which they come first. Each slot is one row.
    Otherwise as `combine_with_xla`, which brings all replicas home.
    """
    weights, dst_rank = metadata.weights, metadata.dst_rank
    num_replicas = dst_rank.shape[1]
    one_by_one = metadata._replace(
        weights=None,
        seq_len=jnp.repeat(metadata.seq_len, num_replicas),
        dst_rank=dst_rank.reshape(-1),
        dst_offset=metadata.dst_offset.reshape(-1),
    )
    options = {"num_tokens": dst_rank.size, "dtypes": dtypes, "fingerprint": fingerprint}
    totals = []
    for rows in combine_with_xla(ranks, one_by_one, arrays, **options):
        rows = rows.reshape(num_tokens, num_replicas, *rows.shape[1:])
        total = jnp.zeros_like(rows[:, 0], sum_dtype(rows.dtype))
        is_new = dst_rank >= 0
        for i in range(num_replicas):
            part = jnp.zeros_like(total)
            for c in range(i, num_replicas):
                weight = weights[:, c].reshape(-1, *[1] * (total.ndim - 1)).astype(total.dtype)
                added = part + rows[:, c].astype(total.dtype) * weight
                part = _where_row(dst_rank[:, c] == dst_rank[:, i], added, part)
            part = part.astype(rows.dtype).astype(total.dtype)
            total = _where_row(is_new[:, i], total + part, total)
            is_new &= dst_rank != dst_rank[:, i, None]
        totals.append(total.astype(rows.dtype))
    return totals


def _on_each(one_rank: Callable[..., Any], ranks: XlaRanks) -> list[Array]:
    """Returns the results of the running rank, or those of all ranks in order."""
    if ranks.axis_names:
        return one_rank(ranks.rank)
    results = jax.vmap(one_rank)(jnp.arange(ranks.num_ranks, dtype=jnp.int32))
    return [x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in results]


# ---- Sums.


class _Sender(NamedTuple):
    """One rank's part of the plan."""

    dst_rank: Int32[Array, "S C"]
    dst_row: Int32[Array, "S C"]
    src_row: Int32[Array, " S"]
    num_rows: Int32[Array, " S"]


class _Sources(NamedTuple):
    """The rows `[W, capacity, ...]` of all ranks from which one result is summed."""

    bits: Array
    dtype: Any
    dtype_out: Any

    @property
    def accumulator(self) -> Any:
        return self.dtype if self.bits.dtype == self.dtype else np.dtype(np.float32)

    @property
    def keeps_first(self) -> bool:
        """Whether rounding the accumulator could change a row with one source: the bits of NaN."""
        return self.dtype == self.dtype_out != self.accumulator


class _Sums(NamedTuple):
    """The sum so far."""

    num_sources: Int32[Array, " T"]
    totals: list[Array]
    firsts: list[Array | None]  # the bits of the first source, if they are kept


def _no_sums(sources: list[_Sources], num_tokens: int) -> _Sums:
    zeros = lambda y, dtype: jnp.zeros((num_tokens, *y.bits.shape[2:]), dtype)
    return _Sums(
        jnp.zeros(num_tokens, jnp.int32),
        [zeros(y, y.accumulator) for y in sources],
        [zeros(y, y.bits.dtype) if y.keeps_first else None for y in sources],
    )


def _sum_one_shard(sender: _Sender, sources: list[_Sources], sums: _Sums) -> _Sums:
    """Sums contiguous shards, where a row is in at most one of them."""
    rows = jnp.arange(sums.num_sources.size, dtype=jnp.int32)
    slot = jnp.searchsorted(sender.src_row, rows, side="right") - 1
    is_named = rows < (sender.src_row + sender.num_rows)[slot]
    return _add_shards(jnp.where(is_named, slot, -1), sender, sources, sums)


def _sum_every_shard(sender: _Sender, sources: list[_Sources], sums: _Sums) -> _Sums:
    """Sums rows that may be in any number of shards: each turn adds the next one of every row."""
    num_slots = sender.src_row.size
    rows = jnp.arange(sums.num_sources.size, dtype=jnp.int32)[None]
    slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
    ends = sender.src_row + sender.num_rows
    is_named = (sender.src_row[:, None] <= rows) & (rows < ends[:, None])

    def next_slot(slot):
        return jnp.min(jnp.where(is_named & (slots > slot[None]), slots, num_slots), axis=0)

    def turn(carry):
        slot, sums = carry
        return next_slot(slot), _add_shards(slot, sender, sources, sums)

    flat, tree = jax.tree.flatten((next_slot(jnp.full_like(rows[0], -1)), sums))
    everything = [*flat, *sender, *(y.bits for y in sources)]
    carry = jax.tree.unflatten(tree, vary_alike(everything)[: len(flat)])
    return lax.while_loop(lambda carry: jnp.any(carry[0] < num_slots), turn, carry)[1]


def _add_shards(slot: Array, sender: _Sender, sources: list[_Sources], sums: _Sums) -> _Sums:
    """Adds to every row the replicas of its shard `slot`; nothing if that is not in [0, S)."""
    rows = jnp.arange(slot.size, dtype=jnp.int32)
    for c in range(sender.dst_rank.shape[1]):
        to = sender.dst_rank.at[slot, c]
        rank = to.get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        row = sender.dst_row[slot, c] + rows - sender.src_row[slot]
        is_source = rank >= 0
        is_first = is_source & (sums.num_sources == 0)
        totals, firsts = [], []
        for y, total, first in zip(sources, sums.totals, sums.firsts, strict=True):
            bits = _take_rows(y.bits, rank, row)
            value = _from_bits(bits, y.dtype).astype(y.accumulator)
            added = _where_row(is_source, total + value, total)
            totals.append(_where_row(is_first, value, added))
            firsts.append(None if first is None else _where_row(is_first, bits, first))
        sums = _Sums(sums.num_sources + is_source.astype(jnp.int32), totals, firsts)
    return sums


def _round(sums: _Sums, sources: list[_Sources]) -> list[Array]:
    """Returns the results as bits."""
    results = [_to_bits(x.astype(y.dtype_out)) for x, y in zip(sums.totals, sources, strict=True)]
    return [
        x if first is None else _where_row(sums.num_sources == 1, first, x)
        for x, first in zip(results, sums.firsts, strict=True)
    ]


# ---- Rows and bits.


def _take_rows(x: Array, rank: Array, row: Array) -> Array:
    """Returns `x[rank, row]`, or zero if there is none."""
    if x.size == 0:
        return jnp.zeros((row.size, *x.shape[2:]), x.dtype)
    return x.at[rank, row].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _where_row(flags: Array, x: Array, y: Array) -> Array:
    return jnp.where(flags.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def _to_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, _carrier(x.dtype)) if x.dtype != _carrier(x.dtype) else x


def _from_bits(bits: Array, dtype: Any) -> Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def _carrier(dtype: Any) -> Any:
    """Returns the type in which elements of `dtype` are moved."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(f"uint{8 * dtype.itemsize}") if is_narrow else dtype


def _finish(bits: Array, dtype: Any, plan: Transfers) -> Array:
    """Returns the result, or NaN (zero) if the plan is invalid."""
    nan = complex(np.nan, np.nan) if jnp.issubdtype(dtype, jnp.complexfloating) else np.nan
    says_invalid = np.array(nan if jnp.issubdtype(dtype, jnp.inexact) else 0).astype(dtype)
    return _from_bits(jnp.where(plan.is_valid, bits, says_invalid.view(bits.dtype)), dtype)
