"""Rows in chunks of one size, and which of them belong to the same piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

from jax_cp_dispatch._residuals import PAIRS

# Float32 inside: without this, TPUs and GPUs round the factors of a product.
dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class RowIndex(NamedTuple):
    """Rows in chunks.

    Attributes:
      where: the chunk and the group of each.
      row: in its chunk.
      mask: 1 for the rows of its piece in its chunk.
    """

    where: tuple[Int32[Array, " P"], Int32[Array, " P"]]
    row: Int32[Array, " P"]
    mask: Float[Array, "P 1 C 1"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of rows [G, L]: n for each group, of C rows; the last is padded.

    Attributes:
      num_rows: L (static).
      in_slice: chunks that are computed together, a divisor of n (static).
      ids: i32 [n, G, C]; the piece of each row.
      into: [n, G, 1, C, 1]; 1 for the rows of a piece that entered the chunk from the one before,
        else 0.
      last: likewise; 1 for the rows of the piece of the last row.
    """

    num_rows: int = dataclasses.field(metadata={"static": True})
    in_slice: int = dataclasses.field(metadata={"static": True})
    ids: Any
    into: Any
    last: Any

    @property
    def size(self) -> int:
        return self.ids.shape[2]

    def apply(self, fn: Callable[..., Any], inputs: PyTree[Shaped[Array, "G L ..."]]) -> Any:
        """Returns `fn(rows, ids)` of all chunks: arrays [n, ...], from rows [n, G, C, ...].

        Computed for one slice of chunks after another, and again by the derivative, which keeps
        `named_pairs`. So memory holds what `fn` returns, and caches what it needs meanwhile.
        """
        split_rows = lambda x: jax.tree.map(partial(split, size=self.size), x)
        count = self.in_slice
        if len(self.ids) == count:
            return fn(split_rows(inputs), self.ids)
        slices = jax.tree.map(partial(split, size=count * self.size), inputs)
        ids = self.ids.reshape(-1, count, *self.ids.shape[1:])
        of_slice = jax.checkpoint(
            lambda x, ids: fn(split_rows(x), ids),
            prevent_cse=False,
            policy=jax.checkpoint_policies.save_only_these_names(PAIRS),
        )
        out = lax.map(lambda x: of_slice(*x), (slices, ids))
        return jax.tree.map(lambda x: lax.collapse(x, 0, 2), out)

    def join(self, x: Float[Array, "n G N C V"]) -> Float[Array, "G L N V"]:
        """Puts rows in chunks back."""
        x = jnp.moveaxis(x, (1, 3), (0, 2))  # [G, n, C, N, V]
        return lax.collapse(x, 1, 3)[:, : self.num_rows]

    def index_of(self, row: Int32[Array, " P"], used: Bool[Array, " P"]) -> RowIndex:
        """Finds rows, counted over all groups, and the rows of their pieces in their chunks."""
        group, at = row // self.num_rows, row % self.num_rows
        index = at // self.size, group
        here = self.ids[index]
        mask = (here == jnp.take_along_axis(here, at[:, None] % self.size, 1)) & used[:, None]
        return RowIndex(index, at % self.size, mask[:, None, :, None].astype(self.into.dtype))

    def rows_between(
        self, first: Int32[Array, " P"], last: Int32[Array, " P"]
    ) -> Bool[Array, "P n G C"]:
        """Returns which rows lie between two rows of one group, both included."""
        n, groups, size = self.ids.shape
        place = np.arange(n * size, dtype=np.int32).reshape(n, 1, size)
        row = np.arange(groups, dtype=np.int32)[:, None] * self.num_rows + place
        first, last = (x[:, None, None, None] for x in (first, last))
        return jnp.asarray(place < self.num_rows) & (first <= row) & (row <= last)

    def between(self, first: Int32[Array, " P"], last: Int32[Array, " P"]) -> Bool[Array, "P n"]:
        """Returns which chunks are between two rows of one group: from the first's to the last's.

        The chunk of the last row is not one of them.
        """
        chunk = jnp.arange(len(self.ids), dtype=jnp.int32)
        of = lambda row: (row % self.num_rows // self.size)[:, None]
        return (of(first) <= chunk) & (chunk < of(last))


def chunks_of(piece_ids: Int32[Array, "G L"], size: int, num_heads: int, dtype: Any) -> Chunks:
    """Returns the chunks of rows with these pieces; 0 is padding."""
    num_chunks, matrices = -(-piece_ids.shape[1] // size), piece_ids.shape[0] * num_heads
    num_slices = -(-num_chunks // max(1, _matrices_in_slice() // matrices))
    in_slice = -(-num_chunks // num_slices)
    ids = split(piece_ids, size, multiple=in_slice)
    before = jnp.pad(ids[:-1, :, -1:], ((1, 0), (0, 0), (0, 0)), constant_values=-1)
    mask = lambda x: x[:, :, None, :, None].astype(dtype)
    into, last = mask(ids == before), mask(ids == ids[:, :, -1:])
    return Chunks(piece_ids.shape[1], in_slice, ids, into, last)


def split(
    x: Shaped[Array, "G L ..."], size: int, *, multiple: int = 1
) -> Shaped[Array, "n G C ..."]:
    """Cuts rows into a multiple of so many chunks; the last ones are padded with zeros."""
    missing = -x.shape[1] % (size * multiple)
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:]).swapaxes(0, 1)


def lower(
    ids: Int32[Array, "n G C"], dtype: Any, *, strict: bool = False
) -> Float[Array, "n G 1 C C"]:
    """Returns 1 for each row and those before it in its piece."""
    same = ids[..., :, None] == ids[..., None, :]
    below = np.tri(ids.shape[-1], k=-int(strict), dtype=bool)
    return (same & below)[:, :, None].astype(dtype)


def upper(ids: Int32[Array, "n G C"], dtype: Any) -> Float[Array, "n G 1 C C"]:
    """Returns 1 for each row and those behind it in its piece."""
    same = ids[..., :, None] == ids[..., None, :]
    above = ~np.tri(ids.shape[-1], dtype=bool)
    return (same & above)[:, :, None].astype(dtype)


def blocks_of_four(left: Array, lower: Array, right: Array) -> Array:
    """Returns [[left, 0], [lower, right]] of matrices of one size."""
    rows = (left, jnp.zeros_like(left)), (lower, right)
    return jnp.concatenate([jnp.concatenate(row, -1) for row in rows], -2)


def default_chunk() -> int:
    """Rows of a chunk on this platform; see docs/sequence.md for the measurement."""
    return 32 if jax.default_backend() == "cpu" else 64


def _matrices_in_slice() -> int:
    """Chunks of heads that are computed together: a few MB on CPUs."""
    return 64 if jax.default_backend() == "cpu" else 1024
