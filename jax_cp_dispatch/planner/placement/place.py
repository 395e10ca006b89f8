"""`place_tokens`: assigns the tokens of a batch to ranks; reorders arrays and restores them."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.planner.describe import column_of
from jax_cp_dispatch.planner.documents import Documents, documents_of
from jax_cp_dispatch.planner.pieces import Pieces, lay_out
from jax_cp_dispatch.planner.placement.build import build_plan
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan, describe_placed
from jax_cp_dispatch.planner.placement.stamp import stamp_of_pieces

_OP = "place_tokens"

# Lengths of the documents of a batch row.
Row: TypeAlias = Iterable[int | np.integer]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The assignment of the tokens of a batch `[batch, columns]` to ranks. Picklable; NumPy only.

    Places index the rows of all ranks: rank r holds places `[r * T, (r + 1) * T)`, with `T = batch
    * columns / world_size`. In an array `[batch, columns, ...]` that is sharded over its columns,
    these are the rank's columns of each batch row, one batch row after another.

    Attributes:
      batch, columns: shape of the batch.
      world_size: number of ranks.
      plan: for `context_parallel_attention(algorithm="placed")`.
      source, place, tokens: i64 `[P]`; the ranges of tokens that stay together: first token in the
        batch (counted row by row), first place, length. Sorted by place; padding included.
    """

    batch: int
    columns: int
    world_size: int
    plan: PlacedPlan
    source: Int[np.ndarray, " P"]
    place: Int[np.ndarray, " P"]
    tokens: Int[np.ndarray, " P"]

    @functools.cached_property
    def permutation(self) -> Int[np.ndarray, " BT"]:
        """The token at each place, counted over the batch row by row."""
        return self._map(self.place, self.source)

    @functools.cached_property
    def inverse(self) -> Int[np.ndarray, " BT"]:
        """The place of each token."""
        return self._map(self.source, self.place)

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts token arrays `[batch, columns, ...]` into placed order.

        Call on the host with NumPy arrays, as a data loader does, or anywhere with JAX arrays.
        Apply it to tokens, labels, positions and segment ids alike. Shift labels by one token
        first: neighbours in placed order need not be neighbours in a document.

        Raises:
          ValueError: an array does not start with `[batch, columns]`.
        """
        return jax.tree.map(lambda x: self._move("apply", x), arrays)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays in placed order back into the order of the batch; the inverse of `apply`."""
        return jax.tree.map(lambda x: self._move("restore", x), arrays)

    def describe(self) -> str:
        """Returns the text of `PlacedPlan.describe`, with the batch columns of its pieces."""
        sizes = {"columns": self.columns, "num_tokens": self.plan.num_tokens}
        where = column_of(self.source, self.place, **sizes)
        return describe_placed(self.plan, "Placement.describe", where)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _map(self, first: np.ndarray, value: np.ndarray) -> np.ndarray:
        total = self.batch * self.columns
        dtype = np.int32 if total < 2**31 else np.int64
        order = np.argsort(first)
        shift = (value - first)[order].astype(dtype)
        return np.arange(total, dtype=dtype) + np.repeat(shift, self.tokens[order])

    def _move(self, name: str, x: Any) -> Any:
        if tuple(x.shape[:2]) != (self.batch, self.columns):
            raise ValueError(
                f"Placement.{name}: an array has shape {list(x.shape)} but the placement is for "
                f"[{self.batch}, {self.columns}, ...]. Pad the columns as segment 0, or place the "
                "tokens of this batch."
            )
        xp = np if isinstance(x, np.ndarray) else jnp
        rest = x.shape[2:]
        rows = self.columns // self.world_size
        if name == "apply":
            x = xp.take(x.reshape(-1, *rest), self.permutation, axis=0)
            x = x.reshape(self.world_size, self.batch, rows, *rest).swapaxes(0, 1)
        else:
            x = x.reshape(self.batch, self.world_size, rows, *rest).swapaxes(0, 1)
            x = xp.take(x.reshape(-1, *rest), self.inverse, axis=0)
        return x.reshape(self.batch, self.columns, *rest)


