"""Whose chunk each rank holds at each step (`num_ranks² * num_chunks` entries)."""

from jax_cp_dispatch.cycles.integer_rows import CycleRows, ranks_and_cycles


def source_is_earlier(cycles: CycleRows) -> list[list[list[bool]]]:
    """Returns whether a held chunk belongs to this rank or an earlier one, for causal attention.

    At step 0, a rank holds its own chunks. A chunk that follows its cycle is at `row[i]` after it
    was at `row[i - 1]`, so at step t rank `row[i]` holds the chunk of rank `row[i - t]`.

    Args:
      cycles: rows of ranks; see `hamiltonian_cycles`. No cycles are those of one rank.
    Returns:
      `[rank][step][chunk]`: true if the source is at most the rank.
    Raises:
      ValueError: a row is not a permutation of the ranks, or two rows use one link.
      TypeError: rows of anything but integers.
    """
    num_ranks, rows = ranks_and_cycles("source_is_earlier", cycles)
    places = [{rank: place for place, rank in enumerate(row)} for row in rows]
    return [
        [
            [row[at[rank] - step] <= rank for row, at in zip(rows, places, strict=True)]
            for step in range(num_ranks)
        ]
        for rank in range(num_ranks)
    ]
