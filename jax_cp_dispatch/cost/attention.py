"""The cost of attention: work, traffic, hardware, and the times predicted from these."""

import dataclasses
import math
import numbers
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
from jaxtyping import Integer

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host

# ---- The work of attention: its shapes and documents, floating-point operations, bytes of rows.


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call of attention, with its sequence sharded equally over the ranks.

    Attributes:
      num_ranks: ranks over which the sequence is sharded.
      tokens_per_rank: tokens of each batch row on one rank.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_size: elements of a head.
      itemsize: bytes of an element of q, k, v and the output.
      lengths: tokens of the documents of each batch row, in order; the rest of a row is padding.
        None: one batch row with one document.
      mask: see `context_parallel_attention`; None is causal. Its arrays, if any, are NumPy's, of
        all columns of the ranks, where the documents follow one another from the first.
      latent_size: elements of a latent row, which moves in place of keys and values (`expand=`).
      expand_flops: floating-point operations that expand one row, forward.
    Raises:
      TypeError, ValueError: the documents of a batch row exceed the row, or an argument is invalid.
    """

    num_ranks: int
    tokens_per_rank: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int
    lengths: tuple[tuple[int, ...], ...] | None = None
    mask: Mask | str | None = None
    latent_size: int | None = None
    expand_flops: float = 0.0

    def __post_init__(self) -> None:
        sizes = ("num_ranks", "num_heads", "num_kv_heads", "head_size", "itemsize")
        check_positive("Workload", **{name: getattr(self, name) for name in sizes})
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Workload: {self.num_heads} query heads cannot share {self.num_kv_heads} KV "
                "heads; num_heads must be a multiple of num_kv_heads."
            )
        num_tokens = self.num_ranks * self.tokens_per_rank
        mask = read_mask_on_host("Workload", self.mask, (len(self.rows), num_tokens))
        object.__setattr__(self, "mask", mask)
        longest = max(map(sum, self.rows), default=0)
        if longest > num_tokens:
            raise ValueError(
                f"Workload: the documents of a batch row have {longest} tokens, but the ranks hold "
                f"{self.num_ranks} x {self.tokens_per_rank} = {num_tokens}. Pass "
                f"tokens_per_rank>={-(-longest // self.num_ranks)}, or fewer documents."
            )

    @property
    def visible(self) -> Mask:
        """`mask`, as an object."""
        return cast(Mask, self.mask)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """`lengths`, or its default."""
        one_document = ((self.num_ranks * self.tokens_per_rank,),)
        return one_document if self.lengths is None else self.lengths

    @property
    def rows_per_rank(self) -> int:
        """Tokens of all batch rows on one rank."""
        return self.tokens_per_rank * len(self.rows)

    def q_bytes(self, num_tokens: int | float) -> int | float:
        """Bytes of `num_tokens` rows of q, or of the output."""
        return num_tokens * self.num_heads * self.head_size * self.itemsize

    def kv_bytes(self, num_tokens: int | float, *, itemsize: int | None = None) -> int | float:
        """Bytes of `num_tokens` rows of what moves: keys and values, or latents.

        For gradients in float32, pass itemsize 4.
        """
        size = self.latent_size or 2 * self.num_kv_heads * self.head_size
        return num_tokens * size * (itemsize or self.itemsize)


def attention_flops(
    num_pairs: int | float,
    *,
    num_heads: int,
    head_size: int,
    value_head_size: int | None = None,
    backward: bool = False,
) -> float:
    """Floating-point operations of the matrix products of attention over `num_pairs` pairs.

    A multiply-add counts as two. The forward pass makes two products (QKᵀ, PV); the backward pass
    makes five, because it recomputes the logits (QKᵀ, dO Vᵀ, Pᵀ dO, dS K, dSᵀ Q).

    Args:
      num_pairs: query-key pairs that the mask admits, as in `Plan.pairs`.
      num_heads: query heads.
      head_size: size of a query or key head.
      value_head_size: size of a value head; None means `head_size`.
      backward: count the backward pass alone instead of the forward pass.
    Returns:
      Floating-point operations, as a float.
    """
    value_head_size = head_size if value_head_size is None else value_head_size
    per_pair = 3 * head_size + 2 * value_head_size if backward else head_size + value_head_size
    return 2.0 * num_pairs * num_heads * per_pair


def rows_bytes(num_rows: int, *, num_heads: int, head_size: int, itemsize: int) -> int:
    """Bytes of `num_rows` rows of `num_heads` heads of `head_size` elements of `itemsize` bytes."""
    return num_rows * num_heads * head_size * itemsize


# ---- Models hardware: the speed of ranks, their links, and the time of one exchange.

Topology = Literal["full_mesh", "nvswitch", "shared_memory"]
_RATES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("matmul_flops", "attention_flops", "planned_attention_flops"),
        lambda x: 0 < x < math.inf,
        "positive and finite",
    ),
    (("link_bandwidth",), lambda x: x > 0, "positive"),
    (("rail_bandwidth",), lambda x: x >= 0, "at least 0"),
    (("link_latency", "rail_latency"), lambda x: 0 <= x < math.inf, "at least 0 and finite"),
)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine: ranks in nodes. Bandwidths are per direction; links are full-duplex.

    Attributes:
      matmul_flops: FLOP/s of a matrix product on one rank; for "shared_memory", of all ranks
        together.
      link_bandwidth: bytes/s, see `topology`.
      link_latency: seconds until the first byte of an exchange inside a node arrives.
      topology: how the ranks of a node are linked. "full_mesh": a link of `link_bandwidth` between
        any two; a rank that sends to one other uses one link. "nvswitch": one port of
        `link_bandwidth` per rank, which one receiver can saturate. "shared_memory": virtual devices
        of one machine. They share its cores, so idle ranks leave their share to the others. Rows
        are copied at `link_bandwidth` by all ranks together: in exchanges, also those that stay on
        their rank, and into the layout of attention. None of this can be hidden.
      ranks_per_node: ranks of a node; None if all ranks are in one node.
      rails: NICs of a node; its ranks share them.
      rail_bandwidth: bytes/s of one NIC; 0 if all ranks are in one node.
      rail_latency: seconds until the first byte from another node arrives.
      cores: cores that the ranks of "shared_memory" share.
      attention_flops: FLOP/s of attention on one rank, as `matmul_flops`, of the pairs that the
        mask admits; None: as `matmul_flops`.
      planned_attention_flops: the same in algorithms that follow a plan, which attend to shorter
        blocks; None: as `attention_flops`.
    Raises:
      TypeError, ValueError: the topology is unknown, FLOP/s are not positive and finite,
        `link_bandwidth` is not positive (infinite links cost no time), another rate or latency is
        negative, or a count is less than 1.
    """

    matmul_flops: int | float
    link_bandwidth: int | float
    link_latency: int | float
    topology: Topology
    ranks_per_node: int | None = None
    rails: int = 1
    rail_bandwidth: int | float = 0.0
    rail_latency: int | float = 0.0
    cores: int = 1
    attention_flops: int | float | None = None
    planned_attention_flops: int | float | None = None

    def __post_init__(self) -> None:
        if self.topology not in typing.get_args(Topology):
            raise ValueError(
                f"Hardware: topology is {self.topology!r}; it needs to be one of "
                f"{', '.join(map(repr, typing.get_args(Topology)))}."
            )
        counts = {"rails": self.rails, "cores": self.cores, "ranks_per_node": self.ranks_per_node}
        check_positive("Hardware", **{name: x for name, x in counts.items() if x is not None})
        for names, is_fine, needs in _RATES:
            for name in names:
                x: Any = getattr(self, name)
                if x is None and name.endswith("attention_flops"):
                    continue
                if not isinstance(x, numbers.Real) or not is_fine(x):
                    raise ValueError(
                        f"Hardware: {name} is {x!r}; it needs to be {needs}. Pass the rate of your "
                        "machine, or start from an entry of cost.HARDWARE (dataclasses.replace)."
                    )

    @property
    def has_shared_memory(self) -> bool:
        """Whether ranks share cores and memory, so that no link has a rate of its own."""
        return self.topology == "shared_memory"

    def attention_rate(self, *, is_planned: bool) -> int | float:
        """Returns the FLOP/s of attention, if it follows a plan or not."""
        planned = self.planned_attention_flops if is_planned else None
        return planned or self.attention_flops or self.matmul_flops

    def node_size(self, num_ranks: int) -> int:
        """Returns the ranks of each node if `num_ranks` ranks fill nodes evenly.

        Raises:
          ValueError: they fill several nodes unevenly.
        """
        size = min(self.ranks_per_node or num_ranks, num_ranks)
        if num_ranks % size:
            raise ValueError(
                f"Hardware: {num_ranks} ranks cannot be divided into nodes of {size}. Pass a "
                "multiple, or another ranks_per_node (dataclasses.replace)."
            )
        return size

    def exchange_seconds(
        self,
        message_bytes: int | float,
        *,
        num_ranks: int,
        inside: int = 0,
        outside: int = 0,
        senders: int = 1,
    ) -> float:
        """Predicts the seconds in which a rank sends one message to each receiver.

        Args:
          message_bytes: bytes of each message.
          num_ranks: ranks that take part in the exchange.
          inside: receivers in its own node.
          outside: receivers in other nodes.
          senders: ranks of its node that send to other nodes at the same time.
        """
        if self.has_shared_memory and inside + outside:
            num_bytes = num_ranks * (inside + outside) * message_bytes
            return self.link_latency + num_bytes / self.link_bandwidth
        seconds = 0.0
        if inside:
            per_link = 1 if self.topology == "full_mesh" else inside
            seconds = self.link_latency + per_link * message_bytes / self.link_bandwidth
        if outside:
            share = self.rail_bandwidth * min(1.0, self.rails / senders)
            seconds = max(seconds, self.rail_latency + outside * message_bytes / share)
        return seconds


