"""Attention layers of model libraries, computed by `context_parallel_attention`.

Importing this needs none of these libraries.
"""

from jax_cp_dispatch.adapters.documents import Documents
from jax_cp_dispatch.adapters.equinox import equinox_attention
from jax_cp_dispatch.adapters.flax import flax_attention_fn

__all__ = ["Documents", "equinox_attention", "flax_attention_fn"]
