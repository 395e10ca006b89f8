"""The operands of a matmul as the caller has them, and as the two-dimensional weights of a GEMM.

all_gather_matmul:      x [*batch, M, K],   several w [K, *N], each with a bias [*N]
matmul_reduce_scatter:  x [*batch, M, *K],  one w [*K, N], with a bias [N]

On a rank, or of all ranks: then the first dimension of *N, or of *K, is sharded over them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.types import FLOATS, CommOverlapType, read_array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOperands:
    """Arrays of a matmul, a pytree.

    Attributes:
      x: the tokens.
      ws, biases: the weights, and for each a bias or None.
      num_contracted: how many dimensions are contracted, the last of x with the first of w.
    """

    x: Any
    ws: tuple[Any, ...]
    biases: tuple[Any, ...]
    num_contracted: int = dataclasses.field(metadata={"static": True})

    @property
    def tokens_shape(self) -> tuple[int, ...]:
        """(*batch, M)."""
        return self.x.shape[: self.x.ndim - self.num_contracted]

    @property
    def sizes(self) -> tuple[int, int]:
        """Contracted elements, and columns of all weights."""
        shape = self.ws[0].shape
        return math.prod(shape[: self.num_contracted]), sum(map(math.prod, self._columns()))

    def multiply(self, run: Callable[..., Array], num_parts: int) -> tuple[Array, ...]:
        """Returns the product of each weight.

        Args:
          run: of x [*batch, M, K], weights [K, N] each, and a bias [sum of N] or None.
          num_parts: the ranks that the columns of all weights belong to; 1: they are one rank's.
        """
        k, _ = self.sizes
        columns = self._columns()
        sizes = [math.prod(dims) for dims in columns]
        ws = tuple(w.reshape(k, n) for w, n in zip(self.ws, sizes, strict=True))
        product = run(self.x.reshape(*self.tokens_shape, k), ws, self._bias(sizes, num_parts))
        parts = split_columns(product, sizes, num_parts)
        return tuple(
            part.reshape(*part.shape[:-1], *dims) for part, dims in zip(parts, columns, strict=True)
        )

    def _columns(self) -> list[tuple[int, ...]]:
        return [w.shape[self.num_contracted :] for w in self.ws]

    def _bias(self, sizes: Sequence[int], num_parts: int) -> Array | None:
        given = [bias for bias in self.biases if bias is not None]
        if not given:
            return None
        dtype = jnp.result_type(*given)
        flat = [
            jnp.zeros(n, dtype) if bias is None else bias.reshape(n).astype(dtype)
            for bias, n in zip(self.biases, sizes, strict=True)
        ]
        return join_columns(flat, num_parts)


def join_columns(arrays: Sequence[Array], num_parts: int) -> Array:
    """[.., p N_i] of each array to [.., p sum of N_i], in which each part has its own columns."""
    if len(arrays) == 1:
        return arrays[0]
    shapes = [(*a.shape[:-1], num_parts, a.shape[-1] // num_parts) for a in arrays]
    parts = [a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]
    joined = jnp.concatenate(parts, axis=-1)
    return joined.reshape(*joined.shape[:-2], num_parts * joined.shape[-1])


def split_columns(array: Array, sizes: Sequence[int], num_parts: int) -> list[Array]:
    """The inverse of `join_columns`; `sizes` are the columns of each array, of all parts."""
    if len(sizes) == 1:
        return [array]
    parts = array.reshape(*array.shape[:-1], num_parts, sum(sizes) // num_parts)
    split = jax.lax.split(parts, [n // num_parts for n in sizes], axis=parts.ndim - 1)
    return [a.reshape(*array.shape[:-1], n) for a, n in zip(split, sizes, strict=True)]


# ---- Checks of what the caller has given.


def read_operands(op: str, kind: CommOverlapType, x: Any, w: Any, bias: Any) -> MatmulOperands:
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
    operands = MatmulOperands(x=x, ws=ws, biases=biases, num_contracted=num_contracted)
    _check_types(op, operands, names)
    for name, w, bias in zip(names, ws, biases, strict=True):
        _check_shapes(op, operands, name, w, bias, gathers=gathers)
    return operands


def _check_types(op: str, operands: MatmulOperands, names: list[str]) -> None:
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
    op: str, operands: MatmulOperands, name: str, w: Array, bias: Array | None, *, gathers: bool
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
    operands: MatmulOperands,
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
