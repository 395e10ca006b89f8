"""Invalid choices, profiles and grouped GEMMs.

Others: test_layer_refusals.py of the overlapped layers, test_gemm_refusals.py of `gemm` and its
buffers, test_scaled_gemm_refusals.py, and test_scaling_refusals.py.
"""

from typing import Any, cast

import jax
import numpy as np
import pytest
from refusals import NO_PLAN, check_names, check_rejected

import jax_cp_dispatch as cp

pytestmark = pytest.mark.usefixtures("unchecked_types")

SHAPE = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)
ROWS = np.ones((8, 4), np.float32)
MATRICES = np.ones((2, 4, 3), np.float32)


def grouped(rhs: Any = MATRICES, **options: Any):
    multiply = lambda *operands: cp.grouped_gemm(*operands, **options)
    return jax.eval_shape(multiply, ROWS, rhs, np.array([5, 3], np.int32))


# Name, call, and the message after "<operation>: ".
CASES = [
    ("grouped_gemm", lambda: grouped(contracting_dims=3), "contracting_dims is 3; it needs"),
    ("grouped_gemm", lambda: grouped(contracting_dims=((1,),)), "it needs to be one of"),
    ("grouped_gemm", lambda: grouped(ROWS), "two and three dimensions"),
    ("grouped_gemm", lambda: grouped(np.ones((3, 4, 3), "f")), "3 matrices but there are 2 groups"),
    ("grouped_gemm", lambda: grouped(bias=np.ones(3)), r"bias has shape \(3,\); .*one row per"),
    (
        "grouped_gemm",
        lambda: grouped(ROWS, contracting_dims=((0,), (0,)), bias=np.ones((2, 4))),
        "got a bias where rows are contracted; .* Omit it",
    ),
    (
        "comm_overlap_buffer_bytes",
        lambda: cp.buffers.comm_overlap_buffer_bytes(
            *("AG", "BULK", (8, 8), "float32", 4), **cast(Any, {"foo": 3})
        ),
        "got an unexpected keyword argument 'foo'",
    ),
    ("choose_comm_gemm", lambda: cp.choose_comm_gemm(NO_PLAN), "type ndarray.*CommGemmShape. Pass"),
    (
        "choose_comm_gemm",
        lambda: cp.choose_comm_gemm(SHAPE, hardware=cast(Any, "h100")),
        "type str.*needs to be of type Hardware",
    ),
    ("overlap_profile", lambda: cp.profiling.overlap_profile(NO_PLAN), "type ndarray.*a function"),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
