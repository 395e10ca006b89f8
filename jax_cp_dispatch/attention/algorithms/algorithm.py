"""`Algorithm`: what is asked of every algorithm; one object, in one file, answers all of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.operands import Operands, Outputs
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.masks.mask import PLACED
from jax_cp_dispatch.planning import Plan

if TYPE_CHECKING:
    from jax_cp_dispatch.attention.algorithms.rank_program import Batch, RankProgram


class Call(NamedTuple):
    """A call of attention, as an algorithm decides whether it can serve it; static.

    Attributes:
      options: of the call.
      num_ranks: devices that share the sequence.
      num_heads: query heads of one device.
      plan: of the call, or None.
    """

    options: AttentionOptions
    num_ranks: int
    num_heads: int
    plan: Plan | None = None


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """An algorithm with its own options; frozen, so equal ones share a compiled program.

    Attributes:
      name: in lower case; selects the algorithm with all defaults.
      follows_plan: whether it uses the plan of documents in packed order.
    """

    name: ClassVar[str]
    follows_plan: ClassVar[bool] = False

    def check(self, op: str) -> None:
        """Checks the types of its options, but not whether they match the ranks."""

    def why_not(self, call: Call) -> str | None:
        """Returns None, or the sentence why it cannot serve this call, and the next step."""
        if call.options.order == PLACED:
            return (
                f"the documents are those of a placement, which algorithm={self.name!r} cannot "
                "follow. Pass algorithm='placed'; or, if the placement does not fit and left all "
                "tokens in place, documents.unplaced()."
            )
        return None

    def plan_before(self, packed: PackedMask, num_ranks: int) -> Plan | None:
        """Returns a plan of known documents that are not sharded over groups, if it follows one."""

    def attend(
        self,
        options: AttentionOptions,
        operands: Operands,
        packed: PackedMask,
        plan: Plan | None,
    ) -> Outputs:
        """Computes one rank's part; differentiable.

        Args:
          options: of the call, checked.
          operands: the rank's rows.
          packed: the mask, and the documents of the rank's columns.
          plan: of all ranks, or the rank's slice.
        """
        raise NotImplementedError

    def rank_program(
        self, options: AttentionOptions, batch: Batch, *, backward: bool
    ) -> RankProgram | None:
        """Returns its part of one rank alone, for `balance_profile`; None: it is not measured."""


def refuse(op: str, algorithm: Algorithm, call: Call) -> None:
    """Raises if the algorithm cannot serve the call."""
    why = algorithm.why_not(call)
    if why is not None:
        raise ValueError(f"{op}: {why}")
