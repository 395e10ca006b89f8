"""Planning: from shards and their destinations to the `Metadata` of every exchange.

The planning functions are `jax.numpy` with static shapes. With concrete arguments the size of the
reverse plan is exact; with traced ones it is `max_recv_seqs`. The public arguments are annotated
without shapes, so that this module's errors name the argument. The compiled functions are annotated
with shapes.
"""

import dataclasses
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from jax_cp_dispatch._arguments import clip_to_int32, host_value
from jax_cp_dispatch.metadata.fields import Metadata

# ---- Checks the arguments of the planning functions; every error names the argument.

_MAX_LENGTH = 2**32 - 1
_TOKENS = {"seq_len", "kv_context_size", "q_to_num_kv_token", "shard_len", "shard_context"}


class Inputs:
    """The integer arrays of one call: NumPy where values are known, traced otherwise."""

    def __init__(self, op: str, **arrays: Any):
        self.op = op
        self._arrays = {}
        for name, value in arrays.items():
            known = host_value(value)
            array = value if known is None else known
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"{op}: {name} has dtype {array.dtype}; it needs an integer dtype.")
            self._arrays[name] = array

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    @property
    def known(self) -> bool:
        """Whether every value is known, so that sizes may depend on them."""
        return all(isinstance(x, np.ndarray) for x in self._arrays.values())

    def canonical(self) -> list[Any]:
        """Returns the arrays in the order given: u32 where they count tokens, else i32."""
        return [
            clip_to_int32(x, np.uint32 if name in _TOKENS else np.int32)
            for name, x in self._arrays.items()
        ]

    def first_shape(self, name: str) -> tuple[int, int]:
        """Returns (W, S), which the argument `name` `[W, S]` defines."""
        shape = self[name].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{self.op}: {name} has shape {shape}; it needs [W, S]: W ranks by S slots, at "
                f"least one of each. Pass the plan of all ranks, not one rank's row."
            )
        return shape

    def require_shape(self, name: str, *shapes: tuple[int | str, ...]) -> None:
        """Rejects any shape not in `shapes`, where a string denotes any positive size."""
        got = self[name].shape
        for shape in shapes:
            if len(got) == len(shape) and all(
                n > 0 if isinstance(want, str) else n == want
                for n, want in zip(got, shape, strict=True)
            ):
                return
        needs = " or ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)
        raise ValueError(f"{self.op}: {name} has shape {got}; it needs {needs}.")

    def require_range(self, name: str, low: int, high: int) -> None:
        """Rejects known values outside `[low, high]`."""
        x = self[name]
        if isinstance(x, np.ndarray):
            self.refuse(name, (x < low) | (x > high), f"needs to lie in [{low}, {high}]")

    def refuse(self, name: str, bad: np.ndarray, needs: str) -> None:
        """Raises at the first element of `name` that is `bad`."""
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            axes = ("rank", "slot", "replica", "component")
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
            raise ValueError(f"{self.op}: {name} at {place} is {self[name][at]}; it {needs}.")

    def require_tokens(self, what: str, per_rank: np.ndarray, *, high: int = _MAX_LENGTH) -> None:
        """Rejects token sums that exceed the range of the plan's fields."""
        if per_rank.max() > high:
            rank = int(per_rank.argmax())
            raise ValueError(
                f"{self.op}: {what} of rank {rank} is {int(per_rank[rank])} tokens; at most "
                f"{high} are possible. Give each rank fewer tokens."
            )

    def num_slots(self, needed: np.ndarray | None, max_recv_seqs: Any) -> tuple[int, int]:
        """Returns (slots to compute with, slots to return) for `needed` slots per rank.

        Both are `max_recv_seqs` if it is given. Otherwise the computation uses the next power of
        two, so that plans of varying size share a few compiled programs.
        """
        most = None if needed is None else int(needed.max())
        if max_recv_seqs is None:
            if most is None:
                raise ValueError(
                    f"{self.op}: the number of shards that a rank receives depends on traced "
                    f"values. Pass max_recv_seqs, an upper bound, as a static int."
                )
            exact = max(1, most)  # arrays are never empty, even if no rank receives
            return 1 << (exact - 1).bit_length(), exact
        if isinstance(max_recv_seqs, Tracer):
            raise TypeError(
                f"{self.op}: max_recv_seqs is traced; it needs to be a static int, because it is a "
                "shape."
            )
        bound = operator.index(max_recv_seqs)
        if bound < 1:
            raise ValueError(f"{self.op}: max_recv_seqs is {bound}; it needs to be at least 1.")
        if needed is not None and most is not None and most > bound:
            raise ValueError(
                f"{self.op}: rank {int(needed.argmax())} would receive {most} shards but "
                f"max_recv_seqs is {bound}. Pass max_recv_seqs>={most}, or omit it."
            )
        return bound, bound


