"""The static description of a collective call's ranks and their transport."""

import dataclasses
from typing import Any

import numpy as np

from jax_cp_dispatch._ranks.axis import other_axes
from jax_cp_dispatch._ranks.deadline import default_deadline_ms

Groups = tuple[tuple[Any, ...], ...]
"""The device of each rank, group by group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Communicator:
    """The ranks of one call.

    Attributes:
      axis_names: mesh axes on which a device's index is its rank, major axis first; without axes
        the call does not communicate.
      num_ranks: of one group; 0 without axes.
      group_axes: mesh axes on which a device's index is its group. Groups are independent.
      open_axes: mesh axes that the lowering must make manual.
      implementation: the caller's choice; None selects one.
      deadline_ms: milliseconds that a rank waits for another; None: the platform's default.
    """

    axis_names: tuple[str, ...] = ()
    num_ranks: int = 0
    group_axes: tuple[str, ...] = ()
    open_axes: tuple[str, ...] = ()
    implementation: str | None = None
    deadline_ms: int | None = None

    def inside(self, mesh: Any) -> "Communicator":
        """Returns the same ranks with all axes of `mesh` manual."""
        groups = other_axes(mesh, self.axis_names)
        return dataclasses.replace(self, group_axes=groups, open_axes=())

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes that every handler reads; GPUs have another default deadline."""
        return {
            "axis": ",".join(self.axis_names),
            "num_ranks": np.int64(self.num_ranks),
            "deadline_ms": np.int64(self.deadline_ms or default_deadline_ms()),
        }
