"""Checks the limits of a placement that no array size expresses, before and after planning."""

import numpy as np

from jax_cp_dispatch._window import Reach
from jax_cp_dispatch.planner.constraints import check_longest_keys, check_ranks
from jax_cp_dispatch.planner.documents import Documents
from jax_cp_dispatch.planner.pieces import Pieces
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.sizes import DoesNotFitError

_OP = "place_tokens"


def check_config(config: PlacementConfig, *, world_size: int, num_tokens: int) -> None:
    """Requires constraints that match the ranks."""
    check_ranks(_OP, config, world_size)
    for name in ("min_piece", "block"):
        if getattr(config, name) > max(num_tokens, 1):
            raise ValueError(
                f"{_OP}: {name} is {getattr(config, name)} but a rank holds {num_tokens} tokens. "
                f"Pass {name}<={num_tokens}."
            )


def check_lengths(
    documents: Documents, config: PlacementConfig, *, num_tokens: int, within: Reach
) -> None:
    """Rejects limits that no placement keeps, with the document that exceeds them."""
    check_longest_keys(_OP, config, documents, within)
    lengths = documents.lengths
    if not len(lengths):
        return
    document = int(lengths.argmax())
    longest = int(lengths[document])
    away = longest - num_tokens
    if config.max_away is not None and away > config.max_away:
        raise DoesNotFitError(
            f"{_OP}: {documents.name(document)} has {longest} tokens but a rank holds "
            f"{num_tokens}, so at least {away} are away from home, but max_away is "
            f"{config.max_away}. Pass max_away>={away} or None in PlacementConfig."
        )
    num_pieces = -(-longest // max(num_tokens, 1))
    if num_pieces > 1 and longest < num_pieces * config.min_piece:
        raise DoesNotFitError(
            f"{_OP}: {documents.name(document)} has {longest} tokens but a rank holds {num_tokens},"
            f" so one of its {num_pieces} pieces has at most {longest // num_pieces} tokens, but "
            f"min_piece is {config.min_piece}. Pass min_piece<={longest // num_pieces}."
        )


def check_pieces(documents: Documents, pieces: Pieces, config: PlacementConfig) -> None:
    """Rejects a placement that exceeds `max_away` or `min_piece`."""
    lengths = documents.lengths
    tokens = pieces.end - pieces.start
    if config.min_piece > 1:
        missing = np.minimum(lengths[pieces.document], config.min_piece) - tokens
        if missing.max(initial=0) > 0:
            at = int(missing.argmax())
            raise DoesNotFitError(
                f"{_OP}: rank {pieces.rank[at]} would hold a piece of {tokens[at]} tokens of "
                f"{documents.name(pieces.document[at])} but min_piece is {config.min_piece}. Pass "
                "less, a larger balance_tolerance, or more padding."
            )
    if config.max_away is not None:
        away, home = _away(lengths, pieces, tokens)
        if away.max(initial=0) > config.max_away:
            document = int(away.argmax())
            raise DoesNotFitError(
                f"{_OP}: {away[document]} tokens of {documents.name(document)} would be away "
                f"from its home, rank {home[document]}, but max_away is {config.max_away}. Pass "
                f"max_away>={away[document]}, or more padding."
            )


def limits_kept(documents: Documents, pieces: Pieces) -> dict[str, int]:
    """Returns the largest `min_piece` and the least `max_away` that the pieces keep."""
    lengths, tokens = documents.lengths, pieces.end - pieces.start
    cut = tokens[tokens < lengths[pieces.document]]
    away, _ = _away(lengths, pieces, tokens)
    return {
        "min_piece": int(cut.min(initial=tokens.max(initial=1))),
        "max_away": int(away.max(initial=0)),
    }


def _away(lengths: np.ndarray, pieces: Pieces, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, per document, its tokens outside its home, and the home."""
    num_ranks = int(pieces.rank.max(initial=0)) + 1
    held, index = np.unique(pieces.document * num_ranks + pieces.rank, return_inverse=True)
    sums = np.zeros(len(held), np.int64)
    np.add.at(sums, index, tokens)
    document, rank = held // num_ranks, held % num_ranks
    away, home = lengths.astype(np.int64), np.zeros(len(lengths), np.int64)
    order = np.argsort(sums, kind="stable")  # the largest comes last and stays
    away[document[order]] = lengths[document[order]] - sums[order]
    home[document[order]] = rank[order]
    return away, home
