"""Masks as tables of queries: pairs and keys of pieces, and what the planner makes of them."""

from typing import Any

import numpy as np
import pytest
from array_masks import KINDS, random_mask
from mask_oracle import batch_ranges, batch_visible
from packed_batches import pack

from jax_cp_dispatch import PlanConfig
from jax_cp_dispatch._ranks.runtime import native
from jax_cp_dispatch.documents.table import from_segment_ids
from jax_cp_dispatch.masks import Chunked, Ranges, SlidingWindow
from jax_cp_dispatch.planning.request import PlanRequest, native_problem
from jax_cp_dispatch.planning.seen_keys import seen_keys

SHAPE = (2, 60)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_keys_of_pieces_are_those_of_the_mask(kind):
    """Of parts of documents: each key that a query of the part sees, and few others."""
    rng = np.random.default_rng()
    segment_ids, _ = pack(rng, *SHAPE, max_length=40)
    constructor, arrays, pairs = random_mask(kind, rng, segment_ids)
    visible = batch_visible(segment_ids, pairs)
    documents = from_segment_ids("a test", segment_ids, None)
    seen: Any = seen_keys(constructor(*arrays), documents)
    for document, length in enumerate(documents.lengths.tolist()):
        row, first = divmod(int(documents.first[document]), SHAPE[1])
        of_document = visible[row, first : first + length, first : first + length]
        start = int(rng.integers(0, length))
        end = int(rng.integers(start + 1, length + 1))
        part = np.array([document]), np.array([start]), np.array([end])
        assert seen.pairs(*part) == of_document[start:end].sum()
        held = np.zeros(length, bool)
        for _, a, b in zip(*seen.keys_of(*part), strict=True):
            held[a:b] = True
        needed = of_document[start:end].any(0)
        assert (held >= needed).all()
        if kind != "ranges" and end - start < length:
            np.testing.assert_array_equal(held, needed)
        query_first, query_last = seen.table.running_keys(documents.lengths)
        here = slice(seen.table.first[document] + start, seen.table.first[document] + end)
        keys = np.flatnonzero(needed)
        if len(keys):
            assert query_first[here][0] <= keys[0] and query_last[here][-1] > keys[-1]


@pytest.mark.parametrize("mask", [SlidingWindow(9, 4), Chunked(13)], ids=str)
def test_the_planner_makes_the_same_of_numbers_and_of_their_table(mask):
    rng = np.random.default_rng()
    segment_ids, _ = pack(rng, 2, 400, max_length=300)
    documents = from_segment_ids("a test", segment_ids, None)
    assigned = []
    for same in (mask, Ranges(*batch_ranges(mask, segment_ids))):
        seen = seen_keys(same, documents)
        request = PlanRequest(documents, None, 4, seen, PlanConfig(), None)
        columns = (documents.first % documents.columns).tolist()
        sizes = {"columns": columns, "columns_per_rank": 100, "query_cost": 4}
        assigned.append(native.move_queries(native_problem(native.QueryProblem, request, sizes)))
    np.testing.assert_array_equal(*assigned)
