"""Finds the rank with the most work before planning, and the document that causes it."""

from typing import NamedTuple

import numpy as np

from jax_cp_dispatch.cost import Workload
from jax_cp_dispatch.documents.table import documents_of
from jax_cp_dispatch.planner.planned_pieces import pieces_at_home
from jax_cp_dispatch.planner.seen_keys import seen_keys


class Slowest(NamedTuple):
    """The rank with the most work if tokens stay as they are, and where its work comes from.

    Attributes:
      rank: its number.
      imbalance: its work divided by the mean of all ranks.
      share: of its work that the part of one document makes.
      batch_row, document: number of that document in its batch row, from 0, empty ones not counted.
      queries, length: tokens of the document on the rank, and in total.
    """

    rank: int
    imbalance: float
    share: float
    batch_row: int
    document: int
    queries: int
    length: int


def slowest_rank(workload: Workload) -> Slowest:
    """Returns it for a workload with at least one token."""
    n = workload.num_ranks
    columns = n * workload.tokens_per_rank
    rows = [[x for x in row if x] for row in workload.rows]
    documents = documents_of("plan", world_size=n, lengths=rows, columns=columns)
    pieces = pieces_at_home(documents, n)
    document = np.searchsorted(documents.first, pieces.first)
    pairs = seen_keys(workload.visible, documents).pairs(document, pieces.start, pieces.end)
    work = pieces.per_rank(pairs, n)
    rank = int(work.argmax())
    here = np.flatnonzero(pieces.rank == rank)
    at = int(here[pairs[here].argmax()])
    batch_row = int(pieces.first[at]) // columns
    earlier = sum(map(len, rows[:batch_row]))
    return Slowest(
        rank=rank,
        imbalance=float(work[rank] / work.mean()),
        share=float(pairs[at] / work[rank]),
        batch_row=batch_row,
        document=int(document[at]) - earlier,
        queries=int(pieces.end[at] - pieces.start[at]),
        length=int(pieces.length[at]),
    )
