"""`Received`: what ranks receive in a plan made inside `jit`; and the sizes of its arrays."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class Received(NamedTuple):
    """What ranks receive: a sequence of blocks of queries by rank, then in global order.

    Blocks without queries come last, with rank W. A block of queries needs keys from the first
    that a query of it sees to the last. Those that its rank does not have from earlier blocks are a
    contiguous range of columns, because first and last keys never decrease in global order.
    """

    block: Int32[Array, " G"]  # in global order
    rank: Int32[Array, " G"]
    row: Int32[Array, " G"]  # where its rank receives its first query
    first_column: Int32[Array, " G"]  # of the range of keys
    kv_row: Int32[Array, " G"]  # where its rank receives the range
    num_keys: Int32[Array, " G"]  # of the range
    runs_before: Int32[Array, " G"]  # runs of earlier blocks of its rank
    num_runs: Int32[Array, " G"]  # that begin in the block


class Capacities(NamedTuple):
    """Static sizes of a plan, in the order of `AttentionPlan.largest_needs`."""

    q: int
    kv: int
    q_transfers: int
    kv_transfers: int
    pieces: int
