"""The options of one call of a layer, made at the door."""

from __future__ import annotations

import dataclasses

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.documents.layouts import check_layout


@dataclasses.dataclass(frozen=True)
class Options:
    """Which ranks hold the tokens, in which order, and how they exchange; static.

    Attributes:
      exchange: the op, its axis, and how to move.
      layout: "contiguous" or "zigzag"; a placement has its own order.
      checks_order: whether ranks check that documents are in the order of the layout; not if that
        was checked on the host.
    """

    exchange: CollectiveOptions
    layout: str = "contiguous"
    checks_order: bool = True

    @classmethod
    def of_call(
        cls,
        op: str,
        axis_name: AxisName,
        layout: str = "contiguous",
        implementation: str | None = None,
        deadline: float | None = None,
    ) -> Options:
        """Returns checked options; raises the errors of the public functions."""
        given = {"implementation": implementation, "deadline": deadline}
        options = read_options(op, axis_name, **given)
        check_layout(op, layout)
        return cls(options, layout)

    @property
    def op(self) -> str:
        return self.exchange.op

    @property
    def axis_name(self) -> AxisName:
        return self.exchange.axis_name
