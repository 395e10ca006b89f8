"""`PackedMask`: what the tokens of packed rows see, as the algorithms pass it on."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.array_mask import MaskKind


class PackedMask(NamedTuple):
    """A mask, and the documents within which it holds; a pytree of arrays `[B, T]`.

    Attributes:
      mask: which keys of its document a query sees; of a plan that knows the rest, its kind.
      segment_ids, positions: the documents; see `context_parallel_attention`. Of whole batch rows,
        or of the columns of a rank.
    """

    mask: Mask | MaskKind
    segment_ids: Any = None
    positions: Any = None
