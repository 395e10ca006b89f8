"""`PlanConfig`: the static choices of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.core

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.planner.constraints import check_domains
from jax_cp_dispatch.planner.segment_ids import Ids

# Fields of `PlanConfig`, in the order of `AttentionPlan.needs`.
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
      expected_overflow: set by `from_sample`; the estimated share of batches that do not fit the
        capacities that it found.
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

    @classmethod
    def from_sample(
        cls,
        batches: Iterable[Any],
        *,
        world_size: int,
        overflow: float = 1e-4,
        columns: int | None = None,
        window: int | None = None,
        config: PlanConfig | None = None,
    ) -> PlanConfig:
        """Finds capacities for a run from a sample of its batches, for plans made outside `jit`.

        With the result, the plans of all batches have the same shapes, so a training step is
        compiled once. Each capacity is the larger of the sample's maximum and the quantile of an
        exponential tail, fitted to the largest tenth of the sample (at least ten batches). So a
        batch exceeds any of them with a probability of about `overflow`, if batches are drawn like
        the sample and their needs do not have a heavier tail. The sample itself can only show
        rates of about 1 / len(batches); take at least a few hundred batches. `expected_overflow` is
        the estimate for the result. For a batch that does not fit, see `fallback` of
        `plan_attention`.

        Call on the host. Takes the time of `plan_attention` for each batch.

        Args:
          batches: for each batch its lengths as for `plan_attention`, or its segment ids. A
            two-dimensional array is segment ids [B, columns], whatever its values are.
          world_size, columns, window: as for `plan_attention`.
          overflow: wanted share of batches that do not fit, between 0 and 1.
          config: other choices of the plans, such as the numbers of heads. Capacities that it has
            are kept.
        Returns:
          The config with all capacities, and `expected_overflow` of those that were found.
        Raises:
          TypeError, ValueError: there is no batch, `overflow` is not between 0 and 1, or as
            `plan_attention`.
        """
        from jax_cp_dispatch.planner.plan import plan_attention
        from jax_cp_dispatch.planner.sample import Needs, config_of_sample

        def needs(**given: Any) -> Needs:
            plan = plan_attention(world_size=world_size, window=window, **given)
            own, all_ranks = plan.num_tokens, plan.num_tokens * world_size
            # A rank sends each of its queries once.
            most = all_ranks, all_ranks, own, all_ranks, all_ranks
            return Needs(own, plan.needs[0].tolist(), [max(x, 1) for x in most])

        op, config = "PlanConfig.from_sample", config or cls()
        check_config(op, config)
        return config_of_sample(op, batches, overflow, columns, config, CAPACITIES, needs)

    def needs(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> PlanConfig:
        """Returns the smallest capacities for the plan of one batch that is made inside `jit`.

        Call on the host with concrete arrays, for example in a data loader before a step that plans
        under `jit`. Balances the work, but creates no plan. For several batches, use the maximum of
        each capacity. A plan made outside `jit` assigns queries differently; its own needs are in
        `AttentionPlan.needs`.

        Args:
          segment_ids, positions, world_size, window: see `plan_attention`.
        Returns:
          This config with its capacities replaced.
        Raises:
          TypeError, ValueError: as `plan_attention`, except for capacities.
        """
        from jax_cp_dispatch.planner.capacities import check_shapes, read_host_documents
        from jax_cp_dispatch.planner.stages import assign

        op = "PlanConfig.needs"
        grid = check_shapes(op, segment_ids, positions, world_size, window, self)
        segment_ids, positions = read_host_documents(op, segment_ids, positions)
        options = {"window": window, "tolerance": self.balance_tolerance}
        with jax.core.eval_context():
            needs = assign(segment_ids, positions, grid=grid, **options).needs
            values = [max(int(x), 1) for x in jax.device_get(needs)]
        return dataclasses.replace(self, **dict(zip(CAPACITIES, values, strict=True)))

    def fits(
        self,
        segment_ids: Ids,
        positions: Ids | None = None,
        *,
        world_size: int,
        window: int | None = None,
    ) -> bool:
        """Whether the plan of one batch fits these capacities inside `jit`; None always fits.

        See `needs`.
        """
        need = self.needs(segment_ids, positions, world_size=world_size, window=window)
        given = [(getattr(self, name), getattr(need, name)) for name in CAPACITIES]
        return all(capacity is None or capacity >= least for capacity, least in given)


def check_config(op: str, config: PlanConfig) -> None:
    if not isinstance(config, PlanConfig):
        raise TypeError(
            f"{op}: config is {config!r}; it needs to be a PlanConfig. Omit it for the default."
        )
