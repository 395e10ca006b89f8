"""Lowers an exchange to XLA's collectives, or to gathers on a device that holds all ranks."""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.dtypes import canonicalize_dtype
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._dispatch.arguments import Exchange
from jax_cp_dispatch._dispatch.xla_transfers import (
    MetadataOperands,
    XlaRanks,
    XlaTransfers,
    find_sources,
    read_transfers,
)
from jax_cp_dispatch._ranks.communicator import rank_index
from jax_cp_dispatch._ranks.implementations import (
    program_platform,
)
from jax_cp_dispatch._ranks.job import first_failure
from jax_cp_dispatch._ranks.lowering import Chosen
from jax_cp_dispatch._ranks.options import vary_alike
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.metadata import compute_metadata

# ---- Rows between ranks by XLA: `ragged_all_to_all`, or for a combine several all-gathers.
#
# `ragged_all_to_all` moves only what the plan says, without a copy between. Each replica of a shard
# is one update. XLA takes equally many updates from each rank to each other, so of those from one
# rank to another all but the replicas for it are empty. It is only lowered, never differentiated:
# JAX's derivative of `ragged_all_to_all` writes rows to their source, so a row that was sent to
# several ranks would get the gradient of one.
#
# One all-gather of whole buffers needs W times the memory of one. With a plan that reserves space
# for all keys, that exceeds the memory of an accelerator, so rows return in turns.


def _send_or_return(
    plan: XlaTransfers,
    ranks: XlaRanks,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    num_rows: int,
    *,
    returns: bool,
) -> list[Shaped[Array, "out_rows ..."]]:
    """Returns this rank's receive buffers of a dispatch; rows that no rank writes are zero.

    If `returns`, the rows of a combine come home instead: of all replicas of this rank's shards, by
    slots, then replicas.
    """
    rank, num_moved = ranks.rank, plan.num_moved
    other = jnp.arange(len(num_moved), dtype=jnp.int32)[:, None, None]
    num_own = jnp.where(plan.dst_rank[rank] == other, num_moved[rank], 0)  # of this rank's shards
    num_theirs = jnp.where(plan.dst_rank == rank, num_moved, 0)
    if returns:
        num_sent, num_received, begin, there = num_theirs, num_own, plan.dst_row, plan.begin_at_home
    else:
        everywhere = lambda x: jnp.broadcast_to(x[rank], num_moved.shape)
        num_sent, num_received, there = num_own, num_theirs, everywhere(plan.dst_row)
        begin = everywhere(jnp.broadcast_to(plan.src_row[..., None], num_moved.shape))
    begin, there = (jnp.where(num_sent > 0, x, 0) for x in (begin, there))
    updates = [x.ravel() for x in (begin, num_sent, there, num_received)]
    results = []
    for x in arrays:
        x, out = vary_alike([x, jnp.zeros((num_rows, *x.shape[1:]), x.dtype)])
        results.append(lax.ragged_all_to_all(x, out, *updates, axis_name=ranks.axis_names))
    return results


MAX_GATHERED_BYTES = 2**30
"""Rows that one all-gather of a combine brings to a rank; not measured."""


