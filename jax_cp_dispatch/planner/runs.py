"""Key ranges of a plan: a short list of runs of rows, expanded inside the program.

A run is a piece of a document in consecutive rows of a rank. Within it, the key range of the next
row is that of the row before, one key further.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch.planner.blocks import running_max
from jax_cp_dispatch.planner.pieces import Pieces
from jax_cp_dispatch.planner.transfers import number_on_rank


def runs_of_pieces(
    pieces: Pieces, counts: Int[np.ndarray, " W"], *, num_runs: int, num_rows: int
) -> dict[str, Int32[np.ndarray, "W P"]]:
    """Returns run_row, run_position and run_origin of a plan, by name.

    Args:
      pieces: by rank and row.
      counts: pieces of each rank.
      num_runs: size of the arrays, at least the largest count.
      num_rows: of a rank; the row of unused runs.
    """
    index = pieces.rank, number_on_rank(pieces.rank, counts)
    runs = {
        "run_row": (pieces.row, num_rows),
        "run_position": (pieces.start, 0),
        "run_origin": (pieces.origin, 0),
    }
    arrays = {}
    for name, (values, fill) in runs.items():
        arrays[name] = np.full((len(counts), num_runs), fill, np.int32)
        arrays[name][index] = values
    return arrays


def local_runs(plan: Any, rank: Any) -> list[Any]:
    """Returns run_row, run_position, run_origin and num_rows of one rank.

    `plan` has these fields for all ranks, or is a slice for one rank, with or without the leading
    axis. NumPy arrays and a concrete rank give NumPy.
    """
    runs = [plan.run_row, plan.run_position, plan.run_origin, plan.num_rows]
    if jnp.ndim(plan.run_row) == 1:
        return runs
    rank = 0 if jnp.shape(plan.run_row)[0] == 1 else rank
    on_host = all(isinstance(x, np.ndarray) for x in runs) and not isinstance(rank, jax.Array)
    return [(x if on_host else jnp.asarray(x))[rank] for x in runs]


def key_ranges(
    row: Int32[Any, " P"],
    position: Int32[Any, " P"],
    origin: Int32[Any, " P"],
    num_rows: Int32[Any, ""],
    *,
    size: int,
    window: int | None,
) -> tuple[Int32[Any, " size"], Int32[Any, " size"]]:
    """Returns the first and last + 1 received key of each of `size` rows.

    Args:
      row: the first row of each run, ascending; unused runs have `size` or more.
      position: the place in its document of that row's token; -1 in a run of padding.
      origin: the received row where the document starts, or would start.
      num_rows: rows in use; all others are padding.
      window: maximum keys to which a query attends, or None.
    Returns:
      The ranges; (0, 0) for padding.
    """
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
    place = index - row[run] + first
    earliest = 0 if window is None else xp.maximum(place - (window - 1), 0)
    is_query = (index < num_rows) & (first >= 0)
    start = xp.where(is_query, origin[run] + earliest, 0).astype(np.int32)
    return start, xp.where(is_query, origin[run] + place + 1, 0).astype(np.int32)
