"""Finds the rank with the most work before planning, and the document that causes it."""

from typing import NamedTuple

import numpy as np

from jax_cp_dispatch.cost import Workload
from jax_cp_dispatch.documents.table import documents_of
from jax_cp_dispatch.planner.piece_table import home_pieces
from jax_cp_dispatch.planner.seen_keys import seen_keys
from jax_cp_dispatch.planner.transfers import sums_of_ranks


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
    pieces = home_pieces(documents, n)
    seen = seen_keys(workload.visible, documents)
    pairs = seen.pairs(pieces.document, pieces.start, pieces.end)
    work = sums_of_ranks(pieces.rank, pairs, n)
    rank = int(work.argmax())
    here = np.flatnonzero(pieces.rank == rank)
    at = int(here[pairs[here].argmax()])
    document = int(pieces.document[at])
    batch_row = int(documents.first[document]) // columns
    earlier = sum(map(len, rows[:batch_row]))
    return Slowest(
        rank=rank,
        imbalance=float(work[rank] / work.mean()),
        share=float(pairs[at] / work[rank]),
        batch_row=batch_row,
        document=document - earlier,
        queries=int(pieces.end[at] - pieces.start[at]),
        length=int(documents.lengths[document]),
    )
