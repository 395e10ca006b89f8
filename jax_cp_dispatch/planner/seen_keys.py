"""`SeenKeys`: the pairs of pieces of documents, and the keys that they need, for any mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch.documents.table import DocumentTable
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.planner.query_table import QueryTable, query_table


class KeysOfPieces(NamedTuple):
    """Ranges of keys [start, end) of documents, by piece, then ascending."""

    piece: Int[np.ndarray, " G"]
    start: Int[np.ndarray, " G"]
    end: Int[np.ndarray, " G"]


class SeenKeys(NamedTuple):
    """What the queries of the documents of a batch see.

    Attributes:
      mask: which keys of its document a query sees.
      lengths: tokens of each document.
      table: of each query; None for a mask of numbers, which has closed forms.
    """

    mask: Mask
    lengths: Int[np.ndarray, " D"]
    table: QueryTable | None

    def pairs(self, document: Any, start: Any, end: Any) -> Int[np.ndarray, " P"]:
        """Returns the query-key pairs of the queries [start, end) of documents."""
        if self.table is None:
            return self._numbers.pairs(start, end, self.lengths[document])
        return self.table.pairs(document, start, end)

    def keys_of(self, document: Any, start: Any, end: Any) -> KeysOfPieces:
        """Returns the keys that each piece [start, end) of a document needs."""
        piece, lengths = np.arange(len(document)), self.lengths[document]
        if self.table is None:
            return KeysOfPieces(piece, *self._numbers.keys_of(start, end, lengths))
        is_cut = end - start < lengths
        whole = piece[~is_cut]
        found = [KeysOfPieces(whole, np.zeros_like(whole), lengths[whole])]
        for i in piece[is_cut].tolist():
            keys = self.table.needed(int(document[i]), int(start[i]), int(end[i]))
            found.append(KeysOfPieces(np.full(len(keys[0]), i), *keys))
        joined = [np.concatenate(x) for x in zip(*found, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return KeysOfPieces(*(x[order] for x in joined))

    def most_keys(self) -> tuple[int, int]:
        """Returns the document with the query that sees most keys, and their number."""
        if self.table is None:
            document = int(self.lengths.argmax())
            return document, int(self._numbers.num_keys(int(self.lengths[document])))
        keys = np.diff(self.table.pairs_before)
        query = int(keys.argmax())
        return int(np.searchsorted(self.table.first, query, side="right")) - 1, int(keys[query])

    def describe_to(self, problem: Any, num_tokens: int) -> None:
        """Sets the mask of a problem of `csrc/planner` that has its lengths already.

        `num_tokens`: of the batch; no number of a mask needs to be larger.
        """
        if self.table is None:
            problem.pairs = self._numbers.clipped(num_tokens).pair_count
        else:
            problem.set_table(self.table.pairs_before, *self.table.running_keys(self.lengths))

    @property
    def _numbers(self) -> StaticMask:
        assert isinstance(self.mask, StaticMask)
        return self.mask


def seen_keys(mask: Mask, documents: DocumentTable) -> SeenKeys:
    """Returns what the queries of a batch see."""
    table = query_table(mask, documents) if mask.has_arrays else None
    return SeenKeys(mask, documents.lengths, table)