def count_per_rank(dst: np.ndarray, world_size: int, weights: np.ndarray) -> np.ndarray:
    """Returns the sum of `weights` sent to each rank; exact below 2**53."""
    sent = dst >= 0
    total = np.bincount(
        dst[sent], weights=np.broadcast_to(weights, dst.shape)[sent], minlength=world_size
    )
    return total.astype(np.int64)


# ---- The compiled arithmetic of planning: running sums per destination, and their inverse.
#
# W ranks, S slots, C replicas, N = S * C shards per rank in global order, R slots of a reverse
# plan.
# Token sums wrap modulo 2**32; callers reject known values that would.

# Shards of a rank that are compared pairwise; a table [W * blocks, W] combines the blocks. Both
# parts cost about the same near 64 shards, and neither needs a sort.
_BLOCK = 64
# Rows of that table that are summed at a time: on CPU 10 times faster than `jnp.cumsum` at 512
# rows.
_ROWS = 4


@partial(jax.jit, static_argnames="num_slots")
def plan(
    seq_len: UInt32[Array, "W S"], dispatch: Int32[Array, "W S *C"], *, num_slots: int
) -> tuple[Metadata, Metadata]:
    """`compute_metadata` for `num_slots` reverse slots."""
    replicas = dispatch.reshape(*seq_len.shape, -1)
    tokens = jnp.broadcast_to(seq_len[..., None], replicas.shape)
    (offset, matrix), (slot, counts) = _sums_per_destination(
        _flat(replicas), _flat(tokens), jnp.ones(_flat(replicas).shape, jnp.int32)
    )
    forward = _forward(seq_len, dispatch, offset.reshape(dispatch.shape), matrix)
    source = _slot_source(_flat(replicas), slot, num_slots)
    num_received = jnp.sum(counts, 0, dtype=jnp.int32)
    mask = dispatch >= 0 if dispatch.ndim == 3 else None
    return forward, _reverse(seq_len, replicas.shape[2], source, num_received, matrix, mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KvInputs:
    """The arguments of `compute_metadata_kv`, in its order."""

    kv_to_q_mapping: Int32[Array, "W S C 2"]
    kv_to_q_rank: Int32[Array, "W S C"]
    kv_context_size: UInt32[Array, "W S"]
    q_to_num_kv_seq: Int32[Array, "W S"]
    q_to_num_kv_token: UInt32[Array, "W S"]
    seq_len: UInt32[Array, "W S"]
    num_seqs: Int32[Array, " W"]
    q_dispatch: Int32[Array, "W S"]


@partial(jax.jit, static_argnames="num_slots")
def plan_kv(kv: KvInputs, *, num_slots: int) -> tuple[Metadata, Metadata]:
    """`compute_metadata_kv` for `num_slots` reverse slots."""
    world_size, num_shards = kv.seq_len.shape
    (first_row, _), (first_slot, reserved) = _sums_per_destination(
        kv.q_dispatch, kv.q_to_num_kv_token, kv.q_to_num_kv_seq
    )
    q_rank, q_slot = kv.kv_to_q_mapping[..., 0], kv.kv_to_q_mapping[..., 1]
    query = jnp.where((q_rank >= 0) & (q_slot >= 0), q_rank * num_shards + q_slot, -1)
    dst = jnp.where(query >= 0, _take(kv.q_dispatch, query), -1)
    row = jnp.where(dst >= 0, _take(first_row, query) + kv.kv_context_size[..., None], 0)
    slot = _take(first_slot, query) + kv.kv_to_q_rank
    tokens = jnp.broadcast_to(kv.seq_len[..., None], dst.shape)

    matrix = _sum_table(_flat(dst), _flat(tokens), world_size)
    forward = _forward(kv.seq_len, dst, row, matrix, at_least=kv.num_seqs)
    source = _slot_source(_flat(dst), _flat(slot), num_slots)
    # Some slots may be empty, so the last used one counts. Slots beyond the bound are not in
    # `source`; then the slots that the queries reserve are counted.
    reserved = jnp.sum(reserved, 0, dtype=jnp.int32)
    num_received = jnp.where(reserved > num_slots, reserved, _last_used(source >= 0))
    return forward, _reverse(kv.seq_len, dst.shape[2], source, num_received, matrix, dst >= 0)


@partial(jax.jit, static_argnames="num_slots")
def attn_layout(
    shard_len: UInt32[Array, "W S"],
    shard_context: UInt32[Array, "W S"],
    dispatch: Int32[Array, "W S"],
    *,
    num_slots: int,
) -> tuple[
    Int32[Array, "W R_plus_1"],
    Int32[Array, "W R_plus_1"],
    Int32[Array, " W"],
    Int32[Array, " W"],
    Int32[Array, " W"],
]:
    """The fields of `compute_attn_layout_seqlens` for `num_slots` received shards."""
    ((slot, counts),) = _sums_per_destination(dispatch, jnp.ones(dispatch.shape, jnp.int32))
    source = _slot_source(dispatch, slot, num_slots)
    q, kv = (
        jnp.where(source >= 0, _take(x, source), 0).astype(jnp.int32)
        for x in (shard_len, shard_context)
    )
    cu_q, cu_kv = (jnp.pad(jnp.cumsum(x, 1, dtype=jnp.int32), ((0, 0), (1, 0))) for x in (q, kv))
    return cu_q, cu_kv, q.max(1), kv.max(1), jnp.sum(counts, 0, dtype=jnp.int32)


def _flat(x: Shaped[Array, "W S C"]) -> Shaped[Array, "W N"]:
    return x.reshape(x.shape[0], -1)


def _take(x: Shaped[Array, "W S"], index: Int32[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Returns `x.ravel()[index]`; the caller masks the entries of negative indices."""
    return jnp.take(x.ravel(), index, mode="clip")


def _sum_table(
    dst: Int32[Array, "A N"], weight: Shaped[Array, "A N"], world_size: int
) -> Shaped[Array, "A W"]:
    """Returns, per row, the sum of the weights for each destination."""
    sent = dst >= 0
    row = jnp.arange(dst.shape[0])[:, None]
    table = jnp.zeros((dst.shape[0], world_size), weight.dtype)
    return table.at[row, jnp.where(sent, dst, 0)].add(jnp.where(sent, weight, 0))


def _sums_per_destination(
    dst: Int32[Array, "W N"], *weights: Shaped[Array, "W N"]
) -> list[tuple[Shaped[Array, "W N"], Shaped[Array, "W W"]]]:
    """Returns each weight's sums over earlier shards to the same rank, and per [src, dst]."""
    world_size, num = dst.shape
    block = min(num, _BLOCK)
    pad = ((0, 0), (0, -num % block))
    dst = jnp.pad(dst, pad, constant_values=-1).reshape(-1, block)
    weights = tuple(jnp.pad(weight, pad).reshape(-1, block) for weight in weights)
    tables = [_sum_table(dst, weight, world_size) for weight in weights]
    column = jnp.maximum(dst, 0)
    before = tuple(jnp.take_along_axis(_rows_before(t), column, 1) for t in tables)

    # A loop, because XLA would repeat one [block, block] comparison for each use of the sums.
    def add_shard(sums, shard):
        index, shard_dst, shard_weights = shard
        later = (dst == shard_dst[:, None]) & (jnp.arange(block)[None] > index)
        added = (jnp.where(later, weight[:, None], 0) for weight in shard_weights)
        return tuple(x + y for x, y in zip(sums, added, strict=True)), None

    shards = (jnp.arange(block), dst.T, tuple(weight.T for weight in weights))
    sums, _ = jax.lax.scan(add_shard, before, shards)
    sums = [jnp.where(dst >= 0, x, 0).reshape(world_size, -1)[:, :num] for x in sums]
    matrices = [jnp.sum(t.reshape(world_size, -1, world_size), 1, dtype=t.dtype) for t in tables]
    return list(zip(sums, matrices, strict=True))


def _rows_before(table: Shaped[Array, "A W"]) -> Shaped[Array, "A W"]:
    """Returns the exclusive cumulative sum along the rows, computed in nested groups."""
    num_rows, width = table.shape
    if num_rows == 1:
        return jnp.zeros_like(table)
    groups = jnp.pad(table, ((0, -num_rows % _ROWS), (0, 0))).reshape(-1, _ROWS, width)
    before = _rows_before(jnp.sum(groups, 1, dtype=table.dtype))
    earlier = jnp.tril(jnp.ones((_ROWS, _ROWS), bool), -1)[:, :, None]
    within = jnp.sum(jnp.where(earlier, groups[:, None], 0), 2, dtype=table.dtype)
    return (before[:, None] + within).reshape(-1, width)[:num_rows]


def _slot_source(
    dst: Int32[Array, "W N"], slot: Int32[Array, "W N"], num_slots: int
) -> Int32[Array, "W R"]:
    """Returns the global index of the shard in each slot of each destination; -1 if empty."""
    world_size = dst.shape[0]
    size = world_size * num_slots
    position = jnp.where((dst >= 0) & (slot < num_slots), dst * num_slots + slot, size)
    index = jnp.arange(dst.size, dtype=jnp.int32)
    source = jnp.full(size, -1, jnp.int32).at[position.ravel()].set(index, mode="drop")
    return source.reshape(world_size, num_slots)


def _last_used(used: Bool[Array, "W S"]) -> Int32[Array, " W"]:
    """Returns the last used slot of each rank, plus one."""
    return jnp.max(jnp.where(used, jnp.arange(1, used.shape[1] + 1, dtype=jnp.int32), 0), 1)


def _forward(
    seq_len: UInt32[Array, "W S"],
    dst: Int32[Array, "W S *C"],
    offset: UInt32[Array, "W S *C"],
    matrix: UInt32[Array, "W W"],
    *,
    at_least: Int32[Array, " W"] | int = 0,
) -> Metadata:
    used = (dst.reshape(*seq_len.shape, -1) >= 0).any(-1) | (seq_len > 0)
    num_seqs = jnp.maximum(_last_used(used), at_least)
    return _metadata(dst, offset, seq_len, num_seqs, matrix.T)


def _reverse(
    seq_len: UInt32[Array, "W S"],
    num_replicas: int,
    source: Int32[Array, "W R"],
    num_received: Int32[Array, " W"],
    matrix: UInt32[Array, "W W"],
    mask: Bool[Array, "W S C"] | None,
) -> Metadata:
    """Returns each received shard to its sender: replica c of row o goes to row c * T + o."""
    filled = source >= 0
    shard, replica = source // num_replicas, source % num_replicas
    home = jnp.where(filled, shard // seq_len.shape[1], -1)
    start = jnp.cumsum(seq_len, 1, dtype=seq_len.dtype) - seq_len
    total = jnp.sum(seq_len, 1, dtype=seq_len.dtype)
    row = jnp.take(total, home, mode="clip") * replica.astype(seq_len.dtype) + _take(start, shard)
    offset = jnp.where(filled, row, 0)
    lengths = jnp.where(filled, _take(seq_len, shard), 0)
    metadata = _metadata(home, offset, lengths, num_received, matrix)
    return dataclasses.replace(metadata, seq_recv_mask=mask, recv_seq_lens=seq_len)


def _metadata(
    dst_rank: Int32[Array, "..."],
    dst_offset: UInt32[Array, "..."],
    seq_len: UInt32[Array, "W slots"],
    num_seqs: Int32[Array, " W"],
    received: UInt32[Array, "W W"],
) -> Metadata:
    total = jnp.sum(received, 1, dtype=received.dtype)
    return Metadata(
        dst_rank=dst_rank,
        dst_offset=dst_offset,
        seq_len=seq_len,
        num_recv_tokens=jnp.concatenate([received, total[:, None]], 1),
        num_seqs=num_seqs,
        num_total_recv_tokens=total,
        world_size=received.shape[0],
    )


_MAX_INT32 = 2**31 - 1
_MAX_UINT32 = 2**32 - 1


class AttnLayoutSeqlens(NamedTuple):
    """Inputs of variable-length attention kernels, per rank, in attention layout.

    R is the number of slots for received shards: the number that the busiest rank receives (at
    least 1), or `max_recv_seqs`. Lengths count tokens.

    Attributes:
      cu_seqlens_q: i32 `[W, R + 1]`; the start of each received query shard, then the total,
        repeated past the rank's last shard.
      cu_seqlens_kv: i32 `[W, R + 1]`; the same for the KV context of each query shard.
      max_seqlen_q: i32 `[W]`; the longest query shard, 0 if nothing is received.
      max_seqlen_kv: i32 `[W]`; the longest KV context.
      num_local_seqs: i32 `[W]`; query shards received; exceeds R only if traced values need more
        than `max_recv_seqs`.
    """

    cu_seqlens_q: Int32[Array, "W R_plus_1"]
    cu_seqlens_kv: Int32[Array, "W R_plus_1"]
    max_seqlen_q: Int32[Array, " W"]
    max_seqlen_kv: Int32[Array, " W"]
    num_local_seqs: Int32[Array, " W"]


def compute_metadata(
    seq_len: ArrayLike, dispatch: ArrayLike, *, max_recv_seqs: int | None = None
) -> tuple[Metadata, Metadata]:
    """Plans an exchange; shards arrive in the order (rank, slot, replica) of their senders.

    Call anywhere, also inside `jit` and `vmap`. Not differentiable (integers).

    Args:
      seq_len: integer `[W, S]`; tokens in each shard.
      dispatch: integer `[W, S]` or `[W, S, C]`; the rank each shard (replica) goes to, -1 = none.
      max_recv_seqs: slots of the reverse plan. None: as many as the busiest rank receives (at least
        1); the arguments must then be concrete.
    Returns:
      The forward plan, and the reverse plan, which returns every received shard to its sender.
      Reverse slots are in the order of arrival. Replica c of the shard at row o returns to row `c *
      T + o`, where T is the sender's `sum(seq_len)`. If traced values need more slots than
      `max_recv_seqs`, the slots beyond it are missing, and `num_seqs` is the number needed.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: wrong shapes, values out of range, more shards than `max_recv_seqs`, or traced
        arguments without `max_recv_seqs`.
    """
    inputs = Inputs("compute_metadata", seq_len=seq_len, dispatch=dispatch)
    world_size, num_shards = inputs.first_shape("seq_len")
    shape = (world_size, num_shards)
    inputs.require_shape("dispatch", shape, (*shape, "C"))
    inputs.require_range("seq_len", 0, _MAX_UINT32)
    inputs.require_range("dispatch", -1, world_size - 1)
    needed = None
    if inputs.known:
        lengths, dst = inputs["seq_len"].astype(np.int64), inputs["dispatch"]
        dst = dst.reshape(*shape, -1)
        inputs.require_tokens("seq_len x C", lengths.sum(1) * dst.shape[2])
        received = count_per_rank(dst, world_size, lengths[..., None])
        inputs.require_tokens("what seq_len sends to the buffer", received)
        needed = count_per_rank(dst, world_size, np.ones(1))
    return _forward_reverse(plan, inputs, needed, max_recv_seqs)


def compute_metadata_kv(
    kv_to_q_mapping: ArrayLike,
    kv_to_q_rank: ArrayLike,
    kv_context_size: ArrayLike,
    q_to_num_kv_seq: ArrayLike,
    q_to_num_kv_token: ArrayLike,
    seq_len: ArrayLike,
    num_seqs: ArrayLike,
    q_dispatch: ArrayLike,
    *,
    max_recv_seqs: int | None = None,
) -> tuple[Metadata, Metadata]:
    """Plans the exchange of keys and values for planned queries: each query gets its own KV.

    A rank receives the KV in the order of its queries; the shards of one query are in
    `kv_to_q_rank` order. Call anywhere, also inside `jit` and `vmap`. Not differentiable.

    Args:
      kv_to_q_mapping: integer `[W, S, C, 2]`; (rank, slot) of the query shard that replica c of a
        KV shard serves; unused if either is -1.
      kv_to_q_rank: integer `[W, S, C]`; the position of the KV shard among those of that query.
      kv_context_size: integer `[W, S]`; tokens of the document before the KV shard.
      q_to_num_kv_seq: integer `[W, S]`; KV shards of each query shard.
      q_to_num_kv_token: integer `[W, S]`; their tokens.
      seq_len: integer `[W, S]`; tokens in each KV shard.
      num_seqs: integer `[W]`; slots in use. The plan covers these, and every slot with a
        destination or a length.
      q_dispatch: integer `[W, S]`; the rank each query shard goes to, -1 = none.
      max_recv_seqs: slots of the reverse plan, as in `compute_metadata`.
    Returns:
      The forward plan `[W, S, C]`, and the reverse plan, with one slot per received KV shard. It
      returns rows in layout `(C, sum(seq_len))`.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: as in `compute_metadata`; or KV that exceeds the rows reserved for its query.
    """
    inputs = Inputs(
        "compute_metadata_kv",
        kv_to_q_mapping=kv_to_q_mapping,
        kv_to_q_rank=kv_to_q_rank,
        kv_context_size=kv_context_size,
        q_to_num_kv_seq=q_to_num_kv_seq,
        q_to_num_kv_token=q_to_num_kv_token,
        seq_len=seq_len,
        num_seqs=num_seqs,
        q_dispatch=q_dispatch,
    )
    world_size, num_shards = shape = inputs.first_shape("seq_len")
    for name in ("kv_context_size", "q_to_num_kv_seq", "q_to_num_kv_token", "q_dispatch"):
        inputs.require_shape(name, shape)
    inputs.require_shape("num_seqs", (world_size,))
    inputs.require_shape("kv_to_q_mapping", (*shape, "C", 2))
    inputs.require_shape("kv_to_q_rank", inputs["kv_to_q_mapping"].shape[:3])
    inputs.require_range("q_dispatch", -1, world_size - 1)
    inputs.require_range("num_seqs", 0, num_shards)
    for name in ("seq_len", "kv_context_size", "q_to_num_kv_token"):
        inputs.require_range(name, 0, _MAX_UINT32)
    inputs.require_range("q_to_num_kv_seq", 0, _MAX_INT32)
    needed = _check_kv(inputs) if inputs.known else None
    plan_inputs = lambda *arrays, num_slots: plan_kv(
        KvInputs(*map(jnp.asarray, arrays)), num_slots=num_slots
    )
    return _forward_reverse(plan_inputs, inputs, needed, max_recv_seqs)


def compute_attn_layout_seqlens(
    shard_len: ArrayLike,
    shard_context: ArrayLike,
    dispatch: ArrayLike,
    *,
    max_recv_seqs: int | None = None,
) -> AttnLayoutSeqlens:
    """Returns the lengths of the received query shards and of their KV, in attention layout.

    Call anywhere, also inside `jit` and `vmap`. Not differentiable.

    Args:
      shard_len: integer `[W, S]`; tokens in each query shard.
      shard_context: integer `[W, S]`; tokens of the shard's KV context, itself included.
      dispatch: integer `[W, S]`; the rank each query shard goes to, -1 = none.
      max_recv_seqs: R, the slots of the result; None as in `compute_metadata`.
    Returns:
      Cumulative lengths with the leading zero; past the last shard they repeat the total.
    Raises:
      TypeError: an argument is not of integers.
      ValueError: as in `compute_metadata`.
    """
    inputs = Inputs(
        "compute_attn_layout_seqlens",
        shard_len=shard_len,
        shard_context=shard_context,
        dispatch=dispatch,
    )
    world_size, num_shards = inputs.first_shape("shard_len")
    inputs.require_shape("shard_context", (world_size, num_shards))
    inputs.require_shape("dispatch", (world_size, num_shards))
    inputs.require_range("dispatch", -1, world_size - 1)
    needed = None
    for name in ("shard_len", "shard_context"):
        inputs.require_range(name, 0, _MAX_INT32)
        if inputs.known:
            received = count_per_rank(inputs["dispatch"], world_size, inputs[name])
            inputs.require_tokens(f"what {name} sends to the layout", received, high=_MAX_INT32)
    if inputs.known:
        needed = count_per_rank(inputs["dispatch"], world_size, np.ones(1))
    fields, num_slots = _compute(attn_layout, inputs, needed, max_recv_seqs)
    cu_seqlens_q, cu_seqlens_kv, *rest = fields
    return AttnLayoutSeqlens(
        _cut(cu_seqlens_q, num_slots + 1), _cut(cu_seqlens_kv, num_slots + 1), *rest
    )


def _check_kv(inputs: Inputs) -> np.ndarray:
    """Checks known KV inputs against each other; returns the slots that each rank needs."""
    mapping, dispatch = inputs["kv_to_q_mapping"], inputs["q_dispatch"]
    outside = (mapping < -1) | (mapping >= dispatch.shape)
    inputs.refuse("kv_to_q_mapping", outside, "needs to name a rank and a slot, or be -1")
    rank, slot = np.moveaxis(mapping.clip(0), -1, 0)
    dst = np.where((mapping < 0).any(-1), -1, dispatch[rank, slot])

    needs = "needs to lie in [0, q_to_num_kv_seq of its query)"
    position = inputs["kv_to_q_rank"].astype(np.int64)
    room = inputs["q_to_num_kv_seq"][rank, slot]
    inputs.refuse("kv_to_q_rank", (dst >= 0) & ((position < 0) | (position >= room)), needs)
    sent = np.flatnonzero(dst >= 0)
    place = (np.ravel_multi_index((rank, slot), dispatch.shape) << 31) + position
    again = dst >= 0
    again.flat[sent[np.unique(place.flat[sent], return_index=True)[1]]] = False
    inputs.refuse("kv_to_q_rank", again, "needs to differ from the other KV shards of its query")
    lengths = inputs["seq_len"].astype(np.int64)
    context = inputs["kv_context_size"].astype(np.int64)
    room = inputs["q_to_num_kv_token"].astype(np.int64)[rank, slot]
    too_long = (dst >= 0) & ((context + lengths)[..., None] > room)
    needs = "needs to leave space for seq_len within q_to_num_kv_token of its query"
    inputs.refuse("kv_context_size", too_long.any(-1), needs)

    world_size = len(lengths)
    inputs.require_tokens("seq_len x C", lengths.sum(1) * dst.shape[2])
    for name, to, tokens in (
        ("what seq_len sends to the buffer", dst, lengths[..., None]),
        ("what q_to_num_kv_token reserves in the buffer", dispatch, inputs["q_to_num_kv_token"]),
    ):
        inputs.require_tokens(name, count_per_rank(to, world_size, tokens))
    return count_per_rank(dispatch, world_size, inputs["q_to_num_kv_seq"])


def _forward_reverse(
    function: Callable[..., Any],
    inputs: Inputs,
    needed: np.ndarray | None,
    max_recv_seqs: int | None,
) -> tuple[Metadata, Metadata]:
    (forward, reverse), num_slots = _compute(function, inputs, needed, max_recv_seqs)
    slots = {
        name: _cut(getattr(reverse, name), num_slots)
        for name in ("dst_rank", "dst_offset", "seq_len")
    }
    return forward, dataclasses.replace(reverse, **slots)


def _compute(
    function: Callable[..., Any],
    inputs: Inputs,
    needed: np.ndarray | None,
    max_recv_seqs: int | None,
) -> tuple[Any, int]:
    """Runs a compiled planning function; returns its result and the number of valid slots."""
    padded, num_slots = inputs.num_slots(needed, max_recv_seqs)
    if not inputs.known:
        return function(*inputs.canonical(), num_slots=padded), num_slots
    with jax.core.eval_context():  # a plan of known values is a constant, even inside jit
        return function(*inputs.canonical(), num_slots=padded), num_slots


def _cut(x: Array, num_slots: int) -> Array:
    """Returns `x[:, :num_slots]`; cut on the host, so that sizes do not compile new programs."""
    if x.shape[1] == num_slots:
        return x
    with jax.core.eval_context():
        return jnp.asarray(np.asarray(x)[:, :num_slots])
