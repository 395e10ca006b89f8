"""Checksums that tie a plan to the batch for which it was made.

They are sums over the runs of a rank's rows: rows with one segment id, or with consecutive
positions. So each rank computes the checksum of its own rows locally, and a planner that knows the
runs does not need the rows. NumPy arrays give NumPy, without starting JAX.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt32

from jax_cp_dispatch._window import Window, reach
from jax_cp_dispatch.planner.segment_ids import Ids, mix, words

Words = Int32[Array, "B T"] | Int32[np.ndarray, "B T"]

# What a row of a run adds to the value of the row before it.
ID_STEP, POSITION_STEP = 0, 1
_STEPS = ID_STEP, POSITION_STEP


def checksums(
    x: Words | None, num_ranks: int, *, step: int, num_rows: Any = None
) -> Int32[Array | np.ndarray, " W"]:
    """Returns the checksum of each rank's columns of `words`; 0 for None.

    Different batches have equal checksums with probability 2**-32. With `num_rows`, i32 [W], only
    the first rows of each rank count.
    """
    if x is None:
        return np.zeros(num_ranks, np.int32)
    xp = _module_of(x)
    rows = _bits(x).reshape(x.shape[0], num_ranks, -1).swapaxes(0, 1).reshape(num_ranks, -1)
    follows = rows[:, 1:] == rows[:, :-1] + np.uint32(step)
    begins = xp.concatenate([xp.ones((num_ranks, 1), bool), ~follows], axis=1)
    row = xp.arange(rows.shape[1], dtype=np.int32)[None]
    if num_rows is not None:
        begins &= row < num_rows[:, None]
    hashed = _hash(row.astype(np.uint32), rows)
    return _signed(xp.where(begins, hashed, np.uint32(0)).sum(1, dtype=np.uint32))


def checksums_of_runs(
    rank: Int[np.ndarray, " R"],
    row: Int[np.ndarray, " R"],
    value: Int[np.ndarray, " R"],
    *,
    step: int,
    num_ranks: int,
) -> Int32[np.ndarray, " W"]:
    """Returns `checksums` of runs that cover the rows of every rank, by rank, then by first row.

    Consecutive runs may be one: for example two documents with the same id.
    """
    row, value = (x.astype(np.uint32) for x in (row, value))
    follows = np.zeros(len(rank), bool)
    length = row[1:] - row[:-1]
    follows[1:] = (rank[1:] == rank[:-1]) & (value[1:] == value[:-1] + np.uint32(step) * length)
    total = np.zeros(num_ranks, np.uint32)
    np.add.at(total, rank[~follows], _hash(row, value)[~follows])
    return _signed(total)


def make_stamp(
    ids: Int32[Array | np.ndarray, " W"],
    positions: Int32[Array | np.ndarray, " W"],
    *,
    window: Window | None,
    causal: bool = True,
) -> Int32[Any, "W 3"]:
    """Returns the stamp of a plan from the checksums of each rank's segment ids and positions.

    In each rank's row: the checksum of the whole batch and the mask, then the rank's own two.
    """
    left, right = reach("make_stamp", causal, window)
    xp = _module_of(ids)
    own = xp.stack([ids, positions], axis=1)
    place = np.arange(1, 1 + own.size, dtype=np.uint32).reshape(own.shape)
    behind = 0 if left is None else left + 2
    ahead = 1 if right is None else right + (right > 0)
    seed = np.uint32((behind + 0x9E3779B1 * ahead) & 0xFFFFFFFF)
    each = mix(_bits(own) + place * np.uint32(0x165667B1))
    batch = mix(each.sum(keepdims=True, dtype=np.uint32) + seed)
    return xp.concatenate([xp.broadcast_to(_signed(batch), (len(own), 1)), own], axis=1)


@partial(jax.jit, static_argnames=("num_ranks", "window"))
def stamp_of_batch(
    ids: Words,
    positions: Words | None,
    *,
    num_ranks: int,
    window: int | None,
) -> Int32[Array, "W 3"]:
    """Returns the stamp from `words` of all ranks' values."""
    own = (
        jnp.asarray(checksums(x, num_ranks, step=step))
        for x, step in zip((ids, positions), _STEPS, strict=True)
    )
    return make_stamp(*own, window=window)


def rank_stamp(
    stamp: Int32[Array, " 3"],
    ids: Words | None,
    positions: Words | None,
    *,
    num_rows: Int32[Array, ""] | None = None,
) -> Int32[Array, " 5"]:
    """Returns the checksums sent with an exchange: the batch, then pairs (expected, seen).

    Args:
      stamp: this rank's row of the plan's stamp.
      ids, positions: `words` of this rank's columns; None counts as expected.
      num_rows: rows whose positions count; None: all.
    """
    batch, *expected = stamp
    num_rows = None if num_rows is None else num_rows[None]
    seen = [
        None if ids is None else checksums(ids, 1, step=ID_STEP)[0],
        None
        if positions is None
        else checksums(positions, 1, step=POSITION_STEP, num_rows=num_rows)[0],
    ]
    pairs = [(x, x if y is None else y) for x, y in zip(expected, seen, strict=True)]
    return jnp.stack([batch, *(value for pair in pairs for value in pair)])


def check_batch(
    op: str,
    stamp: Int32[Any, "... 3"],
    segment_ids: Ids,
    positions: Ids | None,
    *,
    num_tokens: int,
    num_rows: Int32[Any, "..."] | None = None,
) -> None:
    """Raises unless the stamp of a plan is that of these arrays; for `validate` of a plan."""
    if stamp.ndim != 2:
        raise ValueError(
            f"{op}: this is not the plan of all ranks of one batch; its stamp has shape "
            f"{stamp.shape}. Validate each plan before stack_plans."
        )
    num_ranks = len(stamp)
    named = {"segment_ids": (segment_ids, None), "positions": (positions, num_rows)}
    for place, (name, (x, counted)) in enumerate(named.items()):
        if x is None:
            continue
        if x.ndim != 2 or x.size != num_ranks * num_tokens or x.shape[1] % num_ranks:
            raise ValueError(
                f"{op}: {name} has shape {x.shape} but the plan is for {num_ranks} ranks of "
                f"{num_tokens} rows. Pass the plan of this batch."
            )
        seen = checksums(words(x), num_ranks, step=_STEPS[place], num_rows=counted)
        differs = np.asarray(stamp)[:, 1 + place] != np.asarray(seen)
        if differs.any():
            raise ValueError(
                f"{op}: the plan was made for another batch: the {name} of rank "
                f"{int(differs.argmax())} are not those of the plan. Pass the plan "
                "of this batch, and placed tokens in placed order."
            )


def _hash(row: UInt32[Any, "..."], value: UInt32[Any, "..."]) -> UInt32[Any, "..."]:
    """Hashes the beginning of a run."""
    return mix(value * np.uint32(0x9E3779B1) + (row + np.uint32(1)) * np.uint32(0x27D4EB2F))


def _module_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _bits(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.view(np.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _signed(x: Any) -> Any:
    return x.view(np.int32) if isinstance(x, np.ndarray) else x.view(jnp.int32)
