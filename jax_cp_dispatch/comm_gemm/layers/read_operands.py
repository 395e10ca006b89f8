"""Checks of a matmul's operands and of the tokens of each rank."""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.layers.matmul_operands import Operands
from jax_cp_dispatch.comm_gemm.operand_types import read_array
from jax_cp_dispatch.comm_gemm.types import FLOATS, CommOverlapType


def read_operands(op: str, kind: CommOverlapType, x: Any, w: Any, bias: Any) -> Operands:
    """Returns the operands; a tuple holds several weights, or their biases."""
    gathers, is_several = kind == CommOverlapType.AG, isinstance(w, tuple)
    if isinstance(w, list) and any(hasattr(one, "shape") for one in w):
        raise TypeError(f"{op}: w is a list of {len(w)} arrays; pass several weights as a tuple.")
    if is_several and not (gathers and w):
        has = "at least one is needed" if gathers else "several weights need a common x"
        raise ValueError(f"{op}: w is a tuple of {len(w)}, but {has}. Pass an array.")
    num_biases = len(bias) if isinstance(bias, tuple) else None
    if num_biases != (len(w) if is_several else None) and bias is not None:
        got = f"{type(bias).__name__}" if num_biases is None else f"a tuple of {num_biases}"
        needs = f"a tuple of {len(w)} arrays or None, as w is" if is_several else "an array"
        raise ValueError(f"{op}: bias is {got}; it needs to be {needs}.")
    ws = w if is_several else (w,)
    biases = (None,) * len(ws) if bias is None else bias if is_several else (bias,)
    names = [f"w[{i}]" if is_several else "w" for i in range(len(ws))]
    x, ws = read_array(op, "x", x), tuple(map(partial(read_array, op), names, ws))
    biases = tuple(None if b is None else read_array(op, "bias", b) for b in biases)
    num_contracted = 1 if gathers else max(1, ws[0].ndim - 1)
    operands = Operands(x=x, ws=ws, biases=biases, num_contracted=num_contracted)
    _check_types(op, operands, names)
    for name, w, bias in zip(names, ws, biases, strict=True):
        _check_shapes(op, operands, name, w, bias, gathers=gathers)
    return operands


def _check_types(op: str, operands: Operands, names: list[str]) -> None:
    x, ws = operands.x, operands.ws
    biases = [("bias", bias) for bias in operands.biases if bias is not None]
    for name, array in (("x", x), *zip(names, ws, strict=True), *biases):
        if array.dtype.name not in FLOATS:
            raise TypeError(f"{op}: {name} is {array.dtype}; it needs to be one of {FLOATS}.")
    if len({w.dtype for w in ws}) > 1:
        types = " and ".join(sorted({w.dtype.name for w in ws}))
        raise TypeError(f"{op}: w is {types}; several weights need the same dtype. Convert them.")
    if (x.dtype.name == "float64") != (ws[0].dtype.name == "float64"):
        raise TypeError(
            f"{op}: x is {x.dtype} and w {ws[0].dtype}; float64 can only be used with float64. "
            "Convert one."
        )


def _check_shapes(
    op: str, operands: Operands, name: str, w: Array, bias: Array | None, *, gathers: bool
) -> None:
    """Shapes of x, one weight and its bias."""
    x, num_contracted = operands.x, operands.num_contracted
    if x.ndim < 1 + num_contracted or w.ndim < 2:
        needs = "[*batch, tokens, K] and [K, *N]" if gathers else "[*batch, tokens, *K] and [*K, N]"
        raise ValueError(
            f"{op}: x has shape {x.shape} and {name} {w.shape}; it needs {needs}. Reshape other "
            "dimensions into these."
        )
    of_x, of_w = x.shape[x.ndim - num_contracted :], w.shape[:num_contracted]
    if of_x != of_w:
        found = (of_x[0], of_w[0]) if num_contracted == 1 else (of_x, of_w)
        raise ValueError(
            f"{op}: x has {found[0]} columns but {name} has {found[1]} rows; they are contracted. "
            f"Transpose {name}, or split both over the same axis."
        )
    columns = w.shape[num_contracted:]
    if bias is not None and bias.shape != columns:
        raise ValueError(
            f"{op}: bias has shape {bias.shape}; it needs {columns}, one element for each column "
            f"of {name}."
        )


def read_row_counts(
    op: str,
    kind: CommOverlapType,
    operands: Operands,
    num_ranks: int,
    row_counts: Sequence[int] | None,
) -> tuple[int, ...]:
    """Returns the rows of each rank's chunk, per batch."""
    rows = operands.tokens_shape[-1]
    if row_counts is None:
        if kind == CommOverlapType.AG:
            return (rows,) * num_ranks
        if rows % num_ranks:
            raise ValueError(
                f"{op}: {rows} tokens are not a multiple of the {num_ranks} ranks. Pass the tokens "
                "of each as row_counts=(...), or pad."
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
            f"least 0, {what}: the tokens of x, which has shape {operands.x.shape}."
        )
    return counts
