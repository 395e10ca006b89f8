"""`place_tokens` assigns the tokens of a batch to ranks; a `Placement` reorders arrays."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import check_positive, check_type
from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch._text import by_group, describe_mask, describe_plan, outline, work_by_share
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import check_document_mask, check_moved, permuted
from jax_cp_dispatch.documents.table import Row, document_table
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.planning.config import (
    PLACED_CAPACITIES,
    PlanConfig,
    check_fallback,
    check_ranks,
)
from jax_cp_dispatch.planning.on_host import fallback_plan, plan_placed
from jax_cp_dispatch.planning.plan import Plan, reduce_saved, slice_plan, stack_plans
from jax_cp_dispatch.planning.request import (
    DoesNotFitError,
    PlannedPieces,
    PlanRequest,
    QueryTable,
    check_all_ranks,
    check_longest_keys,
    check_rank,
    lay_out,
    native_problem,
    num_moved,
    rank_sums,
    read_layers,
)
from jax_cp_dispatch.planning.runs import describe_cuts


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The assignment of the tokens of a batch `[batch, columns]` to ranks. Picklable; NumPy only.

    A place is a row of a rank, counted over all ranks: rank r holds places `[r * T, (r + 1) * T)`,
    with `T = batch * columns / world_size`. In an array `[batch, columns, ...]` whose columns are
    sharded over the ranks, these are the rank's columns of the first batch row, then those of the
    second, and so on. Each of several groups has its own batch rows and W ranks. T then counts the
    tokens of one of these ranks, and rank r of group g is number `g * W + r`.

    Attributes:
      batch, columns: shape of the batch.
      world_size: number of ranks.
      plans: for `context_parallel_attention(algorithm="placed")`; one for each mask.
      layers: the weight of each mask in the work, as integers without a common factor.
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
    made_of: tuple[tuple[tuple[PlanRequest, ...], PlannedPieces | None], ...]
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
        ids, positions = [], []
        for (request, *_), _ in self.made_of:
            table = request.documents
            number = table.numbers()
            ids.append(np.append(np.int32(0), table.ids)[number])
            first = np.append(0, table.first % table.columns)[number]
            counted = np.where(number > 0, np.arange(table.columns) - first, 0)
            given = counted if request.positions is None else np.asarray(request.positions)
            positions.append(given.astype(np.int32))
        ids, positions = self.apply((np.concatenate(ids), np.concatenate(positions)))
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
        if read.has_arrays and self.rank is not None:
            raise ValueError(
                f"{op}: this is the part of rank {self.rank}, which does not know the order of all "
                "tokens. Call it on the placement of all ranks, then slice_of."
            )
        plans, batch = [], self.batch // self.num_groups
        for number, group in enumerate(self.groups):
            ((requests, pieces),) = group.made_of
            assert pieces is not None
            rows = slice(number * batch, (number + 1) * batch)
            own = jax.tree.map(lambda x, rows=rows: x[rows], read)
            check_document_mask(op, own, requests[0].documents)
            if own.has_query_ranges:
                order = np.lexsort((pieces.row, pieces.document, pieces.rank))
                rank, document, start, *_ = pieces.take(order)
                follows = (rank[1:] == rank[:-1]) & (document[1:] == document[:-1])
                if (follows & (start[1:] < start[:-1])).any():
                    raise ValueError(
                        f"{op}: a rank holds pieces of a document out of order, and {own} limits "
                        "the queries of each key. Pass it to place_tokens, as one of masks."
                    )
            request = requests[0].with_mask(own)._replace(rank=self.rank)
            moves = group.source, group.place, group.tokens
            plans.append((plan_placed(request, pieces, _put_mask_in_order(request, moves)),))
        return _join_plans(plans)[0]

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
        return _expanded(self.place, self.source, self.tokens, self.batch * self.columns)

    @functools.cached_property
    def inverse(self) -> Int[np.ndarray, " BT"]:
        """The place of each token."""
        self._check_whole("inverse")
        return _expanded(self.source, self.place, self.tokens, self.batch * self.columns)

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

        For several groups, they are `[groups, W]`.
        """
        self._check_whole("pairs_before")
        return self._sum("pairs_before")

    @property
    def imbalance(self) -> Float32[np.ndarray, ""]:
        """Largest work of a rank in all layers by its share; see `PlanConfig.rank_speeds`.

        For several groups, it is the largest; `describe` also compares the ranks of all groups.
        """
        self._check_whole("imbalance")
        return self._imbalance(self._sum("pairs"))

    @property
    def imbalance_before(self) -> Float32[np.ndarray, ""]:
        """`imbalance` if tokens stay in the order of the batch."""
        return self._imbalance(self.pairs_before)

    @property
    def num_kv_tokens_moved_between_nodes(self) -> int:
        """Keys that move between ranks of different nodes, each copy counted; 0 without nodes."""
        op = "Placement.num_kv_tokens_moved_between_nodes"
        size = self.config.node_size(self.world_size)
        return num_moved(op, self.plan.kv_metadata, size or self.world_size)

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B held ..."]]:
        """Puts token arrays `[batch, columns, ...]`, and masks of them, into placed order.

        Call on the host with NumPy arrays, as a data loader does, or anywhere with JAX arrays.
        Apply it to tokens, labels, positions and segment ids alike. Shift labels by one token
        first: neighbours in placed order need not be neighbours in a document.

        For one rank's part, the result is `[batch, columns / W, ...]`: the columns of this rank.

        Raises:
          ValueError: an array does not start with `[batch, columns]`.
        """
        check_moved("Placement.apply", arrays, (self.batch, self.columns), PACKED)
        return permuted(arrays, self._apply, PLACED)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays in placed order back into the order of the batch; the inverse of `apply`."""
        self._check_whole("restore")
        check_moved("Placement.restore", arrays, (self.batch, self.columns), PLACED)
        return permuted(arrays, self._restore, PACKED)

    def describe(self) -> str:
        """Returns the text of `Plan.describe`, and what layers beside attention move."""
        op = "Placement.describe"
        if self.reason is not None:
            return f"{op}: no tokens were placed. {self.reason}"
        if self.num_groups > 1:
            texts = [x.describe() for x in self.groups]
            return by_group(texts, self._sum("pairs"), self.config.rank_speeds)
        plan, config = self.plan, self.config
        size = config.node_size(self.world_size)
        constraints = {"speeds": config.rank_speeds, "ranks_per_node": size}
        text = describe_plan(op, plan, **constraints)
        lines = [text, "", *describe_cuts(plan.cut_pieces, plan.num_tokens)]
        if len(self.plans) > 1:
            lines.append(f"  masks     all layers together: max/mean {self.imbalance:.3f}")
        for layers, each in zip(self.layers[1:], self.plans[1:], strict=True):
            lines.append(describe_mask(layers, sum(self.layers), each))
        return "\n".join(lines)

    def _sum(self, pairs: str) -> Any:
        """Returns the sum over the layers."""
        of_plans = zip(self.layers, self.plans, strict=True)
        return sum(n * np.asarray(getattr(plan, pairs)) for n, plan in of_plans)

    def _imbalance(self, pairs: Any) -> Float32[np.ndarray, ""]:
        return np.asarray(work_by_share(pairs, self.config.rank_speeds).max(), np.float32)

    def _apply(self, x: Any) -> Any:
        xp = np if isinstance(x, np.ndarray) else jnp
        x = xp.take(x.reshape(self.batch * self.columns, *x.shape[2:]), self.permutation, axis=0)
        return _by_columns(x, self.batch, self._num_held, self.num_groups)

    def _restore(self, x: Any) -> Any:
        xp, shape = np if isinstance(x, np.ndarray) else jnp, x.shape
        of_group = self.num_groups, self.batch // self.num_groups
        rows = self.columns // self.world_size
        x = x.reshape(*of_group, self.world_size, rows, *shape[2:]).swapaxes(1, 2)
        x = xp.take(x.reshape(self.batch * self.columns, *shape[2:]), self.inverse, axis=0)
        return x.reshape(shape)

    @property
    def _num_held(self) -> int:
        return self.world_size if self.rank is None else 1

    def _check_whole(self, name: str) -> None:
        check_all_ranks(f"Placement.{name}", self._num_held, self.world_size)


# ---- `place_tokens`: assigns the tokens of a batch to ranks.

_OP = "place_tokens"
# Fields that are equal in the plans of all masks of a placement.
_OF_ALL_MASKS = ("run_row", "run_position", "run_length", "cut_pieces", "num_rows")
Requests = Sequence[PlanRequest]  # of a group of batch rows, with each of the masks


def place_tokens(
    lengths: Iterable[Row] | Row | None = None,
    *,
    world_size: int,
    segment_ids: Int[Any, "B T"] | None = None,
    positions: Int[Any, "B T"] | None = None,
    columns: int | None = None,
    mask: Mask | str | None = None,
    masks: Sequence[Mask | str] | None = None,
    layers: Sequence[int | float | np.number] | None = None,
    config: PlanConfig = PlanConfig(),
    fallback: str | None = None,
    num_groups: int = 1,
    rank: int | None = None,
) -> Placement:
    """Assigns each token of a batch to a rank, once, so that few keys move.

    All ranks get the same number of tokens and nearly equal work, counted in query-key pairs.
    Queries then stay on their rank in every layer. Only keys and values move, and in the backward
    pass their gradients. Most documents stay whole on one rank; long ones are cut.

    Call on the host, also in worker processes of a data loader: it does not initialize JAX and uses
    no device. Equal inputs give equal placements in every process and on every machine. Not
    differentiable.

    Args:
      lengths, columns, world_size: see `plan_attention`.
      segment_ids: instead of lengths, see `plan_attention`.
      positions: with segment ids only; a document also ends where they do not increase.
      mask: "full", "causal" or an object of `jax_cp_dispatch.masks`; None is causal. With "full", a
        rank that holds any token of a document receives all of its keys.
      masks: several masks instead of one, for a model whose layers differ. The placement balances
        the sum of their pairs and has a plan for each. The keys that move are counted as the union.
      layers: with masks; how many layers use each, or what a pair of each costs, in any unit:
        FLOPs, or measured seconds, also fractional. Ratios are kept to 2**-15. None: equal.
      config: balance tolerance, constraints and capacities.
      fallback: "ring" returns, instead of an error for a batch that exceeds a limit of the config,
        a placement that leaves all tokens where they are. Its plan is as in `plan_attention`.
        Needs all capacities.
      num_groups: groups of consecutive batch rows, each placed on W ranks of its own: the devices
        of `batch_axis`. Their plans are stacked, as by `stack_plans`. With a fallback, all groups
        are placed or none, since one step computes all of them.
      rank: returns the part of this rank alone, like `Placement.slice_of`; see `plan_attention`.
        With several groups, use `Placement.groups`.
    Returns:
      The placement. Its plans are for arrays in placed order.
    Raises:
      TypeError: lengths or ids are not integers, or `mask` is not a mask.
      ValueError: sizes do not match, a document is not contiguous, or the placement exceeds a
        capacity of the config and there is no fallback.
    """
    check_type(_OP, "config", config, PlanConfig, "Omit it for the default.")
    check_positive(_OP, world_size=world_size)
    world_size = int(world_size)
    documents = document_table(
        _OP,
        world_size=world_size,
        lengths=lengths,
        segment_ids=segment_ids,
        positions=positions,
        columns=columns,
    )
    masks_read, layers = read_layers(_OP, mask, masks, layers)
    shape = documents.batch, documents.columns
    masks_read = [read_mask_on_host(_OP, x, shape) for x in masks_read]
    for read in masks_read:
        check_document_mask(_OP, read, documents)
    check_positive(_OP, num_groups=num_groups)
    if documents.batch % num_groups:
        raise ValueError(
            f"{_OP}: num_groups is {num_groups}, which must divide the {documents.batch} batch "
            "rows. Pass the number of devices of batch_axis, and pad the batch with rows of "
            "segment id 0."
        )
    if num_groups > 1 and rank is not None:
        raise ValueError(
            f"{_OP}: got rank with num_groups={num_groups}. Omit rank, and call slice_of on one of "
            "Placement.groups."
        )
    check_ranks(_OP, config, world_size)
    num_tokens = documents.num_tokens // num_groups // world_size
    if config.block is not None and config.block > max(num_tokens, 1):
        raise ValueError(
            f"{_OP}: block is {config.block} but a rank holds {num_tokens} tokens. Pass "
            f"block<={num_tokens}."
        )
    check_fallback(_OP, fallback, config, PLACED_CAPACITIES)
    check_rank(_OP, rank, world_size)
    request = PlanRequest(documents, positions, world_size, config, rank)
    groups = list(_split_groups(request, masks_read, num_groups))
    placed: list[Any] = []
    reasons = []
    for number, requests in enumerate(groups):
        none: dict[str, Any] = dict.fromkeys(PLACED_CAPACITIES)
        free = [x._replace(config=dataclasses.replace(config, **none)) for x in requests]
        best = _assigned(free, layers)
        try:  # first the placement with the best balance
            placed.append(_place(requests, best))
            continue
        except DoesNotFitError:
            pass
        try:
            placed.append(_place(requests, _assigned(requests, layers)))
        except DoesNotFitError as error:
            placed.append(_place(free, best))
            needs = zip(PLACED_CAPACITIES, _largest_needs(placed[-1][2]).tolist(), strict=True)
            sizes = ", ".join(f"{name}={x}" for name, x in needs)
            where = f"in group {number} of {num_groups}, " if num_groups > 1 else ""
            reasons.append(
                f"{_OP}: {where}{str(error).removeprefix(f'{_OP}: ')} The placement with the best "
                f"balance needs {sizes}."
            )
    if reasons and fallback is None:
        raise DoesNotFitError("\n".join(reasons))
    if reasons:
        placed = [_left_in_place(*of_group) for of_group in zip(groups, placed, strict=True)]
    pieces, of_groups, plans = zip(*placed, strict=True)
    size = documents.num_tokens // num_groups
    moves = []
    for number, (source, place, tokens) in enumerate(of_groups):
        here = slice(None) if rank is None else place // max(num_tokens, 1) == rank
        moves.append((number * size + source[here], number * size + place[here], tokens[here]))
    source, place, tokens = (np.concatenate(x) for x in zip(*moves, strict=True))
    plans = _join_plans(plans)
    needed: Any = dict(zip(PLACED_CAPACITIES, _largest_needs(plans).tolist(), strict=True))
    return Placement(
        batch=documents.batch,
        columns=documents.columns,
        world_size=world_size,
        plans=plans,
        layers=layers,
        config=config,
        made_of=tuple((tuple(x), y) for x, y in zip(groups, pieces, strict=True)),
        source=source,
        place=place,
        tokens=tokens,
        needed=None if reasons else dataclasses.replace(config, **needed),
        reason="\n".join(reasons) or None,
        rank=rank,
    )


def _split_groups(
    request: PlanRequest, masks: Sequence[Mask], num: int
) -> Iterator[list[PlanRequest]]:
    """Yields the requests of each group of consecutive batch rows, one for each mask."""
    documents, positions = request.documents, request.positions
    rows = documents.batch // num
    group = documents.first // max(rows * documents.columns, 1)
    for number in range(num):
        of_group = slice(number * rows, (number + 1) * rows)
        held = group == number
        first = documents.first[held] - number * rows * documents.columns
        fields = {x: getattr(documents, x)[held] for x in ("lengths", "ids", "given_ids")}
        own = request._replace(
            documents=documents._replace(**fields, first=first, batch=rows),
            positions=None if positions is None else np.asarray(positions)[of_group],
        )
        cut = lambda x, rows=of_group: x[rows]
        yield [own.with_mask(jax.tree.map(cut, mask)) for mask in masks]


# The pieces of documents in the rows of the ranks, or None; what `_list_moves` returns; the plans.
Placed: TypeAlias = tuple[PlannedPieces | None, Sequence[np.ndarray], tuple[Plan, ...]]


def _assigned(requests: Requests, layers: tuple[int, ...]) -> PlannedPieces:
    """Returns the pieces of documents in the rows of the ranks of a group, for all of its masks.

    Raises:
      DoesNotFitError: `kv_capacity` is too small.
    """
    request = requests[0]
    for each in requests:
        check_longest_keys(_OP, each)
    limits = {"tokens_per_rank": request.num_tokens, "max_received": request.config.kv_capacity}
    problem = native_problem(native.PlacementProblem, requests, limits, layers)
    assigned = native.place_documents(problem).astype(np.int64)  # nanobind says "long long"
    # A table of queries needs the pieces of a document in order; other masks take any order.
    with_table = (x for x in requests if isinstance(x.seen, QueryTable))
    return lay_out(assigned, next(with_table, request))[0]


def _place(requests: Requests, pieces: PlannedPieces) -> Placed:
    """Plans each mask of a group, of which these are the pieces.

    Raises:
      DoesNotFitError: a capacity of the config is too small.
    """
    moves = _list_moves(requests[0], pieces)
    plans = [plan_placed(x, pieces, _put_mask_in_order(x, moves)) for x in requests]
    same = {name: getattr(plans[0], name) for name in _OF_ALL_MASKS}
    plans[1:] = [dataclasses.replace(x, **same) for x in plans[1:]]
    return pieces, moves, tuple(plans)


def _left_in_place(requests: Requests, placed: Placed) -> Placed:
    """Returns the fallback of a group that needs what this placement needs."""
    documents, num_ranks = requests[0].documents, requests[0].num_ranks
    rows = documents.columns // num_ranks
    rank, batch = np.divmod(np.arange(num_ranks * documents.batch), documents.batch)
    source = batch * documents.columns + rank * rows
    moves = source, np.arange(len(source)) * rows, np.full(len(source), rows)
    needs = _largest_needs(placed[2])
    return None, moves, tuple(fallback_plan(x, needs, is_placed=True) for x in requests)


def _largest_needs(plans: Sequence[Plan]) -> Int32[np.ndarray, " 5"]:
    """Returns capacities that suffice for all of these, in the order of `PLACED_CAPACITIES`."""
    return np.max([np.reshape(x.largest_needs, (-1, 5)).max(0) for x in plans], axis=0)


def _join_plans(of_groups: Sequence[tuple[Plan, ...]]) -> tuple[Plan, ...]:
    """Returns a plan for each mask: stacked if there are several groups."""
    if len(of_groups) == 1:
        return of_groups[0]
    return tuple(stack_plans(plans) for plans in zip(*of_groups, strict=True))


# ---- The order of placed tokens: ranges of them that move from the batch to places.


def _list_moves(request: PlanRequest, pieces: PlannedPieces) -> list[np.ndarray]:
    """Returns source, place and length of every range, by place; padding comes last per rank."""
    documents, num_ranks, num_tokens = request.documents, request.num_ranks, request.num_tokens
    tokens = pieces.end - pieces.start
    source = documents.first[pieces.document] + pieces.start
    place = pieces.rank * num_tokens + pieces.row
    used = rank_sums(pieces.rank, tokens, num_ranks)

    # Gaps between documents, and the rows that are left on each rank, are as many tokens. Both are
    # cut where one of them ends.
    free = np.arange(num_ranks) * num_tokens + used, num_tokens - used
    sides = [(first, size, np.cumsum(size)) for first, size in (documents.padding(), free)]
    ends = np.union1d(sides[0][2], sides[1][2])
    ends = ends[ends > 0]
    starts = np.concatenate([[0], ends])[:-1].astype(np.int64)
    padding = []
    for first, size, end in sides:
        at = np.searchsorted(end, starts, side="right")
        padding.append(first[at] + starts - (end[at] - size[at]))
    padding.append(ends - starts)

    moves = [np.concatenate(x) for x in zip((source, place, tokens), padding, strict=True)]
    order = np.argsort(moves[1])
    return [x[order] for x in moves]


def _expanded(
    start: Int[np.ndarray, " P"],
    value: Int[np.ndarray, " P"],
    tokens: Int[np.ndarray, " P"],
    num_tokens: int,
) -> Int[np.ndarray, " N"]:
    """Returns the value of each index of ranges of consecutive indices; read-only.

    `num_tokens`: of the batch; no value is larger.
    """
    dtype = np.int32 if num_tokens < 2**31 else np.int64
    order = np.argsort(start)
    values = np.repeat((value - start)[order], tokens[order]).astype(dtype)
    first = int(start.min(initial=num_tokens))
    values += np.arange(first, first + len(values), dtype=dtype)
    values.flags.writeable = False
    return values


def _by_columns(
    x: Shaped[Any, "places ..."], batch: int, num_held: int, num_groups: int = 1
) -> Shaped[Any, "B T ..."]:
    """Returns rows of ranks, one rank of a group after another, as columns of the batch rows."""
    rest = x.shape[1:]
    rows = x.shape[0] // max(batch * num_held, 1)
    x = x.reshape(num_groups, num_held, batch // num_groups, rows, *rest).swapaxes(1, 2)
    return x.reshape(batch, num_held * rows, *rest)


def _put_mask_in_order(request: PlanRequest, moves: Sequence[np.ndarray]) -> Mask | None:
    """Returns a mask with arrays in placed order; None for others.

    `moves`: source, place and length of every range, of all ranks.
    """
    if not request.mask.has_arrays:
        return None
    source, place, tokens = moves
    token = _expanded(place, source, tokens, request.documents.num_tokens)
    batch = request.documents.batch
    put = lambda x: _by_columns(np.asarray(x).reshape(-1)[token], batch, request.num_ranks)
    return jax.tree.map(put, request.mask)
