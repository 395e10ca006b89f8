"""Random scenarios for tests and benchmarks, and a simulation of their exchange."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, Shaped

from jax_cp_dispatch._arguments import check_integer, check_positive, check_type
from jax_cp_dispatch.metadata import (
    AttnLayoutSeqlens,
    Metadata,
    compute_attn_layout_seqlens,
    compute_metadata,
    compute_metadata_kv,
)

__all__ = ["create_qkv_dispatch", "gen_seq_lens", "orchestrate_simulate"]


class QkvDispatchInputs(NamedTuple):
    """Arguments of `compute_metadata_kv`, with its order and shapes, as NumPy int32."""

    kv_to_q_mapping: np.ndarray
    kv_to_q_rank: np.ndarray
    kv_context_size: np.ndarray
    q_to_num_kv_seq: np.ndarray
    q_to_num_kv_token: np.ndarray
    seq_len: np.ndarray
    num_seqs: np.ndarray
    q_dispatch: np.ndarray


def gen_seq_lens(
    key: Array, world_size: int, num_seqs: int, total_len: int
) -> Int32[Array, "W num_seqs"]:
    """Draws `num_seqs` lengths per rank, each at least 1, whose sum is exactly `total_len`.

    Call anywhere; `key` may be traced, the sizes are static.

    Args:
      key: of the random numbers.
      world_size: number of ranks W.
      num_seqs: lengths of each rank.
      total_len: their sum, in tokens.
    Raises:
      TypeError: a size is not an integer.
      ValueError: `total_len` is too short for `num_seqs` lengths, or a size is not positive.
    """
    check_positive("gen_seq_lens", world_size=world_size, num_seqs=num_seqs)
    check_integer("gen_seq_lens", "total_len", total_len)
    if total_len < num_seqs:
        raise ValueError(
            f"gen_seq_lens: total_len {total_len} is less than num_seqs {num_seqs}, but each "
            f"length is at least 1. Pass total_len>={num_seqs}."
        )
    spare = total_len - num_seqs
    cuts = jax.random.randint(key, (world_size, num_seqs - 1), 0, spare + 1, dtype=jnp.int32)
    cuts = jnp.pad(jnp.sort(cuts, 1), ((0, 0), (1, 0)))
    return 1 + jnp.diff(cuts, axis=1, append=jnp.full((world_size, 1), spare, jnp.int32))


def draw_qkv_dispatch(
    key: Array, world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int
) -> QkvDispatchInputs:
    """Draws the scenario that `create_qkv_dispatch` plans. Call outside `jit`."""
    op = "create_qkv_dispatch"
    check_positive(op, world_size=world_size, num_seqs=num_seqs, max_cp_degree=max_cp_degree)
    check_integer(op, "total_seq_len", total_seq_len)
    if total_seq_len % max_cp_degree:
        raise ValueError(
            f"{op}: total_seq_len {total_seq_len} is not divisible by max_cp_degree "
            f"{max_cp_degree}, but every document is cut into equal shards. Pass a multiple of "
            f"{max_cp_degree}."
        )
    if total_seq_len < num_seqs * max_cp_degree:
        raise ValueError(
            f"{op}: total_seq_len {total_seq_len} is too short for num_seqs "
            f"{num_seqs} documents of at least max_cp_degree {max_cp_degree} tokens. Pass "
            f"total_seq_len>={num_seqs * max_cp_degree}."
        )
    powers = [2**i for i in range(int(max_cp_degree).bit_length()) if max_cp_degree % 2**i == 0]
    choices = np.array(sorted({*powers, max_cp_degree}))

    key_len, key_degree, key_rank = jax.random.split(key, 3)
    units = gen_seq_lens(key_len, world_size, num_seqs, total_seq_len // max_cp_degree)
    choice = jax.random.randint(key_degree, units.shape, 0, len(choices))
    doc_len, doc_degree = np.asarray(units) * max_cp_degree, choices[choice]
    # Each document has its own order of ranks, in which it distributes its shards.
    priority = jax.random.uniform(key_rank, (*units.shape, world_size))
    order = np.asarray(priority).argsort(-1)

    num_slots = num_seqs * max_cp_degree
    slot = np.arange(num_slots)
    end = doc_degree.cumsum(1)
    doc = (slot[:, None] >= end[:, None, :]).sum(-1)  # [W, S]; num_seqs where the slot is padding
    used = doc < num_seqs
    doc = np.minimum(doc, num_seqs - 1)
    rank = np.arange(world_size)[:, None]
    degree = doc_degree[rank, doc]
    part = slot - (end - doc_degree)[rank, doc]  # which shard of its document
    seq_len = np.where(used, doc_len[rank, doc] // degree, 0)
    context = np.where(used, part * seq_len, 0)

    # Causal: shard `part` serves itself and the later shards of its document.
    replica = np.arange(max_cp_degree)
    serves = used[..., None] & (part[..., None] + replica < degree[..., None])
    query = np.stack(np.broadcast_arrays(rank[..., None], slot[:, None] + replica), -1)
    inputs = QkvDispatchInputs(
        kv_to_q_mapping=np.where(serves[..., None], query, -1),
        kv_to_q_rank=np.where(serves, part[..., None], -1),
        kv_context_size=context,
        q_to_num_kv_seq=np.where(used, part + 1, 0),
        q_to_num_kv_token=context + seq_len,
        seq_len=seq_len,
        num_seqs=end[:, -1],
        q_dispatch=np.where(used, order[rank, doc, part % world_size], -1),
    )
    return QkvDispatchInputs(*(x.astype(np.int32) for x in inputs))


def create_qkv_dispatch(
    key: Array, world_size: int, total_seq_len: int, num_seqs: int, max_cp_degree: int
) -> tuple[Metadata, Metadata, Metadata, Metadata, AttnLayoutSeqlens]:
    """Draws documents, cuts them, sends the shards to random ranks and plans queries and keys.

    Each rank's row of `total_seq_len` tokens holds `num_seqs` documents. Each is cut into 1, 2, 4,
    … or `max_cp_degree` equal shards; shards of one document go to different ranks while there
    are enough. Shard i of a document attends to its KV shards 0 … i. Call outside `jit`.

    Args:
      key: of the random numbers.
      world_size: number of ranks W.
      total_seq_len: tokens of each rank.
      num_seqs: documents of each rank.
      max_cp_degree: most shards of a document.
    Returns:
      Forward and reverse plan of the queries, forward and reverse plan of the keys and values,
      and the lengths in attention layout.
    Raises:
      ValueError: `total_seq_len` is not divisible by `max_cp_degree`, or too short.
    """
    inputs = draw_qkv_dispatch(key, world_size, total_seq_len, num_seqs, max_cp_degree)
    lengths, dispatch = inputs.seq_len, inputs.q_dispatch
    return (
        *compute_metadata(lengths, dispatch),
        *compute_metadata_kv(*inputs),
        compute_attn_layout_seqlens(lengths, inputs.q_to_num_kv_token, dispatch),
    )


def orchestrate_simulate(tensor: ArrayLike, output: ArrayLike, metadata: Metadata) -> Array:
    """Moves every shard of every rank at once, as a perfect network would.

    Call anywhere, on whole arrays. Linear and differentiable in `tensor` and `output`: a row sent
    twice receives the sum of two gradients. Needs memory for the arrays only, whatever the number
    of shards.

    Args:
      tensor: `[W, T, ...]`; the rows of every rank.
      output: `[W, R, ...]`; the rows before the exchange. Rows that no rank writes keep their
        value.
      metadata: the plan of all W ranks, forward or reverse; its ranges do not overlap.
    Returns:
      `[W, R, ...]` of the dtype of `output`.
    Raises:
      ValueError: the shapes do not match.
    """
    remedy = "Pass one of the two that compute_metadata returns."
    check_type("orchestrate_simulate", "metadata", metadata, Metadata, remedy)
    tensor, output = jnp.asarray(tensor), jnp.asarray(output)
    world_size = metadata.world_size
    for name, x in (("tensor", tensor), ("output", output), ("metadata", metadata.seq_len)):
        if x.ndim < 2 or x.shape[0] != world_size:
            raise ValueError(
                f"orchestrate_simulate: {name} has shape {x.shape}; it needs all {world_size} "
                f"ranks of the plan as its first axis."
            )
    if tensor.shape[2:] != output.shape[2:]:
        raise ValueError(
            f"orchestrate_simulate: a row of tensor has shape {tensor.shape[2:]} but a row of "
            f"output {output.shape[2:]}. Pass an output with the rows of the tensor."
        )
    return _simulate(tensor, output, metadata)


@jax.jit
def _simulate(
    tensor: Shaped[Array, "W T *feature"], output: Shaped[Array, "W R *feature"], plan: Metadata
) -> Shaped[Array, "W R *feature"]:
    world_size, num_tokens = tensor.shape[:2]
    num_rows = output.shape[1]
    # Row indices are below 2**31, since larger arrays could not exist.
    length = jnp.asarray(plan.seq_len).astype(jnp.int32)
    src = jnp.cumsum(length, 1) - length if plan.src_offset is None else plan.src_offset
    src = jnp.asarray(src).astype(jnp.int32) + num_tokens * jnp.arange(world_size)[:, None]

    dst = jnp.asarray(plan.dst_rank).reshape(*length.shape, -1)
    start = jnp.asarray(plan.dst_offset).reshape(dst.shape).astype(jnp.int32)

    # All rows that move, in the order of the shards and their copies: from where, and to where.
    moves = jnp.where(dst >= 0, jnp.clip(num_rows - start, 0, length[..., None]), 0).ravel()
    moved = jnp.arange(world_size * num_rows, dtype=jnp.int32)
    copy = jnp.repeat(jnp.arange(dst.size), moves, total_repeat_length=moved.size)
    within = moved - (jnp.cumsum(moves) - moves)[copy]
    target = (dst * num_rows + start).ravel()[copy] + within
    target = jnp.where(within < moves[copy], target, moved.size)
    source = jnp.broadcast_to(src[..., None], dst.shape).ravel()[copy] + within
    source = jnp.full(moved.size, -1, jnp.int32).at[target].set(source, mode="drop")

    rows = tensor.reshape(-1, *tensor.shape[2:])
    received = jnp.take(rows, jnp.maximum(source, 0), axis=0, mode="clip").reshape(output.shape)
    written = (source >= 0).reshape(world_size, num_rows, *[1] * (output.ndim - 2))
    return jnp.where(written, received.astype(output.dtype), output)
