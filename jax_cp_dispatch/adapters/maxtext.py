"""Attention of MaxText under context parallelism, by `context_parallel_attention`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.adapters.maxtext_call import attention_keywords, what_is_missing
from jax_cp_dispatch.attention import context_parallel_attention


@contextlib.contextmanager
def maxtext_attention(*, algorithm: Any = "zigzag", **options: Any) -> Iterator[None]:
    """Computes the attention of MaxText models that are traced in this block, in training.

    Applies to calls whose queries are sharded over several devices by MaxText's logical rules:
    global, sliding, chunked, block-diffusion, full and latent (MLA) attention, with attention
    sinks, masks of images and the largest logits, of packed documents or not, with MaxText's load
    balance (its reordering of tokens) or without. The results are MaxText's, except that padding is
    zero, and that blocks of image tokens never cross documents.

    MaxText computes all other calls: those on one context device, decoding and prefill, and with a
    warning those that need what `context_parallel_attention` lacks: masks of indexers and
    compressed keys, MoBA, striped tokens.

    Args:
      algorithm: as in `context_parallel_attention`; "balanced" without load balance only.
      options: `implementation`, `deadline` and `num_comm_sm` of `context_parallel_attention`.
    Raises:
      TypeError, ValueError: while a model is traced; see `context_parallel_attention`.
    """
    from flax import nnx
    from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]

    dense = AttentionOp.apply_attention
    signature = inspect.signature(dense)

    @functools.wraps(dense)
    def apply_attention(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named).arguments
        keywords = attention_keywords(**call) if call["model_mode"] == "train" else None
        if keywords and (missing := what_is_missing(**call)):
            warn_caller(f"maxtext_attention: got {missing}; MaxText computes it.")
            keywords = None
        if not keywords:
            return dense(*arguments, **named)
        out = context_parallel_attention(algorithm=algorithm, **keywords, **options)
        if keywords["return_max_logits"]:
            out, largest = out
            # MaxText's have an axis of batch rows, over which it takes the largest.
            call["self"].max_logits = nnx.Intermediate(largest[None])
        return out, None, None

    AttentionOp.apply_attention = apply_attention
    try:
        yield
    finally:
        AttentionOp.apply_attention = dense
