"""`PackedMask`: what the tokens of packed rows see, as the algorithms pass it on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class PackedMask(NamedTuple):
    """A mask, and the documents within which it holds; a pytree of arrays `[B, T]`.

    Attributes:
      mask: a `Mask`: which keys of its document a query sees; or with a plan that knows the rest,
        its `MaskKind`.
      segment_ids, positions: the documents; see `context_parallel_attention`. Of whole batch rows,
        or of the columns of a rank.
    """

    mask: Any
    segment_ids: Any = None
    positions: Any = None

    def with_segment_ids(self, shape: tuple[int, int]) -> PackedMask:
        """Returns the same with segment ids; without them, each batch row is one document."""
        if self.segment_ids is not None:
            return self
        return self._replace(segment_ids=np.ones(shape, np.int32))
