"""Maps: which chunk each rank sends to each other; whose chunk it holds at each step."""

from collections.abc import Sequence

from jax_cp_dispatch.cycles.integer_rows import CycleRows, check_chunk_maps, ranks_and_cycles


def cycles_of_maps(
    out_chunk: CycleRows, in_chunk: CycleRows, num_ranks: int, *, op: str = "cycles_of_maps"
) -> list[list[int]]:
    """Returns the cycle of each chunk from the ranks' maps: the inverse of `chunk_maps`.

    Args:
      out_chunk: for ranks a, b the chunk that a sends to b, or -1.
      in_chunk: for ranks a, b the chunk that a receives from b, or -1: the transpose.
      num_ranks: rows and columns of both.
      op: the calling function, for error messages.
    Returns:
      A row of ranks for each chunk, starting at rank 0.
    Raises:
      ValueError: as in `check_chunk_maps`; or a chunk does not visit every rank.
      TypeError: rows of anything but integers.
    """
    num_chunks, sent, _ = check_chunk_maps(out_chunk, in_chunk, num_ranks, op=op)
    rows = []
    for chunk in range(num_chunks):
        # A rank sends and receives a chunk once, so its path ends, or returns to rank 0.
        row, following = [0], _receiver(sent[0], chunk)
        while following > 0:
            row.append(following)
            following = _receiver(sent[following], chunk)
        if following < 0 or len(row) != num_ranks:
            end = "ends there" if following < 0 else "returns there too early"
            raise ValueError(
                f"{op}: chunk {chunk} goes from rank 0 along {row} and {end}. Each chunk must "
                f"visit all {num_ranks} ranks. Use chunk_maps of hamiltonian_cycles."
            )
        rows.append(row)
    return rows


def _receiver(sent: Sequence[int], chunk: int) -> int:
    """Returns the rank to which a chunk is sent, or -1."""
    return sent.index(chunk) if chunk in sent else -1


def chunk_maps(cycles: CycleRows) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the chunk that moves on each link when every chunk follows its cycle.

    Args:
      cycles: see `check_cycles`; an empty list for one rank.
    Returns:
      `out_chunk[a][b]`, the chunk that rank a sends to rank b, and `in_chunk[a][b]`, the one that a
      receives from b; -1 for none. Each is the transpose of the other.
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
