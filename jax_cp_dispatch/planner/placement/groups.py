"""The groups of batch rows, each placed on its own ranks: together, so that all are or none."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.planner.piece_table import PieceTable
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan
from jax_cp_dispatch.planner.request import PlanRequest
from jax_cp_dispatch.planner.stack import stack_plans

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

    plans: tuple[PlacedPlan, ...]
    moves: tuple[Int[np.ndarray, " P"], ...]
    made_of: tuple[Requests, PieceTable | None]
    needed: PlacementConfig | None = None
    reason: str | None = None


def rows_of_groups(
    documents: DocumentTable, positions: Any, masks: Sequence[Any], num_groups: int
) -> Iterator[tuple[DocumentTable, Any, list[Any]]]:
    """Yields the documents, positions and masks of each group of consecutive batch rows."""
    rows = documents.batch // num_groups
    group = documents.first // max(rows * documents.columns, 1)
    for number in range(num_groups):
        of_group = slice(number * rows, (number + 1) * rows)
        held = group == number
        first = documents.first[held] - number * rows * documents.columns
        part = DocumentTable(
            documents.lengths[held], first, documents.ids[held], rows, documents.columns
        )
        own = None if positions is None else np.asarray(positions)[of_group]
        yield part, own, [jax.tree.map(lambda x, rows=of_group: x[rows], mask) for mask in masks]


def joined_plans(of_groups: Sequence[tuple[PlacedPlan, ...]]) -> tuple[PlacedPlan, ...]:
    """Returns a plan for each mask: stacked if there are several groups."""
    if len(of_groups) == 1:
        return of_groups[0]
    return tuple(stack_plans(plans) for plans in zip(*of_groups, strict=True))


def joined_moves(groups: Sequence[PlacedGroup], group_tokens: int) -> list[np.ndarray]:
    """Returns the ranges of all groups, in tokens and places of the whole batch."""
    shifted = [
        (source + n * group_tokens, place + n * group_tokens, tokens)
        for n, (source, place, tokens) in enumerate(group.moves for group in groups)
    ]
    return [np.concatenate(x) for x in zip(*shifted, strict=True)]


def joined_reasons(op: str, groups: Sequence[PlacedGroup]) -> str | None:
    """Returns why some groups do not fit, or None."""
    number = lambda n: f"in group {n} of {len(groups)}, " if len(groups) > 1 else ""
    reasons = [
        f"{op}: {number(n)}{group.reason}"
        for n, group in enumerate(groups)
        if group.reason is not None
    ]
    return "\n".join(reasons) or None
