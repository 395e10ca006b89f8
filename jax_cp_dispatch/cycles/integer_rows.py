"""Cycles and maps as rows of integers, and their checks, also of those of callers."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

CycleRows = Sequence[Sequence[int]] | Integer[np.ndarray, "rows columns"]
Checked = tuple[tuple[int, ...], ...]


def check_cycles(cycles: CycleRows, num_ranks: int, *, op: str = "check_cycles") -> Checked:
    """Rejects cycles that would put two chunks on one link.

    Args:
      cycles: rows of ranks, each a permutation of `range(num_ranks)`; the last rank sends to the
        first. At least one row; none for one rank, where nothing moves.
      num_ranks: number of ranks.
      op: the calling function, for error messages.
    Returns:
      The rows, as tuples of Python integers.
    Raises:
      ValueError: a row is not such a permutation, or two rows use the same link in one direction.
      TypeError: rows of anything but integers.
    """
    rows = integer_rows(op, "cycles", cycles)
    everyone = set(range(num_ranks))
    for number, row in enumerate(rows):
        if len(row) != num_ranks or set(row) != everyone:
            raise ValueError(
                f"{op}: row {number} of cycles is {_shown(row)}, which is not a permutation of "
                f"0, ..., {num_ranks - 1}. Every cycle must visit each of the {num_ranks} ranks "
                "once."
            )
    if (num_ranks == 1) != (not rows):
        raise ValueError(
            f"{op}: got {len(rows)} cycles for {num_ranks} ranks; it needs none for one rank, at "
            "least one for more. Use hamiltonian_cycles."
        )
    if rows:
        ranks = np.array(rows)
        arcs = ranks * num_ranks + np.roll(ranks, -1, axis=1)
        uses = np.bincount(arcs.ravel())
        if uses.max() > 1:
            arc = int(uses.argmax())
            sender, receiver = divmod(arc, num_ranks)
            one, two, *_ = np.flatnonzero((arcs == arc).any(axis=1)).tolist()
            raise ValueError(
                f"{op}: rows {one} and {two} of cycles both go from rank {sender} to rank "
                f"{receiver}. Cycles must not share a link. Use hamiltonian_cycles."
            )
    return rows


def check_chunk_maps(
    out_chunk: CycleRows, in_chunk: CycleRows, num_ranks: int, *, op: str = "check_chunk_maps"
) -> tuple[int, Checked, Checked]:
    """Rejects maps that would lose or overwrite a chunk.

    Args:
      out_chunk: for ranks a, b the chunk that a sends to b, or -1.
      in_chunk: for ranks a, b the slot in which a receives the chunk from b, or -1: the transpose
        of `out_chunk`, because a chunk keeps its number.
      num_ranks: rows and columns of both.
      op: the calling function, for error messages.
    Returns:
      The number of chunks (the largest number sent, plus 1), and both maps as tuples of Python
      integers.
    Raises:
      ValueError: a map has another shape, sends to the sender, or contains a number below -1; a
        rank sends a chunk twice, or fills a slot twice; the maps contradict each other.
      TypeError: rows of anything but integers.
    """
    maps = {
        "out_chunk": integer_rows(op, "out_chunk", out_chunk),
        "in_chunk": integer_rows(op, "in_chunk", in_chunk),
    }
    for name, rows in maps.items():
        if len(rows) != num_ranks or any(len(row) != num_ranks for row in rows):
            raise ValueError(
                f"{op}: {name} has rows of length {[len(row) for row in rows]}, but needs "
                f"{num_ranks} rows of {num_ranks}, one entry for each pair of ranks."
            )
        what = "sends chunk" if name == "out_chunk" else "fills slot"
        for rank, row in enumerate(rows):
            if row[rank] != -1 or min(row) < -1:
                raise ValueError(
                    f"{op}: {name}[{rank}] is {_shown(row)}; it needs -1 at index {rank}, its own "
                    "rank, and -1 or a chunk elsewhere."
                )
            used = [chunk for chunk in row if chunk >= 0]
            if len(set(used)) != len(used):
                twice = next(chunk for chunk in used if used.count(chunk) > 1)
                raise ValueError(
                    f"{op}: rank {rank} {what} {twice} twice in one exchange: {name}[{rank}] is "
                    f"{_shown(row)}. Each number except -1 may appear only once."
                )
    sent, received = maps.values()
    for receiver, row in enumerate(received):
        for sender, slot in enumerate(row):
            if slot != sent[sender][receiver]:
                raise ValueError(
                    f"{op}: out_chunk[{sender}][{receiver}] is {sent[sender][receiver]} but "
                    f"in_chunk[{receiver}][{sender}] is {slot}. The maps must be each other's "
                    "transpose. Use chunk_maps, which makes both."
                )
    return 1 + max(map(max, sent)), sent, received


def check_count(op: str, name: str, value: int) -> int:
    """Returns a number of ranks or nodes as a Python integer; it must be at least 1."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
        raise TypeError(f"{op}: {name} is {value!r}; it needs to be an integer.")
    if operator.index(value) < 1:
        raise ValueError(f"{op}: {name} is {value}; it needs to be at least 1.")
    return operator.index(value)


def ranks_and_cycles(op: str, cycles: CycleRows) -> tuple[int, Checked]:
    """Returns checked cycles and their number of ranks: the length of the first row, or 1."""
    rows = integer_rows(op, "cycles", cycles)
    num_ranks = max(1, len(rows[0])) if rows else 1
    return num_ranks, check_cycles(rows, num_ranks, op=op)


def integer_rows(op: str, name: str, rows: Any) -> Checked:
    """Returns tuples of Python integers; compares types, because numpy would accept True as 1."""
    try:
        rows = tuple(tuple(row) for row in rows)
    except TypeError:
        raise TypeError(f"{op}: {name} is {rows!r}; it needs to be rows of integers.") from None
    for number, row in enumerate(rows):
        for kind in set(map(type, row)) - {int}:
            if kind is bool or not issubclass(kind, int | np.integer):
                raise TypeError(
                    f"{op}: row {number} of {name} has entries of type {kind.__name__}; it needs "
                    "integers."
                )
    return tuple(tuple(map(int, row)) for row in rows)


def _shown(row):
    return f"[{', '.join(map(str, row[:16]))}{', ...' if len(row) > 16 else ''}]"