def _gather_in_turns(
    plan: XlaTransfers,
    ranks: XlaRanks,
    arrays: Sequence[Shaped[Array, "capacity ..."]],
    num_home: int,
    num_at_once: int,
) -> list[Shaped[Array, "home ..."]]:
    """Brings the rows of a combine home; `num_at_once` of each rank in a turn."""
    rank, capacity = ranks.rank, arrays[0].shape[0]
    begin = plan.begin_at_home[rank]
    rows = jnp.arange(num_home, dtype=jnp.int32)
    replica = jnp.searchsorted(begin.ravel(), rows, side="right") - 1
    src_rank = plan.dst_rank[rank].ravel()[replica]
    src_row = plan.dst_row[rank].ravel()[replica] + rows - begin.ravel()[replica]

    def turn(i, homes):
        first = jnp.minimum(i * num_at_once, capacity - num_at_once)
        row = src_row - first
        is_here = (row >= 0) & (row < num_at_once) & (src_rank >= 0)
        results = []
        for x, home in zip(arrays, homes, strict=True):
            gathered = ranks.gather(lax.dynamic_slice_in_dim(x, first, num_at_once))
            taken = gathered.at[src_rank, row].get(mode="clip")
            results.append(jnp.where(is_here.reshape(-1, *[1] * (x.ndim - 1)), taken, home))
        return results

    homes = [jnp.zeros((num_home, *x.shape[1:]), x.dtype) for x in arrays]
    homes = vary_alike([*homes, *arrays, src_row])[: len(homes)]
    return lax.fori_loop(0, -(-capacity // num_at_once), turn, homes)


# ---- Movement by XLA's collectives alone: `implementation="xla"`, on every platform.
#
# Rows move by `ragged_all_to_all` where the caller allows it. Otherwise every rank gathers the rows
# of all ranks and selects from them; for a combine of more than `MAX_GATHERED_BYTES` in turns. No
# error can be raised at run time: a plan that the native handlers would reject fills the results of
# all ranks, floating-point ones with NaN, others with zeros.
#
# Rows move as unsigned integers where a float is narrower than 32 bits, because XLA may compute
# with such types in float32, which changes the bits of a NaN.


def dispatch_with_xla(
    ranks: XlaRanks, plan: XlaTransfers, arrays: Sequence[Shaped[Array, "rows ..."]], capacity: int
) -> list[Shaped[Array, "out_rows ..."]]:
    """Sends each shard to the ranks that the plan names, bit for bit; other rows are zero.

    Call on every rank, with manual axes; or once if one device holds all ranks: arrays and results
    are then those of all ranks.
    """
    dtypes = [x.dtype for x in arrays]
    bits = [_to_bits(x) for x in arrays]
    if ranks.are_ragged(ranks.rows_per_rank_in(bits[0]), plan):
        received = _send_or_return(plan, ranks, bits, capacity, returns=False)
    else:
        everyones = [ranks.gather(x) for x in bits]

        def receive(rank):
            src_rank, src_row = find_sources(plan, rank, capacity)
            return [_take_rows(x, src_rank, src_row) for x in everyones]

        received = _on_each(receive, ranks)
    return [_finish(x, dtype, plan) for x, dtype in zip(received, dtypes, strict=True)]


def combine_with_xla(
    ranks: XlaRanks,
    plan: XlaTransfers,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    num_tokens: int,
    dtypes: Sequence[str],
) -> list[Shaped[Array, "out_rows ..."]]:
    """Returns rows to their ranks and sums the replicas of each, by slots, then replicas 0 ... C-1.

    The adjoint of `dispatch_with_xla`, and called like it. Floats narrower than 32 bits accumulate
    in float32, everything else in its own type; rounds once. A row with one source keeps its bits;
    XLA determines the bits of a NaN that is a sum of several. Rows that no shard names are zero.
    """
    dtypes_in, dtypes_out = [y.dtype for y in arrays], [np.dtype(dtype) for dtype in dtypes]
    bits = [_to_bits(y) for y in arrays]
    capacity = ranks.rows_per_rank_in(bits[0])
    # What returns to a rank at most: all replicas of its rows, and no more than all ranks hold,
    # since a plan in which ranges overlap there is not valid.
    num_named = 1 if plan.is_contiguous else plan.num_rows.shape[1]
    num_home = min(num_tokens * num_named * plan.dst_rank.shape[2], ranks.num_ranks * capacity)
    num_bytes = ranks.num_ranks * sum(y.nbytes for y in bits)  # gathered
    num_at_once = max(1, MAX_GATHERED_BYTES * capacity // max(1, num_bytes))
    homes = None
    if ranks.are_ragged(num_home, plan):
        homes = _send_or_return(plan, ranks, bits, num_home, returns=True)
    elif ranks.axis_names and num_at_once < capacity:
        homes = _gather_in_turns(plan, ranks, bits, num_home, num_at_once)
    if homes is None:
        held, dst_rank, dst_row = [ranks.gather(y) for y in bits], plan.dst_rank, plan.dst_row
    else:
        held, dst_rank = [home[None] for home in homes], jnp.minimum(plan.dst_rank, 0)
        dst_row = plan.begin_at_home
    sources = [_Sources(*each) for each in zip(held, dtypes_in, dtypes_out, strict=True)]
    at_home = plan._replace(dst_rank=dst_rank, dst_row=dst_row)
    totals = _on_each(lambda rank: _sum_of_rank(rank, at_home, sources, num_tokens), ranks)
    return [_finish(x, dtype, plan) for x, dtype in zip(totals, dtypes_out, strict=True)]


def combine_weighted_with_xla(
    ranks: XlaRanks,
    metadata: MetadataOperands,
    arrays: Sequence[Shaped[Array, "rows ..."]],
    num_tokens: int,
    dtypes: Sequence[str],
    **options: Any,
) -> list[Shaped[Array, "T ..."]]:
    """Returns rows to their ranks and sums the replicas of each, times `metadata.weights`.

    Those of one rank are summed first, in float32 (float64 for float64), and rounded to the dtype
    of the rows; then the ranks, in the order in which they come first. Each slot is one row.
    Otherwise as `combine_with_xla`, which brings all replicas home; `options` are those of
    `read_transfers`.
    """
    weights, dst_rank = metadata.weights, metadata.dst_rank
    num_replicas = dst_rank.shape[1]
    one_by_one = metadata._replace(
        weights=None,
        seq_len=jnp.repeat(metadata.seq_len, num_replicas),
        dst_rank=dst_rank.reshape(-1),
        dst_offset=metadata.dst_offset.reshape(-1),
    )
    plan = read_transfers(one_by_one, ranks, num_tokens=dst_rank.size, **options)
    totals = []
    for rows in combine_with_xla(ranks, plan, arrays, dst_rank.size, dtypes):
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
    num_sources: Int32[Array, " T"]
    totals: list[Array]
    firsts: list[Array | None]  # the bits of the first source, if they are kept


def _sum_of_rank(
    rank: Array, plan: XlaTransfers, sources: list[_Sources], num_tokens: int
) -> list[Array]:
    """Returns the sums of one rank's rows, by the bits in which they move."""
    dst_rank, dst_row, src_row, num_rows = (x[rank] for x in plan[:4])
    zeros = lambda y, dtype: jnp.zeros((num_tokens, *y.bits.shape[2:]), dtype)
    sums = _Sums(
        jnp.zeros(num_tokens, jnp.int32),
        [zeros(y, y.accumulator) for y in sources],
        [zeros(y, y.bits.dtype) if y.keeps_first else None for y in sources],
    )
    rows = jnp.arange(num_tokens, dtype=jnp.int32)

    def add(slot: Array, sums: _Sums) -> _Sums:
        """Adds to every row the replicas of its shard `slot`; nothing if not in [0, S)."""
        tokens = jnp.arange(slot.size, dtype=jnp.int32)
        for c in range(dst_rank.shape[1]):
            to = dst_rank.at[slot, c]
            other = to.get(mode="fill", fill_value=-1, wrap_negative_indices=False)
            row = dst_row[slot, c] + tokens - src_row[slot]
            is_source = other >= 0
            is_first = is_source & (sums.num_sources == 0)
            totals, firsts = [], []
            for y, total, first in zip(sources, sums.totals, sums.firsts, strict=True):
                bits = _take_rows(y.bits, other, row)
                value = _from_bits(bits, y.dtype).astype(y.accumulator)
                added = _where_row(is_source, total + value, total)
                totals.append(_where_row(is_first, value, added))
                firsts.append(None if first is None else _where_row(is_first, bits, first))
            sums = _Sums(sums.num_sources + is_source.astype(jnp.int32), totals, firsts)
        return sums

    if plan.is_contiguous:  # a row is in at most one shard
        slot = jnp.searchsorted(src_row, rows, side="right") - 1
        is_named = rows < (src_row + num_rows)[slot]
        sums = add(jnp.where(is_named, slot, -1), sums)
    else:  # in any number of shards: each turn adds the next one of every row
        num_slots = src_row.size
        slots = jnp.arange(num_slots, dtype=jnp.int32)[:, None]
        tokens = rows[None]
        is_named = (src_row[:, None] <= tokens) & (tokens < (src_row + num_rows)[:, None])

        def next_slot(slot):
            return jnp.min(jnp.where(is_named & (slots > slot[None]), slots, num_slots), axis=0)

        flat, tree = jax.tree.flatten((next_slot(jnp.full_like(rows, -1)), sums))
        everything = [*flat, dst_rank, dst_row, src_row, num_rows, *(y.bits for y in sources)]
        carry = jax.tree.unflatten(tree, vary_alike(everything)[: len(flat)])
        turn = lambda carry: (next_slot(carry[0]), add(*carry))
        sums = lax.while_loop(lambda carry: jnp.any(carry[0] < num_slots), turn, carry)[1]
    totals = zip(sums.totals, sources, strict=True)
    results = [_to_bits(total.astype(y.dtype_out)) for total, y in totals]
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


def _finish(bits: Array, dtype: Any, plan: XlaTransfers) -> Array:
    """Returns the result, or NaN (zero) if the plan is invalid."""
    nan = complex(np.nan, np.nan) if jnp.issubdtype(dtype, jnp.complexfloating) else np.nan
    says_invalid = np.array(nan if jnp.issubdtype(dtype, jnp.inexact) else 0).astype(dtype)
    return _from_bits(jnp.where(plan.is_valid, bits, says_invalid.view(bits.dtype)), dtype)


# ---- Whether `implementation="xla"` may use `ragged_all_to_all`: a test at first use decides.
#
# Devices that are here run it. For devices that are not, such as those of a topology, it is
# compiled: XLA refuses the operation for some TPU slices.

_PLATFORMS = {"cuda", "tpu"}  # XLA's CPU backend does not have the operation
_TIMEOUT = 60.0  # seconds for the other processes to reach the self-test
_AXIS, _ROWS, _CAPACITY = "ranks", 16, 10


def may_be_ragged(platforms: Sequence[str], backend: Any) -> bool:
    """Whether a program that is lowered for `platforms` may use `ragged_all_to_all`.

    A program for the devices that are here needs the self-test, which all processes of a job run
    together. A program for other devices, those of `backend`, needs a compiler that takes the
    operation. Any other program, whose backend may be None, is only lowered, and uses it.
    """
    if len(platforms) != 1 or platforms[0] not in _PLATFORMS:
        return False
    if backend is not None and program_platform(backend.platform) == platforms[0]:
        devices = tuple(backend.devices())
        if devices[0] not in jax.devices():
            return _compiles(devices)
    return program_platform() != platforms[0] or _passes()


def _decided(why_not: Callable[[], str]) -> bool:
    """Whether there is no reason, asked in a thread without the context that is being lowered."""
    with ThreadPoolExecutor(1) as thread:
        reason = thread.submit(why_not).result()
    if reason:
        say_once(f"moves all ranks' rows by all-gather (implementation='xla'): {reason}.")
    return not reason


@functools.lru_cache(maxsize=16)
def _compiles(devices: tuple[Any, ...]) -> bool:
    """Whether the compiler of these devices, which cannot run here, takes the operation."""
    return _decided(functools.partial(_refusal, devices))


def _refusal(devices: tuple[Any, ...]) -> str:
    """Returns why the compiler refuses the operation, or "".

    The slice decides, not the number of ranks. Few ranks compile in less than a second; with 256,
    the compiler can take two minutes to refuse.
    """
    num_ranks = math.gcd(len(devices), 2)
    mesh = Mesh(np.array(devices).reshape(-1, num_ranks), ("groups", _AXIS))

    def exchange(x: Array) -> Array:
        each = jnp.arange(num_ranks, dtype=jnp.int32)
        one = jnp.ones_like(each)
        return jax.lax.ragged_all_to_all(x, x, each, one, each, one, axis_name=_AXIS)

    spec = P(mesh.axis_names)
    run = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = jax.ShapeDtypeStruct((len(devices) * num_ranks, 8), jnp.float32)
    platform = program_platform(devices[0].platform)
    try:
        run.trace(rows).lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # whatever XLA raises, the all-gather remains
        slice_, reason = f"{len(devices)} x {devices[0].device_kind}", str(error).splitlines()[0]
        return f"XLA cannot compile ragged_all_to_all for {slice_}: {reason}"
    return ""


@functools.cache
def _passes() -> bool:
    """Runs the self-test once; all processes of the job get the same answer."""
    return _decided(lambda: first_failure("ragged_all_to_all", _failure, _TIMEOUT))


def _failure() -> str:
    """Moves rows over all devices by both ways; returns what differs, or "" if nothing does."""
    devices = np.array(jax.devices())
    ranks = np.arange(len(devices), dtype=np.int32)
    # Uneven ranges: each rank sends 0, 1 or 2 rows to the next rank, and others to the one after.
    num_rows = np.stack([ranks % 3, _ROWS // 2 - ranks % 3], axis=1)
    to = np.stack([ranks + 1, ranks + 2], axis=1) % len(devices)
    try:
        plan, _ = compute_metadata(num_rows, to)
        metadata = MetadataOperands(
            plan.num_recv_tokens, plan.seq_len, plan.dst_rank, plan.dst_offset, plan.src_offset
        )
        # The plan is a constant of the program, which runs in several processes as well.
        run = jax.shard_map(
            lambda: _num_different(metadata, len(devices)),
            mesh=Mesh(devices, (_AXIS,)), in_specs=(), out_specs=P(_AXIS),
        )  # fmt: skip
        is_wrong = any(np.asarray(x.data).any() for x in jax.jit(run)().addressable_shards)
    except Exception as error:  # whatever XLA raises, the all-gather remains
        return f"ragged_all_to_all cannot run here: {str(error).splitlines()[0]}"
    return "ragged_all_to_all failed its self-test" if is_wrong else ""


def _num_different(metadata: MetadataOperands, num_ranks: int) -> Array:
    """Returns [1]: how many elements of this rank's results differ between the two ways."""
    rank = lax.axis_index(_AXIS)
    own = jnp.arange(_ROWS * 4, dtype=jnp.float32).reshape(_ROWS, 4) + 1000 * rank
    results = []
    for ragged in (True, False):
        ranks = XlaRanks(rank, (_AXIS,), num_ranks, ragged)
        rows = [own, own.astype(jnp.bfloat16)]
        plan = read_transfers(metadata, ranks, num_tokens=_ROWS, capacity=_CAPACITY)
        sent = dispatch_with_xla(ranks, plan, rows, _CAPACITY)
        home = combine_with_xla(ranks, plan, sent, _ROWS, [x.dtype.name for x in sent])
        results.append([*sent, *home])
    counts = [jnp.sum(x != y) for x, y in zip(*results, strict=True)]
    return jnp.sum(jnp.stack(counts))[None]


def lower_by_xla(ctx: Any, *operands: Any, exchange: Exchange, choice: Chosen | None = None) -> Any:
    program, is_static = ctx.module_context, exchange.by_collectives is not None
    ragged = not is_static and may_be_ragged(program.platforms, program.backend)
    run = functools.partial(move_by_xla, exchange, ragged)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def move_by_xla(exchange: Exchange, ragged: bool, *operands: Any) -> list[Any]:
    """Makes the exchange of one rank, or of a device that holds the rows of all ranks."""
    if any(canonicalize_dtype(x.dtype) != x.dtype for x in operands):
        with jax.enable_x64(True):  # which the partitioner has left
            return move_by_xla(exchange, ragged, *operands)
    fields, arrays, _ = exchange.split(operands)
    if exchange.by_collectives is not None:
        moved = exchange.by_collectives(arrays)
        if exchange.sums is None:
            return moved
        return [y.astype(dtype) for y, dtype in zip(moved, exchange.sums, strict=True)]
    axis_names = () if exchange.is_global else exchange.comm.axis_names
    ranks = XlaRanks(rank_index(axis_names), axis_names, exchange.comm.num_ranks, ragged)
    rest, groups, outs = iter(fields), exchange.groups, []
    metadata = [MetadataOperands(**{name: next(rest) for name in x.fields}) for x in groups]
    fingerprints = [next(rest) if group.has_fingerprint else None for group in groups]
    by_group = exchange.by_group(arrays)
    sums = exchange.by_group(exchange.sums or [""] * exchange.num_arrays)
    for group, fields, fingerprint, arrays, dtypes in zip(
        groups, metadata, fingerprints, by_group, sums, strict=True
    ):
        num_tokens, capacity = group.num_tokens, group.capacity
        if (num_tokens if exchange.sums is None else capacity) == 0:
            arrays = [x[:0] for x in arrays]  # padding, because custom calls take no empty arrays
        options: Any = {"capacity": capacity, "fingerprint": fingerprint}
        if fields.weights is not None:
            outs += combine_weighted_with_xla(ranks, fields, arrays, num_tokens, dtypes, **options)
            continue
        plan = read_transfers(fields, ranks, num_tokens=num_tokens, **options)
        if exchange.sums is None:
            outs += dispatch_with_xla(ranks, plan, arrays, capacity)
        else:
            outs += combine_with_xla(ranks, plan, arrays, num_tokens, dtypes)
    return outs


# ---- Plans that are one collective of XLA on arrays whose rows are the ranks' tokens.


class AllToAll(NamedTuple):
    """Row c of rank r goes to rank c, as its row r; its transpose is itself."""

    axis_name: Any

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        return [lax.all_to_all(x, self.axis_name, 0, 0) for x in arrays]

    def transposed(self) -> "AllToAll":
        return self


class AllGather(NamedTuple):
    """The one row of each rank goes to all; the transpose sums the rows of all ranks."""

    axis_name: Any
    sums: bool = False

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        if not self.sums:
            return [lax.all_gather(x, self.axis_name, tiled=True) for x in arrays]
        wide = [x.astype(sum_dtype(x.dtype)) for x in arrays]
        return [lax.psum_scatter(x, self.axis_name, tiled=True) for x in wide]

    def transposed(self) -> "AllGather":
        return self._replace(sums=not self.sums)
