"""`place_tokens`: assigns the tokens of a batch to ranks."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.documents.given import check_document_mask
from jax_cp_dispatch.documents.table import DocumentTable, Row, document_table
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.planning.config import (
    PLACED_CAPACITIES,
    PlanConfig,
    check_config,
    check_fallback,
    check_ranks,
)
from jax_cp_dispatch.planning.fallback import fallback_plan
from jax_cp_dispatch.planning.groups import (
    Layers,
    PlacedGroup,
    Requests,
    describe_layers,
    join_moves,
    join_plans,
    join_reasons,
    read_layers,
    split_groups,
)
from jax_cp_dispatch.planning.piece_table import PieceTable, lay_out
from jax_cp_dispatch.planning.placed_plan import (
    list_moves,
    no_moves,
    plan_placed,
    put_mask_in_order,
)
from jax_cp_dispatch.planning.placement import Placement
from jax_cp_dispatch.planning.plan import OF_ALL_MASKS, Plan
from jax_cp_dispatch.planning.request import (
    DoesNotFitError,
    PlanRequest,
    check_longest_keys,
    native_problem,
)
from jax_cp_dispatch.planning.seen_keys import seen_keys
from jax_cp_dispatch.planning.transfers import check_rank, order_by_rank

_OP = "place_tokens"


def place_tokens(
    lengths: Iterable[Row] | Row | None = None,
    *,
    world_size: int,
    segment_ids: Int[Any, "B T"] | None = None,
    positions: Int[Any, "B T"] | None = None,
    columns: int | None = None,
    mask: Mask | str | None = None,
    masks: Sequence[Mask | str] | None = None,
    layers: Sequence[int] | None = None,
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
      lengths: tokens of the documents, in order: one list per batch row, or one list for a single
        row. The rest of a row is padding.
      world_size: number of ranks W.
      segment_ids: integers [B, columns], instead of lengths; see `plan_attention`. W must divide
        the columns.
      positions: with segment ids only; a document also ends where they do not increase.
      columns: with lengths only; tokens of a batch row, a multiple of W. None: the longest row,
        rounded up.
      mask: "full", "causal" or an object of `jax_cp_dispatch.masks`; None is causal. With "full", a
        rank that holds any token of a document receives all of its keys.
      masks: several masks instead of one, for a model whose layers differ. The placement balances
        the sum of their pairs and has a plan for each. The keys that move are counted as the union.
      layers: with masks; how many layers use each. None: equally many.
      config: balance tolerance, constraints and capacities.
      fallback: "ring" returns, instead of an error for a batch that exceeds a limit of the config,
        a placement that leaves all tokens where they are. Its plan has the usual shapes, and
        `Plan.fits` is false: use a ring for this batch. Needs all capacities.
      num_groups: groups of consecutive batch rows, each placed on W ranks of its own: the devices
        of `batch_axis`. Their plans are stacked, as by `stack_plans`. With a fallback, all groups
        are placed or none, since one step computes all of them.
      rank: returns the part of this rank alone, like `Placement.slice_of`, but without arrays of
        all ranks, whose counts of rows grow with W * W. It is the index on the mesh axis, not that
        of a process. None: all ranks. With several groups, use `Placement.groups`.
    Returns:
      The placement. Its plans are for arrays in placed order.
    Raises:
      TypeError: lengths or ids are not integers, or `mask` is not a mask.
      ValueError: sizes do not match, a document is not contiguous, or the placement exceeds a
        capacity of the config and there is no fallback.
    """
    check_config(_OP, config)
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
    layers_of = read_layers(_OP, mask, masks, layers)
    shape = documents.batch, documents.columns
    masks_read = [read_mask_on_host(_OP, x, shape) for x in layers_of.masks]
    for read in masks_read:
        check_document_mask(_OP, read, documents)
    _check_groups(documents, num_groups, rank)
    requests_of = [
        tuple(PlanRequest(rows, at, world_size, seen_keys(x, rows), config, rank) for x in own)
        for rows, at, own in split_groups(documents, positions, masks_read, num_groups)
    ]
    request = requests_of[0][0]
    _check_config(request)
    check_fallback(_OP, fallback, config, PLACED_CAPACITIES)
    check_rank(_OP, rank, world_size)
    groups = [_place_group(x, layers_of) for x in requests_of]
    reason = join_reasons(_OP, groups)
    if reason is not None:
        if fallback is None:
            raise DoesNotFitError(reason)
        groups = [_left_in_place(x) for x in groups]
    moves = join_moves(groups, documents.num_tokens // num_groups)
    here = order_by_rank(moves[1] // max(request.num_tokens, 1), rank)
    needed = [x.needed for x in groups]
    return Placement(
        batch=documents.batch,
        columns=documents.columns,
        world_size=world_size,
        plans=join_plans([x.plans for x in groups]),
        layers=layers_of.layers,
        made_of=tuple(x.made_of for x in groups),
        config=config,
        needed=None if reason is not None else _largest(config, needed),
        reason=reason,
        rank=rank,
        source=moves[0][here],
        place=moves[1][here],
        tokens=moves[2][here],
    )


def _check_config(request: PlanRequest) -> None:
    """Requires constraints that match the ranks."""
    check_ranks(_OP, request.config, request.world_size)
    block, num_tokens = request.config.block, request.num_tokens
    if block is not None and block > max(num_tokens, 1):
        raise ValueError(
            f"{_OP}: block is {block} but a rank holds {num_tokens} tokens. Pass "
            f"block<={num_tokens}."
        )


def _check_groups(documents: DocumentTable, num_groups: int, rank: int | None) -> None:
    """Requires groups of equal batch rows, all ranks of them."""
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


def _place_group(requests: Requests, layers: Layers) -> PlacedGroup:
    """Places the tokens of a group, or says why they do not fit; its plans are then fallbacks."""
    try:
        pieces = _place(requests, layers)
        moves = tuple(list_moves(requests[0], pieces))
        plans, needed = _plans(requests, pieces, moves)
    except DoesNotFitError as error:
        text, needs = _capacities_that_suffice(requests, layers)
        plans = tuple(fallback_plan(x, needs, is_placed=True) for x in requests)
        moves = no_moves(requests[0].documents, requests[0].world_size)
        reason = str(error).removeprefix(f"{_OP}: ") + text
        return PlacedGroup(plans, moves, (requests, None), reason=reason)
    return PlacedGroup(plans, moves, (requests, pieces), needed)


def _left_in_place(group: PlacedGroup) -> PlacedGroup:
    """Returns a group as if it did not fit."""
    requests, _ = group.made_of
    needs = np.asarray(group.plans[0].largest_needs)[0]
    plans = tuple(fallback_plan(x, needs, is_placed=True) for x in requests)
    moves = no_moves(requests[0].documents, requests[0].world_size)
    return group._replace(plans=plans, moves=moves, made_of=(requests, None))


def _largest(config: PlanConfig, needed: Sequence[Any]) -> PlanConfig:
    """Returns capacities that suffice for all of these."""
    most = {name: max(getattr(x, name) for x in needed) for name in PLACED_CAPACITIES}
    return dataclasses.replace(config, **most)


def _place(requests: Requests, layers: Layers) -> PieceTable:
    """Returns the pieces of documents in the rows of the ranks."""
    for request in requests:
        check_longest_keys(_OP, request)
    # A table of queries needs the pieces of a document in order; other masks take any order.
    seen = next((x.seen for x in requests if x.seen.table is not None), requests[0].seen)
    return lay_out(_assign(requests, layers), seen)[0]


def _plans(
    requests: Requests, pieces: PieceTable, moves: Sequence[np.ndarray]
) -> tuple[tuple[Plan, ...], PlanConfig]:
    """Returns a plan for each mask, and the capacities that they need."""
    built = [plan_placed(x, pieces, put_mask_in_order(x, moves)) for x in requests]
    first = built[0][0]
    same = {name: getattr(first, name) for name in OF_ALL_MASKS}
    plans = (first, *(dataclasses.replace(x, **same) for x, _ in built[1:]))
    return plans, _largest(requests[0].config, [x for _, x in built])


def _capacities_that_suffice(
    requests: Requests, layers: Layers
) -> tuple[str, Int32[np.ndarray, " 5"]]:
    """Returns a sentence with capacities that suffice, all at once, and `Plan.largest_needs`.

    Without capacities, it is empty.
    """
    none: dict[str, Any] = dict.fromkeys(PLACED_CAPACITIES)
    free = dataclasses.replace(requests[0].config, **none)
    if free == requests[0].config:
        return "", np.zeros(len(PLACED_CAPACITIES), np.int32)
    requests = tuple(x._replace(config=free) for x in requests)
    pieces = _place(requests, layers)
    _, needed = _plans(requests, pieces, list_moves(requests[0], pieces))
    sizes = ", ".join(f"{name}={getattr(needed, name)}" for name in PLACED_CAPACITIES)
    return f" The placement with the best balance needs {sizes}.", np.array(
        [getattr(needed, x) for x in PLACED_CAPACITIES], np.int32
    )


def _assign(requests: Requests, layers: Layers) -> Int[np.ndarray, "P 4"]:
    """Returns the pieces of each rank: rows (rank, document, start, end), sorted."""
    limits = {
        "tokens_per_rank": requests[0].num_tokens,
        "max_received": requests[0].config.kv_capacity,
    }
    problem = native_problem(native.PlacementProblem, requests[0], limits)
    if len(requests) > 1:
        seen = [x.seen for x in requests]
        describe_layers(problem, seen, layers.layers, requests[0].documents)
    assigned = native.place_documents(problem)
    return assigned.astype(np.int64)  # nanobind says "long long"