_H100 = Hardware(
    matmul_flops=600e12,
    link_bandwidth=376e9,
    link_latency=12e-6,
    topology="nvswitch",
    ranks_per_node=8,
    rails=8,
    rail_bandwidth=50e9,
    rail_latency=18e-6,
)
HARDWARE = {
    "h100": _H100,
    "h200": _H100,
    "b200": dataclasses.replace(_H100, matmul_flops=1600e12, link_bandwidth=770e9),
    "mi300x": dataclasses.replace(
        _H100, matmul_flops=400e12, link_bandwidth=48e9, topology="full_mesh"
    ),
    "cpu": Hardware(
        matmul_flops=90e9,
        link_bandwidth=15e9,
        link_latency=80e-6,
        topology="shared_memory",
        cores=2,
        attention_flops=160e9,
        planned_attention_flops=125e9,
    ),
}
"""Machines to start from; change them with `dataclasses.replace`.

==================  =========  ==================================  =======  ===============
machine             attention  link                                latency  between nodes
==================  =========  ==================================  =======  ===============
h100, nodes of 8    [1]        port of 450 GB/s, 376 measured [2]  [3]      [4]
h200, nodes of 8    as h100    as h100                             as h100  as h100 [4]
b200, nodes of 8    [5]        port of 900 GB/s, 770 measured [6]  as h100  as h100 [4]
mi300x, nodes of 8  assumed    7 links of 64 GB/s, 48 usable [7]   as h100  as h100
cpu, 2 cores        [8]        [9]                                 [9]
==================  =========  ==================================  =======  ===============

For GPUs, only the pairs that the mask admits count, at one rate for both passes. H200 differs from
H100 in the size and the bandwidth of its memory, which do not enter these predictions.

[1] FlashAttention-3, bfloat16, forward (arXiv:2407.08608; measured again in
pytorch/benchmark#2391: 614 TFLOP/s at 8K tokens, 621 at 16K).

[2] One direction between two GPUs: NVIDIA/nccl#1264.

[3] NCCL's own model, `src/graph/tuning.cc` at 01afd20, ring, protocol Simple: 8.4 µs for a call,
and 3.4 µs for a step over NVLink or 9.6 µs over the network.

[4] DGX H100, H200 and B200 user guides: eight ConnectX-7 of 400 Gbit/s, one per GPU.

[5] FlashAttention-4, bfloat16, forward: at most 1613 TFLOP/s (the paper in
Dao-AILab/flash-attention, assets/fa4_paper.pdf).

[6] One direction between two GPUs of a GB200: Azure/AI-benchmarking-guide#7.

[7] rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X".

[8] 8 virtual devices, float32, one document of 16K to 64K tokens, forward and backward: the mean
rates of the zigzag ring, and of balanced attention (`benchmarks/results/attention_growth.json`).

[9] Exchanges between 8 virtual devices: of 16 KB per rank; and between the rates of 1 MB and of
8 MB per rank (`benchmarks/results/exchange.json`).
"""


