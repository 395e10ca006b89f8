"""Tables of the chunks that each rank holds at each step (`num_ranks² * num_chunks` entries)."""

from jax_cp_dispatch.cycles.checks import CycleRows, check_count, ranks_and_cycles


def cycle_sources(cycles: CycleRows) -> list[list[list[int]]]:
    """Returns the rank whose chunk is in each slot when every chunk follows its cycle.

    Args:
      cycles: see `check_cycles`; no cycles are those of one rank.
    Returns:
      Ranks `[step][rank][chunk]`; at step 0 the rank itself, and over all steps each rank once.
    Raises:
      ValueError, TypeError: see `check_cycles`.
    """
    return _sources(cycles, "cycle_sources")


def direct_sources(n: int) -> list[list[list[int]]]:
    """Returns the schedule without cycles: every chunk comes directly from its owner.

    Exists for any number of ranks. Every link carries one chunk per step. Each rank keeps its own
    chunks for sending, in addition to those that it holds and those that arrive.

    Args:
      n: number of ranks.
    Returns:
      Ranks `[step][rank][chunk]` for n - 1 chunks; at step 0 the rank itself, and over all steps
      each rank once. Chunk c comes from rank `r - 1 - (c + step - 1) % (n - 1)`, modulo n.
    Raises:
      ValueError: n is less than 1.
      TypeError: n is not an integer.
    """
    n = check_count("direct_sources", "n", n)
    return [
        [
            [(r - 1 - (c + step - 1) % (n - 1)) % n if step else r for c in range(n - 1)]
            for r in range(n)
        ]
        for step in range(n)
    ]


def source_is_earlier(cycles: CycleRows) -> list[list[list[bool]]]:
    """Returns whether a held chunk belongs to this rank or an earlier one, for causal attention.

    Args:
      cycles: see `check_cycles`; no cycles are those of one rank.
    Returns:
      `[rank][step][chunk]`: true if the source is at most the rank.
    Raises:
      ValueError, TypeError: see `check_cycles`.
    """
    by_step = _sources(cycles, "source_is_earlier")
    return [
        [[source <= rank for source in by_rank[rank]] for by_rank in by_step]
        for rank in range(len(by_step))
    ]


def _sources(cycles, op):
    num_ranks, rows = ranks_and_cycles(op, cycles)
    sources = [[[] for _ in range(num_ranks)] for _ in range(num_ranks)]
    for row in rows:
        for step in range(num_ranks):
            for place, rank in enumerate(row):
                sources[step][rank].append(row[place - step])
    return sources
