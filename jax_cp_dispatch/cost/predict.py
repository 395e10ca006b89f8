"""Predicts the time of each algorithm: the sums over its steps."""

import dataclasses
import itertools

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.rank_pairs import decisive_pairs
from jax_cp_dispatch.cost.steps import ALGORITHMS, step_costs
from jax_cp_dispatch.cost.traffic import Rows
from jax_cp_dispatch.cost.ulysses import can_share_heads
from jax_cp_dispatch.cost.work import Workload


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Sums over the steps of an algorithm, in seconds.

    Attributes:
      total: Σ max(compute, communication).
      compute: Σ compute, of the slowest rank of each step.
      communication: Σ communication, hidden or not.
      exposed_communication: Σ max(0, communication - compute) = total - compute.
      imbalance: query-key pairs of the slowest ranks of all steps, divided by those of a rank if
        the work were equal.
      bytes_per_rank: bytes that a rank sends, on average.
      bytes_between_nodes: those of them that go to other nodes.
    """

    total: float
    compute: float
    communication: float
    exposed_communication: float
    imbalance: float
    bytes_per_rank: float
    bytes_between_nodes: float = 0.0


def predict(
    workload: Workload,
    *,
    hardware: Hardware,
    with_backward: bool = False,
    moved_tokens: tuple[Rows, Rows] | None = None,
    placed_tokens: Rows | None = None,
) -> dict[str, Prediction]:
    """Predicts the time of every algorithm; call on the host.

    Args:
      workload: shapes and documents.
      hardware: rates of ranks and links.
      with_backward: predict forward and backward pass together, instead of the forward pass.
      moved_tokens, placed_tokens: see `step_costs`.
    Returns:
      A prediction for each of `ALGORITHMS`; "hamilton_nodes" only for several nodes, "placed" only
      with `placed_tokens`, and "ulysses" only if the ranks divide the query heads.
    Raises:
      ValueError: the ranks cannot be divided into nodes.
    """
    passes = (False, True) if with_backward else (False,)
    options = {
        "hardware": hardware,
        "moved_tokens": moved_tokens,
        "placed_tokens": placed_tokens,
    }
    sums = {}
    for algorithm in ALGORITHMS:
        if algorithm == "placed" and placed_tokens is None:
            continue
        if algorithm == "ulysses" and not can_share_heads(workload):
            continue
        costs = [step_costs(algorithm, workload, backward=x, **options) for x in passes]
        steps = list(itertools.chain(*costs))
        sums[algorithm] = (
            sum(max(x.compute, x.communication) for x in steps),
            *map(sum, zip(*(x[:4] for x in steps), strict=True)),
        )
    pairs = {name: float(decisive_pairs(name, workload, hardware).sum()) for name in sums}
    if hardware.node_size(workload.num_ranks) == workload.num_ranks:
        del sums["hamilton_nodes"]
    return {
        algorithm: Prediction(
            total=total,
            compute=compute,
            communication=communication,
            exposed_communication=total - compute,
            imbalance=pairs[algorithm] / pairs["balanced"] if pairs["balanced"] else 1.0,
            bytes_per_rank=sent_bytes,
            bytes_between_nodes=between,
        )
        for algorithm, (total, compute, communication, sent_bytes, between) in sums.items()
    }
