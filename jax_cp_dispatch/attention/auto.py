"""`Auto`: the algorithm of a call by its documents, and the plan by which it was predicted."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jax_cp_dispatch._arguments import is_on_host
from jax_cp_dispatch.attention.algorithms import (
    ALGORITHMS,
    Algorithm,
    Balanced,
    Placed,
    Zigzag,
)
from jax_cp_dispatch.attention.algorithms.balanced import check_plan_config
from jax_cp_dispatch.attention.algorithms.by_plan import moves_of_plan
from jax_cp_dispatch.attention.call_options import AttentionOptions
from jax_cp_dispatch.attention.choose import candidates, choose_for, default_hardware
from jax_cp_dispatch.attention.latents import key_shapes
from jax_cp_dispatch.attention.operands import Operands, has_no_tokens
from jax_cp_dispatch.cost import Hardware, Workload
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.ranges import PackedMask
from jax_cp_dispatch.documents.table import document_lengths
from jax_cp_dispatch.global_call.kv_heads import kv_copies
from jax_cp_dispatch.planning import Plan, PlanConfig
from jax_cp_dispatch.planning.request import DoesNotFitError


class Sizes(NamedTuple):
    """The sizes of a call on all its ranks.

    Attributes:
      num_ranks: W.
      num_tokens: of a batch row, on all ranks.
      num_groups: parts of the batch; each has ranks of its own.
      head_devices: that share the heads.
    """

    num_ranks: int
    num_tokens: int
    num_groups: int = 1
    head_devices: int = 1


@dataclasses.dataclass(frozen=True)
class Auto:
    """The algorithm of the plan; without one, the choice of `choose_algorithm` from concrete ids.

    "placed" is only used with its plan: tokens are in the order of the batch otherwise, and cannot
    be placed inside a call.

    Attributes:
      hardware: rates and topology for the prediction; None: see `choose_algorithm`.
      config: of the plan, as in `Balanced`. A batch that is not sharded is planned once; one that
        does not fit gets another algorithm. The groups of a sharded batch plan in the program, and
        are predicted with the heads of the call and the nodes of the hardware.
    """

    name: ClassVar[str] = "auto"
    follows_plan: ClassVar[bool] = True
    hardware: Hardware | None = None
    config: PlanConfig = PlanConfig()

    def check(self, op: str) -> None:
        """Checks the types of its options."""
        check_plan_config(op, self.config)
        if not isinstance(self.hardware, Hardware | None):
            raise TypeError(
                f"{op}: hardware is {self.hardware!r}; it needs to be a "
                "jax_cp_dispatch.cost.Hardware. Omit it for the entry of the default backend."
            )

    def head_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns none: it chooses no algorithm that shares heads for latents."""
        return ()

    def choose(
        self,
        options: AttentionOptions,
        operands: Operands,
        packed: PackedMask,
        plan: Plan | None,
        sizes: Sizes,
    ) -> tuple[Algorithm, Plan | None]:
        """Returns the algorithm, and its plan, if it has one: that of the call, or else a new one.

        Operands are padded to a multiple of the ranks.
        """
        is_zigzag = options.order.layout == "zigzag"
        if plan is not None:
            return Placed() if plan.is_placed else Balanced(self.config), plan
        if has_no_tokens(operands):
            return Zigzag() if is_zigzag else Balanced(self.config), None
        if any(isinstance(x, Tracer) for x in packed[1:]):
            raise ValueError(
                f"{options.op}: algorithm='auto' reads segment_ids on the host, but they are "
                "traced. Call choose_algorithm outside jit, once for similar batches, and pass "
                "the algorithm of its result."
            )
        if not all(is_on_host(x) for x in jax.tree.leaves(packed.mask)):  # planned in the program
            return Zigzag() if is_zigzag else Balanced(self.config), None
        hardware = self.hardware or default_hardware()
        workload = _workload(options, operands, packed, sizes)
        estimate = None
        if not is_zigzag and sizes.num_groups > 1:  # each group makes its own plan in the program
            estimate = Balanced().plan_for(workload, hardware)
        elif not is_zigzag:
            shape = operands.q.shape[0], sizes.num_tokens
            known = packed.with_segment_ids(shape)
            try:
                estimate = plan = Balanced(self.config).plan_before(known, sizes.num_ranks)
            except DoesNotFitError:
                estimate = None
        layout: Any = {"layout": options.order.layout}
        compared = candidates(workload, hardware, **layout)
        moves: dict[Algorithm, Any] = {x: None for x in compared if not x.follows_plan}
        if estimate is not None:
            moves[Balanced(self.config)] = moves_of_plan(estimate, hardware)
        choice, _ = choose_for(workload, moves, hardware=hardware, with_backward=True, **layout)
        return choice.algorithm, plan if choice.algorithm.follows_plan else None


_BY_NAME: dict[str, type[Algorithm] | type[Auto]] = {x.name: x for x in (*ALGORITHMS, Auto)}


def read_algorithm(op: str, algorithm: Any) -> Algorithm | Auto:
    """Returns an algorithm; a short name selects the one with all defaults."""
    if isinstance(algorithm, str) and algorithm in _BY_NAME:
        return _BY_NAME[algorithm]()
    if not isinstance(algorithm, tuple(_BY_NAME.values())):
        raise ValueError(
            f"{op}: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, _BY_NAME))}, or an object with options: "
            f"{', '.join(f'{kind.__name__}()' for kind in _BY_NAME.values())}."
        )
    algorithm.check(op)
    return algorithm


def _workload(
    options: AttentionOptions, operands: Operands, packed: PackedMask, sizes: Sizes
) -> Workload:
    """Returns the work of one group; the rows of the first represent all."""
    (B, _, N, H), T = operands.q.shape, sizes.num_tokens
    K = key_shapes(options.expansion, operands)[0].shape[2]
    rows = max(B // sizes.num_groups, 1)
    lengths = ((T,),) * rows
    order = slice(None)
    if options.order.layout == "zigzag":
        order = zigzag_permutation(T, sizes.num_ranks, inverse=True)
    mask, segment_ids, positions = jax.tree.map(lambda x: np.asarray(x)[:rows, order], packed)
    if segment_ids is not None or positions is not None:
        ids = np.ones((rows, T), np.int32) if segment_ids is None else segment_ids
        if mask.has_arrays:  # padding is a document for each token: columns stay as they are
            column = np.arange(1, 1 + T)
            ids = np.where(ids == 0, ids.max(initial=0) + column, ids)
            positions = None if positions is None else np.where(segment_ids == 0, 0, positions)
        lengths = document_lengths(ids, positions)
    workload = Workload(
        num_ranks=sizes.num_ranks,
        tokens_per_rank=T // sizes.num_ranks,
        num_heads=N // sizes.head_devices,
        num_kv_heads=K * kv_copies(N, K, sizes.head_devices) // sizes.head_devices,
        head_size=H,
        itemsize=operands.q.dtype.itemsize,
        mask=mask,
        lengths=lengths,
    )
    if options.expansion is None:
        return workload
    latent_size = sum(x.shape[3] for x in operands.k)  # as one projection of all features
    flops = 4.0 * latent_size * workload.num_kv_heads * workload.head_size
    return dataclasses.replace(workload, latent_size=latent_size, expand_flops=flops)
