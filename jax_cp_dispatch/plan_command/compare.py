"""Plans a batch with each algorithm, counts what moves, and predicts the times."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch.attention import Hamilton
from jax_cp_dispatch.attention.choose import Choice, choose_for
from jax_cp_dispatch.attention.planned_traffic import balanced_plan, placement, traffic_of_plans
from jax_cp_dispatch.cost import Hardware, StepCost, Workload, step_costs
from jax_cp_dispatch.cost.rank_pairs import pairs_of_ranks
from jax_cp_dispatch.plan_command.slowest import Slowest, slowest_rank
from jax_cp_dispatch.planner import Placement, Plan


class Sent(NamedTuple):
    """Bytes that a rank sends in one layer, forward, over one kind of link.

    Attributes:
      mean: of all ranks.
      busiest: of the rank that sends or receives most in each exchange; it decides the time.
    """

    mean: float
    busiest: float


class Layout(NamedTuple):
    """One way to share the work of a batch.

    Attributes:
      name: of the layout and its algorithm.
      algorithm: as in the predictions.
      imbalance: largest work of a rank divided by the mean.
      slowest: the rank with the most work.
      queries, keys: rows that move, over all ranks, each copy counted.
      inside, between: bytes inside nodes, and between nodes.
    """

    name: str
    algorithm: str
    imbalance: float
    slowest: int
    queries: int
    keys: int
    inside: Sent
    between: Sent


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that the command reports about one number of ranks.

    Attributes:
      workload, hardware: the arguments of the prediction.
      with_backward: whether times include the backward pass.
      slowest: the rank with the most work before planning, and why; None without work.
      layouts: before and after planning.
      choice: of `choose_algorithm`.
      seconds: predicted times with the rearrangement of tokens.
      balanced, placement: the plans.
      steps: predicted steps of each algorithm, without the rearrangement.
    """

    workload: Workload
    hardware: Hardware
    with_backward: bool
    slowest: Slowest
    layouts: tuple[Layout, ...]
    choice: Choice
    seconds: dict[str, float]
    balanced: Plan
    placement: Placement
    steps: dict[str, list[StepCost]]

    @property
    def num_tokens(self) -> int:
        return self.workload.num_ranks * self.workload.rows_per_rank

    @property
    def rearrangement(self) -> dict[str, float]:
        """Predicted seconds to rearrange tokens and the output; 0 where none is needed."""
        return {x: self.seconds[x] - y.total for x, y in self.choice.predictions.items()}

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
    with step("moving queries"):
        balanced = balanced_plan(workload, hardware)
    with step("placing tokens"):
        placed = placement(workload, hardware)
    with step("predicting times"):
        moves = traffic_of_plans(hardware, balanced, placed.plan)
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
        with_backward=with_backward,
        slowest=slowest_rank(workload),
        layouts=layouts,
        choice=choice,
        seconds=seconds,
        balanced=balanced,
        placement=placed,
        steps=steps,
    )


def _layouts(
    workload: Workload,
    forward: dict[str, list[StepCost]],
    balanced: Plan,
    placed: Placement,
) -> tuple[Layout, ...]:
    """Returns all layouts, with the bytes that the predicted forward steps send."""
    n = workload.num_ranks
    rotated = 0, n * (n - 1) * workload.rows_per_rank  # all keys travel to all ranks
    exchanged = (n - 1) * workload.rows_per_rank  # rows of all heads; each rank keeps its share
    contiguous = pairs_of_ranks(workload)
    is_causal = workload.visible.is_causal
    order = "zigzag" if is_causal else "contiguous"
    folded = pairs_of_ranks(workload, zigzag=is_causal)
    moved = int(balanced.num_q_tokens_moved), int(balanced.num_kv_tokens_moved)
    rows: dict[str, tuple[str, np.ndarray, int, int]] = {
        "ring": ("contiguous, ring", contiguous, *rotated),
        "zigzag": ("zigzag, ring" if is_causal else "contiguous, zigzag", folded, *rotated),
        "hamilton": (f"{order}, hamilton", folded, *rotated),
        "hamilton_nodes": (f"{order}, hamilton_nodes", folded, *rotated),
        "ulysses": ("contiguous, ulysses", np.full(n, contiguous.sum() / n), exchanged, exchanged),
        "balanced": ("balanced", np.asarray(balanced.pairs, float), *moved),
        "placed": ("placed", np.asarray(placed.plan.pairs, float), 0, _keys_moved(placed)),
    }
    layouts = []
    for algorithm, (name, work, queries, keys) in rows.items():
        if algorithm not in forward:
            continue
        steps = forward[algorithm]
        between = Sent(sum(x.between_bytes for x in steps), sum(x.most_between for x in steps))
        sent = sum(x.sent_bytes for x in steps)
        inside = Sent(sent - between.mean, sum(x.most_inside for x in steps))
        imbalance = float(work.max() / work.mean()) if work.any() else 1.0
        slowest = int(work.argmax())
        layouts.append(Layout(name, algorithm, imbalance, slowest, queries, keys, inside, between))
    return tuple(layouts)


def _keys_moved(placed: Placement) -> int:
    return int(placed.plan.num_kv_tokens_moved)
