"""Masks of documents that begin with a prompt: `PrefixLM`, and `SharedPrefix`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Integer

from jax_cp_dispatch._arrays import run_begins, run_ends
from jax_cp_dispatch.masks.mask import (
    OF_OTHER_COLUMNS,
    ArrayMask,
    MaskRanges,
    array_mask,
    ends_fit,
    gathered,
    is_traced,
    maximum,
    minimum,
)


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

    @property
    def is_causal(self) -> bool:
        return False

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        is_outside = self.prefix_end == 0
        before = (jnp if is_traced(self.prefix_end) else np).roll(self.prefix_end, 1, axis=1)
        follows = (column == start) | (before > 0)
        return [
            (is_outside | ends_fit(column, self.prefix_end), OF_OTHER_COLUMNS),
            (
                is_outside | follows,
                "has a prefix that does not begin its document. Pass in_prefix "
                "for the first tokens of a document; for others, Blocks.",
            ),
        ]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, minimum(end, maximum(column + 1, self.prefix_end)))


# ---- `SharedPrefix`: completions of one prompt, which see the prompt and themselves.

_NO_END = np.int32(2**31 - 1)


@array_mask
class SharedPrefix(ArrayMask):
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

    has_query_ranges = True
    q_end: Int32[Array | np.ndarray, "B T"]

    def __init__(self, completion_ids: Integer[Array | np.ndarray, "B T"]) -> None:
        xp = jnp if is_traced(completion_ids) else np
        if isinstance(completion_ids, np.ndarray):
            _check_runs(completion_ids)
        completion_ids = gathered(completion_ids)
        ends = run_ends(completion_ids)
        self._store(q_end=xp.where(completion_ids == 0, _NO_END, ends))

    @property
    def is_causal(self) -> bool:
        return True

    def rules(self, column: Any, start: Any, end: Any) -> list[tuple[Any, str]]:
        in_prompt = self.q_end == _NO_END
        return [
            (in_prompt | ends_fit(column, self.q_end), OF_OTHER_COLUMNS),
            (
                in_prompt | (column != start),
                "has a document that begins with a completion. Give a "
                "prompt and its completions one segment id and the prompt completion id 0, and "
                "omit positions. Where nothing is shared, as of a prompt of one token, give each "
                "completion a segment id of its own, and completion id 0.",
            ),
        ]

    def ranges(self, column: Any, start: Any, end: Any) -> MaskRanges:
        return MaskRanges(start, column + 1, start, minimum(end, self.q_end))


def _check_runs(ids: Integer[np.ndarray, "B T"]) -> None:
    """Requires one run for each id between two prompts."""
    is_first = run_begins(ids)
    row, column = np.nonzero(is_first & (ids != 0))
    prompts = np.cumsum(is_first & (ids == 0), axis=1)[row, column]
    runs = np.stack([row, prompts, ids[row, column]])
    order = np.lexsort(runs[::-1])
    again = np.flatnonzero((np.diff(runs[:, order], axis=1) == 0).all(0))
    if len(again):
        i = order[again[0] + 1]
        raise ValueError(
            f"SharedPrefix: batch row {row[i]}: completion {ids[row[i], column[i]]} begins again "
            f"at column {column[i]}; a completion needs to be one run of its id. Pass the "
            "completions of a prompt one after the other, with different ids."
        )
