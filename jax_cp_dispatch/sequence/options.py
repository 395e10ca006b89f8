"""The options of one call of a layer, made at the door."""

from __future__ import annotations

import dataclasses

from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options
from jax_cp_dispatch.masks.token_order import PACKED, Order


@dataclasses.dataclass(frozen=True)
class Options:
    """Which ranks hold the tokens, in which order, and how they exchange; static.

    Attributes:
      exchange: the op, its axis, and how to move.
      order: of the tokens.
      checks_order: whether ranks check that documents are in this order; not if that
        was checked on the host.
    """

    exchange: CollectiveOptions
    order: Order = PACKED
    checks_order: bool = True

    @classmethod
    def of_call(
        cls,
        op: str,
        axis_name: AxisName,
        implementation: str | None = None,
        deadline: float | None = None,
    ) -> Options:
        """Returns checked options; raises the errors of the public functions."""
        given = {"implementation": implementation, "deadline": deadline}
        return cls(read_options(op, axis_name, **given))

    @property
    def op(self) -> str:
        return self.exchange.op

    @property
    def axis_name(self) -> AxisName:
        return self.exchange.axis_name
