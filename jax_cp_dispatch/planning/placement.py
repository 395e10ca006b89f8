"""`Placement`: where each token of a batch is; reorders arrays and restores them."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, PyTree, Shaped

from jax_cp_dispatch._text import by_group, describe_mask, describe_plan, outline, work_by_share
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.given import check_document_mask
from jax_cp_dispatch.masks import ArrayMask, Mask
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.masks.read import check_mask_order, read_mask_on_host
from jax_cp_dispatch.planning.config import PlanConfig
from jax_cp_dispatch.planning.cuts import describe_cuts
from jax_cp_dispatch.planning.groups import join_plans
from jax_cp_dispatch.planning.piece_table import PieceTable
from jax_cp_dispatch.planning.placed_plan import (
    by_columns,
    expand_ranges,
    pieces_ascend,
    plan_placed,
    put_mask_in_order,
)
from jax_cp_dispatch.planning.plan import Plan, reduce_saved, slice_plan
from jax_cp_dispatch.planning.request import PlanRequest
from jax_cp_dispatch.planning.transfers import check_all_ranks, num_moved


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The assignment of the tokens of a batch `[batch, columns]` to ranks. Picklable; NumPy only.

    Places index the rows of all ranks: rank r holds places `[r * T, (r + 1) * T)`, with `T = batch
    * columns / world_size`; of several groups, rank r of group g is number `g * W + r`, and T that
    of its rows. In an array `[batch, columns, ...]` that is sharded over its columns,
    these are the rank's columns of each batch row, one batch row after another.

    Attributes:
      batch, columns: shape of the batch.
      world_size: number of ranks.
      plans: for `context_parallel_attention(algorithm="placed")`; one for each mask.
      layers: how many layers use each mask, without a common factor.
      made_of: of each group, the batch with each of its masks, and its pieces, for `plan_for`.
      config: the choices with which it was made.
      reason: why the batch does not fit, if this is the fallback of `place_tokens`; else None.
      rank: the rank whose part this is; None: all ranks.
      source, place, tokens: i64 `[P]`; the ranges of tokens that stay together: first token in the
        batch (counted row by row), first place, length. Sorted by place; padding included.
      needed: see `needs`; None if the batch does not fit.
    """

    batch: int
    columns: int
    world_size: int
    plans: tuple[Plan, ...]
    layers: tuple[int, ...]
    config: PlanConfig
    made_of: tuple[tuple[tuple[PlanRequest, ...], PieceTable | None], ...]
    source: Int[np.ndarray, " P"]
    place: Int[np.ndarray, " P"]
    tokens: Int[np.ndarray, " P"]
    needed: PlanConfig | None
    reason: str | None = None
    rank: int | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the first mask; of several groups, a stack of theirs."""
        return self.plans[0]

    @property
    def num_groups(self) -> int:
        """The groups of batch rows, each placed on its own ranks."""
        return len(self.made_of)

    @functools.cached_property
    def groups(self) -> "tuple[Placement, ...]":
        """The placement of each group of batch rows; itself, if there is one."""
        if self.num_groups == 1:
            return (self,)
        batch = self.batch // self.num_groups
        tokens = batch * self.columns

        def group(number: int) -> Placement:
            here = self.place // max(tokens, 1) == number
            of_group = jax.tree.map(lambda x: x[number], self.plans)
            first = number * tokens
            moves = {"source": self.source[here] - first, "place": self.place[here] - first}
            changed = {"batch": batch, "plans": of_group, "made_of": (self.made_of[number],)}
            return dataclasses.replace(self, tokens=self.tokens[here], **moves, **changed)

        return tuple(map(group, range(self.num_groups)))

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents of the batch in placed order, with the plans; of one rank, its columns.

        Documents that were given by their lengths are numbered from 1 in each batch row.
        """
        ids, positions = (
            np.concatenate(x) for x in zip(*map(_ids_and_positions, self.made_of), strict=True)
        )
        ids, positions = self.apply((ids, positions))
        return Documents.in_order(ids, positions, self.plans, order=PLACED, columns=self.columns)

    def plan_for(self, mask: Mask | str) -> Plan:
        """Returns a plan for another mask over the same tokens; `imbalance` tells its balance.

        `documents.with_plan` adds it to the documents.

        Arrays of a mask are in the order of the batch, `[batch, columns]`.

        Raises:
          ValueError: no tokens were placed, or the plan exceeds a capacity of the config.
        """
        op = "Placement.plan_for"
        if self.reason is not None:
            raise ValueError(f"{op}: no tokens were placed. {self.reason}")
        read = read_mask_on_host(op, mask, (self.batch, self.columns))
        batch = self.batch // self.num_groups
        own = lambda n: jax.tree.map(lambda x: x[n * batch : (n + 1) * batch], read)
        plans = [(group._plan_for(op, own(n)),) for n, group in enumerate(self.groups)]
        return join_plans(plans)[0]

    def _plan_for(self, op: str, read: Mask) -> Plan:
        """Returns the plan of a single group."""
        ((requests, pieces),) = self.made_of
        assert pieces is not None
        check_document_mask(op, read, requests[0].documents)
        request = requests[0].with_mask(read)._replace(rank=self.rank)
        if read.has_arrays and self.rank is not None:
            raise ValueError(
                f"{op}: this is the part of rank {self.rank}, which does not know the order of all "
                "tokens. Call it on the placement of all ranks, then slice_of."
            )
        if read.has_query_ranges and not pieces_ascend(pieces):
            raise ValueError(
                f"{op}: a rank holds pieces of a document out of order, and {read} limits the "
                "queries of each key. Pass it to place_tokens, as one of masks."
            )
        in_order = put_mask_in_order(request, (self.source, self.place, self.tokens))
        return plan_placed(request, pieces, in_order)[0]

    def slice_of(self, rank: int) -> "Placement":
        """Returns the part of one rank: the tokens that it holds, and its slice of the plan.

        It is what `place_tokens(..., rank=rank)` returns. Its `apply` returns this rank's columns
        of arrays of the whole batch. What depends on all ranks raises an error.

        Raises:
          ValueError: rank is not in `[0, W)`, this is a part already, or has several groups.
        """
        if self.num_groups > 1:
            raise ValueError(
                f"Placement.slice_of: got {self.num_groups} groups. Call it on one of `groups`."
            )
        plans = tuple(slice_plan("Placement.slice_of", x, rank) for x in self.plans)
        here = self.place // max(self.plan.num_tokens, 1) == rank
        moves = {name: getattr(self, name)[here] for name in ("source", "place", "tokens")}
        return dataclasses.replace(self, plans=plans, rank=rank, **moves)

    __repr__ = outline  # a plan has many arrays; `describe` is for reading
    __reduce__ = reduce_saved

    @functools.cached_property
    def permutation(self) -> Int[np.ndarray, " places"]:
        """The token at each place, counted over the batch row by row; of one rank, `[T]`.

        Read-only, like `inverse`.
        """
        return self._map(self.place, self.source, (self.rank or 0) * self.plan.num_tokens)

    @functools.cached_property
    def inverse(self) -> Int[np.ndarray, " BT"]:
        """The place of each token."""
        self._check_whole("inverse")
        return self._map(self.source, self.place, 0)

    @property
    def needs(self) -> PlanConfig:
        """The smallest capacities for this plan; other choices as in `config`.

        Raises:
          ValueError: the batch did not fit, so nothing was placed. The message says what it needs.
        """
        if self.needed is None:
            raise ValueError(f"Placement.needs: no tokens were placed. {self.reason}")
        return self.needed

    @property
    def pairs_before(self) -> Float32[np.ndarray, "*groups W"]:
        """Query-key pairs of each rank, of all layers, if tokens stay in the order of the batch.

        Of several groups, `[groups, W]`.
        """
        self._check_whole("pairs_before")
        return self._sum(np.asarray(x.pairs_before) for x in self.plans)

    @property
    def imbalance(self) -> Float32[np.ndarray, ""]:
        """Largest work of a rank in all layers by its share; see `PlanConfig.rank_speeds`.

        Of several groups, the largest of all; `describe` also compares the ranks of all groups.
        """
        self._check_whole("imbalance")
        return self._imbalance(self._pairs)

    @property
    def imbalance_before(self) -> Float32[np.ndarray, ""]:
        """`imbalance` if tokens stay in the order of the batch."""
        return self._imbalance(self.pairs_before)

    @property
    def num_kv_tokens_moved_between_nodes(self) -> int:
        """Keys that move between ranks of different nodes, each copy counted; 0 without nodes."""
        op = "Placement.num_kv_tokens_moved_between_nodes"
        return num_moved(op, self.plan.kv_metadata, self.config.ranks_per_node or self.world_size)

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B held ..."]]:
        """Puts token arrays `[batch, columns, ...]`, and masks of them, into placed order.

        Call on the host with NumPy arrays, as a data loader does, or anywhere with JAX arrays.
        Apply it to tokens, labels, positions and segment ids alike. Shift labels by one token
        first: neighbours in placed order need not be neighbours in a document.

        Of one rank's part, the result is `[batch, columns / W, ...]`: the columns of this rank.

        Raises:
          ValueError: an array does not start with `[batch, columns]`.
        """
        return jax.tree.map(self._apply, arrays, is_leaf=_is_whole)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays in placed order back into the order of the batch; the inverse of `apply`."""
        self._check_whole("restore")
        return jax.tree.map(self._restore, arrays, is_leaf=_is_whole)

    def describe(self) -> str:
        """Returns the text of `Plan.describe`, and what layers beside attention move."""
        op = "Placement.describe"
        if self.reason is not None:
            return f"{op}: no tokens were placed. {self.reason}"
        if self.num_groups > 1:
            texts = [x.describe() for x in self.groups]
            return by_group(texts, self._pairs, self.config.rank_speeds)
        plan, config = self.plan, self.config
        constraints = {"speeds": config.rank_speeds, "ranks_per_node": config.ranks_per_node}
        text = describe_plan(op, plan, **constraints)
        lines = [text, "", *describe_cuts(plan.cut_pieces, plan.num_tokens)]
        if len(self.plans) > 1:
            lines.append(f"  masks     all layers together: max/mean {self.imbalance:.3f}")
        for layers, each in zip(self.layers[1:], self.plans[1:], strict=True):
            lines.append(describe_mask(layers, sum(self.layers), each))
        return "\n".join(lines)

    @property
    def _pairs(self) -> Float32[np.ndarray, "*groups W"]:
        return self._sum(np.asarray(x.pairs) for x in self.plans)

    def _sum(self, pairs: Iterable[Any]) -> Any:
        """Returns the sum over the layers."""
        return sum(n * x for n, x in zip(self.layers, pairs, strict=True))

    def _imbalance(self, pairs: Any) -> Float32[np.ndarray, ""]:
        return np.asarray(work_by_share(pairs, self.config.rank_speeds).max(), np.float32)

    def _map(self, start: np.ndarray, value: np.ndarray, first: int) -> np.ndarray:
        """Returns the values of consecutive indices from `first`, of ranges of indices."""
        dtype = np.int32 if self.batch * self.columns < 2**31 else np.int64
        values = expand_ranges(start, value, self.tokens).astype(dtype)
        values += np.arange(first, first + len(values), dtype=dtype)
        values.flags.writeable = False  # `apply` and `restore` use them again
        return values

    def _apply(self, x: Any) -> Any:
        if isinstance(x, Mask):
            check_mask_order("Placement.apply", x, PACKED)
            moved = jax.tree.map(self._apply, x)
            return x.reordered(moved, PLACED) if isinstance(x, ArrayMask) else x
        xp, rest = self._check_array("apply", x)
        x = xp.take(x.reshape(self.batch * self.columns, *rest), self.permutation, axis=0)
        return by_columns(x, self.batch, self._num_held, self.num_groups)

    def _restore(self, x: Any) -> Any:
        if isinstance(x, Mask):
            check_mask_order("Placement.restore", x, PLACED)
            moved = jax.tree.map(self._restore, x)
            return x.reordered(moved, PACKED) if isinstance(x, ArrayMask) else x
        xp, rest = self._check_array("restore", x)
        rows = self.columns // self.world_size
        of_group = self.num_groups, self.batch // self.num_groups
        x = x.reshape(*of_group, self.world_size, rows, *rest).swapaxes(1, 2)
        x = xp.take(x.reshape(self.batch * self.columns, *rest), self.inverse, axis=0)
        return x.reshape(self.batch, self.columns, *rest)

    @property
    def _num_held(self) -> int:
        return self.world_size if self.rank is None else 1

    def _check_whole(self, name: str) -> None:
        check_all_ranks(f"Placement.{name}", self._num_held, self.world_size)

    def _check_array(self, name: str, x: Any) -> tuple[Any, tuple[int, ...]]:
        """Returns the array's module, and its axes after the tokens."""
        if isinstance(x, Documents):
            raise TypeError(
                f"Placement.{name}: got Documents among the arrays. Pass arrays and masks alone: "
                "those in placed order are Placement.documents."
            )
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"Placement.{name}: got a value of type {type(x).__name__}; all leaves need to be "
                "arrays of NumPy or JAX. Pass numpy.asarray of each list."
            )
        if tuple(x.shape[:2]) != (self.batch, self.columns):
            raise ValueError(
                f"Placement.{name}: an array has shape {list(x.shape)} but the placement is for "
                f"[{self.batch}, {self.columns}, ...]. Pad the columns with segment 0, or place "
                "the tokens of this batch."
            )
        return (np if isinstance(x, np.ndarray) else jnp), tuple(x.shape[2:])


def _is_whole(x: Any) -> bool:
    return isinstance(x, Mask | Documents)


def _ids_and_positions(made_of: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and positions of a group, in the order of the batch."""
    request = made_of[0][0]
    table = request.documents
    tokens, shape = table.tokens(), (table.batch, table.columns)
    ids = np.zeros(table.num_tokens, np.int32)
    ids[tokens] = np.repeat(table.ids, table.lengths)
    if request.positions is not None:
        return ids.reshape(shape), np.asarray(request.positions).astype(np.int32)
    positions = np.zeros(table.num_tokens, np.int32)
    positions[tokens] = tokens - np.repeat(table.first, table.lengths)
    return ids.reshape(shape), positions.reshape(shape)