# ---- Counts what ranks send, by the kind of link: inside a node, or between nodes.


class Traffic(NamedTuple):
    """Rows or bytes that ranks send in one exchange.

    Attributes:
      inside: to other ranks of the same node; mean of all ranks.
      between: to ranks of other nodes; mean of all ranks.
      most_inside, most_between: the most that one rank sends or receives; they determine the time
        if all ranks compute equally long.
      capacity: rows of a rank's receive buffer, which attention rewrites even if they are empty;
        None: the rows that it receives and its own.
      of_ranks: what each rank sends or receives, the larger of both, inside its node and between
        nodes; None: not known.
    """

    inside: float
    between: float
    most_inside: float
    most_between: float
    capacity: int | None = None
    of_ranks: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    @property
    def total(self) -> float:
        """What a rank sends, on average."""
        return self.inside + self.between

    def times(self, factor: int | float) -> "Traffic":
        """Returns the multiple of it: for example, rows times the bytes of a row."""
        inside, between, most_inside, most_between = (factor * x for x in self[:4])
        traffic = Traffic(inside, between, most_inside, most_between)
        return traffic if self.of_ranks is None else traffic._with_ranks(factor * self._array())

    def plus(self, other: "Traffic") -> "Traffic":
        """Returns the traffic of two parts of one exchange; the busiest ranks may be the same."""
        both = zip(self[:4], other[:4], strict=True)
        inside, between, most_inside, most_between = (x + y for x, y in both)
        traffic = Traffic(inside, between, most_inside, most_between)
        known = [x._array() for x in (self, other) if x.of_ranks is not None]
        return traffic._with_ranks(sum(known)) if known else traffic

    def of_rank(self, rank: int) -> "Traffic":
        """Returns it with what this rank sends or receives in place of the most."""
        if self.of_ranks is None:
            return self
        inside, between = self.of_ranks
        return self._replace(most_inside=inside[rank], most_between=between[rank])

    def _array(self) -> np.ndarray:
        return np.asarray(self.of_ranks, float)

    def _with_ranks(self, of_ranks: Any) -> "Traffic":
        inside, between = (tuple(x) for x in of_ranks.tolist())
        return self._replace(of_ranks=(inside, between))


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
    mean, most, of_ranks = [], [], []
    for where in (same, ~same):
        part = np.where(where, moving, 0)
        mean.append(float(part.sum() / n))
        of_ranks.append(np.maximum(part.sum(0), part.sum(1)))
        most.append(float(of_ranks[-1].max()))
    traffic = Traffic(mean[0], mean[1], most[0], most[1], capacity)
    return traffic._with_ranks(np.array(of_ranks))


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
        the work were equal. Less than 1 for a plan whose slowest rank exchanges more than others.
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


