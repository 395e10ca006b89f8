"""What multi_gpu.py measures: full sizes, quick ones for a report, and tiny ones for CPU devices.

Imports no JAX: `multi_gpu.sh` asks for the sections before any process starts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The defaults are sizes of use.

    Attributes:
      rounds: samples of each program; each is the mean of calls in a row.
      moved: bytes per GPU of an exchange.
      beside: those that are also measured beside a GEMM, and with fewer multiprocessors.
      square: rows and columns of that GEMM.
      tokens: per GPU, of attention.
      heads, kv_heads, head_size, dtype: of attention.
      causal, packed: algorithms of one document, and of packed ones.
      gemms: (M, K, N) of global size, of an all-gather GEMM; transposed of a reduce-scatter one.
    """

    rounds: int = 20
    moved: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 28, 1 << 30)
    beside: tuple[int, ...] = (1 << 26, 1 << 28)
    square: int = 8192
    tokens: tuple[int, ...] = (8192, 32768, 131072)
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    causal: tuple[str, ...] = ("ring", "zigzag", "balanced")
    packed: tuple[str, ...] = ("zigzag", "balanced", "placed")
    gemms: tuple[tuple[int, int, int], ...] = ((8192, 4096, 28672), (32768, 8192, 8192))


FULL = Sizes()
SIZES = {
    "full": FULL,
    "quick": dataclasses.replace(
        FULL, rounds=5, moved=(1 << 10, 1 << 20, 1 << 26), beside=(1 << 26,), tokens=(8192,),
        gemms=FULL.gemms[:1],
    ),
    "tiny": Sizes(
        rounds=2, moved=(1 << 16,), beside=(1 << 16,), square=64, tokens=(64,), heads=2,
        kv_heads=1, head_size=8, dtype="float32", gemms=((64, 16, 64),),
        causal=("ring",), packed=("placed",),
    ),
}  # fmt: skip


def sections_of(sizes: Sizes) -> list[str]:
    """Returns the names of the sections, in their order."""
    attention = [f"{case} {tokens}" for tokens in sizes.tokens for case in ("causal", "packed")]
    return ["gate", "movement", "gemm", *attention, "maxtext"]


def runs_of(sizes: Sizes) -> list[str]:
    """Returns the sections that share processes, joined by commas: tiny ones all after the gate."""
    gate, *others = sections_of(sizes)
    return [gate, ",".join(others)] if sizes == SIZES["tiny"] else [gate, *others]
