"""Predicts the cost of attention and overlapped GEMMs, and their times on given hardware."""

from jax_cp_dispatch.cost.comm_gemm import (
    CommGemmMethod,
    CommGemmShape,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.cost.hardware import HARDWARE, Hardware
from jax_cp_dispatch.cost.pairs import count_pairs
from jax_cp_dispatch.cost.predict import Prediction, predict
from jax_cp_dispatch.cost.rank_pairs import rank_pairs
from jax_cp_dispatch.cost.steps import ALGORITHMS, StepCost, step_costs
from jax_cp_dispatch.cost.traffic import Traffic, rows_by_link
from jax_cp_dispatch.cost.work import Workload, attention_flops, rows_bytes

__all__ = [
    "ALGORITHMS",
    "HARDWARE",
    "CommGemmMethod",
    "CommGemmShape",
    "Hardware",
    "Prediction",
    "StepCost",
    "Traffic",
    "Workload",
    "attention_flops",
    "comm_gemm_methods",
    "count_pairs",
    "predict",
    "predict_comm_gemm",
    "rank_pairs",
    "rows_by_link",
    "rows_bytes",
    "step_costs",
]
