"""Attention over a sharded sequence: cases, runs on a mesh, and dense results."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_oracle import attention, attention_gradients
from jax.sharding import PartitionSpec as P
from mask_oracle import batch_ranges
from on_mesh import AXIS, mesh_of
from packed_batches import pack

from jax_cp_dispatch import Balanced, Documents, Hamilton, PlanConfig, context_parallel_attention
from jax_cp_dispatch.documents import zigzag_permutation
from jax_cp_dispatch.masks import Mask

NAMES = ("out", "dq", "dk", "dv")
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program; `documents` says whether it gets segment ids, positions, both or neither."""

    algorithm: str
    num_ranks: int
    rows: int  # of one rank
    nodes: int | None = None
    cycles: Any = None
    maps: Any = None  # the chunks that each rank sends to each, instead of cycles
    documents: str = "none"  # "none", "segments", "positions", "both"
    mask: Mask | str = "causal"
    zigzag: bool = False  # whether tokens are in zigzag order
    batch: int = 1
    heads: tuple[int, int] = (2, 2)  # of queries, of keys
    scale: float | None = None
    logit_soft_cap: float | None = None
    implementation: str | None = None
    check_vma: bool = True
    dtype: str = "float32"

    @property
    def function(self):
        """Returns the attention function of one rank."""
        algorithm: Any = self.algorithm
        if algorithm == "hamilton":
            algorithm = Hamilton(self.nodes, self.cycles, self.maps)
        if algorithm == "balanced":
            algorithm = Balanced(PlanConfig(block=8))
        return partial(
            context_parallel_attention,
            axis_name=AXIS,
            algorithm=algorithm,
            mask=self.mask,
            scale=self.scale,
            logit_soft_cap=self.logit_soft_cap,
            implementation=self.implementation,
        )

    @property
    def order(self):
        """Returns the token stored in each row."""
        num_tokens = self.num_ranks * self.rows
        if self.zigzag:
            return zigzag_permutation(num_tokens, self.num_ranks)
        return np.arange(num_tokens)

    def given(self, segment_ids=None, positions=None) -> dict[str, Any]:
        """Returns the keywords of attention for documents in packed order; any may be None."""
        if not self.zigzag:
            return {"segment_ids": segment_ids, "positions": positions}
        if segment_ids is None:
            segment_ids = np.ones((self.batch, self.num_ranks * self.rows), np.int32)
        return {"documents": Documents(segment_ids, positions).zigzag(self.num_ranks)}

    def __str__(self):
        fields = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{name}={getattr(self, name)}" for name in fields)


def draw(case, seed=0) -> Any:
    """Returns q, k, v and a cotangent in sequence order, with segment ids and positions."""
    rng = np.random.default_rng(seed)
    shape = case.batch, case.num_ranks * case.rows
    N, K = case.heads
    sizes = ((N, 8), (K, 8), (K, 4), (N, 4))
    arrays = [rng.normal(size=(*shape, *size)).astype(jnp.dtype(case.dtype)) for size in sizes]
    padding = 0.0 if case.documents == "positions" else 0.2
    segment_ids, positions = pack(rng, *shape, max_length=max(2, shape[1] // 2), padding=padding)
    if case.documents == "both":
        segment_ids = np.minimum(segment_ids, 1)
    return (
        *arrays,
        segment_ids if case.documents in ("segments", "both") else None,
        positions if case.documents in ("positions", "both") else None,
    )


def out_and_gradients(case, mesh=None, batch_axis=None) -> Any:
    """Returns the program `(q, k, v, g, segment_ids, positions) -> (out, dq, dk, dv)` of a case.

    Documents are in packed order, the other arrays in that of the case.
    """
    rows = P(batch_axis, AXIS)
    attend: Any = jax.shard_map(
        lambda q, k, v, given: case.function(q, k, v, **given),
        mesh=mesh or mesh_of(case.num_ranks),
        in_specs=rows,
        out_specs=rows,
        check_vma=case.check_vma,
    )

    @jax.jit
    def run(q, k, v, g, *documents):
        given = case.given(*documents)
        out, pull_back = jax.vjp(lambda *x: attend(*x, given), q, k, v)
        return out, *pull_back(g)

    return run


def run(case, operands, program=None):
    """Returns results in sequence order; all padding rows are NaN."""
    q, k, v, g, *documents = operands
    if documents[0] is not None:
        is_token = (documents[0] > 0)[..., None, None]
        q, k, v, g = (np.where(is_token, x, np.array(np.nan, x.dtype)) for x in (q, k, v, g))
    stored = (x[:, case.order] for x in (q, k, v, g))
    results = (program or out_and_gradients(case))(*stored, *documents)
    return [np.asarray(x)[:, np.argsort(case.order)] for x in results]


def dense(case, operands):
    """Returns the same from the oracle, in float64."""
    *arrays, segment_ids, positions = operands
    q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
    options = {"scale": case.scale, "logit_soft_cap": case.logit_soft_cap}
    start, end = attended(q.shape[:2], segment_ids, positions, case.mask)
    out, lse = attention(q, k, v, start, end, **options)
    dlse = np.zeros(lse.shape)
    return [out, *attention_gradients(q, k, v, start, end, g, dlse, **options)]


def attended(shape, segment_ids, positions, mask):
    """Returns the tokens [start, end) that each token sees, from the definition."""
    ids = np.ones(shape, int) if segment_ids is None else segment_ids
    return batch_ranges(mask, ids, positions)


def relative_errors(got, want):
    """Returns the largest difference of each array, relative to its largest entry or 0.1.

    dq and dk of queries with one key are 0 up to rounding, hence 0.1.
    """
    errors = {}
    for name, x, y in zip(NAMES, got, want, strict=True):
        assert x.shape == y.shape
        difference = np.abs(np.asarray(x, np.float64) - y)
        errors[name] = float(np.max(difference) / np.max(np.abs(y), initial=0.1))
    return errors


def check(case, operands, program=None):
    """Checks that results equal dense attention, in the operands' dtype; returns them."""
    got = run(case, operands, program)
    assert {str(x.dtype) for x in got} == {case.dtype}
    errors = relative_errors(got, dense(case, operands))
    assert max(errors.values()) <= TOLERANCE[case.dtype], errors
    return got
