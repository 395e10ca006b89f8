"""The algorithm of a call with "auto", and the plan by which it was predicted."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_cp_dispatch._arguments import is_on_host
from jax_cp_dispatch.attention.algorithms import Algorithm, Auto, Balanced, Placed, Zigzag
from jax_cp_dispatch.attention.choose import choose_for, default_hardware
from jax_cp_dispatch.attention.latents import shapes_of_keys
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.attention.planned_traffic import balanced_plan, traffic_of_plans
from jax_cp_dispatch.attention.program import GlobalOptions
from jax_cp_dispatch.cost import Workload
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.packed_mask import PackedMask
from jax_cp_dispatch.documents.table import document_lengths
from jax_cp_dispatch.planner import Plan
from jax_cp_dispatch.planner.limits import DoesNotFitError


def choose_for_call(
    options: GlobalOptions, auto: Auto, operands: Operands, packed: PackedMask, plan: Any
) -> tuple[Algorithm, Plan | None]:
    """Returns the algorithm, and its plan, if it has one: that of the call, or else a new one.

    All operands are padded to a multiple of the ranks.
    """
    layout = options.attention.layout
    if plan is not None:
        return Placed() if plan.is_placed else Balanced(auto.config), plan
    if any(isinstance(x, Tracer) for x in packed[1:]):
        raise ValueError(
            f"{options.attention.op}: algorithm='auto' reads segment_ids on the host, but they are "
            "traced. Call choose_algorithm outside jit, once for similar batches, and pass "
            "the algorithm of its result."
        )
    if not all(is_on_host(x) for x in jax.tree.leaves(packed.mask)):  # planned in the program
        return Zigzag() if layout == "zigzag" else Balanced(auto.config), None
    hardware = auto.hardware or default_hardware()
    q, (k, _) = operands.q, shapes_of_keys(options.attention.expansion, operands)
    workload = _workload(options, q, k, packed)
    if options.attention.expansion is not None:  # as one projection of all features
        latent_size = sum(x.shape[3] for x in operands.k)
        flops = 4.0 * latent_size * workload.num_kv_heads * workload.head_size
        workload = dataclasses.replace(workload, latent_size=latent_size, expand_flops=flops)
    if layout == "contiguous":
        if options.axes.batch:  # each group makes its own plan in the program
            estimate = balanced_plan(workload, hardware)
        else:
            if packed.segment_ids is None:
                packed = packed._replace(segment_ids=np.ones(q.shape[:2], np.int32))
            try:
                estimate = plan = options.plan(packed, auto.config)
            except DoesNotFitError:
                estimate = None
    else:
        estimate = None
    moves = traffic_of_plans(hardware, estimate, None)
    choice, _ = choose_for(workload, hardware=hardware, layout=layout, with_backward=True, **moves)
    if isinstance(choice.algorithm, Balanced):
        return Balanced(auto.config), plan
    return choice.algorithm, None


def _workload(options: GlobalOptions, q: Any, k: Any, packed: PackedMask) -> Workload:
    """Returns the work of one group; the rows of the first represent all."""
    axes, attention, num_ranks = options.axes, options.attention, options.num_ranks
    rows = max(q.shape[0] // axes.num_groups, 1)
    lengths = ((q.shape[1],),) * rows
    order = slice(None)
    if attention.layout == "zigzag":
        order = zigzag_permutation(q.shape[1], num_ranks, inverse=True)
    mask, segment_ids, positions = jax.tree.map(lambda x: np.asarray(x)[:rows, order], packed)
    if segment_ids is not None or positions is not None:
        ids = np.ones((rows, q.shape[1]), np.int32) if segment_ids is None else segment_ids
        if mask.has_arrays:  # padding is a document for each token: columns stay as they are
            column = np.arange(1, 1 + q.shape[1])
            ids = np.where(ids == 0, ids.max(initial=0) + column, ids)
            positions = None if positions is None else np.where(segment_ids == 0, 0, positions)
        lengths = document_lengths(ids, positions)
    head_devices = axes.num_devices(axes.heads)
    num_kv_heads = k.shape[2] * axes.kv_copies(q.shape[2], k.shape[2])
    return Workload(
        num_ranks=num_ranks,
        tokens_per_rank=q.shape[1] // num_ranks,
        num_heads=q.shape[2] // head_devices,
        num_kv_heads=num_kv_heads // head_devices,
        head_size=q.shape[3],
        itemsize=q.dtype.itemsize,
        mask=mask,
        lengths=lengths,
    )
