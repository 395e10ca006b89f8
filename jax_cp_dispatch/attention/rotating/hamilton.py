"""Hamilton attention: keys and values go round the ranks in chunks, each on a cycle of its own."""

from __future__ import annotations

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._window import Window
from jax_cp_dispatch.attention.algorithms import Hamilton
from jax_cp_dispatch.attention.options import AttentionOptions, ExchangeOptions
from jax_cp_dispatch.attention.rotating.call import rotating_attention
from jax_cp_dispatch.cycles.checks import CycleRows


def hamilton_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    *,
    axis_name: AxisName,
    causal: bool = True,
    nodes: int | None = None,
    cycles: CycleRows | str | None = None,
    maps: tuple[CycleRows, CycleRows] | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
    layout: str = "contiguous",
    window: Window | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention over a sharded sequence that uses the links between all ranks at once.

    The keys and values of a rank are cut into n - 1 chunks, and each travels along a Hamiltonian
    cycle of its own; the cycles share no link. n steps with n - 1 exchanges, as in a ring, and as
    many bytes, spread over all n - 1 links of a rank. With causal attention computed in zigzag
    layout, as `zigzag_ring_attention`: equal work for every rank at every step. Where to call, the
    derivative and what is kept for it: as `ring_attention`.

    Args:
      nodes: u > 1: the ranks stand in u nodes of m = n / u ranks, one node after another. Then
        there are m chunks (m - 1 for m = 3, 5), and at each step a rank sends one of them to
        another node and the rest within its own.
      cycles: instead of those of `hamiltonian_cycles` or `two_level_cycles`, rows of your own, one
        for each chunk; or "direct": each chunk comes straight from its rank, a different one at
        each step, which needs memory for a third set of chunks. None is "direct" for 4 and 6
        ranks, which have no such cycles, otherwise cycles.
      maps: instead of cycles, the pair (out_chunk, in_chunk) that says which chunk each rank sends
        to and receives from each other one, in every exchange: what `chunk_maps` returns, or your
        own. The maps have to be each other's transpose, and take every chunk to every rank.
      q, k, v, axis_name, causal: as `ring_attention`. Gradients of keys and values travel with
        them, or with "direct" straight home.
      segment_ids, positions, layout, window: as `ring_attention`.
      scale, logit_soft_cap, implementation, deadline: as `ring_attention`.
    Returns:
      The output in the layout and dtype of q; zero for padding.
    Raises:
      ValueError: `nodes` does not divide the ranks; `cycles` are none, or share a link; `maps`
        contradict each other, or miss a rank; else as `ring_attention`.
    References:
      TASP (arXiv:2509.26541); Tillson, JCTB 29 (1980), 68-74.
    """
    algorithm = Hamilton(nodes, cycles, maps)
    options = AttentionOptions(
        ExchangeOptions("hamilton_attention", axis_name, implementation, deadline),
        causal=causal,
        window=window,
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
    )
    return rotating_attention(options, algorithm, q, k, v, segment_ids, positions)
