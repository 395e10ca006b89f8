"""`PlanConfig`: the static choices of a plan."""

from __future__ import annotations

import dataclasses

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.planner.constraints import check_domains

# Fields of `PlanConfig`, in the order of `AttentionPlan.largest_needs`.
CAPACITIES = ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Static choices of a plan. A capacity of None selects a default; see `plan_attention`.

    Attributes:
      block: inside `jit`, rows per block, the unit of planning and movement. Outside, documents are
        cut at multiples of it, counted from their start, where the planner finds such cuts. None:
        128 inside `jit`; outside, cuts anywhere, into pieces of at least 128 queries if possible.
      q_capacity: rows of the buffer in which a rank receives queries.
      kv_capacity: rows of the buffer in which a rank receives keys and values, its own included.
      max_q_transfers, max_kv_transfers: ranges of queries, and of keys, that one rank may send.
      max_pieces: pieces of documents that one rank may compute.
      num_heads, num_kv_heads: heads of queries, and of keys. A plan made outside `jit` moves as few
        bytes as possible; see `query_cost` and `key_cost`. Only the ratio matters. The defaults
        suit models with 4 query heads per key head; pass those of yours.
      balance_tolerance: fraction by which the work of a rank may exceed its share, which is the
        mean if all ranks are equally fast. A larger tolerance moves fewer bytes.
      rank_speeds: relative speed of each rank. The share of a rank in the work is proportional to
        it. None: all are equally fast.
      ranks_per_node: consecutive ranks of one node. Fewer bytes between nodes are preferred to
        fewer bytes in total. None: no nodes.
      backward: count the bytes of a training step, the backward pass included. False: those of the
        forward pass.
      expected_overflow: set by `fit_plan_config`; the estimated share of batches that do not
        fit the capacities that it found.
    """

    block: int | None = None
    q_capacity: int | None = None
    kv_capacity: int | None = None
    max_q_transfers: int | None = None
    max_kv_transfers: int | None = None
    max_pieces: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    balance_tolerance: float = 0.01
    rank_speeds: tuple[float, ...] | None = None
    ranks_per_node: int | None = None
    backward: bool = False
    expected_overflow: float | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        check_domains(self, CAPACITIES)
        check_positive("PlanConfig", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)

    @property
    def rows_per_block(self) -> int:
        """Rows of a block inside `jit`; the queries of a piece that is not shorter than wanted."""
        return self.block or 128

    @property
    def query_cost(self) -> int:
        """Rows of one head that move with a query that is computed away from home.

        Forward, the query and its output; backward, the gradients of both.
        """
        return (4 if self.backward else 2) * self.num_heads

    @property
    def key_cost(self) -> int:
        """Rows of one head that move with a key to another rank.

        Forward, the key and its value. Backward, their gradients in float32, which count twice, as
        rows of 16-bit elements.
        """
        return (6 if self.backward else 2) * self.num_kv_heads

    def fits(self, needs: PlanConfig) -> bool:
        """Whether these capacities are at least those of `needs`; None is always enough.

        Args:
          needs: of one batch; see `needs_inside_jit` and `AttentionPlan.needs`.
        """
        pairs = [(getattr(self, name), getattr(needs, name)) for name in CAPACITIES]
        return all(capacity is None or capacity >= (need or 0) for capacity, need in pairs)


def check_config(op: str, config: PlanConfig) -> None:
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )
