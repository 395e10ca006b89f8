"""Reads the mask of the plan command: from text, and from arrays beside the segment ids."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.masks import (
    BlockCausal,
    Blocks,
    Causal,
    Chunked,
    Full,
    Mask,
    PrefixLM,
    Ranges,
    SharedPrefix,
    SlidingWindow,
    StaticMask,
    Tree,
)

_PLAIN = {"causal": Causal, "full": Full}
_OF_TOKENS = {"sliding_window": SlidingWindow, "chunked": Chunked, "block_causal": BlockCausal}
_OF_ARRAYS: dict[str, tuple[Callable[..., Mask], tuple[str, ...]]] = {
    "prefix_lm": (PrefixLM, ("in_prefix",)),
    "blocks": (Blocks, ("block_ids",)),
    "shared_prefix": (SharedPrefix, ("completion_ids",)),
    "tree": (Tree, ("span_ids", "parents")),
    "ranges": (Ranges, ("k_start", "k_end", "q_start", "q_end")),
}
_OPTIONAL = ("q_start", "q_end")
_NOT_OF_TOKENS = ("parents",)
FORMS = ", ".join([*_PLAIN, *(f"{name}:TOKENS" for name in _OF_TOKENS), *_OF_ARRAYS])


class MaskOfArrays(NamedTuple):
    """A mask whose arrays are read from the file of segment ids.

    Attributes:
      name: as in `--mask`.
      arrays: by name, of the batch rows that are planned.
    """

    name: str
    arrays: dict[str, Shaped[np.ndarray, "B ..."]]

    def of(self, num_columns: int) -> Mask:
        """Returns the mask of batch rows cut, or padded, to this many columns."""
        make, _ = _OF_ARRAYS[self.name]
        try:
            return make(**{name: self._sized(name, num_columns) for name in self.arrays})
        except (TypeError, ValueError) as error:
            raise InputError(f"--mask {self.name}: {error}") from None

    def _sized(self, name: str, num_columns: int) -> np.ndarray:
        x = self.arrays[name]
        if name in _NOT_OF_TOKENS or x.ndim != 2:
            return x
        missing = max(0, num_columns - x.shape[1])
        none = -1 if name == "span_ids" else 0
        return np.pad(x[:, :num_columns], ((0, 0), (0, missing)), constant_values=none)


def read_mask_text(
    text: str, path: pathlib.Path, *, row: int | None = None
) -> StaticMask | MaskOfArrays:
    """Returns the mask that `--mask` names.

    Args:
      text: see `FORMS`.
      path: the file of lengths, or of segment ids and the arrays of the mask.
      row: keep only this batch row.
    Raises:
      InputError: the text names no mask, or the file has not its arrays.
    """
    name, _, tokens = text.partition(":")
    if text in _PLAIN:
        return _PLAIN[text]()
    if text in _OF_ARRAYS:
        return _arrays_of(text, path, row)
    if name not in _OF_TOKENS or not tokens.isdecimal() or not 0 < int(tokens) < 2**31:
        raise InputError(
            f"--mask is {text!r}; pass one of {FORMS}, for example --mask sliding_window:4096."
        )
    return _OF_TOKENS[name](int(tokens))


def _arrays_of(mask: str, path: pathlib.Path, row: int | None) -> MaskOfArrays:
    _, names = _OF_ARRAYS[mask]
    needed = [name for name in names if name not in _OPTIONAL]
    found = _load(path) if path.suffix.lower() == ".npz" else {}
    missing = [name for name in ["segment_ids", *needed] if name not in found]
    if missing:
        raise InputError(
            f"--mask {mask} needs the arrays segment_ids, {', '.join(needed)}; {path} has no "
            f"{', no '.join(missing)}. Save them in one .npz file by numpy.savez."
        )
    is_token = np.atleast_2d(found["segment_ids"] != 0)
    if (is_token[:, 1:] & ~is_token[:, :-1]).any():
        raise InputError(
            f"--mask {mask}: {path} has padding before a document. Pass segment ids with all "
            "padding at the end of each batch row."
        )
    rows = slice(None) if row is None else slice(row, row + 1)
    arrays = {name: np.atleast_2d(found[name])[rows] for name in names if name in found}
    return MaskOfArrays(mask, arrays)


def _load(path: pathlib.Path) -> dict[str, Any]:
    """Returns the arrays of a file; none if `read_lengths` will refuse it."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return dict(found)
    except (EOFError, OSError, ValueError):
        return {}
