"""What attention costs, and how long each algorithm would take on given hardware; plain NumPy."""

from jax_cp_dispatch.cost.hardware import HARDWARE, Hardware
from jax_cp_dispatch.cost.predict import ALGORITHMS, Prediction, StepCost, predict, step_costs
from jax_cp_dispatch.cost.work import Workload, attention_flops, rank_pairs, rows_bytes

__all__ = [
    "ALGORITHMS",
    "HARDWARE",
    "Hardware",
    "Prediction",
    "StepCost",
    "Workload",
    "attention_flops",
    "predict",
    "rank_pairs",
    "rows_bytes",
    "step_costs",
]
