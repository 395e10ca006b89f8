"""Models hardware: the speed of ranks, their links, and the time of one exchange."""

import dataclasses
import typing
from typing import Literal

from jax_cp_dispatch.cost.attention import AttentionRate

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
        of one machine. They share its cores, so idle ranks leave their share to the others. Copies
        run at `link_bandwidth` for all ranks together and cannot be hidden.
      ranks_per_node: ranks of a node; None if all ranks are in one node.
      rails: NICs of a node; its ranks share them.
      rail_bandwidth: bytes/s of one NIC.
      rail_latency: seconds until the first byte from another node arrives.
      cores: cores that the ranks of "shared_memory" share.
      copies: for "shared_memory", how often a row for another rank is copied: once between virtual
        devices; twice between processes, into memory that both read, and out of it. Rows that stay
        on their rank are copied once.
      attention: how fast a rank computes attention; None: its products run at `matmul_flops`.
      memory_bandwidth: bytes/s at which a rank rewrites rows in its memory; for "shared_memory",
        all ranks together.
      rank_latency: for "shared_memory", the seconds that each further `cores` ranks add to an
        exchange, if there are more ranks than cores: they take turns.
      cache_bytes, cache_bandwidth: for "shared_memory", the size of the caches, and the rate of
        copies within them. Of a larger exchange, the part that fits is copied at this rate.
      near_cache_bytes, near_cache_bandwidth: the same for the caches nearest to the cores, which
        hold the first part of an exchange. Fitted values describe the times of small exchanges, and
        can differ from those of the caches.
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
    copies: int = 1
    attention: AttentionRate | None = None
    memory_bandwidth: int | float = float("inf")
    rank_latency: int | float = 0.0
    cache_bytes: int | float = 0.0
    cache_bandwidth: int | float = float("inf")
    near_cache_bytes: int | float = 0.0
    near_cache_bandwidth: int | float = float("inf")

    def __post_init__(self) -> None:
        if self.topology not in typing.get_args(Topology):
            raise ValueError(
                f"Hardware: topology is {self.topology!r}; it needs to be one of "
                f"{', '.join(map(repr, typing.get_args(Topology)))}."
            )

    @property
    def attention_rate(self) -> AttentionRate:
        """`attention`, or its default."""
        return AttentionRate(self.matmul_flops) if self.attention is None else self.attention

    def shared_latency(self, num_ranks: int) -> float:
        """Returns the seconds of an empty exchange between ranks of "shared_memory"."""
        return self.link_latency + max(0.0, num_ranks / self.cores - 1) * self.rank_latency

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
        own_bytes: int | float = 0,
    ) -> float:
        """Predicts the seconds in which a rank sends one message to each receiver.

        Args:
          message_bytes: bytes of each message.
          num_ranks: ranks that take part in the exchange.
          inside: receivers in its own node.
          outside: receivers in other nodes.
          senders: ranks of its node that send to other nodes at the same time.
          own_bytes: bytes that stay on the rank. Only "shared_memory" counts them.
        """
        if self.topology == "shared_memory" and inside + outside:
            num_bytes = num_ranks * (self.copies * (inside + outside) * message_bytes + own_bytes)
            near = min(num_bytes, self.near_cache_bytes / 2)  # read and written
            cached = max(near, min(num_bytes, self.cache_bytes / 2))
            return (
                self.shared_latency(num_ranks)
                + near / self.near_cache_bandwidth
                + (cached - near) / self.cache_bandwidth
                + (num_bytes - cached) / self.link_bandwidth
            )
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
        link_bandwidth=15.3e9,
        link_latency=51.9e-6,
        topology="shared_memory",
        cores=2,
        rank_latency=38.8e-6,
        cache_bytes=6.77e6,
        cache_bandwidth=27.5e9,
        near_cache_bytes=2.1e6,
        near_cache_bandwidth=19.2e9,
        memory_bandwidth=10e9,
        attention=AttentionRate(
            flops=228e9,
            backward_flops=178e9,
            exponentials=970e6,
            half_rate_rows=35.5,
            tile_rows=256,
            planned_tile_rows=128,
            least_tile_queries=64,
            tile_keys=128,
        ),
    ),
}
"""Machines to start from; change them with `dataclasses.replace`, or fit them with `calibrate`.

==================  =========  ==================================  =======  ===============
machine             attention  link                                latency  between nodes
==================  =========  ==================================  =======  ===============
h100, nodes of 8    [1]        port of 450 GB/s, 376 measured [2]  [3]      [4]
h200, nodes of 8    as h100    as h100                             as h100  as h100 [4]
b200, nodes of 8    [5]        port of 900 GB/s, 770 measured [6]  as h100  as h100 [4]
mi300x, nodes of 8  assumed    7 links of 64 GB/s, 48 usable [7]   as h100  as h100
cpu, 2 cores        [8]        [8]                                 [8]
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

[8] 8 virtual devices, float32: `benchmarks/results/cost_model.json`.
"""
