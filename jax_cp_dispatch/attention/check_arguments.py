"""Checks the arguments of attention over a mesh axis, for all algorithms."""

from __future__ import annotations

from typing import Any

from jax_cp_dispatch.attention.local.check_operands import check_arrays, check_operands
from jax_cp_dispatch.attention.local.sink import check_sink
from jax_cp_dispatch.attention.operands import Operands
from jax_cp_dispatch.documents.segment_ids import check_documents
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.array_mask import MaskKind
from jax_cp_dispatch.masks.read import read_mask
from jax_cp_dispatch.planner import Plan


def check_rows(op: str, operands: Operands, segment_ids: Any, positions: Any) -> None:
    """Requires that arrays of one rank, or of all ranks, match."""
    q, k, v, sink, _ = operands
    if v is not None:  # not latent rows, which `read_latents` checks
        _check_qkv(op, q, k, v)
    check_sink(op, sink, q.shape[2])
    check_documents(op, segment_ids, positions, q.shape[:2], "q has B, T =")


def _check_qkv(op: str, q: Any, k: Any, v: Any) -> None:
    check_arrays(op, q=q, k=k, v=v)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need "
            "[B, T, heads, features] with equal B and T. For queries and keys of "
            "different lengths, use local_attention on one device."
        )
    check_operands(op, q, k, v)


def read_mask_of_plan(op: str, mask: Any, plan: Plan) -> Mask | MaskKind:
    """Returns the mask of a plan, or the one that is passed beside it, which must be the same.

    The arrays of a mask are compared in the step, by their checksum.
    """
    given: Any = plan.mask if mask is None else read_mask(op, mask)
    if given is not plan.mask and given.kind != plan.mask:
        raise ValueError(
            f"{op}: mask is {given}, but the plan is for {plan.mask}. Omit mask, or plan with "
            f"mask={given}."
        )
    return given
