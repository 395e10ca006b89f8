"""The time of one step of attention, and of all steps: what algorithms predict of themselves."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_cp_dispatch.cost.hardware import Hardware
from jax_cp_dispatch.cost.traffic import Receivers, Traffic, exchange_seconds
from jax_cp_dispatch.cost.work import Workload, attention_flops


class StepCost(NamedTuple):
    """One step: its computation, and the communication during it."""

    compute: float  # seconds, of the slowest rank
    communication: float  # seconds
    sent_bytes: float  # by each rank, on average
    between_bytes: float = 0.0  # those of them that go to other nodes
    most_inside: float = 0.0  # bytes that the busiest rank sends or receives inside its node
    most_between: float = 0.0  # and between nodes


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


def add_steps(steps: Sequence[StepCost], *, imbalance: float) -> Prediction:
    """Returns the sums over the steps."""
    total = sum(max(x.compute, x.communication) for x in steps)
    compute, communication, sent, between = map(sum, zip(*(x[:4] for x in steps), strict=True))
    exposed = total - compute
    return Prediction(total, compute, communication, exposed, imbalance, sent, between)


def step_cost(
    compute: float,
    sent: Traffic,
    receivers: Receivers,
    workload: Workload,
    hardware: Hardware,
    own_bytes: int | float = 0,
) -> StepCost:
    """Returns the step that computes for some seconds, and sends bytes meanwhile."""
    seconds = exchange_seconds(sent, receivers, workload.num_ranks, hardware, own_bytes)
    return StepCost(
        compute, seconds, *(sent.total, sent.between, sent.most_inside, sent.most_between)
    )


def one_after_the_other(steps: Sequence[StepCost]) -> list[StepCost]:
    """Returns steps that compute or communicate, but not both."""
    alone = [(StepCost(x.compute, 0.0, 0.0), x._replace(compute=0.0)) for x in steps]
    return [step for pair in alone for step in pair]


def attention_seconds(
    num_pairs: Any,
    workload: Workload,
    hardware: Hardware,
    *,
    q_rows: int | float,
    kv_rows: int | float,
    backward: bool,
    is_planned: bool = False,
) -> Any:
    """Predicts the seconds of computations of attention.

    Their FLOPs divided by the rate of attention; the expansion of latent rows (backward, again, and
    both its transposes); and on "shared_memory" the copies of operands and results. Elsewhere,
    attention hides these copies. Forward, they are q and the output, k and v. Backward, q, dout,
    the output and dq; k, v, and their gradients in float32.

    Args:
      num_pairs: query-key pairs of the slowest rank: a number, or an array of them.
      q_rows, kv_rows: rows of each computation.
      is_planned: see `Hardware.attention_rate`.
    Returns:
      Seconds, in the shape of `num_pairs`.
    """
    sizes = {"num_heads": workload.num_heads, "head_size": workload.head_size}
    rate = hardware.attention_rate(is_planned=is_planned)
    seconds = num_pairs * (attention_flops(1, **sizes, backward=backward) / rate)
    if hardware.topology == "shared_memory":
        num_bytes = (4 if backward else 2) * workload.q_bytes(q_rows) + workload.kv_bytes(kv_rows)
        if backward:
            num_bytes += workload.kv_bytes(kv_rows, itemsize=4)
        seconds = seconds + workload.num_ranks * num_bytes / hardware.link_bandwidth
    products = 3 if backward else 1
    return seconds + kv_rows * workload.expand_flops * products / hardware.matmul_flops
