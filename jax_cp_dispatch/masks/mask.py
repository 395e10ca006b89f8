"""What every mask is: its interface, the bases of masks of numbers and of arrays, `Order`."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P, reshard
from jaxtyping import Int64

from jax_cp_dispatch._arguments import check_integer, clip_to_int32


class MaskRanges(NamedTuple):
    """What the tokens of packed rows see, in columns of their batch row; int32 `[B, T]`.

        visible(q, k) = k_start[q] <= k < k_end[q] and q_start[k] <= q < q_end[k]

    Attributes:
      k_start, k_end: the keys of each query.
      q_start, q_end: the queries of each key; None: all.
    """

    k_start: Any
    k_end: Any
    q_start: Any = None
    q_end: Any = None


class Mask(abc.ABC):
    """Which keys of its document a query sees.

        visible(q, k) = k_start(q) <= k < k_end(q) and q_start(k) <= q < q_end(k)

    A mask is a frozen pytree. Its kind and its numbers are static, so masks with equal numbers
    share a compiled program. What data decides is arrays `[B, T]`, its only leaves: they are
    sharded and gathered like segment ids, and may be traced. They move with the tokens if these are
    permuted; the columns in them stay those of the batch as packed. A mask never crosses the ends
    of documents.

    Attributes:
      has_arrays: whether data decides what is visible: arrays `[B, T]`.
      has_query_ranges: whether keys have ranges of queries.
    """

    has_arrays: ClassVar[bool] = False
    has_query_ranges: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def is_causal(self) -> bool:
        """Whether no query sees keys after its own."""

    @property
    def kind(self) -> Any:
        """What a plan has of the mask beside ranges of rows: itself; with arrays, a `MaskKind`."""
        return self

    @abc.abstractmethod
    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        """Returns what tokens see, in columns of their batch row; of NumPy arrays by NumPy.

        The values for padding have no meaning.

        Args:
          column: of each token, `[B, T]`, or what broadcasts to it.
          start: the first column of its document, `[B, T]`.
          end: one past the last.
        """

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        """Returns what the arrays of tokens in these documents have to be, as in `ranges`.

        Each rule is booleans `[B, T]`, and what a false one means. Padding may break them. They
        find a mask that was made of other columns than those of its tokens.
        """
        return []

    def num_keys(self, length: Any) -> Any:
        """Bounds the keys that a query of a document of `length` tokens sees."""
        return length

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The most keys before, and after, its own that a query sees; None: to the document's end.

        No document or array makes a query see keys farther away.
        """
        return None, None

    def clipped(self, num_tokens: int) -> Mask:
        """Returns the same mask for documents of at most `num_tokens` tokens, with 32-bit sums."""
        return self

    def simplified(self) -> Mask:
        """Returns the simplest equal mask, so that equal masks compare equal."""
        return self


def maximum(x: Any, y: Any) -> Any:
    """Returns the larger elements; of NumPy arrays by NumPy."""
    return (jnp if has_tracers(x, y) else np).maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    return (jnp if has_tracers(x, y) else np).minimum(x, y)


def has_tracers(*arrays: Any) -> bool:
    """Whether one of these is an array of JAX."""
    return any(isinstance(x, jax.Array) for x in arrays)


class Order(NamedTuple):
    """The order of tokens; static."""

    # "packed": one document after another. "zigzag": see `zigzag_permutation`. "placed": as
    # `place_tokens` has placed them.
    name: str
    num_ranks: int = 0  # of zigzag order; else 0

    @property
    def layout(self) -> str:
        """The layout of tokens that are not placed: "zigzag" or "contiguous"."""
        return "zigzag" if self.name == "zigzag" else "contiguous"

    def __str__(self) -> str:
        if self.name == "zigzag":
            return f"zigzag order of {self.num_ranks} ranks"
        return f"{self.name} order"


PACKED, PLACED = Order("packed"), Order("placed")


def check_made_packed(op: str, order: Order) -> None:
    """Requires packed order of what is constructed, also by `dataclasses.replace`."""
    if order != PACKED:
        raise ValueError(
            f"{op}: this is dataclasses.replace of one in {order}, but it is made in packed order. "
            "Replace fields of the packed one, and put that in this order again."
        )


