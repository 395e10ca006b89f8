"""Paths over the ranks of a node, to be joined to cycles over several nodes."""

from jax_cp_dispatch.cycles.checks import check_count
from jax_cp_dispatch.cycles.decomposition import hamiltonian_cycles


def hamiltonian_paths(m: int) -> list[list[int]]:
    """Hamiltonian paths over m ranks that together use each of the m (m - 1) links once.

    Args:
      m: ranks; any number but 3 and 5.
    Returns:
      m permutations of the ranks. Path i starts at rank i, and no two end at the same rank. For
      even m path i ends at i + m/2.
    Raises:
      ValueError: m is 3 or 5, for which there are none, or less than 1.
      TypeError: m is no integer.
    """
    m = check_count("hamiltonian_paths", "m", m)
    if m in (3, 5):
        raise ValueError(
            f"hamiltonian_paths: m is {m}, but the links between 3 or 5 ranks do not decompose "
            f"into {m} Hamiltonian paths: with a rank more they would be cycles over {m + 1} ranks "
            f"(Tillson 1980). two_level_cycles({m}, ...) does with {m - 1}, and as many "
            "chunks."
        )
    # Cycles over one rank more, without it. All arcs from and to it are used once, so that starts
    # and ends are permutations.
    cycles = hamiltonian_cycles(m + 1)
    gaps = [row.index(m) for row in cycles]
    return sorted(row[gap + 1 :] + row[:gap] for row, gap in zip(cycles, gaps, strict=True))


def cut_cycles(m: int) -> list[list[int]]:
    """The m - 1 cycles over an odd number of ranks, each without one arc.

    No two of these paths start or end at the same rank; none starts or ends at rank m - 1.
    """
    # All rows are translations of the first but for rank m - 1, which comes first; cut out is the
    # arc between the next two.
    return sorted(row[2:] + row[:2] for row in hamiltonian_cycles(m))
