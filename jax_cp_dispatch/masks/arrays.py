"""Masks of arrays: `Ranges`, `Blocks`, `BlockDiffusion`, `PrefixLM`, `SharedPrefix` and `Tree`."""

import dataclasses
import functools
import inspect
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer

from jax_cp_dispatch._arguments import check_positive, clip_to_int32
from jax_cp_dispatch._arrays import run_begins, run_ends
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch.masks.mask import (
    PACKED,
    ArrayMask,
    MaskRanges,
    Order,
    check_made_packed,
    gathered,
    has_tracers,
    maximum,
    minimum,
)

_Kind = TypeVar("_Kind", bound="type[ArrayMask]")


def array_mask(kind: _Kind) -> _Kind:
    """Makes a frozen dataclass, a pytree of its fields, whose constructor is its own.

    The annotations of the constructor say which arrays it takes.
    """
    names, construct = list(kind.__annotations__), kind.__init__
    parameters = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def init(mask: Any, *args: Any, order: Order = PACKED, **arrays: Any) -> None:
        check_made_packed(kind.__name__, order)
        given = {**dict(zip(parameters, args, strict=False)), **arrays}
        check_annotated(kind.__name__, construct, given)
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
        vars(mask).update(zip(names, children, strict=True), order=order)
        return mask

    jax.tree_util.register_pytree_with_keys(kind, with_keys, unflatten)
    return kind


_OF_OTHER_COLUMNS = (
    "is made of other columns. Make it from whole batch rows in packed order, and pass it through "
    "Documents.apply or Placement.apply."
)


def _ends_fit(column: Any, end: Any, *, nested: bool = False) -> Any:
    """Whether an end is that of a run with this column: behind it, and the same up to there.

    If runs are nested, no end between them may be behind it.
    """
    following = (jnp if has_tracers(end) else np).concatenate([end[:, 1:], end[:, -1:]], axis=1)
    fits = following <= end if nested else following == end
    return (end > column) & ((column + 1 >= end) | fits)


# ---- `Ranges`, the general form, and `Blocks`: causal, and both ways inside blocks.


@array_mask
class Ranges(ArrayMask):
    """The query q sees the key k if both see each other's column, within their document.

        k_start[q] <= k < k_end[q] and q_start[k] <= q < q_end[k]

    Attributes:
      k_start, k_end: the keys of each query; integers `[B, T]`, in columns of the batch row. They
        may be traced.
      q_start, q_end: the queries of each key; None: no limit.
    """

    k_start: Int32[Array | np.ndarray, "B T"]
    k_end: Int32[Array | np.ndarray, "B T"]
    q_start: Int32[Array | np.ndarray, "B T"] | None
    q_end: Int32[Array | np.ndarray, "B T"] | None

    def __init__(
        self,
        k_start: Integer[Array | np.ndarray, "B T"],
        k_end: Integer[Array | np.ndarray, "B T"],
        q_start: Integer[Array | np.ndarray, "B T"] | None = None,
        q_end: Integer[Array | np.ndarray, "B T"] | None = None,
    ) -> None:
        self._store(k_start=k_start, k_end=k_end, q_start=q_start, q_end=q_end)

    @property
    def has_query_ranges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not (self.q_start is None and self.q_end is None)

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        keys = maximum(start, self.k_start), minimum(end, self.k_end)
        if not self.has_query_ranges:
            return MaskRanges(*keys)
        q_start = start if self.q_start is None else maximum(start, self.q_start)
        return MaskRanges(*keys, q_start, end if self.q_end is None else minimum(end, self.q_end))


@array_mask
class Blocks(ArrayMask):
    """Tokens see earlier tokens of their document, and all tokens of their own block.

    As the image tokens of Gemma 3. `Blocks(block_ids)` takes integers `[B, T]`, which may be
    traced. A block is a run of the same positive id in a document; other ids are of no block.

    Attributes:
      block_end: one past the last column of the block, for its tokens; 0 for others.
    """

    block_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, block_ids: Integer[Array | np.ndarray, "B T"]) -> None:
        block_ids = gathered(block_ids)
        self._store(block_end=run_ends(block_ids) * (block_ids > 0))

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        fits = (self.block_end == 0) | _ends_fit(column, self.block_end)
        return [(fits, _OF_OTHER_COLUMNS)]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, minimum(end, maximum(column + 1, self.block_end)))


# ---- `BlockDiffusion`: a noisy and a clean copy of each document, side by side.


