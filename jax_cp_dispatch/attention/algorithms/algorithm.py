"""`Algorithm`: what is asked of every algorithm; one object, in one file, answers all of it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch.attention.operands import (
    Call,
    Operands,
    Outputs,
    key_shapes,
)
from jax_cp_dispatch.cost import Hardware, Moves, Prediction, StepCost, Workload
from jax_cp_dispatch.cost.attention import Pass
from jax_cp_dispatch.cost.pairs import equal_pairs, planned_pairs
from jax_cp_dispatch.documents.documents import Documents
from jax_cp_dispatch.masks.mask import PACKED, PLACED
from jax_cp_dispatch.planning import Plan

# ---- For `balance_profile`: the attention of one rank, without exchanges, on one device.
#
# The programs call the functions of attention itself, with the key ranges of a rank. The rows that
# a rank would receive may have any values: only their number and the ranges determine the time.

Shape = jax.ShapeDtypeStruct


class RankProgram(NamedTuple):
    """A program of one rank, and what differs between the ranks."""

    # Takes a rank, q, k and v, and these ranges. Returns the output and its lse; with the backward
    # pass, the output and the gradients of q, k and v, where the gradient of the output is the
    # output itself.
    run: Callable[..., Any]
    shapes: Sequence[Shape]  # of q, k and v
    ranges: Sequence[Any]  # of each rank, what its queries see
    num_pairs: Int[np.ndarray, " W"]  # query-key pairs of each rank


@dataclasses.dataclass(frozen=True)
class Algorithm(abc.ABC):
    """An algorithm with its own options; frozen, so equal ones share a compiled program.

    Attributes:
      name: in lower case; selects the algorithm with all defaults.
      follows_plan: whether it uses the plan of documents in packed order.
      gathers_keys: whether a rank has all keys of its queries at once.
      advice: what the reason of a choice of it ends with.
    """

    name: ClassVar[str]
    follows_plan: ClassVar[bool] = False
    gathers_keys: ClassVar[bool] = False
    advice: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return self.name

    def check(self, op: str) -> None:  # noqa: B027 - most have no options
        """Checks the types of its options, but not whether they match the ranks."""

    def why_not(self, call: Call, mask: Any) -> str | None:
        """Returns None, or the sentence why it cannot serve this call, and the next step.

        `mask` is that of the documents; with a plan, it may be a `MaskKind`.
        """
        if call.order == PLACED:
            return (
                f"the documents are those of a placement, which algorithm={self.name!r} cannot "
                "follow. Pass algorithm='placed'; or, if the placement does not fit and left all "
                "tokens in place, documents.unplaced()."
            )
        return None

    def head_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the axes of the sequence over which it shares the heads."""
        return ()

    def plan_before(self, documents: Documents, num_ranks: int) -> Plan | None:
        """Returns a plan of known documents that are not sharded over groups, if it follows one."""
        return None

    @abc.abstractmethod
    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        """Computes one rank's part; differentiable.

        Args:
          call: checked.
          operands: the rank's rows.
          documents: those of the rank's columns, with their mask, and at most one plan: that of all
            ranks, or the rank's slice.
        """

    def rank_program(
        self, call: Call, documents: Documents, qkv: list[Shape], *, backward: bool
    ) -> RankProgram | None:
        """Returns its part of one rank alone, for `balance_profile`; None: it is not measured.

        Args:
          call: over all ranks.
          documents: `[B, W * T]`, on the host, with their mask, and at most one plan.
          qkv: shapes of q, k and v of one rank, `[B, T, heads, H]`.
          backward: whether it also computes the gradients.
        """
        return None

    @classmethod
    def candidates(
        cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool
    ) -> Sequence[Algorithm]:
        """Returns those that can serve a workload, for `choose_algorithm`; see there."""
        return (cls(),)

    def describe(self, workload: Workload) -> str:
        """Returns who sends how much to whom, for people, if neither a plan nor symmetry says it.

        Call on the host, of a candidate for the workload.
        """
        return ""

    def plan_for(self, workload: Workload, hardware: Hardware) -> Plan | None:
        """Returns a plan for the heads and the nodes of a workload, if it follows one."""
        return None

    def predict(
        self,
        workload: Workload,
        *,
        hardware: Hardware,
        with_backward: bool = False,
        moves: Moves | None = None,
    ) -> Prediction:
        """Predicts the time of a workload; call on the host.

        Args:
          workload, hardware, moves: see `step_costs`.
          with_backward: predict forward and backward pass together, instead of the forward pass.
        Raises:
          ValueError: as `step_costs`.
        """
        steps = [
            step
            for backward in (False, True)[: 1 + with_backward]
            for step in self.step_costs(workload, hardware=hardware, backward=backward, moves=moves)
        ]
        equal = float(equal_pairs(workload, hardware))
        slowest = float(np.sum(self._pairs(Pass(workload, hardware, moves=moves))))
        imbalance = slowest / equal if equal else 1.0
        total = sum(max(x.compute, x.communication) for x in steps)
        compute, communication, sent, between = map(sum, zip(*(x[:4] for x in steps), strict=True))
        exposed = total - compute
        return Prediction(total, compute, communication, exposed, imbalance, sent, between)

    def step_costs(
        self,
        workload: Workload,
        *,
        hardware: Hardware,
        backward: bool = False,
        moves: Moves | None = None,
    ) -> list[StepCost]:
        """Predicts the steps of a workload; call on the host.

        Args:
          workload: shapes and documents.
          hardware: rates of ranks and links.
          backward: predict the backward pass alone, with 5/2 of the FLOPs.
          moves: the rows that a plan moves, if the algorithm follows one.
        Returns:
          The steps. On "shared_memory", where nothing can be hidden, computation and communication
          alternate.
        Raises:
          ValueError: the ranks cannot be divided into nodes, the algorithm cannot serve the
            workload, or needs `moves`.
        """
        steps = self._steps(Pass(workload, hardware, backward, moves))
        if not hardware.has_shared_memory:
            return steps
        alone = [(StepCost(x.compute, 0.0, 0.0), x._replace(compute=0.0)) for x in steps]
        return [step for pair in alone for step in pair]

    @abc.abstractmethod
    def _steps(self, of: Pass) -> list[StepCost]:
        """Predicts its steps; in each, computation and communication overlap."""

    def _pairs(self, of: Pass) -> Any:
        """Returns the pairs that decide the time of each computation: of a plan, or equal work."""
        return equal_pairs(of.workload, of.hardware) if of.moves is None else planned_pairs(of)

    def rearrangement_seconds(
        self, workload: Workload, hardware: Hardware, *, layout: str, with_backward: bool
    ) -> float:
        """Predicts the seconds to rearrange tokens before the steps, and back."""
        return 0.0


