"""Key ranges of a plan: a short list of runs of rows, expanded inside the program.

A run is a piece of a document in consecutive rows of a rank. Within it, the key range of a row
depends only on its position in the document, and on the document's length unless the mask is
causal.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._scans import running_max
from jax_cp_dispatch.masks import StaticMask
from jax_cp_dispatch.planner.piece_table import PieceTable
from jax_cp_dispatch.planner.slices import order_by_rank, slice_of_rank
from jax_cp_dispatch.planner.transfers import number_on_rank

# More than any device holds: sums of two row numbers have 32 bits.
_MOST_ROWS = 2**30


class LocalRuns(NamedTuple):
    """The runs of one rank.

    Attributes:
      row: the first row of each run, ascending; unused runs have the number of rows, or more.
      position: the place in its document of that row's token; -1 in a run of padding.
      origin: the received row where the document starts, or would start.
      num_rows: rows in use; all others are padding. -1: a fallback, see `fallback`.
      length: tokens of the document; None if the mask is causal.
    """

    row: Int32[Any, " P"]
    position: Int32[Any, " P"]
    origin: Int32[Any, " P"]
    num_rows: Int32[Any, ""]
    length: Int32[Any, " P"] | None = None


def list_runs(
    pieces: PieceTable,
    counts: Int[np.ndarray, " W"],
    *,
    num_runs: int,
    num_rows: int,
    lengths: Int[np.ndarray, " D"] | None = None,
    rank: int | None = None,
) -> dict[str, Int32[np.ndarray, "held P"]]:
    """Returns run_row, run_position, run_origin and, with lengths, run_length of a plan, by name.

    Args:
      pieces: by rank and row.
      counts: pieces of each rank.
      lengths: tokens of each document.
      num_runs: size of the arrays, at least the largest count.
      num_rows: of a rank; the row of unused runs.
      rank: the only one whose runs are returned; None: all.
    """
    pieces = PieceTable._make(x[order_by_rank(pieces.rank, rank)] for x in pieces)
    counts, ranks = counts[slice_of_rank(rank)], pieces.rank - (rank or 0)
    index = ranks, number_on_rank(ranks, counts)
    runs = {
        "run_row": (pieces.row, num_rows),
        "run_position": (pieces.start, 0),
        "run_origin": (pieces.origin, 0),
    }
    if lengths is not None:
        runs["run_length"] = lengths[pieces.document], 0
    arrays = {}
    for name, (values, fill) in runs.items():
        arrays[name] = np.full((len(counts), num_runs), fill, np.int32)
        arrays[name][index] = values
    return arrays


def local_runs(plan: Any, rank: Any) -> LocalRuns:
    """Returns the runs of one rank.

    `plan` has the arrays of all ranks, or is a slice for one rank, with or without the leading
    axis. NumPy arrays and a concrete rank give NumPy.
    """
    names = "run_row", "run_position", "run_origin", "num_rows", "run_length"
    runs = [x for name in names if (x := getattr(plan, name, None)) is not None]
    if jnp.ndim(plan.run_row) > 1:
        rank = 0 if jnp.shape(plan.run_row)[0] == 1 else rank
        on_host = all(isinstance(x, np.ndarray) for x in runs) and not isinstance(rank, jax.Array)
        runs = [(x if on_host else jnp.asarray(x))[rank] for x in runs]
    return LocalRuns(*runs)


def key_ranges(
    runs: LocalRuns, *, size: int, mask: StaticMask
) -> tuple[Int32[Any, " size"], Int32[Any, " size"]]:
    """Returns the first and last + 1 received key of each of `size` rows; (0, 0) for padding.

    In a fallback, which nothing may follow, all rows attend to row 0: it is NaN if no error can be
    raised.

    Args:
      runs: of one rank; with their `length` unless the mask is causal.
      mask: which keys a query sees.
    """
    row, position, origin, num_rows, length = runs
    on_host = all(isinstance(x, np.ndarray | np.generic) for x in (row, position, origin, num_rows))
    xp: Any = np if on_host else jnp
    index = xp.arange(size, dtype=np.int32)
    if on_host:
        run = np.maximum(np.searchsorted(row, index, side="right") - 1, 0)
    else:
        # `jnp.searchsorted` cannot be traced inside a partly manual `shard_map` in JAX 0.10.
        numbers = jnp.arange(row.shape[0], dtype=jnp.int32)
        run = running_max(jnp.zeros(size, jnp.int32).at[row].max(numbers, mode="drop"))
    first = position[run]
    start = origin[run]
    end = None if length is None else start + length[run]
    here = index - row[run] + first + start
    mask = mask.clipped(_MOST_ROWS)
    is_query = (index < num_rows) & (first >= 0)
    none = (num_rows < 0).astype(np.int32)
    k_start = xp.where(is_query, mask.k_start(here, start), 0).astype(np.int32)
    return k_start, xp.where(is_query, mask.k_end(here, start, end), none).astype(np.int32)
