"""Overlapped GEMMs of one process of worker.py, compared exactly with NumPy on integers."""

from collections.abc import Callable
from typing import Any

from comm_gemm_cases import equal, integers
from comm_gemm_oracle import (
    all_gather_matmul as gathered_product,
    matmul_reduce_scatter as scattered_product,
)

from jax_cp_dispatch import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.gpu import raise_gpu_errors

TOKENS, K, N, ROUNDS = 8, 32, 48, 3
METHODS: list[tuple[Any, Any, dict[str, Any]]] = [
    (all_gather_matmul, gathered_product, {"method": "none"}),
    (all_gather_matmul, gathered_product, {"method": "ring"}),
    (all_gather_matmul, gathered_product, {"method": "ring", "aggregate": True}),
    (matmul_reduce_scatter, scattered_product, {"method": "none"}),
    (matmul_reduce_scatter, scattered_product, {"method": "ring"}),
    (matmul_reduce_scatter, scattered_product, {"method": "pipeline", "num_splits": 3}),
]


def multiply(num_ranks: int, rank: int, place: Callable, read: Callable, on_ranks: Callable,
             name: dict[str, Any]) -> None:  # fmt: skip
    """Runs every method several times on the same channel.

    Args:
      num_ranks, rank: the number of processes, and the index of this one.
      place: makes a global array from one with a rank dimension.
      read: returns this process's part of a global array.
      on_ranks: makes a program over the mesh from a function of local arrays.
      name: axis_name, implementation and deadline.
    """
    for op, oracle, options in METHODS:
        rows = TOKENS if op is all_gather_matmul else TOKENS * num_ranks
        program = on_ranks(lambda x, w, op=op, options=options: op(x, w, **options, **name))
        for seed in range(ROUNDS):
            x, w = integers(seed, num_ranks, rows, K), integers(seed + 9, num_ranks, K, N)
            got = read(program(place(x), place(w)))
            raise_gpu_errors()
            equal(got, oracle(x, w)[rank], (op.__name__, options))
