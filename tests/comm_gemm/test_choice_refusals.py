"""Invalid choices of a method, and profiles."""

from typing import Any, cast

import jax
import pytest
from refusals import NO_PLAN, check_names, check_rejected

import jax_cp_dispatch as cp
from jax_cp_dispatch.profiling import tune

pytestmark = pytest.mark.usefixtures("unchecked_types")

SHAPE = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)


def mesh():
    return jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def tune_on(shapes: Any = (), **options: Any):
    return tune(shapes, **{"mesh": mesh(), "axis_name": "tp", **options})


# Name, call, and the message after "<operation>: ".
CASES = [
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
    (
        "choose_comm_gemm",
        lambda: cp.choose_comm_gemm(SHAPE, table=cast(Any, {})),
        "table is of type dict.*TuningTable. Pass",
    ),
    ("use_tuning", lambda: cp.profiling.use_tuning(cast(Any, "a")), "type str.*TuningTable. Pass"),
    ("tune", lambda: tune_on(mesh="cp"), "mesh is 'cp'; it needs to b"),
    ("tune", lambda: tune_on(axis_name="no"), "axis_name 'no' is not an axis of the mesh"),
    ("tune", lambda: tune_on(dtype="foo"), "dtype is 'foo'; it"),
    ("tune", lambda: tune_on(repeats=0), "repeats is 0"),
    ("tune", lambda: tune_on([("matmul", 8, 8, 8)]), "got a shape of 'matmul'"),
    ("tune", lambda: tune_on([("all_gather_matmul", 6, 8, 8)]), "is not divisible by 4 ranks"),
    ("overlap_profile", lambda: cp.profiling.overlap_profile(NO_PLAN), "type ndarray.*a function"),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
