"""What one placement serves: groups of batch rows, and the masks of layers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import read_mask
from jax_cp_dispatch.planning.config import PlanConfig
from jax_cp_dispatch.planning.piece_table import PieceTable
from jax_cp_dispatch.planning.plan import Plan
from jax_cp_dispatch.planning.request import PlanRequest
from jax_cp_dispatch.planning.seen_keys import SeenKeys, query_table
from jax_cp_dispatch.planning.stack import stack_plans

_MOST = 2**15  # layers, after the common factor is removed: sums of pairs keep 64 bits

# A group of batch rows with each of the masks.
Requests = tuple[PlanRequest, ...]


class PlacedGroup(NamedTuple):
    """How the tokens of a group are placed.

    Attributes:
      plans: one for each mask.
      moves: source, place and length of every range of tokens.
      made_of: its rows with each mask, and its pieces; no pieces if nothing was placed.
      needed: the smallest capacities; None if the group does not fit.
      reason: why it does not fit, without the name of the function; or None.
    """

    plans: tuple[Plan, ...]
    moves: tuple[Int[np.ndarray, " P"], ...]
    made_of: tuple[Requests, PieceTable | None]
    needed: PlanConfig | None = None
    reason: str | None = None


def split_groups(
    documents: DocumentTable, positions: Any, masks: Sequence[Any], num_groups: int
) -> Iterator[tuple[DocumentTable, Any, list[Any]]]:
    """Yields the documents, positions and masks of each group of consecutive batch rows."""
    rows = documents.batch // num_groups
    group = documents.first // max(rows * documents.columns, 1)
    for number in range(num_groups):
        of_group = slice(number * rows, (number + 1) * rows)
        held = group == number
        first = documents.first[held] - number * rows * documents.columns
        own = {x: getattr(documents, x)[held] for x in ("lengths", "ids", "given_ids")}
        part = documents._replace(**own, first=first, batch=rows)
        own = None if positions is None else np.asarray(positions)[of_group]
        yield part, own, [jax.tree.map(lambda x, rows=of_group: x[rows], mask) for mask in masks]


def join_plans(of_groups: Sequence[tuple[Plan, ...]]) -> tuple[Plan, ...]:
    """Returns a plan for each mask: stacked if there are several groups."""
    if len(of_groups) == 1:
        return of_groups[0]
    return tuple(stack_plans(plans) for plans in zip(*of_groups, strict=True))


def join_moves(groups: Sequence[PlacedGroup], group_tokens: int) -> list[np.ndarray]:
    """Returns the ranges of all groups, in tokens and places of the whole batch."""
    shifted = [
        (source + n * group_tokens, place + n * group_tokens, tokens)
        for n, (source, place, tokens) in enumerate(group.moves for group in groups)
    ]
    return [np.concatenate(x) for x in zip(*shifted, strict=True)]


def join_reasons(op: str, groups: Sequence[PlacedGroup]) -> str | None:
    """Returns why some groups do not fit, or None."""
    number = lambda n: f"in group {n} of {len(groups)}, " if len(groups) > 1 else ""
    reasons = [
        f"{op}: {number(n)}{group.reason}"
        for n, group in enumerate(groups)
        if group.reason is not None
    ]
    return "\n".join(reasons) or None


class Layers(NamedTuple):
    """Masks, and the layers that use each, without a common factor."""

    masks: tuple[Mask, ...]
    layers: tuple[int, ...]


def read_layers(
    op: str, mask: Any, masks: Sequence[Any] | None, layers: Sequence[int] | None
) -> Layers:
    """Reads `mask=`, `masks=` and `layers=`."""
    if masks is None:
        if layers is not None:
            raise ValueError(f"{op}: got layers without masks. Pass masks, one for each number.")
        return Layers((read_mask(op, mask),), (1,))
    if mask is not None:
        raise ValueError(f"{op}: got both mask and masks. Pass masks alone.")
    if not isinstance(masks, list | tuple) or not masks:
        raise ValueError(f"{op}: masks is {masks!r}; pass a tuple of at least one mask.")
    seen = tuple(read_mask(op, x) for x in masks)
    layers = (1,) * len(seen) if layers is None else layers
    if not isinstance(layers, list | tuple) or len(layers) != len(seen):
        raise ValueError(
            f"{op}: layers is {layers!r} for {len(seen)} masks. Pass one number for each mask."
        )
    for x in layers:
        check_integer(op, "layers", x)
    factor = math.gcd(*(int(x) for x in layers))
    reduced = [int(x) // max(factor, 1) for x in layers]
    if min(layers) < 1 or max(reduced) > _MOST:
        raise ValueError(f"{op}: layers is {layers!r}; pass numbers from 1 to {_MOST}.")
    return Layers(seen, tuple(reduced))


def describe_layers(
    problem: Any, seen: Sequence[SeenKeys], layers: Sequence[int], documents: DocumentTable
) -> None:
    """Sets several masks of a `PlacementProblem`, and how many layers use each."""
    if all(x.table is None for x in seen):
        masks = [x.mask for x in seen if isinstance(x.mask, StaticMask)]
        counts = (x.clipped(documents.num_tokens).pair_count for x in masks)
        problem.set_layers(list(zip(counts, layers, strict=True)))
        return
    tables = [query_table(x.mask, documents) if x.table is None else x.table for x in seen]
    pairs = sum(n * x.pairs_before for n, x in zip(layers, tables, strict=True))
    first, last = zip(*(x.running_keys(documents.lengths) for x in tables), strict=True)
    problem.set_table(pairs, np.min(first, axis=0), np.max(last, axis=0))