@array_mask
class BlockDiffusion(ArrayMask):
    """Both copies of a document, for training by block diffusion.

    A document is its noisy copy, then its clean copy. Both are cut into blocks of `size` tokens,
    counted from the start of the copy. Noisy tokens see their own noisy block, and the clean blocks
    before it. Clean tokens see the clean blocks up to their own. `both_copies` lays tokens out so.
    `BlockDiffusion(segment_ids, size)` takes the ids of this layout, integers `[B, T]`, one id for
    both copies of a document, 0 for padding; they may be traced. Pass no positions to attention:
    positions for RoPE, which begin again in the clean copy, would end the document there.

    Attributes:
      edge: the first column of the token's block in the noisy copy; one past the last in the clean
        copy.
    Raises:
      ValueError: a document known on the host has an odd number of tokens. For traced ids,
        attention then fails on all ranks.
    References:
      Arriola et al., "Block Diffusion", 2025 (arXiv 2503.09573), appendix B.6: M_BD, M_OBC, M_BC.
    """

    edge: Int32[Array | np.ndarray, "B T"]
    has_query_ranges = True

    def __init__(self, segment_ids: Integer[Array | np.ndarray, "B T"], size: int) -> None:
        check_positive("BlockDiffusion", size=size)
        segment_ids = gathered(segment_ids)
        xp: Any = jnp if has_tracers(segment_ids) else np
        start, end = _runs(segment_ids)
        column = np.arange(segment_ids.shape[1], dtype=np.int32)
        half, is_odd = (end - start) // 2, ((end - start) % 2 == 1) & (segment_ids > 0)
        if xp is np and is_odd.any():
            row, at = np.argwhere(is_odd)[0]
            raise ValueError(
                f"BlockDiffusion: in batch row {row}, the document at column {at} has "
                f"{end[row, at] - at} tokens; it needs a noisy and a clean copy of equal length. "
                "Pass the segment ids of masks.both_copies."
            )
        is_noisy = column - start < half
        position = xp.where(is_noisy, column - start, column - start - half)
        size = min(size, max(len(column), 1))
        first = column - position % size
        edge = xp.where(is_noisy, first, xp.minimum(first + size, end))
        self._store(edge=xp.where(is_odd, -1, edge * (segment_ids > 0)))

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        xp: Any = jnp if has_tracers(self.edge) else np
        before = xp.roll(self.edge, 1, axis=1)
        begins = (start <= self.edge) & (self.edge <= column)
        begins &= (self.edge == column) | (before == self.edge)
        ends = _ends_fit(column, self.edge) & (self.edge <= end)
        is_noisy = column - start < (end - start) // 2
        what = (
            "has a document that is not a noisy and a clean copy of equal length. Lay tokens out "
            "by masks.both_copies, and omit positions; in another order, pass the mask through "
            "Documents.apply or Placement.apply."
        )
        return [(xp.where(is_noisy, begins, ends), what)]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        # The keys of a noisy query begin at its noisy block and end before the clean one. Between
        # them are later noisy blocks, whose keys no earlier query sees.
        xp: Any = jnp if has_tracers(self.edge, start, end) else np
        half = (end - start) // 2
        is_noisy = column - start < half
        k_start = xp.where(is_noisy, self.edge, start + half)
        k_end = xp.where(is_noisy, self.edge + half, self.edge)
        return MaskRanges(k_start, k_end, xp.where(is_noisy, self.edge, start), end)


class BothCopies(NamedTuple):
    """The layout of a batch for block diffusion: every document as a noisy, then a clean copy.

    Attributes:
      columns: the column in the batch of each token of the layout: `np.take_along_axis(tokens,
        columns, axis=1)` has both copies of the tokens, still clean.
      segment_ids: one id for both copies of a document; 0 for padding.
      positions: in the document, for RoPE; the same in both copies. Do not pass them to attention.
      is_noisy: whether a token belongs to the noisy copy: which tokens to corrupt, and which
        outputs to score; False for padding.
      mask: the `BlockDiffusion` of this layout.
    """

    columns: Int32[Array | np.ndarray, "B 2*T"]
    segment_ids: Integer[Array | np.ndarray, "B 2*T"]
    positions: Int32[Array | np.ndarray, "B 2*T"]
    is_noisy: Bool[Array | np.ndarray, "B 2*T"]
    mask: BlockDiffusion


def both_copies(segment_ids: Integer[Array | np.ndarray, "B T"], size: int) -> BothCopies:
    """Lays the noisy and the clean copy of each document side by side, `[B, 2 * T]`.

    For data loaders: NumPy for arrays of NumPy. Place tokens with `PlanConfig(block=size)`, so that
    noisy blocks stay whole where such cuts are found; their keys then do not move.

    Args:
      segment_ids: of the batch, in packed order; a document is a run of one id, 0 is padding.
      size: tokens of a block of diffusion.
    """
    check_annotated("both_copies", both_copies, {"segment_ids": segment_ids})
    check_positive("both_copies", size=size)
    segment_ids = gathered(segment_ids)
    xp: Any = jnp if has_tracers(segment_ids) else np
    ids, start, end = (xp.repeat(x, 2, axis=1) for x in (segment_ids, *_runs(segment_ids)))
    within = np.arange(ids.shape[1], dtype=np.int32) - 2 * start
    position, is_token = within % (end - start), ids > 0
    return BothCopies(
        columns=start + position,
        segment_ids=ids,
        positions=xp.where(is_token, position, 0),
        is_noisy=is_token & (within < end - start),
        mask=BlockDiffusion(ids, size),
    )


def _runs(ids: Any) -> tuple[Any, Any]:
    """Returns the first column of the run of equal ids at each column, and one past its last."""
    return ids.shape[1] - run_ends(ids[:, ::-1])[:, ::-1], run_ends(ids)