class Pass(NamedTuple):
    """What the prediction of steps needs: one pass of a workload, and the hardware.

    Attributes:
      backward: the backward pass alone, instead of the forward pass.
      moves: the `Moves` of a plan, if one is given.
    """

    workload: Workload
    hardware: Hardware
    backward: bool = False
    moves: Any = None


def step_cost(
    of: Pass, compute: float, sent: Traffic, receivers: Receivers, own_bytes: int | float = 0
) -> StepCost:
    """Returns the step that computes for some seconds, and sends bytes meanwhile.

    Both kinds of links work at once. `own_bytes` stay on their rank; only "shared_memory" copies
    them.
    """
    n, hardware, seconds = of.workload.num_ranks, of.hardware, [0.0]
    if n > 1 and sent.total and hardware.has_shared_memory:
        num_bytes = sent.total + own_bytes
        seconds.append(hardware.exchange_seconds(num_bytes, num_ranks=n, inside=1))
    elif n > 1 and sent.total:
        if sent.most_inside:
            message, where = sent.most_inside / receivers.inside, {"inside": receivers.inside}
            seconds.append(hardware.exchange_seconds(message, num_ranks=n, **where))
        if sent.most_between:
            message = sent.most_between / receivers.between
            where = {"outside": receivers.between, "senders": receivers.senders}
            seconds.append(hardware.exchange_seconds(message, num_ranks=n, **where))
    return StepCost(compute, max(seconds), sent.total, *sent[1:4])


