"""`ArrayMask`: a mask that data decides; its registration, and the checks of its arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, reshard

from jax_cp_dispatch._arguments import check_array, clip_to_int32
from jax_cp_dispatch.masks.mask import PACKED, Mask, Order, check_made_packed, is_traced

_Kind = TypeVar("_Kind", bound="type[ArrayMask]")


@jax.tree_util.register_static
class MaskKind:
    """The kind of a mask of arrays, for which a plan was made; the plan has what its tokens see."""

    def __init__(self, of: type[ArrayMask]) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskKind) and self.of is other.of

    def __hash__(self) -> int:
        return hash(self.of)

    def __repr__(self) -> str:
        return self.of.__name__


class ArrayMask(Mask):
    """A mask of arrays `[B, T]`, in columns of the batch as packed, which move with the tokens.

    Equal only to itself: compare its leaves.

    Attributes:
      order: in which its arrays are (static): packed as it is made; `Documents.apply` changes both.
    """

    order: ClassVar[Order] = PACKED

    @property
    def has_arrays(self) -> bool:
        return True

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


def array_mask(kind: _Kind) -> _Kind:
    """Makes a frozen dataclass, a pytree of its fields, whose constructor is its own."""
    names, construct = list(kind.__annotations__), kind.__init__

    @functools.wraps(construct)
    def init(mask: Any, *args: Any, order: Order = PACKED, **arrays: Any) -> None:
        check_made_packed(kind.__name__, order)
        construct(mask, *args, **arrays)

    # A field, so that `dataclasses.replace` passes it.
    made: Any = kind
    made.__annotations__["order"], made.__init__ = Order, init
    dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)(made)

    def with_keys(mask: Any):
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(mask, name)) for name in names]
        return keyed, mask.order

    def unflatten(order, children):
        mask = object.__new__(kind)
        object.__setattr__(mask, "order", order)
        for name, x in zip(names, children, strict=True):
            object.__setattr__(mask, name, x)
        return mask

    jax.tree_util.register_pytree_with_keys(kind, with_keys, unflatten)
    return kind


def check_arrays(op: str, **arrays: Any) -> None:
    """Requires integers `[B, T]`, equal shapes; None is allowed for ranges of queries."""
    shape: Any = None
    optional = ("q_start", "q_end")
    given = [(name, x) for name, x in arrays.items() if name not in optional or x is not None]
    for name, x in given:
        check_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; it needs to be integers.")
        if x.ndim != 2 or x.shape != (shape or x.shape):
            needs = "[B, T]" if shape is None else f"{list(shape)}, as the other arrays"
            raise ValueError(f"{op}: {name} has shape {list(x.shape)}; it needs to be {needs}.")
        shape = x.shape


def gathered(x: Any, *, rows: bool = False) -> Any:
    """Returns an array whose columns, and with `rows` whose rows, no explicit mesh axis shards.

    Runs and trees cross the shards. Attention shards what it takes.
    """
    if not is_traced(x):
        return x
    sharding = jax.typeof(x).sharding
    sharded, *columns = (*sharding.spec, None, None)[:2]
    kept = None if rows else sharded
    if (kept, None) == (sharded, *columns):
        return x
    return reshard(x, NamedSharding(sharding.mesh, P(kept, None)))


OF_OTHER_COLUMNS = (
    "is made of other columns. Make it from whole batch rows in packed order, and pass it through "
    "Documents.apply or Placement.apply."
)


def ends_fit(column: Any, end: Any) -> Any:
    """Whether an end is that of a run with this column: behind it, and the same up to there."""
    return (end > column) & ((column + 1 >= end) | (_shifted(end, -1) == end))


def ends_nest(column: Any, end: Any) -> Any:
    """Whether an end is behind its column, and no end between them is behind it."""
    return (end > column) & ((column + 1 >= end) | (_shifted(end, -1) <= end))


def before(x: Any) -> Any:
    """Returns the value of the column before; of the first, its own."""
    return _shifted(x, 1)


def _shifted(x: Any, columns: int) -> Any:
    xp = jnp if is_traced(x) else np
    edge = x[:, :columns] if columns > 0 else x[:, columns:]
    kept = x[:, :-columns] if columns > 0 else x[:, -columns:]
    return xp.concatenate([edge, kept] if columns > 0 else [kept, edge], axis=1)


def run_ends(x: Any) -> Any:
    """Returns one past the last column of the run of equal values at each column, `[B, T]`."""
    num_tokens = x.shape[1]
    column = np.arange(num_tokens, dtype=np.int32)
    if not is_traced(x):
        is_last = np.ones(x.shape, bool)
        is_last[:, :-1] = x[:, 1:] != x[:, :-1]
        last = np.where(is_last, column, num_tokens)
        return np.minimum.accumulate(last[:, ::-1], axis=1)[:, ::-1] + np.int32(1)
    is_last = jnp.pad(x[:, 1:] != x[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jnp.where(is_last, column, num_tokens)
    return jax.lax.cummin(last, axis=1, reverse=True) + jnp.int32(1)
