"""The passes of local attention for CUDA by cuDNN's flash attention: of one dense document.

cuDNN has no key range per query, so the ranges must be known to be dense when a program is traced.
It reads and writes the arrays of the caller.

jax.nn.dot_product_attention stops the gradient of the logarithm of the sum, and does not return it,
so this module uses the primitives below it.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp

from jax_cp_dispatch._jax_private import fused_attention_stablehlo as fused
from jax_cp_dispatch.attention.local.local_options import CAUSAL, PassOptions

_LARGEST_HEAD = 128  # 256 on Hopper and later, which is unknown when a program is lowered
_CALL: dict[str, Any] = {
    "seed": 42,
    "dropout_rate": 0.0,
    "variadic_args": (False, False),  # no bias, no gradient of a bias
    "layout": fused.AttentionLayout.BTNH.value,
    "sliding_window_length": None,
}
if "score_mod" in inspect.signature(fused.dot_product_attention).parameters:  # since jax 0.12
    _CALL |= {"score_mod_name": None, "score_mod_jaxpr": None}


def takes(options: PassOptions, q, v) -> bool:
    """Whether the ranges are dense, and cuDNN supports such heads."""
    H, Hv = q.shape[3], v.shape[3]
    return (
        options.dense is not None
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and H == Hv <= _LARGEST_HEAD
        and H % 8 == 0
        and options.logit_soft_cap is None
        and not options.return_max_logits  # cuDNN returns no largest logits
    )


def attend(options: PassOptions, operands):
    """`attend` of `uncut.py`, without a sink."""
    out, lse = fused._dot_product_attention_fwd_p.bind(
        *_operands(operands), is_training=True, **_options(options)
    )
    return out.astype(options.out_dtype), lse


def gradients(options: PassOptions, operands):
    """`gradients` of `uncut.py`, without a cotangent of the lse. Results are rounded."""
    out, lse, dout, _ = operands.whole
    of_outputs = lse, *(x.astype(operands.q.dtype) for x in (out, dout))
    results = fused._dot_product_attention_bwd_p.bind(
        *_operands(operands), *of_outputs, **_options(options)
    )
    return tuple(x.astype(to) for x, to in zip(results, options.gradient_dtypes, strict=True))


def _options(options: PassOptions) -> dict[str, Any]:
    mask = fused.MaskType.CAUSAL if options.dense == CAUSAL else fused.MaskType.NO_MASK
    return {"mask_type": mask, "scale": options.scale, **_CALL}


def _operands(operands):
    none = jnp.zeros(0, operands.q.dtype)  # bias, lengths, offsets and tables of pages
    return *operands[:3], *[none] * 7
