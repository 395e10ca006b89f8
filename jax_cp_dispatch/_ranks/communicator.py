"""Who takes part in a collective call, and how its ranks reach each other: its static part."""

import dataclasses
from typing import Any

import numpy as np

from jax_cp_dispatch._ranks.axis import other_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communicator:
    """The ranks of one call.

    Attributes:
      axis_names: mesh axes on which a device's place is its rank, the major one first; none: the
        call does not communicate.
      num_ranks: of one group; 0 without axes.
      group_axes: mesh axes on which a device's place is its group. Every group is on its own.
      open_axes: mesh axes that the lowering has to make manual.
      implementation: that the caller named; None chooses.
      deadline_ms: milliseconds that a rank waits for another.
    """

    axis_names: tuple[str, ...] = ()
    num_ranks: int = 0
    group_axes: tuple[str, ...] = ()
    open_axes: tuple[str, ...] = ()
    implementation: str | None = None
    deadline_ms: int = 60_000

    def inside(self, mesh: Any) -> "Communicator":
        """The same where all axes of `mesh` are manual."""
        groups = other_axes(mesh, self.axis_names)
        return dataclasses.replace(self, group_axes=groups, open_axes=())

    def attributes(self) -> dict[str, Any]:
        """As every handler takes them."""
        return {
            "axis": ",".join(self.axis_names),
            "num_ranks": np.int64(self.num_ranks),
            "deadline_ms": np.int64(self.deadline_ms),
        }
