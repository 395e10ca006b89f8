"""Plans a batch with each algorithm, counts what moves, and predicts the times."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch.attention import Hamilton
from jax_cp_dispatch.attention.choose import Choice, choose_for
from jax_cp_dispatch.cost import (
    Hardware,
    StepCost,
    Workload,
    rank_pairs,
    rows_by_link,
    step_costs,
)
from jax_cp_dispatch.metadata.describe import rows_between_ranks
from jax_cp_dispatch.planner import (
    AttentionPlan,
    PlacedPlan,
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
    nodes = size if size < n else None
    sizes: dict[str, Any] = {"world_size": n, "columns": n * workload.tokens_per_rank}
    with step("moving queries"):
        heads = PlanConfig(
            num_heads=workload.num_heads, num_kv_heads=workload.num_kv_heads, ranks_per_node=nodes
        )
        balanced = plan_attention(lengths=workload.rows, **sizes, window=window, config=heads)
    with step("placing tokens"):
        config = PlacementConfig(ranks_per_node=nodes)
        placement = place_tokens(workload.rows, **sizes, window=window, config=config)
    with step("predicting times"):
        rows = lambda metadata, capacity: rows_by_link(
            rows_between_ranks("plan", metadata), ranks_per_node=size, capacity=capacity
        )
        placed = placement.plan
        queries = rows(balanced.q_metadata, balanced.q_capacity)
        moves: dict[str, Any] = {
            "moved_tokens": (queries, rows(balanced.kv_metadata, balanced.kv_capacity)),
            "placed_tokens": rows(placed.kv_metadata, placed.kv_capacity),
        }
        choice, seconds = choose_for(
            workload, hardware=hardware, with_backward=with_backward, **moves
        )
        options = {"hardware": hardware, **moves}
        forward = {name: step_costs(name, workload, **options) for name in seconds}
        steps = dict(forward)
        if with_backward:
            for name in steps:
                steps[name] = forward[name] + step_costs(name, workload, **options, backward=True)
        layouts = _layouts(workload, forward, balanced, placed)
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


def _layouts(
    workload: Workload,
    forward: dict[str, list[StepCost]],
    balanced: AttentionPlan,
    placed: PlacedPlan,
) -> tuple[Layout, ...]:
    """Returns all layouts, with the bytes that the predicted forward steps send."""
    n = workload.num_ranks
    rotated = 0, n * (n - 1) * workload.rows_per_rank  # all keys travel to all ranks
    contiguous, zigzag = (_imbalance_of(workload, zigzag=x) for x in (False, True))
    moved = int(balanced.num_q_tokens_moved), int(balanced.num_kv_tokens_moved)
    rows: dict[str, tuple[str, float, int, int]] = {
        "ring": ("contiguous, ring", contiguous, *rotated),
        "zigzag": ("zigzag, ring", zigzag, *rotated),
        "hamilton": ("zigzag, hamilton", zigzag, *rotated),
        "hamilton_nodes": ("zigzag, hamilton_nodes", zigzag, *rotated),
        "balanced": ("balanced", float(balanced.imbalance), *moved),
        "placed": ("placed", placed.imbalance, 0, int(placed.num_kv_tokens_moved)),
    }
    layouts = []
    for algorithm, row in rows.items():
        if algorithm in forward:
            sent = sum(x.sent_bytes for x in forward[algorithm])
            between = sum(x.between_bytes for x in forward[algorithm])
            layouts.append(Layout(*row, n * (sent - between), n * between))
    return tuple(layouts)


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
