"""Planning: from shards and their destinations to the `Metadata` of every exchange.

The planning functions are `jax.numpy` with static shapes. With concrete arguments the size of the
reverse plan is exact; with traced ones it is `max_recv_seqs`. The public arguments are annotated
without shapes, so that this module's errors name the argument. The compiled functions are annotated
with shapes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int32

from jax_cp_dispatch.metadata.fields import Metadata
from jax_cp_dispatch.metadata.inputs import Inputs, count_per_rank
from jax_cp_dispatch.metadata.slots import KvInputs, attn_layout, plan, plan_kv

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
