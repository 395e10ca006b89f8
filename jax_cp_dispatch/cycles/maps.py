"""What each rank sends to each, the same at every step."""

from jax_cp_dispatch.cycles.checks import CycleRows, ranks_and_cycles


def chunk_maps(cycles: CycleRows) -> tuple[list[list[int]], list[list[int]]]:
    """The chunk that travels on each link when every chunk follows its cycle.

    Args:
      cycles: see `check_cycles`; no cycles are those of one rank.
    Returns:
      `out_chunk[a][b]`, the chunk that rank a sends to rank b, and `in_chunk[a][b]`, the one that
      a receives from b; -1 where nothing goes. Each is the transpose of the other.
    Raises:
      ValueError, TypeError: see `check_cycles`.
    """
    num_ranks, rows = ranks_and_cycles("chunk_maps", cycles)
    out_chunk = [[-1] * num_ranks for _ in range(num_ranks)]
    in_chunk = [[-1] * num_ranks for _ in range(num_ranks)]
    for chunk, row in enumerate(rows):
        for sender, receiver in zip(row, row[1:] + row[:1], strict=True):
            out_chunk[sender][receiver] = in_chunk[receiver][sender] = chunk
    return out_chunk, in_chunk
