"""The options of one call of attention over a mesh axis, made at the call.

Options of a single algorithm are its own, in `algorithms/`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.attention.latents import Expansion
from jax_cp_dispatch.attention.local.check_operands import check_softmax
from jax_cp_dispatch.attention.operands import Outputs
from jax_cp_dispatch.masks.mask import PACKED, Order


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of every algorithm, checked; static.

    Attributes:
      exchange: the checked options of the exchanges, with the op and the axis.
      order: of the tokens.
      scale, logit_soft_cap, return_lse, return_max_logits: see
        `context_parallel_attention`.
      expansion: of latent rows, or None.
      checks_order: whether ranks check that documents are in the order of the layout; not if that
        was checked on the host.
    """

    exchange: CollectiveOptions
    order: Order = PACKED
    scale: float | None = None
    logit_soft_cap: float | None = None
    return_lse: bool = False
    return_max_logits: bool = False
    expansion: Expansion | None = None
    checks_order: bool = True

    @property
    def op(self) -> str:
        return self.exchange.op

    def __post_init__(self):
        check_softmax(self.op, self.scale, self.logit_soft_cap)

    def returned(self, outputs: Outputs) -> Any:
        """Returns what the caller asked for: the output alone, or a tuple."""
        out, lse, max_logits = outputs
        asked = [lse] if self.return_lse else []
        asked += [max_logits] if self.return_max_logits else []
        return (out, *asked) if asked else out