def zigzag_order(num_ranks: int) -> Order:
    """Returns zigzag order; over one rank, tokens stay in packed order."""
    return Order("zigzag", num_ranks) if num_ranks > 1 else PACKED


# ---- `StaticMask`: a mask of numbers alone, with closed forms of its ranges and pairs.


class StaticMask(Mask):
    """A mask that is known before the batch: each query sees one range of keys.

    A kind says what it is made of, and what is simpler or smaller; the rest follows.

    A mask is a frozen dataclass and a static pytree: its structure is the mask itself. It is not
    registered by `register_dataclass`, because jaxlib (0.10.2 to 0.12.0.1) treats the structures
    of two such classes as equal if their fields are. Their hashes differ, so `jax.jit` confuses
    them in about one process of a hundred, and then runs the program of another mask.
    """

    @property
    @abc.abstractmethod
    def pair_count(self) -> tuple[int, int, int]:
        """What the mask is made of, as `PairCount` in `csrc/planner`: left, right and chunk.

        A query sees `left` keys before its own and `right` after it; -1: all. Unless `chunk` is 0,
        its document is cut into chunks of so many tokens. It then sees those of its chunk up to its
        own if `right` is 0, and else all up to the end of its chunk.
        """

    @property
    def is_causal(self) -> bool:
        _, right, chunk = self.pair_count
        return right == 0 or chunk == 1

    @property
    def reach(self) -> tuple[int | None, int | None]:
        left, right, chunk = self.pair_count
        if chunk:
            return (chunk - 1, 0) if right == 0 else (None, chunk - 1)
        return None if left < 0 else left, None if right < 0 else right

    @property
    def num_diagonals(self) -> int:
        """The diagonal edges of the mask, which cross tiles of pairs.

        The other edges of a chunk that begins and ends cross as many tiles as a diagonal.
        """
        left, right, chunk = self.pair_count
        return 1 + (right == 0) if chunk else (left >= 0) + (right >= 0)

    def num_keys(self, length: Any) -> Any:
        before, after = self.reach
        if before is None or after is None:
            return length
        return minimum(length, before + 1 + after)

    def k_start(self, q: Any, start: Any) -> Any:
        """Returns the first key of each query; it never decreases along a document.

        Queries, keys and documents have the same coordinates: columns of a batch row, received
        rows, or positions in the document. Arrays of NumPy give NumPy.

        Args:
          q: the queries.
          start: the first token of the document of each.
        """
        left, right, chunk = self.pair_count
        if chunk and right == 0:
            return q - remainder(q - start, chunk)
        return start if left < 0 else maximum(start, q - left)

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        """Returns one past the last key of each query; it never decreases along a document.

        Args:
          q, start: as in `k_start`.
          end: one past the end of the document. A causal mask does not read it; it may be None.
        """
        _, right, chunk = self.pair_count
        if right == 0:
            return q + 1
        if not chunk:
            return end if right < 0 else minimum(end, q + (right + 1))
        stop = q - remainder(q - start, chunk) + chunk
        return stop if end is None else minimum(end, stop)

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(self.k_start(column, start), self.k_end(column, start, end))

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        """Counts the pairs (q, k) of one document with q < queries and k < keys."""
        left, right, chunk = self.pair_count
        if not chunk:
            # Those up to a diagonal are a triangle that begins before, or behind, the first query.
            if right < 0:
                seen = queries * keys
            else:
                seen = _triangle(queries + right, keys) - _triangle(right, keys)
            return seen if left < 0 else seen - _triangle(queries - left - 1, keys)
        if right == 0:
            both = np.minimum(queries, keys)
            whole, rest = both // chunk, both % chunk
            # Queries after the last key see the keys of its chunk if they are in it.
            later = np.minimum(queries, (whole + 1) * chunk) - both
            triangles = whole * _triangle(chunk, chunk) + _triangle(rest, rest)
            return triangles + np.maximum(later, 0) * rest
        whole, rest = queries // chunk, queries % chunk
        # Queries of the first chunks see fewer keys than `keys`.
        fewer = np.minimum(whole, keys // chunk)
        pairs = chunk * (chunk * (fewer * (fewer + 1) // 2) + (whole - fewer) * keys)
        return pairs + rest * np.minimum(keys, (whole + 1) * chunk)

    def pairs(self, start: Any, end: Any, length: Any) -> Int64[np.ndarray, "..."]:
        """Counts the pairs of the queries [start, end) of a document of `length` tokens."""
        return np.asarray(self.pairs_before(end, length) - self.pairs_before(start, length))

    def keys_of(self, start: Any, end: Any, length: Any) -> tuple[Any, Any]:
        """Returns the range of keys that at least one of the queries [start, end) sees."""
        zero = np.zeros_like(start)
        return self.k_start(start, zero), self.k_end(end - 1, zero, length)

    def clipped(self, num_tokens: int) -> StaticMask:
        return self


def _triangle(q: Any, k: Any) -> Any:
    """Pairs with query < q and key < k, and key <= query: a triangle, then rows of k."""
    q = np.maximum(q, 0)
    both = np.minimum(q, k)
    return both * (both + 1) // 2 + (q - both) * both


def check_token_count(mask: Any, name: str, value: Any, *, minimum: int) -> None:
    """Requires an integer of at least `minimum`, and sets it as one of Python."""
    op = type(mask).__name__
    check_integer(op, name, value)
    if value < minimum:
        raise ValueError(f"{op}: {name} is {value}; it needs to be at least {minimum}.")
    object.__setattr__(mask, name, int(value))


def no_limit_if_large(value: int | None) -> int | None:
    """Returns None for numbers that no document reaches: positions have 32 bits."""
    return None if value is None or value >= 2**31 else value


def remainder(x: Any, size: int) -> Any:
    """Returns x % size of numbers that are not negative, on the device in one operation."""
    if isinstance(x, jax.Array):
        return lax.rem(x, jax.numpy.asarray(size, x.dtype))
    return x % size


# ---- `ArrayMask`: a mask that data decides.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False)
class MaskKind:
    """The kind of a mask of arrays, for which a plan was made; the plan has what its tokens see."""

    of: type[ArrayMask]

    def __repr__(self) -> str:
        return self.of.__name__


class ArrayMask(Mask):
    """A mask of arrays `[B, T]`, in columns of the batch as packed, which move with the tokens.

    Equal only to itself: compare its leaves.

    Attributes:
      order: in which its arrays are (static): packed as it is made; `Documents.apply` changes both.
    """

    has_arrays: ClassVar[bool] = True
    order: ClassVar[Order] = PACKED

    @property
    def is_causal(self) -> bool:
        """See `Mask`; a kind of mask that never sees later keys says so."""
        return False

    @property
    def kind(self) -> MaskKind:
        return MaskKind(type(self))

    def reordered(self, arrays: Any, order: Order) -> ArrayMask:
        """Returns this mask with arrays in another order; `arrays` are its leaves, of this tree."""
        object.__setattr__(arrays, "order", order)
        return arrays

    def _store(self, **arrays: Any) -> None:
        """Sets the fields, clipped to int32; for constructors, which take other arrays."""
        for name, x in arrays.items():
            stored = x if x is None else clip_to_int32(x)
            object.__setattr__(self, name, stored)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)
        return f"{type(self).__name__}(arrays of shape {list(np.shape(leaves[0]))})"


def gathered(x: Any, *, rows: bool = False) -> Any:
    """Returns an array whose columns, and with `rows` whose rows, no explicit mesh axis shards.

    Runs and trees cross the shards. Attention shards what it takes.
    """
    if not has_tracers(x):
        return x
    sharding = jax.typeof(x).sharding
    sharded, columns = (*sharding.spec, None, None)[:2]
    kept = None if rows else sharded
    if (sharded, columns) == (kept, None):
        return x
    return reshard(x, NamedSharding(sharding.mesh, P(kept, None)))
