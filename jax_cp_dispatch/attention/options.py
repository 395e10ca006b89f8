"""The options of one call of attention over a mesh axis, made at the call.

Options of a single algorithm are in `algorithms.py`.
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
    """The common options of all exchanges of one call; static.

    Attributes:
      op: the function that was called, for error messages.
      axis_name: the mesh axis of the ranks, or several, major axis first.
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
        """Raises the errors documented in `ring_exchange`."""
        check_axis_name(self.op, self.axis_name)
        check_implementation(self.op, self.implementation)
        check_deadline(self.op, self.deadline)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options of every algorithm; static.

    Attributes:
      exchange: options of the exchanges, with the op and the axis.
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
        """Raises the errors documented in `ring_attention`."""
        self.exchange.check()
        check_layout(self.op, self.layout)
        check_softmax(self.op, self.scale, self.logit_soft_cap)
        reach(self.op, self.causal, self.window)
