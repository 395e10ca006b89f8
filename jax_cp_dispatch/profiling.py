"""Predicted and measured times of attention and overlapped GEMMs, and choices based on them."""

from jax_cp_dispatch.attention import (
    AttentionProfile,
    BalanceProfile,
    Choice,
    RankProfile,
    StepProfile,
    balance_profile,
    balanced_attention_profile,
    hamilton_attention_profile,
    placed_attention_profile,
    ring_attention_profile,
    zigzag_ring_attention_profile,
)
from jax_cp_dispatch.comm_gemm import (
    CommGemmChoice,
    OverlapProfile,
    TuningTable,
    current_tuning,
    overlap_profile,
    tune,
    use_tuning,
)
from jax_cp_dispatch.timeline import Span

__all__ = [
    "AttentionProfile",
    "BalanceProfile",
    "Choice",
    "CommGemmChoice",
    "OverlapProfile",
    "RankProfile",
    "Span",
    "StepProfile",
    "TuningTable",
    "balance_profile",
    "balanced_attention_profile",
    "current_tuning",
    "hamilton_attention_profile",
    "overlap_profile",
    "placed_attention_profile",
    "ring_attention_profile",
    "tune",
    "use_tuning",
    "zigzag_ring_attention_profile",
]
