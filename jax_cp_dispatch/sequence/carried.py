"""What a document takes from one call of a layer to the next: `initial_state`, `return_state`.

A rank contributes what it holds of the state behind the last document of each batch row, zeros
elsewhere; `call_layer` sums over the ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from jax_cp_dispatch._arguments import check_array
from jax_cp_dispatch._arrays import chosen, only_where
from jax_cp_dispatch._ranks.varying import vary_alike, varying_axes
from jax_cp_dispatch.masks.mask import PACKED, Order
from jax_cp_dispatch.sequence.pieces import Pieces


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    """The state of a call.

    Attributes:
      initial: before the first document of each batch row, [B, ...]; None: documents begin here.
      is_returned: whether the call returns that behind the last ones (static).
      head_axis: of its arrays (static).
    """

    initial: Any = None
    is_returned: bool = dataclasses.field(default=False, metadata={"static": True})
    head_axis: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def is_used(self) -> bool:
        return self.is_returned or self.initial is not None

    def varying_like(self, arrays: list[Any], axis_names: tuple[str, ...]) -> Carried:
        """Returns it with each array of the state as the arrays beside it; see `vary_alike`."""
        leaves, tree = jax.tree.flatten(self.initial)

        def vary(x: Any, beside: Any) -> Any:
            axes = frozenset(axis_names).union(*map(varying_axes, jax.tree.leaves(beside)))
            return vary_alike([x], also=axes)[0]

        return dataclasses.replace(self, initial=tree.unflatten(map(vary, leaves, arrays)))


def check_state(op: str, state: Any, like: Any, next_step: str) -> None:
    """Requires an initial state with the arrays of `like`; those of a float dtype may differ in it.

    Args:
      op, next_step: for messages.
      state: of the caller; None is none.
      like: a pytree of `jax.ShapeDtypeStruct`.
    """
    if state is None:
        return
    for x in jax.tree.leaves(state):
        check_array(op, "initial_state", x)
    kind = lambda x: jnp.floating if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    described = lambda tree: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)
    is_alike = jax.tree.structure(state) == jax.tree.structure(like) and all(
        x.shape == y.shape and kind(x) == kind(y)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True)
    )
    if not is_alike:
        raise ValueError(
            f"{op}: initial_state has shapes {described(state)}; it needs {described(like)}. "
            f"{next_step}"
        )


def check_order(op: str, order: Order) -> None:
    """Requires packed order, in which the last tokens of a row are those of its last document."""
    if order != PACKED:
        raise ValueError(
            f"{op}: the documents are in {order}; initial_state and return_state need packed "
            "order, in which a row's last tokens are its latest. Pass packed documents and tokens, "
            "or whole documents in this order."
        )


def last_rows(
    pieces: Pieces,
    x: Shaped[Array, "rows ..."],
    width: int,
    initial: Shaped[Array, "B width ..."] | None,
    fill: Any = 0,
) -> Shaped[Array, "B width ..."]:
    """Returns this rank's contribution to the last `width` tokens of the last documents.

    Tokens that a document does not have in this call are those of the state before it, if it is the
    first of the row, else `fill`; rank 0 contributes them. In a row without tokens, the state stays
    as it is.
    """
    ends, num_rows = pieces.row_ends, pieces.begin.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    token = ends.last_end[:, None] - width + place
    row = token - jnp.asarray(pieces.rank, jnp.int32) * num_rows
    is_own = (token >= ends.last_begin[:, None]) & (row >= 0) & (row < num_rows)
    group = jnp.arange(len(row), dtype=jnp.int32)[:, None] * num_rows
    flat = jnp.where(is_own, group + row, 0)
    own = only_where(is_own, x.at[flat].get(mode="promise_in_bounds"))
    is_older = (token < ends.last_begin[:, None]) & (pieces.rank == 0)
    older = jnp.full_like(own, fill)
    if initial is not None:
        length = (ends.last_end - ends.last_begin)[:, None]
        before = jnp.minimum(place + length, width - 1)
        kept = jnp.take_along_axis(
            initial.astype(x.dtype), before.reshape(*before.shape, *[1] * (x.ndim - 1)), axis=1
        )
        older = chosen(_is_first(pieces), kept, older)
    return chosen(is_older, older, own)


def last_states(
    pieces: Pieces,
    behind: PyTree[Shaped[Array, "B ..."]],
    closing: Bool[Array, " B"],
    initial: PyTree[Shaped[Array, "B ..."]] | None,
) -> PyTree[Shaped[Array, "B ..."]]:
    """Returns this rank's contribution to the states behind the last documents.

    Args:
      pieces: of this rank.
      behind: the state behind the last document of each batch row, if this rank has it.
      closing: whether it has.
      initial: stays as it is in rows without tokens.
    """
    own = jax.tree.map(lambda x: only_where(closing, x), behind)
    if initial is None:
        return own
    stays = (pieces.row_ends.last_end == 0) & (pieces.rank == 0)
    return jax.tree.map(lambda x, y: chosen(stays, y.astype(x.dtype), x), own, initial)


def state_of_all(contributions: Any, axis_names: tuple[str, ...]) -> Any:
    """Returns the state, on all ranks: each number is of one rank, and zero on the others."""

    def summed(x: Any) -> Any:
        total = jax.lax.psum(x.astype(jnp.uint8) if x.dtype == bool else x, axis_names)
        return total.astype(x.dtype)

    return jax.tree.map(summed, contributions)


def _is_first(pieces: Pieces) -> Bool[Array, " B"]:
    """Whether the last document of a row is also its first, or there is none."""
    ends = pieces.row_ends
    return (ends.last_begin == ends.first_begin) | (ends.last_end == 0)
