"""Predicts the time of a tensor-parallel GEMM with each method."""

import dataclasses
from typing import Literal, NamedTuple

from jax_cp_dispatch.cost.attention import Hardware

CommGemmOp = Literal["all_gather_matmul", "matmul_reduce_scatter"]


@dataclasses.dataclass(frozen=True)
class CommGemmShape:
    """The shape of a GEMM over a group of ranks.

    Attributes:
      op: its communication.
      m: tokens of all ranks.
      k, n: contracted size and columns of one rank's weight.
      num_ranks: ranks of the group.
      itemsize: bytes of an element of the operands; partial sums have at least 4.
    """

    op: CommGemmOp
    m: int
    k: int
    n: int
    num_ranks: int
    itemsize: int

    @property
    def flops(self) -> float:
        """Floating-point operations of one rank: 2 m n k."""
        return 2.0 * self.m * self.n * self.k

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends: its tokens, or partial sums, to every other rank."""
        gathers = self.op == "all_gather_matmul"
        row_bytes = self.k * self.itemsize if gathers else self.n * max(4, self.itemsize)
        return self.m * row_bytes * (self.num_ranks - 1) / self.num_ranks


class CommGemmMethod(NamedTuple):
    """A way to run the GEMM.

    Attributes:
      name: NONE, PIPELINE or RING_EXCHANGE.
      num_chunks: number of GEMMs into which it is split.
      copies: whether chunks are copied while the GEMM runs; otherwise the GEMM reads other ranks'
        operands in place.
    """

    name: str
    num_chunks: int
    copies: bool = True


def comm_gemm_methods(op: CommGemmOp, num_ranks: int) -> dict[str, CommGemmMethod]:
    """Returns the methods to compare, by label, simplest first.

    Args:
      op: "all_gather_matmul" or "matmul_reduce_scatter".
      num_ranks: p; pairs need an even number.
    """
    ring = lambda copies: CommGemmMethod("RING_EXCHANGE", num_ranks, copies)
    methods = {"none": CommGemmMethod("NONE", 1), "ring": ring(True), "ring direct": ring(False)}
    if op == "all_gather_matmul":
        if num_ranks % 2 == 0:
            methods["ring pairs"] = CommGemmMethod("RING_EXCHANGE", num_ranks // 2)
    else:
        methods |= {f"pipeline {s}": CommGemmMethod("PIPELINE", s) for s in (2, 4)}
    return methods


def predict_comm_gemm(shape: CommGemmShape, method: CommGemmMethod, *, hardware: Hardware) -> float:
    """Predicts the seconds of the forward GEMM.

    Let Tg be the time of the whole GEMM and Tc that of the communication. Without overlap: Tg + Tc.
    A ring of p chunks: Tg/p + (p-1) max(Tg/p, Tc/(p-1)). A ring of pairs, which neighbours swap
    first: Tc/(p-1) + 2 Tg/p + (p/2-1) max(2 Tg/p, 2 Tc/(p-1)). A pipeline of c chunks: Tg/c + (c-1)
    max(Tg/c, Tc/c) + Tc/c. Each chunk adds its latency.

    A ring without copies reads the memory of other ranks, so between linked ranks its cost is that
    of a ring with copies. Virtual devices of one machine share its cores and memory: no copy can be
    hidden, and every chunk reads one of the operands again.

    Args:
      shape: of the GEMM.
      method: how it runs.
      hardware: rates of ranks and links.
    Returns:
      Seconds.
    """
    p, chunks = shape.num_ranks, method.num_chunks
    gemm, gathers = shape.flops / hardware.matmul_flops, shape.op == "all_gather_matmul"
    is_ring = method.name == "RING_EXCHANGE"
    if hardware.topology == "shared_memory":
        operand = shape.m * shape.k if method.name == "PIPELINE" else shape.k * shape.n
        packed = p * (chunks - 1) * operand * shape.itemsize
        moved = p * shape.sent_bytes  # gathered, or read for sums
        if is_ring and not method.copies:
            moved = 0.0
        elif is_ring and not gathers:
            moved *= 2
        copying = (packed + moved) / hardware.link_bandwidth
        return p * shape.flops / hardware.matmul_flops + copying + hardware.link_latency * chunks
    if p == 1:
        return gemm
    communication = hardware.exchange_seconds(
        shape.sent_bytes / (p - 1), num_ranks=p, inside=1 if is_ring else p - 1
    )
    communication *= p - 1 if is_ring else 1
    if method.name == "NONE":
        return gemm + communication
    chunk, latency = gemm / chunks, chunks * hardware.link_latency
    if not is_ring:
        moved = communication / chunks
        return chunk + (chunks - 1) * max(chunk, moved) + moved + latency
    ranks = p // chunks  # ranks whose rows move together
    moved = communication * ranks / (p - 1)
    swap = communication / (p - 1) if ranks > 1 else 0.0
    tail = 0.0 if gathers else shape.sent_bytes / hardware.link_bandwidth / p
    return swap + chunk + (chunks - 1) * max(chunk, moved) + tail + latency
