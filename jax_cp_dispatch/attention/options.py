"""The options of one call of attention over a mesh axis: made where it is called, passed on whole.

What one algorithm alone takes is in `algorithms.py`.
"""

from __future__ import annotations

import dataclasses

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name
from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch._window import Reach, Window, reach
from jax_cp_dispatch.attention.checks import check_layout
from jax_cp_dispatch.attention.local.checks import check_softmax


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """What all exchanges of one call have in common; static.

    Attributes:
      op: the function that was called; begins the message of an error.
      axis_name: the mesh axis of the ranks, or several, the major one first.
      implementation, deadline: see `ring_exchange`.
    """

    op: str
    axis_name: AxisName
    implementation: str | None = None
    deadline: float | None = None

    @property
    def axis_names(self) -> tuple[str, ...]:
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    def check(self) -> None:
        """Raises what `ring_exchange` documents."""
        check_axis_name(self.op, self.axis_name)
        check_implementation(self.op, self.implementation)
        check_deadline(self.op, self.deadline)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What every algorithm takes; static.

    Attributes:
      exchange: of the exchanges; names the op and the axis, too.
      causal, window, layout: see `ring_attention`. A plan has its own window, and is for causal
        attention of contiguous rows.
      scale, logit_soft_cap: see `ring_attention`.
    """

    exchange: ExchangeOptions
    causal: bool = True
    window: Window | None = None
    layout: str = "contiguous"
    scale: float | None = None
    logit_soft_cap: float | None = None

    @property
    def op(self) -> str:
        return self.exchange.op

    @property
    def reach(self) -> Reach:
        return reach(self.op, self.causal, self.window)

    def check(self) -> None:
        """Raises what `ring_attention` documents."""
        self.exchange.check()
        check_layout(self.op, self.layout)
        check_softmax(self.op, self.scale, self.logit_soft_cap)
        reach(self.op, self.causal, self.window)
