"""Describes a plan for people: which rank sends how many rows to which."""

from typing import Any

import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._text import RANKS_HEADER, count, rank_table, short_count, table
from jax_cp_dispatch.metadata.validate import host_value

_LARGEST_MATRIX = 12  # ranks; its lines then have at most 100 characters
_NUM_PAIRS = 8
_NUM_RANKS = 3


def describe_metadata(metadata: Any) -> str:
    """Returns the text of `Metadata.describe`."""
    op = "Metadata.describe"
    if known(op, metadata.seq_len).ndim == 1:
        return _describe_view(op, metadata)
    sent = rows_between_ranks(op, metadata)
    moved = rows_moved(sent)
    in_use, slots = known(op, metadata.num_seqs), np.shape(metadata.seq_len)[1]
    away = sent - np.diag(np.diag(sent))
    return "\n".join(
        [
            f"Metadata: {metadata.world_size} ranks",
            f"  rows      {count(sent.sum())} received; {count(moved)} of them from another rank",
            f"  slots     at most {count(int(in_use.max()))} of {count(slots)} in use "
            f"(rank {in_use.argmax()})",
            "",
            table(RANKS_HEADER, rank_table(_ends(sent, "rows"))),
            "",
            describe_traffic("rows", sent),
            "",
            "  Ranks that receive the most rows from others",
            *(
                f"    rank {rank}: {count(int(away[:, rank].sum()))}; {_partners(away[:, rank])}"
                for rank in np.argsort(-away.sum(0), kind="stable")[:_NUM_RANKS]
            ),
        ]
    )


def _ends(sent: Int[np.ndarray, "W W"], what: str) -> dict[str, np.ndarray]:
    own = np.diag(sent)
    return {
        f"{what} kept": own,
        f"{what} sent to others": sent.sum(1) - own,
        f"{what} received from others": sent.sum(0) - own,
    }


def _describe_view(op: str, metadata: Any) -> str:
    received = known(op, metadata.num_recv_tokens)[:-1].astype(np.int64)
    target, tokens = known(op, metadata.dst_rank), known(op, metadata.seq_len)
    tokens = tokens.reshape(*tokens.shape, *[1] * (target.ndim - 1))
    sent = np.zeros(metadata.world_size, np.int64)
    np.add.at(sent, target[target >= 0], np.broadcast_to(tokens, target.shape)[target >= 0])
    return "\n".join(
        [
            f"Metadata: the view of one of {metadata.world_size} ranks",
            f"  sends     {count(sent.sum())} rows; {_partners(sent, 'to')}",
            f"  receives  {count(received.sum())} rows; {_partners(received)}",
        ]
    )


def _partners(rows: Int[np.ndarray, " W"], direction: str = "from") -> str:
    order = [rank for rank in np.argsort(-rows, kind="stable") if rows[rank] > 0]
    if not order:
        return f"{direction} no rank"
    text = ", ".join(f"{count(int(rows[rank]))} {direction} rank {rank}" for rank in order[:2])
    rest = order[2:]
    more = f", {count(int(rows[rest].sum()))} {direction} {len(rest)} other ranks" if rest else ""
    return text + more


def known(op: str, value: Any) -> np.ndarray:
    """Returns an array's values; raises TypeError if they are not known on this host."""
    found = host_value(value)
    if found is None:
        raise TypeError(
            f"{op}: the plan is traced, or on other hosts. Call it outside jit, on a host that has "
            "the plan of all ranks."
        )
    return found


def rows_between_ranks(op: str, metadata: Any) -> Int[np.ndarray, "W W"]:
    """Returns the rows that each rank (first axis) sends to each (second axis), and keeps.

    Raises:
      TypeError: the plan is traced.
      ValueError: it is one rank's part of the plan.
    """
    received = known(op, metadata.num_recv_tokens)
    if received.ndim != 2 or len(received) != metadata.world_size:
        raise ValueError(
            f"{op}: num_recv_tokens has shape {list(received.shape)} but the plan of all "
            f"{metadata.world_size} ranks has [{metadata.world_size}, {metadata.world_size + 1}]. "
            "Call it on that plan; of stacked plans, on one of them."
        )
    return received[:, : metadata.world_size].T.astype(np.int64)


def rows_moved(sent: Int[np.ndarray, "W W"]) -> int:
    """Returns the rows that go to another rank."""
    return int(sent.sum() - np.trace(sent))


def describe_traffic(what: str, sent: Int[np.ndarray, "W W"]) -> str:
    """Returns a matrix of the rows between ranks, or of many ranks the pairs with most rows."""
    num_ranks = len(sent)
    away = sent - np.diag(np.diag(sent))
    pairs = int(np.count_nonzero(away))
    if not pairs:
        return f"  No {what} move between ranks."
    if num_ranks <= _LARGEST_MATRIX:
        header = ["from \\ to", *map(str, range(num_ranks))]
        rows = [
            [str(i), *(short_count(x) if x else "." for x in sent[i])] for i in range(num_ranks)
        ]
        title = f"  {what.capitalize()} from each rank to each; on the diagonal those that stay"
        return f"{title}\n{table(header, rows, indent=4)}"
    order = np.argsort(-away, axis=None, kind="stable")[: min(_NUM_PAIRS, pairs)]
    shown = [(i, j) for i, j in zip(*np.unravel_index(order, away.shape), strict=True)]
    rows = [[f"rank {i} to rank {j}", count(int(away[i, j]))] for i, j in shown]
    share = sum(away[i, j] for i, j in shown) / away.sum()
    title = f"  {what.capitalize()} move between {count(pairs)} pairs of ranks; the largest"
    rest = f"    These are {share:.0%} of all {what} that move."
    return f"{title}\n{table(('', what), rows, indent=4)}\n{rest}"
