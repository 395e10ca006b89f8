"""Invalid choices of a method, and profiles."""

from typing import Any, cast

import pytest
from refusals import NO_PLAN, check_names, check_rejected, each

import jax_cp_dispatch as cp
from jax_cp_dispatch.comm_gemm import choose_comm_gemm

pytestmark = pytest.mark.usefixtures("unchecked_types")

SHAPE = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)


# By operation: a call, and the message after "<operation>: ".
CASES = {
    "comm_overlap_buffer_bytes": [
        (
            lambda: cp.buffers.comm_overlap_buffer_bytes(
                *("AG", "BULK", (8, 8), "float32", 4), **cast(Any, {"foo": 3})
            ),
            "got an unexpected keyword argument 'foo'",
        )
    ],
    "choose_comm_gemm": [
        (lambda: choose_comm_gemm(NO_PLAN), "type ndarray.*CommGemmShape. Pass"),
        (lambda: choose_comm_gemm(SHAPE, hardware=cast(Any, "h100")), "type str.*needs to be"),
    ],
    "overlap_profile": [
        (lambda: cp.profiling.overlap_profile(NO_PLAN), "type ndarray.*a function")
    ],
}


def test_the_list_is_of_public_functions():
    check_names(CASES)


@each(CASES)
def test_rejected(name, call, says):
    check_rejected(name, call, says)
