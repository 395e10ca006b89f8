"""The operands of a matmul as the caller has them, and as the two-dimensional weights of a GEMM.

all_gather_matmul:      x [*batch, M, K],   several w [K, *N], each with a bias [*N]
matmul_reduce_scatter:  x [*batch, M, *K],  one w [*K, N], with a bias [N]

On a rank, or of all ranks: then the first dimension of *N, or of *K, is sharded over them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
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
