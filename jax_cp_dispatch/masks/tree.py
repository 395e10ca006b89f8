"""`Tree`: tokens see their ancestors in a tree of spans."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Integer

from jax_cp_dispatch._arguments import clip_to_int32
from jax_cp_dispatch.masks.mask import (
    OF_OTHER_COLUMNS,
    ArrayMask,
    MaskRanges,
    array_mask,
    ends_fit,
    gathered,
    is_traced,
    minimum,
)


@array_mask
class Tree(ArrayMask):
    """Tokens see the earlier tokens of their span, and the spans from it up to the root.

    For rollouts of several turns and speculative drafts. `Tree(span_ids, parents)` takes:

    - span_ids, `[B, T]`: the span of each token, in [0, S); negative: none, the token is padding.
      Tokens are in depth-first order and a span is one run; its number does not matter.
    - parents, `[B, S]`: the parent of each span of the batch row, -1 for a root. A document is one
      tree, or several.

    Both may be traced. In depth-first order, a key is visible to the queries from its own column to
    the end of its subtree.

    Attributes:
      q_end: one past the last column of the subtree of each token's span.
    Raises:
      ValueError: of arrays known on the host, a number is out of range, parents form a cycle, a
        span is not one run, or tokens are not in depth-first order. For traced ones, attention then
        fails on all ranks.
    """

    has_query_ranges = True
    q_end: Int32[Array | np.ndarray, "B T"]

    def __init__(
        self,
        span_ids: Integer[Array | np.ndarray, "B T"],
        parents: Integer[Array | np.ndarray, "B S"],
    ) -> None:
        span_ids, parents = (gathered(x, rows=True) for x in (span_ids, parents))
        if not is_traced(span_ids, parents):
            _check_numbers(span_ids, parents)
        q_end, rules = _subtree_ends(span_ids, parents)
        if is_traced(q_end):  # attention refuses such ends
            is_right = jnp.stack([x.all() for x, _ in rules]).all()
            q_end = jnp.where(is_right, q_end, -1)
        else:
            for is_right, what in rules:
                if not is_right.all():
                    row, span = divmod(int(np.argmin(is_right)), parents.shape[1])
                    raise ValueError(f"Tree: batch row {row}: span {span} {what}")
        self._store(q_end=q_end)

    @property
    def is_causal(self) -> bool:
        return True

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        fits = (self.q_end == 0) | ends_fit(column, self.q_end, nested=True)
        return [(fits, f"has tokens that are not in depth-first order, or {OF_OTHER_COLUMNS}")]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, column + 1, start, minimum(end, self.q_end))


def _check_numbers(span_ids: Any, parents: Any) -> None:
    num_spans = parents.shape[1]
    wrong = span_ids >= num_spans, (parents >= num_spans) | (parents < -1)
    for name, x, is_wrong in zip(("span_ids", "parents"), (span_ids, parents), wrong, strict=True):
        if is_wrong.any():
            row, at = np.argwhere(is_wrong)[0]
            raise ValueError(
                f"Tree: {name}[{row}, {at}] is {x[row, at]}, but parents has {num_spans} spans in "
                f"a row. Pass numbers up to {num_spans - 1}, or -1 for none."
            )


def _subtree_ends(span_ids: Any, parents: Any) -> tuple[Any, list[tuple[Any, str]]]:
    """Returns one past the last column of the subtree of each token's span, and rules.

    Each rule is booleans of all spans, and what a false one means: spans are not trees in
    depth-first order.
    """
    xp: Any = jnp if is_traced(span_ids, parents) else np
    (B, T), S = span_ids.shape, parents.shape[1]
    none = B * S  # the spans of all batch rows are in one list, whose last stands for none
    column = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def numbered(x):
        x, first = clip_to_int32(x), S * np.arange(B, dtype=np.int32)[:, None]
        return xp.where((x >= 0) & (x < S), x + first, none).astype(np.int32)

    def folded(x, index, values, how):
        if xp is jnp:
            return getattr(jnp.asarray(x).at[index], how)(values)
        x = x.copy()
        {"max": np.maximum, "min": np.minimum, "add": np.add}[how].at(x, index, values)
        return x

    def of_spans(values, how, initial=0):
        """Folds one value of each token into its span, then that of each span into its ancestors.

        After i steps, a span has the values of its descendants less than 2**i levels below, and
        the ancestor is the one 2**i levels above; after the last step it is none, unless parents
        form a cycle.
        """
        own = folded(np.full(none + 1, initial, np.int32), span, values, how)

        def step(_, state):
            values, ancestor = state
            return folded(values, ancestor, values, how), ancestor[ancestor]

        state, steps = (own, parent), none.bit_length()
        if xp is jnp:
            state = lax.fori_loop(0, steps, step, state)
        else:
            state = functools.reduce(lambda state, i: step(i, state), range(steps), state)
        return own, *state

    span = numbered(span_ids)
    parent = xp.concatenate([numbered(parents).reshape(-1), np.full(1, none, np.int32)])
    last, ends, above_roots = of_spans(column + 1, "max")
    first, firsts, _ = of_spans(column, "min", initial=T)
    size, sizes, _ = of_spans(np.int32(1), "add")
    rules = [
        (above_roots == none, "is its own ancestor. Pass -1 as the parent of a root."),
        (
            (size == 0) | (last - first == size),
            "is not one run of tokens. Pass the tokens of a span one after the other.",
        ),
        (
            (sizes == 0) | (ends - firsts == sizes) & ((size == 0) | (first == firsts)),
            "has descendants that do not follow it in one run. Pass the tokens in depth-first "
            "order: a span, then the subtree of each child.",
        ),
    ]
    return ends[span] * (span < none), [(is_right[:-1], what) for is_right, what in rules]
