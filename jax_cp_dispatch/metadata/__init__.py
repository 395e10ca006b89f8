"""Plans of exchanges as data: which shard goes to which rank and row, and its length."""

from jax_cp_dispatch.metadata.compute import (
    AttnLayoutSeqlens,
    compute_attn_layout_seqlens,
    compute_metadata,
    compute_metadata_kv,
)
from jax_cp_dispatch.metadata.fields import Metadata

__all__ = [
    "AttnLayoutSeqlens",
    "Metadata",
    "compute_attn_layout_seqlens",
    "compute_metadata",
    "compute_metadata_kv",
]
