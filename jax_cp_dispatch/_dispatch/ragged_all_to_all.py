"""`ragged_all_to_all`: the operation of `jax.lax`, by `dispatch`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, read_int32
from jax_cp_dispatch._arrays import chosen
from jax_cp_dispatch._dispatch.arguments import Argument, check_movable, outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName, num_ranks_here, rank_index
from jax_cp_dispatch._ranks.options import read_options, vary_alike
from jax_cp_dispatch.metadata import Metadata

_OP = "ragged_all_to_all"
_FIELDS = "input_offsets", "send_sizes", "output_offsets", "recv_sizes"


@door(
    _OP, output="Reshape the rows of one.", send_sizes="Pass a size of 0 for a rank without rows."
)
def ragged_all_to_all(
    operand: Shaped[Array, "N *feature"],
    output: Shaped[Array, "M *feature"],
    input_offsets: Integer[HostOrDevice, " K"],
    send_sizes: Integer[HostOrDevice, " K"],
    output_offsets: Integer[HostOrDevice, " K"],
    recv_sizes: Integer[HostOrDevice, " K"],
    *,
    axis_name: AxisName | list[str],
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Shaped[Array, "M *feature"]:
    """Sends slices of rows to the other ranks, which write them into their `output`.

    The arguments and the result are those of `jax.lax.ragged_all_to_all`, which XLA cannot run on
    CPU: this function replaces it there, also between processes. It differs in two ways. Slices
    that disagree with `recv_sizes`, exceed an array or overlap where they arrive are errors. And
    the gradient of a row that several slices send is the sum of theirs; JAX's transpose keeps one
    of them.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis. Linear in `operand` and
    `output`.

    Args:
      operand: this rank's rows.
      output: the rows of the result that no rank writes.
      input_offsets, send_sizes: the slices of `operand` to send, K / W for each rank in order.
      output_offsets: the row of the receiver's output where each of these slices begins.
      recv_sizes: the rows of the slices that this rank receives, K / W from each rank in order.
      axis_name: the mesh axis of the ranks, or several, the major one first.
      axis_index_groups: groups of ranks that exchange with each other only, of the same size;
        together all ranks, each once. Ranks of a slice are then numbered within the group.
      implementation, deadline: see `dispatch`.
    Returns:
      `output`, with the received rows.
    Raises:
      TypeError, ValueError: an argument is invalid.
      jax.errors.JaxRuntimeError: see `dispatch`.
    """
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    options = read_options(_OP, axis_name, None, implementation, deadline)
    num_ranks = num_ranks_here(_OP, options.axis_name, "dispatch")
    peers = _peers(axis_index_groups, num_ranks)
    check_movable(_OP, "operand", operand)
    if operand.dtype != output.dtype:
        raise ValueError(
            f"{_OP}: operand is {operand.dtype} and output {output.dtype}; they need rows of one "
            "dtype. Cast one."
        )
    given = input_offsets, send_sizes, output_offsets, recv_sizes
    if not send_sizes.size or send_sizes.size % peers.shape[1]:
        raise ValueError(
            f"{_OP}: {', '.join(_FIELDS)} are [{send_sizes.size}]; they need [K], K a positive "
            f"multiple of the {peers.shape[1]} ranks. Pass a slice of size 0 for a rank that gets "
            "nothing."
        )
    starts, sizes, places, sizes_here = (
        read_int32(_OP, name, x, 0).reshape(peers.shape[1], -1)
        for name, x in zip(_FIELDS, given, strict=True)
    )

    own = jnp.asarray(peers)[rank_index(options.axis_names)]  # the ranks of this rank's group

    def sent(slices: slice, arrays: list[Any]) -> Argument:
        """Sends some of the slices for each rank: those of equal numbers."""
        received = sizes_here[:, slices].sum(1, dtype=jnp.int32)
        from_ranks = jnp.zeros(num_ranks, jnp.int32).at[own].set(received, unique_indices=True)
        start, size, place = (x[:, slices].reshape(-1) for x in (starts, sizes, places))
        plan = Metadata(
            dst_rank=jnp.repeat(own, len(size) // len(own)),
            dst_offset=place,
            seq_len=size,
            src_offset=start,
            num_recv_tokens=jnp.append(from_ranks, received.sum(dtype=jnp.int32)),
            num_seqs=np.int32(len(size)),
            world_size=num_ranks,
        )
        return outgoing(arrays, plan, capacity=len(output), capacity_name="rows of output")

    one = jnp.ones(len(operand), jnp.bfloat16)  # NaN where XLA finds the plan wrong
    operand, one = vary_alike([operand, one], also=options.axis_names)
    parts = [sent(slice(None), [operand, one])]
    if sizes.shape[1] > 1:  # ranks compare sums of what they send and receive by a part
        parts += [sent(slice(i, i + 1), [one]) for i in range(sizes.shape[1])]
    (received, is_written), *others = move(options, parts)
    for [other] in others:
        is_written = jnp.where(jnp.isnan(other), other, is_written)
    received, is_written, output = vary_alike([received, is_written, output])
    wrong = jnp.asarray(jnp.nan if jnp.issubdtype(output.dtype, jnp.inexact) else 0, output.dtype)
    rows = chosen(is_written == 1, received, output)
    return chosen(jnp.isnan(is_written), jnp.full_like(output, wrong), rows)


def _peers(groups: Any, num_ranks: int) -> np.ndarray:
    """Returns the ranks of each rank's group, [W, ranks of a group]."""
    everyone = list(range(num_ranks))
    if groups is None:
        groups = [everyone]
    groups = [list(group) for group in groups]
    sizes = {len(group) for group in groups}
    if sorted(itertools.chain(*groups)) != everyone or len(sizes) != 1:
        raise ValueError(
            f"{_OP}: axis_index_groups is {groups}; it needs groups of one size that together hold "
            f"each of the ranks 0 to {num_ranks - 1} once."
        )
    peers = np.zeros((num_ranks, sizes.pop()), np.int32)
    for group in groups:
        peers[group] = group
    return peers
