"""Attention of one workload by this package and by others, for `gpu_attention.py`.

Each function takes a workload. It returns a function of q, k, v and further arrays, and these
arrays: they are arguments of the compiled program, as in training. It raises `Unsupported` if the
implementation cannot compute the workload.
"""

import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from attention_workloads import Workload
from jax._src.cudnn import fused_attention_stablehlo as fused

from jax_cp_dispatch import local_attention

Attention = tuple[Callable[..., Any], Any]


class Unsupported(Exception):
    """An implementation cannot compute a workload; the message says why."""


def ours(workload: Workload) -> Attention:
    def attend(q, k, v, given):
        return local_attention(q, k, v, **given, out_dtype=q.dtype)[0]

    return attend, workload.given


def cudnn_packed(workload: Workload) -> Attention:
    """cuDNN's packed layout, which `jax.nn` does not offer.

    It computes whole documents, whose number is that of the compiled program.
    """
    lengths = _lengths(workload)
    if any(queries != keys for queries, keys in workload.segments or ()):
        raise Unsupported("JAX offers no causal mask whose last query sees the last key")

    def attend(q, k, v, of):
        lengths, offsets = of
        return fused.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
            mask_type=fused.MaskType.PADDING_CAUSAL, scale=q.shape[-1] ** -0.5,
        )  # fmt: skip

    of = lengths[0][None], _offsets(lengths[0])[None]
    return attend, jax.tree.map(jnp.asarray, of)


def cudnn_causal(workload: Workload) -> Attention:
    """cuDNN on one causal document, through `jax.nn`."""
    T, S = workload.visible.shape
    if workload.segments != [(T, S)] or T != S:
        raise Unsupported("for one document only")

    def attend(q, k, v, _):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    return attend, ()


def flash_attention_3(workload: Workload) -> Attention:
    lengths = _lengths(workload)
    if (workload.heads.size, workload.heads.value_size) != (128, 128):
        raise Unsupported("the published wheel of flash-attn3-jax has heads of 128 only")
    try:
        module = importlib.import_module("flash_attn3_jax")
    except ImportError as error:
        raise Unsupported(f"flash-attn3-jax does not load: {error}") from error
    longest = {f"max_seqlen_{x}": int(max(n)) for x, n in zip("qk", lengths, strict=True)}

    def attend(q, k, v, offsets):
        q, k, v = (x[0] for x in (q, k, v))
        return module.flash_mha_varlen(q, k, v, *offsets, is_causal=True, **longest)[None]

    return attend, [jnp.asarray(_offsets(n)) for n in lengths]


def jax_nn_xla(workload: Workload) -> Attention:
    return _masked(workload, "xla")


def jax_nn_cudnn(workload: Workload) -> Attention:
    return _masked(workload, "cudnn")


def _masked(workload: Workload, implementation: Literal["xla", "cudnn"]) -> Attention:
    def attend(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    return attend, jnp.asarray(workload.visible[None, None])


def _lengths(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Returns the queries and the keys of each segment."""
    if workload.segments is None:
        raise Unsupported("it needs segments that have keys of their own")
    queries, keys = np.asarray(workload.segments, np.int32).T
    return queries, keys


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


IMPLEMENTATIONS = {
    function.__name__: function
    for function in (ours, cudnn_packed, cudnn_causal, flash_attention_3, jax_nn_xla, jax_nn_cudnn)
}
