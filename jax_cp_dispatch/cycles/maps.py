"""What each rank sends to each, the same at every step."""

from collections.abc import Sequence

from jax_cp_dispatch.cycles.checks import CycleRows, check_chunk_maps, ranks_and_cycles


def cycles_of_maps(
    out_chunk: CycleRows, in_chunk: CycleRows, num_ranks: int, *, op: str = "cycles_of_maps"
) -> list[list[int]]:
    """The cycle of each chunk from what each rank sends and receives: `chunk_maps`, backwards.

    Args:
      out_chunk: for ranks a, b the chunk that a sends to b, or -1.
      in_chunk: for ranks a, b the chunk that a receives from b, or -1: the transpose.
      num_ranks: rows and columns of both.
      op: who asks, for the errors.
    Returns:
      A row of ranks for each chunk, from rank 0 on.
    Raises:
      ValueError: as `check_chunk_maps`; or a chunk does not visit every rank.
      TypeError: rows of anything but integers.
    """
    num_chunks, sent, _ = check_chunk_maps(out_chunk, in_chunk, num_ranks, op=op)
    rows = []
    for chunk in range(num_chunks):
        # A rank sends a chunk once and receives it once, so the way ends, or begins again at 0.
        row, following = [0], _receiver(sent[0], chunk)
        while following > 0:
            row.append(following)
            following = _receiver(sent[following], chunk)
        if following < 0 or len(row) != num_ranks:
            end = "ends there" if following < 0 else "is back where it began"
            raise ValueError(
                f"{op}: chunk {chunk} goes from rank 0 along {row} and {end}. Each chunk has to "
                f"visit all {num_ranks} ranks; chunk_maps of hamiltonian_cycles has such maps."
            )
        rows.append(row)
    return rows


def _receiver(sent: Sequence[int], chunk: int) -> int:
    """To whom a rank sends a chunk, -1 for nobody."""
    return sent.index(chunk) if chunk in sent else -1


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
