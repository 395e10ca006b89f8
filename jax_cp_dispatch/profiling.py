"""Predicted and measured times of attention and overlapped GEMMs, and choices based on them."""

from jax_cp_dispatch._rank_times import BalanceProfile
from jax_cp_dispatch.attention import (
    AttentionProfile,
    Choice,
    RankProfile,
    StepProfile,
    balance_profile,
    hamilton_attention_profile,
)
from jax_cp_dispatch.comm_gemm import (
    CommGemmChoice,
    OverlapProfile,
    overlap_profile,
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
    "balance_profile",
    "hamilton_attention_profile",
    "overlap_profile",
]
