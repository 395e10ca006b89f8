"""Paths over the ranks of a node, from which cycles over several nodes are built."""

from jax_cp_dispatch.cycles.decomposition import hamiltonian_cycles
from jax_cp_dispatch.cycles.integer_rows import check_count


def hamiltonian_paths(m: int) -> list[list[int]]:
    """Hamiltonian paths over m ranks that together use each of the m (m - 1) links once.

    Args:
      m: number of ranks; any except 3 and 5.
    Returns:
      m permutations of the ranks. Path i starts at rank i, and no two end at the same rank. For
      even m path i ends at i + m/2.
    Raises:
      ValueError: m is 3 or 5, for which no decomposition exists, or less than 1.
      TypeError: m is not an integer.
    """
    m = check_count("hamiltonian_paths", "m", m)
    if m in (3, 5):
        raise ValueError(
            f"hamiltonian_paths: m is {m}, but the links between 3 or 5 ranks do not decompose "
            f"into {m} Hamiltonian paths: one more rank would make them cycles over {m + 1} ranks "
            f"(Tillson 1980). Use two_level_cycles({m}, ...), which needs only {m - 1} paths and "
            "chunks."
        )
    # Cycles over m + 1 ranks, with the last rank removed. Every arc from and to it is used once, so
    # the starts and the ends of the paths are permutations.
    cycles = hamiltonian_cycles(m + 1)
    gaps = [row.index(m) for row in cycles]
    return sorted(row[gap + 1 :] + row[:gap] for row, gap in zip(cycles, gaps, strict=True))


def cut_cycles(m: int) -> list[list[int]]:
    """Returns the m - 1 cycles over an odd number of ranks, each without one arc.

    No two of these paths start or end at the same rank; none starts or ends at rank m - 1.
    """
    # Rank m - 1 comes first in every row; the rest are translations of the first row. The arc
    # between the next two ranks is removed.
    return sorted(row[2:] + row[:2] for row in hamiltonian_cycles(m))
