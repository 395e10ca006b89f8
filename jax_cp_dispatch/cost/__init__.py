"""Counts the cost of attention and overlapped GEMMs, and predicts times on given hardware."""

from jax_cp_dispatch.cost.comm_gemm import (
    CommGemmMethod,
    CommGemmShape,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.cost.hardware import HARDWARE, Hardware
from jax_cp_dispatch.cost.pairs import count_pairs, rank_pairs
from jax_cp_dispatch.cost.planned import Moves
from jax_cp_dispatch.cost.steps import Prediction, StepCost
from jax_cp_dispatch.cost.traffic import Traffic, rows_by_link
from jax_cp_dispatch.cost.work import Workload, attention_flops, rows_bytes

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
