"""Checks of a matmul's operands and of the tokens of each rank."""

import operator
from collections.abc import Sequence

from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.types import FLOATS, CommOverlapType


def check_arrays(op: str, x: Array, w: Array, bias: Array | None) -> None:
    """Shapes and types of the operands of one matmul."""
    for name, array in (("x", x), ("w", w), ("bias", bias)):
        if array is not None and array.dtype.name not in FLOATS:
            raise TypeError(f"{op}: {name} is {array.dtype}; it needs to be one of {FLOATS}.")
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(
            f"{op}: x has shape {x.shape} and w {w.shape}; it needs [*batch, tokens, K] and "
            "[K, N]. Reshape other dimensions into these."
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: x has {x.shape[-1]} columns but w has {w.shape[0]} rows; they are contracted. "
            "Transpose w, or split both over the same axis."
        )
    if bias is not None and bias.shape != (w.shape[1],):
        raise ValueError(
            f"{op}: bias has shape {bias.shape}; it needs ({w.shape[1]},), an element for each "
            "column of w."
        )
    if (x.dtype.name == "float64") != (w.dtype.name == "float64"):
        raise TypeError(
            f"{op}: x is {x.dtype} and w {w.dtype}; float64 goes with float64 alone. Convert one."
        )


def read_row_counts(
    op: str, kind: CommOverlapType, x: Array, num_ranks: int, row_counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Returns the rows of each rank's chunk, per batch."""
    rows = x.shape[-2]
    if row_counts is None:
        if kind == CommOverlapType.AG:
            return (rows,) * num_ranks
        if rows % num_ranks:
            raise ValueError(
                f"{op}: {rows} tokens do not divide among {num_ranks} ranks. Pass the tokens of "
                "each as row_counts=(...), or pad."
            )
        return (rows // num_ranks,) * num_ranks
    try:
        counts = tuple(operator.index(count) for count in row_counts)
    except TypeError:
        counts = ()
    needs_sum = kind == CommOverlapType.RS
    found, needed = (sum(counts), rows) if needs_sum else (max(counts, default=-1), rows)
    if len(counts) != num_ranks or min(counts, default=-1) < 0 or found != needed:
        what = f"whose sum is {rows}" if needs_sum else f"the largest of them {rows}"
        raise ValueError(
            f"{op}: row_counts is {row_counts!r}; it needs {num_ranks} counts, one per rank, of at "
            f"least 0, {what}: the tokens of x, which has shape {x.shape}."
        )
    return counts
