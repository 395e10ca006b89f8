"""Counts the cost of attention and overlapped GEMMs, and predicts times on given hardware."""

from jax_cp_dispatch.cost.attention import (
    HARDWARE,
    Hardware,
    Prediction,
    StepCost,
    Traffic,
    Workload,
    attention_flops,
    rows_by_link,
    rows_bytes,
)
from jax_cp_dispatch.cost.comm_gemm import (
    CommGemmMethod,
    CommGemmShape,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.cost.pairs import Moves, count_pairs, rank_pairs

__all__ = [
    "HARDWARE",
    "CommGemmMethod",
    "CommGemmShape",
    "Hardware",
    "Moves",
    "Prediction",
    "StepCost",
    "Traffic",
    "Workload",
    "attention_flops",
    "comm_gemm_methods",
    "count_pairs",
    "predict_comm_gemm",
    "rank_pairs",
    "rows_by_link",
    "rows_bytes",
]
