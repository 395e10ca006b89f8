"""Cycles over nodes of ranks, in which only one link per rank leaves the node."""

from typing import NamedTuple

from jax_cp_dispatch.cycles.decomposition import cut_cycles, hamiltonian_cycles, hamiltonian_paths
from jax_cp_dispatch.cycles.integer_rows import check_count
from jax_cp_dispatch.cycles.maps import chunk_maps


class TwoLevelMaps(NamedTuple):
    """Cycles over `m * u` ranks, and their maps. Rank `a * m + l` is the l-th of node a.

    Attributes:
      cycles: one row for each chunk.
      out_chunk, in_chunk: as returned by `chunk_maps`, for links inside and between nodes.
      inter_out: for each rank, [the rank of the next node that it sends to, the chunk], or [-1,
        -1].
      inter_in: for each rank, [the rank of the previous node that it receives from, the chunk], or
        [-1, -1].
    """

    cycles: list[list[int]]
    out_chunk: list[list[int]]
    in_chunk: list[list[int]]
    inter_out: list[list[int]]
    inter_in: list[list[int]]


def two_level_cycles(m: int, u: int, *, rail_aligned: bool = False) -> list[list[int]]:
    """Returns cycles over u nodes of m ranks; each follows a path through one node after another.

    Every link inside a node is used once. Every rank has one link to the next node and one from the
    previous node, each with one chunk per step. There are two exceptions:

    * m = 3 and 5, for which such paths do not exist, have m - 1 cycles. Each omits one link inside
      a node, and the last rank of a node has no link to other nodes.
    * u = 1 gives `hamiltonian_cycles(m)`: m closed paths in one node would have to share links.

    Args:
      m: ranks of a node.
      u: nodes.
      rail_aligned: if true, every link between nodes connects ranks of the same index in their
        nodes.
    Returns:
      m rows (m - 1 in the two exceptions), each a permutation of the `m * u` ranks. Rank `a * m +
      l` is the l-th of node a.
    Raises:
      ValueError: `rail_aligned` with odd m or odd u; m is 4 or 6 and u is 1; m or u is less than 1.
      TypeError: m or u is not an integer.
    """
    m = check_count("two_level_cycles", "m", m)
    u = check_count("two_level_cycles", "u", u)
    if rail_aligned and (m % 2 or u % 2):
        raise ValueError(
            f"two_level_cycles: rail_aligned needs an even number of ranks per node and of nodes, "
            f"got m={m}, u={u}. Pass rail_aligned=False."
        )
    if u == 1:
        return hamiltonian_cycles(m)
    paths = cut_cycles(m) if m in (3, 5) else hamiltonian_paths(m)
    # For even m the path that starts where path i ends, i + m/2, ends where path i starts.
    opposite = paths[m // 2 :] + paths[: m // 2] if rail_aligned else paths
    return [
        [node * m + rank for node in range(u) for rank in (path, other)[node % 2]]
        for path, other in zip(paths, opposite, strict=True)
    ]


def two_level_maps(m: int, u: int, *, rail_aligned: bool = False) -> TwoLevelMaps:
    """Returns the cycles of `two_level_cycles` with the maps of each rank.

    Args, Raises: see `two_level_cycles`.
    Returns:
      `TwoLevelMaps`; with one node, no chunk leaves it.
    """
    cycles = two_level_cycles(m, u, rail_aligned=rail_aligned)
    inter_out = [[-1, -1] for _ in range(m * u)]
    inter_in = [[-1, -1] for _ in range(m * u)]
    for chunk, row in enumerate(cycles):
        for sender, receiver in zip(row, row[1:] + row[:1], strict=True):
            if sender // m != receiver // m:
                inter_out[sender] = [receiver, chunk]
                inter_in[receiver] = [sender, chunk]
    return TwoLevelMaps(cycles, *chunk_maps(cycles), inter_out, inter_in)