def run_unless_empty(
    algorithm: Algorithm, call: Call, operands: Operands, documents: Documents
) -> Outputs:
    """Returns `algorithm.run(...)`; without tokens there is nothing to plan or to move."""
    if documents.plan is not None or 0 not in jax.tree.leaves(operands.q)[0].shape[:2]:
        return algorithm.run(call, operands, documents)
    if call.local is not None:
        empty = call.local.shape(operands)
        return Outputs(jnp.zeros(empty.shape, empty.dtype))
    q, (_, v) = operands.q, key_shapes(call.expansion, operands)
    B, T, N, _ = q.shape
    dtype = sum_dtype(q.dtype)
    lse = jnp.full((B, T, N), -jnp.inf, dtype) if call.return_lse else None
    max_logits = jnp.full(N, -jnp.inf, dtype) if call.return_max_logits else None
    return Outputs(jnp.zeros((B, T, N, v.shape[3]), q.dtype), lse, max_logits)


def refuse(algorithm: Algorithm, call: Call, mask: Any) -> None:
    if (call.pick_block or call.local) and not algorithm.gathers_keys:
        step = {PACKED: "'balanced' or 'halo'", PLACED: "'placed'"}.get(call.order, "'halo'")
        placing = "" if call.order == PLACED else "; or place the tokens, and pass 'placed'"
        why = (
            f"with algorithm={algorithm.name!r} a rank never has all keys of a query at once, as "
            f"picked keys need. Pass algorithm={step}{placing}."
        )
    else:
        why = algorithm.why_not(call, mask)
    if why is not None:
        raise ValueError(f"{call.op}: {why}")
