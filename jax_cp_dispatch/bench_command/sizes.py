"""What the command measures on CPU devices and on GPUs, and with `--quick`."""

import dataclasses
import math
from functools import partial

from jax_cp_dispatch.bench_command.gemm import GATHER, SCATTER, Shape
from jax_cp_dispatch.bench_command.step import Model

_MODEL = Model(layers=2, heads=4, head_size=64, dtype="float32")
Shapes = tuple[Shape, ...]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all sections. The defaults for CPU devices are those of the committed results.

    Attributes:
      repeats: rounds of interleaved runs.
      planning_ranks, planning_tokens: numbers of ranks, and tokens of each.
      moved_tokens, feature, moved_dtype: rows per rank of an exchange, and their shape.
      attention_tokens, heads, head_size, dtype: of one attention layer over all ranks.
      gemms: (op, M, K, N) of global size, in `dtype`.
      step_tokens, model: of a training step.
      process_bytes, process_gemms: between processes, in float32.
    """

    repeats: int = 3
    planning_ranks: tuple[int, ...] = (8, 128, 1024)
    planning_tokens: int = 65536
    moved_tokens: int = 4096
    feature: tuple[int, ...] = (16, 128)
    moved_dtype: str = "bfloat16"
    attention_tokens: int = 8192
    heads: int = 8
    head_size: int = 64
    dtype: str = "float32"
    gemms: Shapes = ((GATHER, 4096, 1024, 5632), (SCATTER, 4096, 2816, 1024))
    step_tokens: int = 4096
    model: Model = _MODEL
    process_bytes: int = 128 << 20
    process_gemms: Shapes = ((GATHER, 2048, 1024, 2048), (SCATTER, 2048, 1024, 2048))


CPU = Sizes()
QUICK = Sizes(
    repeats=1,
    planning_ranks=(8,),
    moved_tokens=256,
    attention_tokens=1024,
    heads=4,
    gemms=((GATHER, 1024, 256, 1408), (SCATTER, 1024, 704, 256)),
    step_tokens=512,
    model=Model(layers=2, heads=2, head_size=32, dtype="float32"),
    process_bytes=2 << 20,
    process_gemms=((GATHER, 512, 256, 512), (SCATTER, 512, 256, 512)),
)
GPU = Sizes(
    repeats=5,
    moved_tokens=32768,
    attention_tokens=16384,
    head_size=128,
    dtype="bfloat16",
    gemms=((GATHER, 8192, 4096, 28672), (SCATTER, 8192, 14336, 4096)),
    step_tokens=16384,
    model=Model(layers=4, heads=8, head_size=128, dtype="bfloat16"),
)


def sizes_for(platform: str, *, quick: bool, num_ranks: int, num_processes: int) -> Sizes:
    """Returns the sizes; those that ranks share are rounded up to two equal parts per rank."""
    if platform == "gpu":
        sizes = dataclasses.replace(GPU, repeats=1) if quick else GPU
    else:
        sizes = QUICK if quick else CPU
    return dataclasses.replace(
        sizes,
        attention_tokens=_shared(sizes.attention_tokens, num_ranks),
        gemms=_all_shared(sizes.gemms, num_ranks),
        step_tokens=_shared(sizes.step_tokens, num_ranks),
        process_gemms=_all_shared(sizes.process_gemms, num_processes),
    )


def _shared(size: int, num_ranks: int) -> int:
    return math.ceil(size / (2 * num_ranks)) * 2 * num_ranks


def _all_shared(shapes: Shapes, num_ranks: int) -> Shapes:
    shared = partial(_shared, num_ranks=num_ranks)
    return tuple((op, shared(m), shared(k), shared(n)) for op, m, k, n in shapes)
