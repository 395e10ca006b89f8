"""`Tree`: tokens see their ancestors in a tree of spans."""

from __future__ import annotations

from typing import Any, NamedTuple

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
    ends_nest,
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

    q_end: Int32[Array | np.ndarray, "B T"]

    def __init__(
        self,
        span_ids: Integer[Array | np.ndarray, "B T"],
        parents: Integer[Array | np.ndarray, "B S"],
    ) -> None:
        span_ids, parents = (gathered(x, rows=True) for x in (span_ids, parents))
        on_host = not is_traced(span_ids, parents)
        if on_host:
            _check_numbers(span_ids, parents)
        forest = _Forest.of(span_ids, parents)
        last = forest.fold_tokens(forest.column + 1, "max")
        ends, above_roots = forest.fold_into_ancestors(last, "max")
        q_end = ends[forest.span] * (forest.span < forest.none)
        wrong = _wrong_order(forest, last, ends, above_roots)
        if on_host:
            _refuse(forest, wrong)
        else:  # attention refuses such ends
            is_right = jnp.stack([x[:-1].all() for x, _ in wrong]).all()
            q_end = jnp.where(is_right, q_end, -1)
        self._store(q_end=q_end)

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def has_query_ranges(self) -> bool:
        return True

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        fits = (self.q_end == 0) | ends_nest(column, self.q_end)
        return [(fits, f"has tokens that are not in depth-first order, or {OF_OTHER_COLUMNS}")]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, column + 1, start, minimum(end, self.q_end))


class _Forest(NamedTuple):
    """The spans of all batch rows in one list; the last one stands for none."""

    span: Any  # [B, T]
    parent: Any  # [B * S + 1]
    spans_of_row: int

    @classmethod
    def of(cls, span_ids: Any, parents: Any) -> _Forest:
        xp: Any = jnp if is_traced(span_ids, parents) else np
        B, S = parents.shape
        first = S * np.arange(B, dtype=np.int32)[:, None]

        def numbered(x):
            x = clip_to_int32(x)
            return xp.where((x >= 0) & (x < S), x + first, B * S).astype(np.int32)

        none = np.full(1, B * S, np.int32)
        return cls(numbered(span_ids), xp.concatenate([numbered(parents).reshape(-1), none]), S)

    @property
    def none(self) -> int:
        return len(self.parent) - 1

    @property
    def column(self) -> Int32[np.ndarray, "B T"]:
        B, T = self.span.shape
        return np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))

    def fold_tokens(self, values: Any, how: str, initial: int = 0) -> Any:
        """Folds one value of each token into its span; that of none has no meaning."""
        return _folded(np.full(self.none + 1, initial, np.int32), self.span, values, how)

    def fold_into_ancestors(self, values: Any, how: str) -> tuple[Any, Any]:
        """Folds the value of each span into all its ancestors.

        After i steps, a span has the values of its descendants less than 2**i levels below, and
        the ancestor is the one 2**i levels above; after the last step it is none, unless parents
        form a cycle.
        """

        def step(_, state):
            values, ancestor = state
            return _folded(values, ancestor, values, how), ancestor[ancestor]

        state, steps = (values, self.parent), self.none.bit_length()
        if is_traced(self.parent):
            return lax.fori_loop(0, steps, step, state)
        for i in range(steps):
            state = step(i, state)
        return state


def _folded(x: Any, index: Any, values: Any, how: str) -> Any:
    if is_traced(x, index, values):
        return getattr(jnp.asarray(x).at[index], how)(values)
    x = x.copy()
    {"max": np.maximum, "min": np.minimum, "add": np.add}[how].at(x, index, values)
    return x


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


def _wrong_order(forest: _Forest, last: Any, ends: Any, above_roots: Any) -> list[tuple[Any, str]]:
    """Returns whether spans are trees in depth-first order, and what is wrong if not.

    `ends` and `above_roots` are the folded `last`.
    """
    first = forest.fold_tokens(forest.column, "min", initial=forest.span.shape[1])
    size = forest.fold_tokens(np.int32(1), "add")
    firsts, _ = forest.fold_into_ancestors(first, "min")
    sizes, _ = forest.fold_into_ancestors(size, "add")
    return [
        (above_roots == forest.none, "is its own ancestor. Pass -1 as the parent of a root."),
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


def _refuse(forest: _Forest, wrong: list[tuple[Any, str]]) -> None:
    for is_right, what in wrong:
        if not is_right[:-1].all():
            row, span = divmod(int(np.argmin(is_right[:-1])), forest.spans_of_row)
            raise ValueError(f"Tree: batch row {row}: span {span} {what}")
