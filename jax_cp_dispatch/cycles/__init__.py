"""Cycles over ranks, on which chunks travel so that every link carries one chunk per step.

`decomposition`: Hamiltonian cycles that use each link once; `paths`: the same inside a node;
`two_level`: cycles over nodes of ranks; `sources`: who holds what at each step; `maps`: what each
rank sends to each; `checks`: of cycles and maps that callers bring. Plain integers throughout:
nothing traces, equal arguments give equal results in every process, and lists are always fresh.
"""

from jax_cp_dispatch.cycles.decomposition import hamiltonian_cycles
from jax_cp_dispatch.cycles.maps import chunk_maps
from jax_cp_dispatch.cycles.paths import hamiltonian_paths
from jax_cp_dispatch.cycles.sources import cycle_sources, direct_sources, source_is_earlier
from jax_cp_dispatch.cycles.two_level import TwoLevelMaps, two_level_cycles, two_level_maps

__all__ = [
    "TwoLevelMaps",
    "chunk_maps",
    "cycle_sources",
    "direct_sources",
    "hamiltonian_cycles",
    "hamiltonian_paths",
    "source_is_earlier",
    "two_level_cycles",
    "two_level_maps",
]
