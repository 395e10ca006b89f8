"""Plans a batch with each algorithm, counts what moves, and predicts the times."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch.attention import Hamilton
from jax_cp_dispatch.attention.choose import Choice, choose_for
from jax_cp_dispatch.cost import Hardware, StepCost, Workload, rank_pairs, step_costs
from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner import (
    AttentionPlan,
    Placement,
    PlacementConfig,
    PlanConfig,
    place_tokens,
    plan_attention,
)


class Layout(NamedTuple):
    """One way to share the work of a batch. Bytes are of all ranks, one layer, forward.

    Attributes:
      name: of the layout and its algorithm.
      imbalance: largest work of a rank divided by the mean.
      queries, keys: rows that move, over all ranks, each copy counted.
      bytes_inside, bytes_between: sent inside nodes, and between nodes.
    """

    name: str
    imbalance: float
    queries: int
    keys: int
    bytes_inside: float
    bytes_between: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that the command reports about one number of ranks.

    Attributes:
      workload, hardware: the arguments of the prediction.
      layouts: before and after planning.
      choice: of `choose_algorithm`, with the numbers of the two plans.
      seconds: predicted times with the rearrangement of tokens.
      balanced, placement: the plans.
      steps: predicted steps of each algorithm.
    """

    workload: Workload
    hardware: Hardware
    layouts: tuple[Layout, ...]
    choice: Choice
    seconds: dict[str, float]
    balanced: AttentionPlan
    placement: Placement
    steps: dict[str, list[StepCost]]

    @property
    def num_tokens(self) -> int:
        return self.workload.num_ranks * self.workload.rows_per_rank

    @property
    def chosen(self) -> str:
        """The name of the choice among the predictions."""
        algorithm = self.choice.algorithm
        over_nodes = isinstance(algorithm, Hamilton) and algorithm.nodes is not None
        return "hamilton_nodes" if over_nodes else algorithm.name

    @property
    def num_nodes(self) -> int:
        return self.workload.num_ranks // self.hardware.node_size(self.workload.num_ranks)


def compare(
    workload: Workload,
    hardware: Hardware,
    *,
    with_backward: bool,
    step: Callable[[str], AbstractContextManager[Any]],
) -> Comparison:
    """Compares the algorithms; `step` reports the progress of a named step."""
    n = workload.num_ranks
    window: Any = workload.window
    size = hardware.node_size(n)
    sizes: dict[str, Any] = {"world_size": n, "columns": n * workload.tokens_per_rank}
    with step("moving queries"):
        heads = PlanConfig(num_heads=workload.num_heads, num_kv_heads=workload.num_kv_heads)
        balanced = plan_attention(lengths=workload.rows, **sizes, window=window, config=heads)
    with step("placing tokens"):
        nodes = PlacementConfig(ranks_per_node=size if size < n else None)
        placement = place_tokens(workload.rows, **sizes, window=window, config=nodes)
    with step("predicting times"):
        moves: dict[str, Any] = {
            "moved_tokens": (balanced.num_q_tokens_moved / n, balanced.num_kv_tokens_moved / n),
            "placed_tokens": placement.plan.num_kv_tokens_moved / n,
        }
        choice, seconds = choose_for(
            workload, hardware=hardware, with_backward=with_backward, **moves
        )
        passes = (False, True) if with_backward else (False,)
        steps = {
            name: [
                x
                for backward in passes
                for x in step_costs(name, workload, hardware=hardware, backward=backward, **moves)
            ]
            for name in seconds
        }
        layouts = (
            *_rotating(workload, hardware),
            *_planned(workload, hardware, balanced, placement),
        )
    return Comparison(
        workload=workload,
        hardware=hardware,
        layouts=layouts,
        choice=choice,
        seconds=seconds,
        balanced=balanced,
        placement=placement,
        steps=steps,
    )


def _rotating(workload: Workload, hardware: Hardware) -> list[Layout]:
    """Returns the layouts in which all keys travel to all ranks."""
    n, m = workload.num_ranks, hardware.node_size(workload.num_ranks)
    keys = n * (n - 1) * workload.rows_per_rank
    total = float(workload.kv_bytes(keys))
    contiguous, zigzag = (_imbalance_of(workload, zigzag=x) for x in (False, True))
    # A ring leaves each node over one of its m ranks. Other cycles use all pairs of ranks.
    ring = 1 / m if m < n else 0.0
    pairs = (n - m) / max(n - 1, 1)
    layouts = [
        ("contiguous, ring", contiguous, ring),
        ("zigzag, ring", zigzag, ring),
        ("zigzag, hamilton", zigzag, pairs),
    ]
    if m < n:
        chunks = m - (m in (3, 5))  # one of them leaves the node in each step
        layouts.append(("zigzag, hamilton_nodes", zigzag, 1 / chunks))
    return [
        Layout(name, imbalance, 0, keys, total * (1 - between), total * between)
        for name, imbalance, between in layouts
    ]


def _imbalance_of(workload: Workload, *, zigzag: bool) -> float:
    work = np.zeros(workload.num_ranks)
    for row in workload.rows:
        work += rank_pairs(
            row,
            num_ranks=workload.num_ranks,
            tokens_per_rank=workload.tokens_per_rank,
            causal=True,
            zigzag=zigzag,
            window=workload.window,
        ).sum(1)
    return float(work.max() / work.mean()) if work.any() else 1.0


def _planned(
    workload: Workload, hardware: Hardware, balanced: AttentionPlan, placement: Placement
) -> list[Layout]:
    placed = placement.plan
    both = {"keys": balanced.kv_metadata, "queries": balanced.q_metadata}
    return [
        _layout("balanced", float(balanced.imbalance), workload, hardware, **both),
        _layout("placed", placed.imbalance, workload, hardware, keys=placed.kv_metadata),
    ]


def _layout(
    name: str,
    imbalance: float,
    workload: Workload,
    hardware: Hardware,
    *,
    keys: Metadata,
    queries: Metadata | None = None,
) -> Layout:
    node = np.arange(workload.num_ranks) // hardware.node_size(workload.num_ranks)
    inside = node[:, None] == node
    moving = ~np.eye(len(node), dtype=bool)

    def rows(metadata: Metadata | None, where: np.ndarray) -> int:
        if metadata is None:
            return 0
        received = np.asarray(metadata.num_recv_tokens)[:, :-1].astype(np.int64)
        return int(received[where & moving].sum())

    def num_bytes(where: np.ndarray) -> float:  # outputs return on the way of the queries
        return float(
            workload.kv_bytes(rows(keys, where)) + 2 * workload.q_bytes(rows(queries, where))
        )

    moved = rows(queries, moving), rows(keys, moving)
    return Layout(name, imbalance, *moved, num_bytes(inside), num_bytes(~inside))
