"""Models hardware: the speed of ranks, their links, and the time of one exchange."""

import dataclasses
import typing
from typing import Literal

Topology = Literal["full_mesh", "nvswitch", "shared_memory"]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A machine: ranks in nodes. Bandwidths are per direction; links are full-duplex.

    Attributes:
      matmul_flops: FLOP/s that attention reaches on one rank; for "shared_memory", on all ranks
        together.
      link_bandwidth: bytes/s, see `topology`.
      link_latency: seconds until the first byte of an exchange inside a node arrives.
      topology: how the ranks of a node are linked. "full_mesh": a link of `link_bandwidth` between
        any two; a rank that sends to one other uses one link. "nvswitch": one port of
        `link_bandwidth` per rank, which one receiver can saturate. "shared_memory": virtual devices
        of one machine. They share its cores, so idle ranks leave their share to the others. Copies
        run at `link_bandwidth` for all ranks together and cannot be hidden.
      ranks_per_node: ranks of a node; None if all ranks are in one node.
      rails: NICs of a node; its ranks share them.
      rail_bandwidth: bytes/s of one NIC.
      rail_latency: seconds until the first byte from another node arrives.
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

    def __post_init__(self) -> None:
        if self.topology not in typing.get_args(Topology):
            raise ValueError(
                f"Hardware: topology is {self.topology!r}; it needs to be one of "
                f"{', '.join(map(repr, typing.get_args(Topology)))}."
            )

    def node_size(self, num_ranks: int) -> int:
        """Returns the ranks of each node if `num_ranks` ranks fill nodes evenly.

        Raises:
          ValueError: they fill several nodes unevenly.
        """
        size = min(self.ranks_per_node or num_ranks, num_ranks)
        if num_ranks % size:
            raise ValueError(
                f"Hardware: {num_ranks} ranks do not fill nodes of {size}. Pass a multiple, or "
                "another ranks_per_node (dataclasses.replace)."
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
            share = self.link_bandwidth / num_ranks
            return self.link_latency + (inside + outside) * message_bytes / share
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
    "mi300x": dataclasses.replace(
        _H100, matmul_flops=400e12, link_bandwidth=48e9, topology="full_mesh"
    ),
    "cpu": Hardware(
        matmul_flops=90e9,
        link_bandwidth=7e9,
        link_latency=100e-6,
        topology="shared_memory",
        cores=2,
    ),
}
"""Machines to start from; change them with `dataclasses.replace`.

==================  =======  ==================================  =======  =========================
machine             FLOP/s   link                                latency  between nodes
==================  =======  ==================================  =======  =========================
h100, nodes of 8    [1]      port of 450 GB/s, 376 measured [2]  [3]      8 NICs of 400 Gbit/s [4]
mi300x, nodes of 8  assumed  7 links of 64 GB/s, 48 usable [5]   as h100  as h100
cpu, 2 cores        [6]      [6]                                 [6]
==================  =======  ==================================  =======  =========================

[1] FlashAttention-3, bfloat16, forward (arXiv:2407.08608; measured again in
pytorch/benchmark#2391: 614 TFLOP/s at 8K tokens, 621 at 16K).

[2] One direction between two GPUs: NVIDIA/nccl#1264.

[3] NCCL's own model, `src/graph/tuning.cc` at 01afd20, ring, protocol Simple: 8.4 µs for a call,
and 3.4 µs for a step over NVLink or 9.6 µs over the network.

[4] DGX H100 user guide: eight ConnectX-7, one per GPU.

[5] rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X".

[6] 8 virtual devices, float32: `benchmarks/results`, latency (dispatch), exchange (ring, 1 MB) and
attention (zigzag, one document, forward and backward).
"""
