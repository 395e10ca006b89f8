"""Hamilton attention: keys and values go round the ranks in chunks, each on a cycle of its own."""

from __future__ import annotations

import functools
from typing import cast

from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch._ranks.axis import AxisName, num_ranks_here
from jax_cp_dispatch._window import Window
from jax_cp_dispatch.attention.rotating.schedules import Cycles, Direct, Transport
from jax_cp_dispatch.attention.rotating.sequence import Sequence, attend_sequence
from jax_cp_dispatch.cycles import hamiltonian_cycles, two_level_cycles
from jax_cp_dispatch.cycles.checks import CycleRows, check_cycles
from jax_cp_dispatch.cycles.maps import cycles_of_maps


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
    num_ranks = num_ranks_here(
        "hamilton_attention", axis_name, "context_parallel_attention(..., algorithm='hamilton')"
    )
    sequence = Sequence(
        transport=Transport("hamilton_attention", axis_name, implementation, deadline),
        schedule=hamilton_schedule(num_ranks, nodes, cycles, maps=maps),
        zigzag=causal,
        causal=causal,
        window=window,
        layout=layout,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
    )
    return attend_sequence(sequence, q, k, v, segment_ids, positions)


def hamilton_schedule(
    num_ranks: int,
    nodes: int | None,
    cycles: CycleRows | str | None,
    op: str = "hamilton_attention",
    *,
    maps: tuple[CycleRows, CycleRows] | None = None,
) -> Cycles | Direct:
    """The schedule that the arguments of `hamilton_attention`, or of its profile, name."""
    if nodes is not None:
        check_integer(op, "nodes", nodes)
    if nodes is not None and (nodes < 1 or num_ranks % nodes):
        raise ValueError(
            f"{op}: nodes is {nodes} but there are {num_ranks} ranks; it needs to divide them."
        )
    is_direct = isinstance(cycles, str)
    if is_direct and cycles != "direct":
        raise ValueError(
            f"{op}: cycles is {cycles!r}; it needs to be rows of ranks, 'direct', or None."
        )
    given = {"nodes": nodes, "cycles": cycles, "maps": maps}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{op}: got both {' and '.join(named)}; pass one of them.")
    if maps is not None:
        if not isinstance(maps, tuple | list) or len(maps) != 2:
            raise TypeError(f"{op}: maps is {maps!r}; it needs to be (out_chunk, in_chunk).")
        is_direct, cycles = False, cycles_of_maps(*maps, num_ranks, op=op)
    if num_ranks == 1:
        if cycles is not None and not is_direct:
            check_cycles(cast(CycleRows, cycles), num_ranks, op=op)
        return Cycles(((0,),))
    if nodes not in (None, 1):
        return _two_level(num_ranks // nodes, nodes)
    if is_direct or (cycles is None and num_ranks in (4, 6)):
        return Direct(num_ranks)
    if cycles is None:
        return _flat(num_ranks)
    return Cycles(check_cycles(cast(CycleRows, cycles), num_ranks, op=op))


@functools.cache
def _flat(num_ranks: int) -> Cycles:
    return Cycles(tuple(map(tuple, hamiltonian_cycles(num_ranks))))


@functools.cache
def _two_level(ranks_per_node: int, nodes: int) -> Cycles:
    return Cycles(tuple(map(tuple, two_level_cycles(ranks_per_node, nodes))))
