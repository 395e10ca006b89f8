"""Fills the ranks with documents."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.plan_command.lengths import Lengths

_MOST_ROWS = 2**31 - 1


class Batch(NamedTuple):
    """Documents that fill the ranks.

    Attributes:
      rows: lengths of the documents of each batch row, without empty ones.
      tokens_per_rank: of each batch row.
      num_cut: documents of which only the beginning fits.
      num_left_out: documents of which nothing fits.
      sources: what `rows` were made from.
    """

    rows: tuple[tuple[int, ...], ...]
    tokens_per_rank: int
    num_cut: int
    num_left_out: int
    sources: Sequence[Lengths]

    def name(self, batch_row: int, document: int) -> str:
        """Says where a document of `rows` was read."""
        lengths, name = self.sources[batch_row]
        with_tokens = (i for i, length in enumerate(lengths) if length)
        return name(next(itertools.islice(with_tokens, document, None)))


def fill_ranks(rows: Sequence[Lengths], *, num_ranks: int, tokens_per_rank: int | None) -> Batch:
    """Cuts each batch row to the tokens of the ranks.

    Args:
      rows: from `read_lengths`.
      num_ranks: that share each batch row.
      tokens_per_rank: of each batch row; None: as many as the longest row needs.
    Raises:
      InputError: plans cannot number the tokens of a rank, or count the pairs.
    """
    if tokens_per_rank is None:
        tokens_per_rank = -(-max(sum(row.lengths) for row in rows) // num_ranks)
    space = num_ranks * tokens_per_rank
    if len(rows) * tokens_per_rank > _MOST_ROWS:
        raise InputError(
            f"a rank would hold {len(rows) * tokens_per_rank} tokens, but plans number rows with "
            "32 bits. Pass more --ranks, or a smaller --tokens-per-rank."
        )
    kept, num_cut, num_left_out = [], 0, 0
    for row in rows:
        total, used = 0, []
        for length in filter(None, row.lengths):
            part = min(length, space - total)
            num_cut += 0 < part < length
            num_left_out += part == 0
            total += part
            if part:
                used.append(part)
        kept.append(tuple(used))
    if sum(x**2 for used in kept for x in used) >= 2**62:
        raise InputError(
            "the documents have more than 2**61 query-key pairs, the most that a plan counts. Pass "
            "shorter documents, or fewer of them."
        )
    return Batch(tuple(kept), tokens_per_rank, num_cut, num_left_out, rows)
