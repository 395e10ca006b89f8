"""Counts what ranks send, by the kind of link: inside a node, or between nodes."""

from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Integer

from jax_cp_dispatch.cost.hardware import Hardware


class Traffic(NamedTuple):
    """Rows or bytes that ranks send in one exchange.

    Attributes:
      inside: to other ranks of the same node; mean of all ranks.
      between: to ranks of other nodes; mean of all ranks.
      most_inside, most_between: the most that one rank sends or receives; they determine the time.
      capacity: rows of a rank's receive buffer, which attention rewrites even if they are empty;
        None: the rows that it receives and its own.
    """

    inside: float
    between: float
    most_inside: float
    most_between: float
    capacity: int | None = None

    @property
    def total(self) -> float:
        """What a rank sends, on average."""
        return self.inside + self.between

    def times(self, factor: int | float) -> "Traffic":
        """Returns the multiple of it: for example, rows times the bytes of a row."""
        inside, between, most_inside, most_between = (factor * x for x in self[:4])
        return Traffic(inside, between, most_inside, most_between)

    def plus(self, other: "Traffic") -> "Traffic":
        """Returns the traffic of two parts of one exchange; the busiest ranks may be the same."""
        both = zip(self[:4], other[:4], strict=True)
        inside, between, most_inside, most_between = (x + y for x, y in both)
        return Traffic(inside, between, most_inside, most_between)


Rows: TypeAlias = int | float | Traffic


def rows_by_link(
    sent: Integer[np.ndarray, "num_ranks num_ranks"],
    *,
    ranks_per_node: int | None = None,
    capacity: int | None = None,
) -> Traffic:
    """Returns the rows that move to other ranks, by the kind of link.

    Args:
      sent: rows that each rank (rows) sends to each rank (columns); its own do not count. For a
        plan, `Metadata.rows_between_ranks()` of its keys, or of its queries.
      ranks_per_node: ranks of a node, one node after another; None: all are in one node.
      capacity: rows of the receive buffer of each rank, if known.
    Raises:
      TypeError: `sent` does not have integers for all pairs of ranks.
      ValueError: the ranks cannot be divided into nodes.
    """
    sent = np.asarray(sent)
    if (
        sent.ndim != 2
        or sent.shape[0] != sent.shape[1]
        or not np.issubdtype(sent.dtype, np.integer)
    ):
        raise TypeError(
            f"rows_by_link: sent is {sent.dtype} of shape {sent.shape}; it needs to be integers "
            "[num_ranks, num_ranks], what each rank sends to each. For a plan, pass "
            "plan.kv_metadata.rows_between_ranks()."
        )
    n = len(sent)
    size = min(ranks_per_node or n, n)
    if n % size:
        raise ValueError(
            f"rows_by_link: {n} ranks cannot be divided into nodes of {size}. Pass a divisor of "
            f"{n} as ranks_per_node."
        )
    node = np.arange(n) // size
    same = node[:, None] == node
    moving = np.where(np.eye(n, dtype=bool), 0, np.asarray(sent, np.float64))
    mean, most = [], []
    for where in (same, ~same):
        part = np.where(where, moving, 0)
        mean.append(float(part.sum() / n))
        most.append(float(max(part.sum(0).max(), part.sum(1).max())))
    return Traffic(mean[0], mean[1], most[0], most[1], capacity)


def spread(rows: Rows, num_ranks: int, hardware: Hardware) -> Traffic:
    """Returns rows as they are, or a number of rows sent equally to all other ranks."""
    if isinstance(rows, Traffic):
        return rows
    between = (num_ranks - hardware.node_size(num_ranks)) / max(num_ranks - 1, 1)
    parts = float(rows) * (1 - between), float(rows) * between
    return Traffic(*parts, *parts)


class Receivers(NamedTuple):
    """The ranks to which each rank sends in one exchange.

    Attributes:
      inside: in its own node.
      between: in other nodes.
      senders: ranks of a node that send to other nodes at the same time.
    """

    inside: int
    between: int
    senders: int


NEXT_RANK = Receivers(1, 1, 1)


def all_others(num_ranks: int, hardware: Hardware) -> Receivers:
    """Returns the receivers if each rank sends to all others."""
    size = hardware.node_size(num_ranks)
    return Receivers(size - 1, num_ranks - size, size)


def exchange_seconds(
    sent: Traffic,
    receivers: Receivers,
    num_ranks: int,
    hardware: Hardware,
    own_bytes: int | float = 0,
) -> float:
    """Returns the seconds of one exchange; both kinds of links work at once.

    `own_bytes` stay on their rank; only "shared_memory" copies them.
    """
    n = num_ranks
    if n == 1 or not sent.total:
        return 0.0
    if hardware.topology == "shared_memory":
        return hardware.exchange_seconds(sent.total + own_bytes, num_ranks=n, inside=1)
    inside = between = 0.0
    if sent.most_inside:
        message = sent.most_inside / receivers.inside
        inside = hardware.exchange_seconds(message, num_ranks=n, inside=receivers.inside)
    if sent.most_between:
        message = sent.most_between / receivers.between
        options = {"outside": receivers.between, "senders": receivers.senders}
        between = hardware.exchange_seconds(message, num_ranks=n, **options)
    return max(inside, between)
