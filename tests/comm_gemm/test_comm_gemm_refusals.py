"""Invalid choices, profiles and scales of GEMMs.

Of the products: test_comm_gemm_errors.py; of one rank's: test_comm_gemm_engine_errors.py and
test_scaled_gemm_errors.py; of quantization: test_scaling_errors.py.
"""

from typing import Any, cast

import jax
import numpy as np
import pytest
from refusals import NO_PLAN, X, check_names, check_rejected

import jax_cp_dispatch as cp
from jax_cp_dispatch.profiling import tune
from jax_cp_dispatch.scaling import DelayedScaling

pytestmark = pytest.mark.usefixtures("unchecked_types")

SCALES: Any = np.ones((128, 4), np.uint8)
SHAPE = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)
ROWS = np.ones((8, 4), np.float32)
MATRICES = np.ones((2, 4, 3), np.float32)


def mesh():
    return jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def gather(w: Any = ROWS.T, **options: Any):
    multiply = lambda x, w: cp.all_gather_matmul(x, w, axis_name="tp", mesh=mesh(), **options)
    return jax.eval_shape(multiply, ROWS, w)


def gemm(**options: Any):
    return jax.eval_shape(lambda x, w: cp.gemm(x, w, **options), ROWS, ROWS.T)


def grouped(rhs: Any = MATRICES, **options: Any):
    multiply = lambda *operands: cp.grouped_gemm(*operands, **options)
    return jax.eval_shape(multiply, ROWS, rhs, np.array([5, 3], np.int32))


def tune_on(shapes: Any = (), **options: Any):
    return tune(shapes, **{"mesh": mesh(), "axis_name": "tp", **options})


def quantize(x: Any, **options: Any):
    state = {"state": DelayedScaling.init(), **options}
    return cp.scaling.quantize(x, "DELAYED_TENSOR_SCALING", **state)


def unpad(shape: Any):
    return cp.scaling.unpad_scales(SCALES, shape=shape)


# Name, call, and the message after "<operation>: ".
CASES = [
    (
        "all_gather_matmul",
        lambda: gather([ROWS.T] * 2),
        "w is a list of 2 arrays; pass several",
    ),
    (
        "all_gather_matmul",
        lambda: gather(scaling_mode="DELAYED_TENSOR_SCALING", scaling_state=3),
        "scaling_state is int; it needs to be",
    ),
    ("gemm", lambda: gemm(contracting_dims=3), "contracting_dims is 3; it nee"),
    ("gemm", lambda: gemm(contracting_dims=(("a",), 0)), r"contracting_dims is \(\("),
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
    ("quantize", lambda: quantize([1.0]), r"x is of type list.*Pass numpy.asarray\(x\)"),
    ("quantize", lambda: quantize(X, state=3), r"type int.*DelayedScaling. Begin"),
    ("dequantize", lambda: cp.scaling.dequantize(NO_PLAN), "type ndarray.*Quantized. Pass"),
    ("pad_scales", lambda: cp.scaling.pad_scales(cast(Any, [[1]])), "scales is of type list"),
    ("swizzle_scales", lambda: cp.scaling.swizzle_scales(cast(Any, X)), r"\(4, 6, 2\).*\[r, c\]"),
    ("unswizzle_scales", lambda: cp.scaling.unswizzle_scales(cast(Any, X)), r"\(4, 6, 2\).*512"),
    ("unpad_scales", lambda: unpad(3), "shape is 3; it needs to be a tuple"),
    ("unpad_scales", lambda: unpad((1.5, 2)), "entry of shape is 1.5; it needs"),
]


def test_the_list_is_of_public_functions():
    check_names(CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    check_rejected(*CASES[index])
