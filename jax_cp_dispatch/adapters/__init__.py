"""Attention and GEMMs of model libraries and trainers, computed by this package.

Importing this needs none of these libraries.
"""

from jax_cp_dispatch.adapters.layers import equinox_attention, flax_attention_fn
from jax_cp_dispatch.adapters.maxtext import maxtext_attention, maxtext_gemms

__all__ = [
    "equinox_attention",
    "flax_attention_fn",
    "maxtext_attention",
    "maxtext_gemms",
]
