"""Hamilton attention: keys and values rotate in chunks, each on its own cycle of ranks."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms import Hamilton
from jax_cp_dispatch.attention.check_arguments import read_rows
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.options import AttentionOptions
from jax_cp_dispatch.attention.peer_arguments import explains_peer_arguments
from jax_cp_dispatch.attention.rotating.call import rotating_attention
from jax_cp_dispatch.cycles.integer_rows import CycleRows
from jax_cp_dispatch.masks import Mask


@explains_peer_arguments
def hamilton_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    mask: Mask | str | None = None,
    nodes: int | None = None,
    cycles: CycleRows | str | None = None,
    maps: tuple[CycleRows, CycleRows] | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    sink: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
    num_comm_sm: int | None = None,
) -> Float[Array, "B T N Hv"] | Any:
    """Computes attention over a sharded sequence, using the links between all ranks at once.

    The keys and values of a rank are cut into n - 1 chunks. Each moves along its own Hamiltonian
    cycle; the cycles share no link. There are n steps with n - 1 exchanges and as many bytes as in
    a ring, spread over all n - 1 links of a rank. Causal attention is computed in zigzag layout, as
    in `zigzag_ring_attention`, so all ranks have equal work at every step. Where to call it, its
    derivative and its residuals: as `ring_attention`.

    Args:
      nodes: u > 1: the ranks form u nodes of m = n / u ranks, in order. There are then m chunks (m
        - 1 for m = 3, 5). At each step a rank sends one of them to another node and the rest within
        its own.
      cycles: your own rows, one for each chunk, instead of those of `hamiltonian_cycles` or
        `two_level_cycles`; or "direct": each chunk comes directly from its owner, a different rank
        at each step, which needs memory for a third set of chunks. None uses cycles, or "direct"
        for 4 and 6 ranks, for which no cycles exist.
      maps: the pair (out_chunk, in_chunk), instead of cycles: which chunk each rank sends to and
        receives from each other rank in every exchange, as returned by `chunk_maps` or your own.
        The maps must be each other's transpose, and bring every chunk to every rank.
      q, k, v, axis_name, mask: as in `ring_attention`. Gradients of keys and values move with
        them, or with "direct" return directly to their owners.
      segment_ids, positions, layout: as `ring_attention`.
      sink, return_lse, return_max_logits: as `ring_attention`.
      scale, logit_soft_cap, implementation, deadline, num_comm_sm: as `ring_attention`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      ValueError: `nodes` does not divide the ranks; `cycles` are not cycles, or share a link;
        `maps` contradict each other, or miss a rank; or as `ring_attention`.
    References:
      TASP (arXiv:2509.26541); Tillson, JCTB 29 (1980), 68-74.
    """
    algorithm = Hamilton(nodes, cycles, maps)
    options = AttentionOptions(
        read_options(
            "hamilton_attention",
            axis_name,
            implementation=implementation,
            deadline=deadline,
            num_comm_sm=num_comm_sm,
        ),
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    operands = Operands(q, k, v, sink)
    packed = read_rows(options.op, operands, mask, segment_ids, positions)
    outputs = rotating_attention(options, algorithm, operands, packed)
    return options.returned(outputs)
