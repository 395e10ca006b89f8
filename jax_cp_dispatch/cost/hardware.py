"""Models hardware: the speed of ranks, their links, and the time of one exchange."""

import dataclasses
import typing
from typing import Literal

Topology = Literal["full_mesh", "nvswitch", "shared_memory"]


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
      rail_bandwidth: bytes/s of one NIC.
      rail_latency: seconds until the first byte from another node arrives.
      cores: cores that the ranks of "shared_memory" share.
      attention_flops: FLOP/s of attention on one rank, as `matmul_flops`, of the pairs that the
        mask admits; None: as `matmul_flops`.
      planned_attention_flops: the same in algorithms that follow a plan, which attend to shorter
        blocks; None: as `attention_flops`.
    Raises:
      ValueError: the topology is unknown.
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
        if self.topology == "shared_memory" and inside + outside:
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