# ---- `PrefixLM`: both ways inside the prompt of a document.


@array_mask
class PrefixLM(ArrayMask):
    """Tokens of the prefix see the whole prefix of their document; other tokens are causal.

    As in PaliGemma and T5. `PrefixLM(in_prefix)` takes booleans `[B, T]`: whether a token belongs
    to the prefix of its document, which is its first tokens. They may be traced.

    Attributes:
      prefix_end: one past the last column of the prefix, for its tokens; 0 for others.
    """

    prefix_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, in_prefix: Bool[Array | np.ndarray, "B T"]) -> None:
        in_prefix = gathered(in_prefix)
        self._store(prefix_end=run_ends(in_prefix) * in_prefix)

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        is_outside = self.prefix_end == 0
        before = (jnp if has_tracers(self.prefix_end) else np).roll(self.prefix_end, 1, axis=1)
        follows = (column == start) | (before > 0)
        return [
            (is_outside | _ends_fit(column, self.prefix_end), _OF_OTHER_COLUMNS),
            (
                is_outside | follows,
                "has a prefix that does not begin its document. Pass in_prefix "
                "for the first tokens of a document; for others, Blocks.",
            ),
        ]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, minimum(end, maximum(column + 1, self.prefix_end)))


class _UntilEnd(ArrayMask):
    """A causal mask whose keys are seen up to their `q_end`, or to the end of their document."""

    has_query_ranges = True
    q_end: Any

    @property
    def is_causal(self) -> bool:
        return True

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, column + 1, start, minimum(end, self.q_end))


# ---- `SharedPrefix`: completions of one prompt, which see the prompt and themselves.

_NO_END = np.int32(2**31 - 1)


@array_mask
class SharedPrefix(_UntilEnd):
    """Tokens see the earlier tokens of the prompt of their document and of their completion.

    `SharedPrefix(completion_ids)` takes integers `[B, T]`, which may be traced: 0 in the prompt,
    another id in each completion after it. A completion is one run of its id; completions that
    touch have different ids. A prompt and its completions are one document, with one segment id.
    Pass no positions to attention, or those that count all of its tokens: positions for RoPE, which
    return to the end of the prompt in each completion, would end the document.

    Attributes:
      q_end: one past the last column of the completion, for its keys; the largest int32 for those
        of the prompt.
    Raises:
      ValueError: ids known on the host form several runs between two prompts.
    """

    q_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, completion_ids: Integer[Array | np.ndarray, "B T"]) -> None:
        xp = jnp if has_tracers(completion_ids) else np
        completion_ids = gathered(completion_ids)
        if isinstance(completion_ids, np.ndarray):  # one run for each id between two prompts
            ids, is_first = completion_ids, run_begins(completion_ids)
            row, column = np.nonzero(is_first & (ids != 0))
            prompts = np.cumsum(is_first & (ids == 0), axis=1)[row, column]
            runs = np.stack([row, prompts, ids[row, column]])
            order = np.lexsort(runs[::-1])
            again = np.flatnonzero((np.diff(runs[:, order], axis=1) == 0).all(0))
            for i in order[again[:1] + 1]:
                raise ValueError(
                    f"SharedPrefix: batch row {row[i]}: completion {ids[row[i], column[i]]} begins "
                    f"again at column {column[i]}; a completion needs to be one run of its id. "
                    "Pass the completions of a prompt one after the other, with different ids."
                )
        ends = run_ends(completion_ids)
        self._store(q_end=xp.where(completion_ids == 0, _NO_END, ends))

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        in_prompt = self.q_end == _NO_END
        return [
            (in_prompt | _ends_fit(column, self.q_end), _OF_OTHER_COLUMNS),
            (
                in_prompt | (column != start),
                "has a document that begins with a completion. Give a "
                "prompt and its completions one segment id and the prompt completion id 0, and "
                "omit positions. Where nothing is shared, as of a prompt of one token, give each "
                "completion a segment id of its own, and completion id 0.",
            ),
        ]


# ---- `Tree`: ancestors in a tree of spans.


@array_mask
class Tree(_UntilEnd):
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
        if not has_tracers(span_ids, parents):
            _check_numbers(span_ids, parents)
        q_end, rules = _subtree_ends(span_ids, parents)
        if has_tracers(q_end):  # attention refuses such ends
            is_right = jnp.stack([x.all() for x, _ in rules]).all()
            q_end = jnp.where(is_right, q_end, -1)
        else:
            for is_right, what in rules:
                if not is_right.all():
                    row, span = divmod(int(np.argmin(is_right)), parents.shape[1])
                    raise ValueError(f"Tree: batch row {row}: span {span} {what}")
        self._store(q_end=q_end)

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        fits = (self.q_end == 0) | _ends_fit(column, self.q_end, nested=True)
        return [(fits, f"has tokens that are not in depth-first order, or {_OF_OTHER_COLUMNS}")]


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
    xp: Any = jnp if has_tracers(span_ids, parents) else np
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