def place_tokens(
    lengths: Iterable[Row] | Row | None = None,
    *,
    world_size: int,
    segment_ids: Int[Any, "B T"] | None = None,
    positions: Int[Any, "B T"] | None = None,
    columns: int | None = None,
    window: int | None = None,
    config: PlacementConfig = PlacementConfig(),
) -> Placement:
    """Assigns each token of a batch to a rank, once, so that few keys move.

    All ranks get the same number of tokens and nearly equal work of causal attention, counted in
    query-key pairs. Queries then stay on their rank in every layer. Only keys and values move, and
    in the backward pass their gradients. Most documents stay whole on one rank; long ones are cut.

    Call on the host, also in worker processes of a data loader: it does not initialize JAX and uses
    no device. Equal inputs give equal placements in every process and on every machine. Not
    differentiable.

    Args:
      lengths: tokens of the documents, in order: one list per batch row, or one list for a single
        row. The rest of a row is padding.
      world_size: number of ranks W.
      segment_ids: integers [B, columns], instead of lengths; see `plan_attention`. W must divide
        the columns.
      positions: with segment ids only; a document also ends where they do not increase.
      columns: with lengths only; tokens of a batch row, a multiple of W. None: the longest row,
        rounded up.
      window: maximum keys to which a query attends, the last of which is its own; None: no limit.
      config: balance tolerance and capacities.
    Returns:
      The placement. Its plan is for arrays in placed order.
    Raises:
      TypeError: lengths or ids are not integers.
      ValueError: sizes do not match, a document is not contiguous, or a capacity is too small.
    """
    documents = documents_of(_OP, lengths, segment_ids, positions, columns, world_size)
    if window is not None and not (isinstance(window, (int, np.integer)) and window >= 1):
        raise ValueError(f"{_OP}: window is {window}; it needs to be at least 1, or None.")
    num_tokens = documents.num_tokens // world_size
    assigned = native.place_documents(
        np.ascontiguousarray(documents.lengths, np.int64),
        num_ranks=world_size,
        tokens_per_rank=num_tokens,
        window=min(window or 0, documents.num_tokens),
        tolerance_ppm=round(1e6 * config.balance_tolerance),
    )
    pieces, spans = lay_out(assigned.astype(np.int64), window)  # nanobind says "long long"
    sizes = {"world_size": world_size, "num_tokens": num_tokens, "window": window}
    stamp = stamp_of_pieces(documents, pieces, positions, **sizes)
    plan = build_plan(pieces, spans, stamp, **sizes, config=config)
    moves = _moves(documents, pieces, num_tokens, world_size)
    return Placement(
        batch=documents.batch,
        columns=documents.columns,
        world_size=world_size,
        plan=plan,
        source=moves[0],
        place=moves[1],
        tokens=moves[2],
    )


def _moves(documents: Documents, pieces: Pieces, num_tokens: int, world_size: int):
    """Returns source, place and length of every range, by place; padding comes last per rank."""
    tokens = pieces.end - pieces.start
    source = documents.first[pieces.document] + pieces.start
    place = pieces.rank * num_tokens + pieces.row
    used = np.zeros(world_size, np.int64)
    np.add.at(used, pieces.rank, tokens)
    free_first = np.arange(world_size) * num_tokens + used
    padding = _match(*documents.padding(), free_first, num_tokens - used)
    moves = [np.concatenate(x) for x in zip((source, place, tokens), padding, strict=True)]
    order = np.argsort(moves[1])
    return [x[order] for x in moves]


def _match(source, source_tokens, place, place_tokens):
    """Splits two lists of ranges with equal sums into ranges of equal length on both sides."""
    source_ends, place_ends = np.cumsum(source_tokens), np.cumsum(place_tokens)
    ends = np.union1d(source_ends, place_ends)
    ends = ends[ends > 0]
    starts = np.concatenate([[0], ends])[:-1].astype(np.int64)
    i = np.searchsorted(source_ends, starts, side="right")
    j = np.searchsorted(place_ends, starts, side="right")
    first = [
        of[k] + starts - (ends_of[k] - tokens_of[k])
        for of, ends_of, tokens_of, k in (
            (source, source_ends, source_tokens, i),
            (place, place_ends, place_tokens, j),
        )
    ]
    return first[0], first[1], ends - starts
