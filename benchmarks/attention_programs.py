"""Programs of attention over 8 virtual devices, forward and backward, one for each method."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import Hamilton, context_parallel_attention, local_attention
from jax_cp_dispatch.cost import attention_flops
from jax_cp_dispatch.documents.layouts import PackedMask, attended_tokens
from jax_cp_dispatch.masks import MaskRanges
from jax_cp_dispatch.masks.read import read_mask
from jax_cp_dispatch.tools.programs import DENSE, gradients, random_operands

NUM_RANKS, NUM_HEADS, HEAD_SIZE = 8, 8, 64
AXIS = "cp"
OURS = ("ring", "zigzag", "hamilton", "ulysses", "balanced")
DIRECT, BY_XLA = "hamilton, direct", "hamilton, XLA's all-to-all"
VARIANTS = (DIRECT, BY_XLA)
PACKAGE, LOCAL = "ringattention", "local attention, one device"
LARGEST_PACKAGE = 32768  # tokens; one run at 64K takes minutes
LARGEST_DENSE = 8192  # tokens; the logits of 8 heads take 11 GB, and four times as much at 16K


@dataclasses.dataclass(frozen=True)
class Case:
    """The input of one measurement.

    Attributes:
      name: for the table.
      num_tokens: of the sequence, one batch row.
      dtype: of q, k, v.
      mask: which keys of its document a token sees.
      segment_ids: of packed documents [1, num_tokens]; None: one document.
    """

    name: str
    num_tokens: int
    dtype: str
    mask: str = "causal"
    segment_ids: Any = None

    def ranges(self) -> MaskRanges:
        shape = (1, self.num_tokens)
        ids = None if self.segment_ids is None else jnp.asarray(self.segment_ids)
        return attended_tokens(PackedMask(read_mask("a benchmark", self.mask), ids), shape)

    @property
    def flops(self) -> float:
        """Floating-point operations of both passes, for pairs that the mask admits."""
        start, end, *_ = self.ranges()
        sizes = {"num_heads": NUM_HEADS, "head_size": HEAD_SIZE}
        pairs = float(np.sum(np.asarray(end - start), dtype=np.float64))
        passes = [attention_flops(pairs, **sizes, backward=x) for x in (False, True)]
        return sum(passes)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:NUM_RANKS]), (AXIS,))


def program(method: str, case: Case) -> tuple[Callable, list[jax.Array]] | str:
    """Returns a compiled program (q, k, v, cotangent) -> (dq, dk, dv) and operands, or why not."""
    if method == DENSE and case.num_tokens > LARGEST_DENSE:
        return "exceeds the memory"
    if method == PACKAGE and case.num_tokens > LARGEST_PACKAGE:
        return "takes too long"
    attend = _attention(method, case)
    if isinstance(attend, str):
        return attend
    sharding = jax.devices()[0] if method == LOCAL else NamedSharding(mesh(), P(None, AXIS))
    arrays = random_operands(case.num_tokens, NUM_HEADS, HEAD_SIZE, case.dtype)
    operands = [jax.device_put(x, sharding) for x in arrays]

    return jax.jit(gradients(attend)).lower(*operands).compile(), operands


def _attention(method: str, case: Case):
    """Returns a function of global q, k, v; or why there is none."""
    if method in (*OURS, *VARIANTS):
        return _ours(method, case)
    return {DENSE: _dense, PACKAGE: _package, LOCAL: _local}[method](case)


def _ours(method: str, case: Case):
    return lambda q, k, v: context_parallel_attention(
        *(q, k, v),
        mesh=mesh(),
        axis_name=AXIS,
        algorithm={DIRECT: Hamilton(cycles="direct"), BY_XLA: "hamilton"}.get(method, method),
        implementation="xla" if method == BY_XLA else None,
        mask=case.mask,
        segment_ids=case.segment_ids,
    )


def _local(case: Case):
    start, end, *_ = case.ranges()
    return lambda q, k, v: local_attention(q, k, v, start, end)[0].astype(q.dtype)


def _dense(case: Case):
    mask = None
    if case.segment_ids is not None:
        ids = case.segment_ids[0]
        mask = jnp.asarray((ids[:, None] == ids) & (ids > 0))[None, None]
    return lambda q, k, v: jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=case.mask == "causal"
    )


def _package(case: Case):
    ring = ring_of_package(
        mesh(), AXIS, case.num_tokens // NUM_RANKS, case.dtype, case.mask == "causal"
    )
    if isinstance(ring, str):
        return ring
    ids = None if case.segment_ids is None else jnp.asarray(case.segment_ids)
    return lambda q, k, v: ring(q, k, v, ids)


def ring_of_package(
    mesh: Mesh, axis_name: str, tokens_per_rank: int, dtype: Any, causal: bool = True
) -> Callable[..., jax.Array] | str:
    """Returns attention (q, k, v, segment ids or None) of `ringattention` from PyPI, or why not.

    The package needs a module that JAX has removed.
    """
    if importlib.util.find_spec("ringattention") is None:
        return "not installed"
    if not hasattr(jax.lib, "xla_bridge"):
        setattr(jax.lib, "xla_bridge", jax.extend.backend)  # noqa: B010  unknown to pyright
    ring = importlib.import_module("ringattention").ringattention
    chunk = min(512, tokens_per_rank)
    options = {
        "causal_block_size": 1 if causal else None,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "dtype": jnp.dtype(dtype),
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    rows, whole = P(None, axis_name), P()
    return jax.shard_map(
        lambda q, k, v, ids: ring(q, k, v, None, ids, None, axis_name, True, options),
        mesh=mesh,
        in_specs=(rows, rows, rows, whole),
        out_specs=rows,
        check_vma=False,
    )
