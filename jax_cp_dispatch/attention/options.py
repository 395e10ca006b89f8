"""The options of one call of attention over a mesh axis, made at the call.

Options of a single algorithm are in `algorithms.py`.
"""

from __future__ import annotations

import dataclasses

from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.attention.arguments import check_layout
from jax_cp_dispatch.attention.local.arguments import check_softmax


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of every algorithm; static.

    Attributes:
      exchange: the checked options of the exchanges, with the op and the axis.
      layout, scale, logit_soft_cap: see `ring_attention`.
    """

    exchange: CollectiveOptions
    layout: str = "contiguous"
    scale: float | None = None
    logit_soft_cap: float | None = None

    @property
    def op(self) -> str:
        return self.exchange.op

    def check(self) -> None:
        """Raises the errors documented in `ring_attention`."""
        check_layout(self.op, self.layout)
        check_softmax(self.op, self.scale, self.logit_soft_cap)
