"""Cycles over ranks, on which chunks travel so that every link carries one chunk per step.

`decomposition`: Hamiltonian cycles that use each link once. `paths`: Hamiltonian paths inside a
  node. `two_level`: cycles over nodes of ranks. `sources`: whose chunk a rank holds at each
  step. `maps`: which chunk each rank sends to each other rank. `integer_rows`: checks of a
  caller's cycles and maps. Everything is plain integers: nothing is traced, equal arguments give
  equal results in every process, and every call returns new lists.
"""

from jax_cp_dispatch.cycles.decomposition import hamiltonian_cycles, hamiltonian_paths
from jax_cp_dispatch.cycles.maps import chunk_maps, source_is_earlier
from jax_cp_dispatch.cycles.two_level import TwoLevelMaps, two_level_cycles, two_level_maps

__all__ = [
    "TwoLevelMaps",
    "chunk_maps",
    "hamiltonian_cycles",
    "hamiltonian_paths",
    "source_is_earlier",
    "two_level_cycles",
    "two_level_maps",
]