def waiting_share(num_kv_heads: int) -> float:
    """Returns the share of an exchange that attention cannot hide, between GPUs.

    Heads move in two parts, see `pipelined_over_heads`: the second comes while the first is
    attended, and the first returns while the second is attended. So the part with fewer heads waits
    before attention, or after it. A single head moves in one part, and all of it waits.
    """
    return num_kv_heads // 2 / num_kv_heads or 1.0


def steps_around(
    of: Pass,
    compute: int | float,
    before: tuple[Traffic, int | float],
    after: tuple[Traffic, int | float],
    receivers: Receivers,
) -> list[StepCost]:
    """Returns the steps of attention between two exchanges: those alone are first and last.

    Exchanges overlap with attention as `waiting_share` says; latent rows move in one part. With an
    even number of heads, attention of A seconds and an exchange of c take A + c - min(A, c) / 2.

    Args:
      compute: seconds of all of attention.
      before, after: what each exchange moves, and the bytes that stay on their rank.
      receivers: of both.
    """

    def exchange(
        what: tuple[Traffic, int | float], share: float = 1.0, seconds: float = 0.0
    ) -> StepCost:
        traffic, own = what
        return step_cost(of, seconds, traffic.times(share), receivers, share * own)

    least = waiting_share(of.workload.num_kv_heads)
    if of.hardware.has_shared_memory or least == 1 or of.workload.latent_size is not None:
        return [exchange(before), StepCost(compute, 0.0, 0.0), exchange(after)]
    first, second = (1 - least, least) if of.backward else (least, 1 - least)
    return [
        exchange(before, first),
        exchange(before, second, first * compute),
        exchange(after, first, second * compute),
        exchange(after, second),
    ]


def attention_seconds(
    of: Pass,
    num_pairs: Any,
    *,
    q_rows: int | float,
    kv_rows: int | float,
    is_planned: bool = False,
) -> Any:
    """Predicts the seconds of computations of attention.

    Their FLOPs divided by the rate of attention; the expansion of latent rows (backward, again, and
    both its transposes); and on "shared_memory" the copies of operands and results. Elsewhere,
    attention hides these copies. Forward, they are q and the output, k and v. Backward, q, dout,
    the output and dq; k, v, and their gradients in float32.

    Args:
      of: the pass.
      num_pairs: query-key pairs of the slowest rank: a number, or an array of them.
      q_rows, kv_rows: rows of each computation.
      is_planned: see `Hardware.attention_rate`.
    Returns:
      Seconds, in the shape of `num_pairs`.
    """
    workload, hardware, backward, _ = of
    sizes = {"num_heads": workload.num_heads, "head_size": workload.head_size}
    rate = hardware.attention_rate(is_planned=is_planned)
    seconds = num_pairs * (attention_flops(1, **sizes, backward=backward) / rate)
    if hardware.has_shared_memory:
        num_bytes = (4 if backward else 2) * workload.q_bytes(q_rows) + workload.kv_bytes(kv_rows)
        if backward:
            num_bytes += workload.kv_bytes(kv_rows, itemsize=4)
        seconds = seconds + workload.num_ranks * num_bytes / hardware.link_bandwidth
    products = 3 if backward else 1
    return seconds + kv_rows * workload.expand_flops * products / hardware.matmul_flops
