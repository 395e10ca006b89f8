"""Attention over local keys, and over a mesh axis."""

from jax_cp_dispatch.attention.api import context_parallel_attention
from jax_cp_dispatch.attention.balanced import balanced_attention
from jax_cp_dispatch.attention.local import local_attention, local_attention_backward
from jax_cp_dispatch.attention.merge import merge_partials

__all__ = [
    "balanced_attention",
    "context_parallel_attention",
    "local_attention",
    "local_attention_backward",
    "merge_partials",
]
