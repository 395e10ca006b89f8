"""Errors of the overlapped matmuls at trace time: options, operands, meshes and platforms."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import GATHER, SCATTER, K, M, N, T, W, ones, refused, trace
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch import gemm
from jax_cp_dispatch.buffers import create_comm_overlap_buffer
from jax_cp_dispatch.scaling import MatmulScaling

pytestmark = pytest.mark.usefixtures("unchecked_types")


@pytest.mark.parametrize(
    "op, options, message",
    [
        (GATHER, {"method": "pipeline"}, r"got CommOverlapMethod\.PIPELINE with CommOverlapType\.AG"
         r"; .* not gathered\. Use CommOverlapMethod\.RING_EXCHANGE"),
        (GATHER, {"method": "bulk"}, r"method is CommOverlapMethod\.BULK, which moves an array duri"
         r"ng an independent GEMM\. Use CommOverlapMethod\.RING_EXCHANGE, or gemm\("),
        (SCATTER, {"method": "bulk"}, r"method is CommOverlapMethod\.BULK, .* Use CommOverlapMet"),
        (SCATTER, {"method": "pipeline", "num_splits": 0}, r"num_splits is 0; it needs to be an i"),
        (SCATTER, {"method": "auto", "num_splits": 2}, r"got num_splits with method='auto', which"),
        (SCATTER, {"method": "none", "num_splits": 2}, r"got num_splits with CommOverlapMethod\.NON"
         r"E, which has no chunks\. Omit it"),
        (SCATTER, {"num_splits": 2}, r"got num_splits with CommOverlapMethod\.RING_EXCHANGE; it is "
         r"an option of CommOverlapMethod\.PIPELINE\. Omit it"),
        (SCATTER, {"rs_overlap_first_gemm": True}, r"got rs_overlap_first_gemm with CommOverlapMeth"
         r"od\.RING_EXCHANGE; it orders the chunks of CommOverlapMethod\.PIPELINE\. Omit it"),
        (GATHER, {"aggregate": True, "atomic": True}, r"got aggregate_ag with CommOverlapType\.AG, "
         r"CommOverlapMethod\.RING_EXCHANGE, atomic_gemm=True; .* Omit it"),
        (GATHER, {"aggregate": True, "use_ce": False}, r"got aggregate_ag with use_ce=False; pair"),
        (SCATTER, {"atomic": True, "use_ce": False}, r"got atomic with use_ce=False; then each r"),
        (GATHER, {"preferred_element_type": "foo"}, r"preferred_element_type is 'foo' for operand"),
        (GATHER, {"method": "rings"}, r"method is 'rings'; it needs to be 'auto', 'none', 'ring'"),
        (SCATTER, {"method": None}, r"method is None; it needs to be 'auto', 'none', 'ring', 'pip"),
        (GATHER, {"gathered": "never"}, r"gathered is 'never'; it needs to be 'keep' or 'again'"),
        (GATHER, {"row_counts": (2, 2, 2)}, r"row_counts is \(2, 2, 2\); it needs 4 counts, one p"),
        (GATHER, {"row_counts": (1, 1, 1, 1)}, r"the largest of them 2: the tokens of x, which ha"),
        (GATHER, {"row_counts": (2, -1, 2, 2)}, r"row_counts is .* of at least 0, the largest of"),
        (GATHER, {"row_counts": (2, 1.5, 2, 2)}, r"row_counts is \(2, 1\.5, 2, 2\); it needs 4 co"),
        (SCATTER, {"row_counts": (2, 2, 2, 1)}, r"row_counts is \(2, 2, 2, 1\); .* whose sum is 8"),
        (GATHER, {"implementation": "nccl"}, r"implementation is 'nccl'; it needs to be 'in_pro"),
        (GATHER, {"deadline": 0.0}, r"deadline is 0\.0; it needs to be a positive number of secon"),
        (GATHER, {"axis_name": "nope"}, r"axis_name 'nope' is not an axis of the mesh here, which"),
        (GATHER, {"axis_name": ()}, r"axis_name is \(\); it needs one mesh axis, or several"),
        (SCATTER, {"axis_name": (AXIS, AXIS)}, r"axis_name is \('cp', 'cp'\); it needs one mesh a"),
        (GATHER, {"buffer": 99, "method": "auto"}, r"there is no buffer 99\. Create it with creat"),
        (GATHER, {"buffer": "99", "method": "auto"}, r"buffer is '99'; it needs to be the int tha"),
    ],
)  # fmt: skip
def test_options_of_layers(op, options, message):
    rows = T if op is GATHER else M
    refused(
        lambda x, w: op(x, w, **options),
        *(ones(rows, K), ones(K, N)),
        error=(ValueError, TypeError),
        match=f"^{op.func.__name__}: .*{message}",
    )


def test_weights_in_a_list():
    refused(
        lambda x, w: GATHER(x, [w, w]),
        *(ones(T, K), ones(K, N)),
        error=TypeError,
        match="all_gather_matmul: w is a list of 2 arrays; pass several weights as a tuple",
    )


def test_pairs_of_chunks_need_an_even_number_of_ranks():
    run = on_ranks(lambda x, w: GATHER(x, w, aggregate=True), mesh_of(3), jit=False)
    with pytest.raises(
        ValueError, match=r"got aggregate_ag with tp_size=3; pairs need an even number"
    ):
        jax.eval_shape(run, np.ones((3, T, K), np.float32), np.ones((3, K, N), np.float32))


@pytest.mark.parametrize(
    "x, w, bias, error, message",
    [
        (
            ones(K),
            ones(K, N),
            None,
            ValueError,
            r"x has shape \(3,\) and w \(3, 5\); it needs \[\*b",
        ),
        (ones(M, K), ones(K), None, ValueError, r"x has shape \(8, 3\) and w \(3,\); it needs"),
        (ones(M, K), ones(), None, ValueError, r"x has .* Reshape other dimensions"),
        (
            ones(M, K),
            ones(N, K),
            None,
            ValueError,
            r"x has 3 columns but w has 5 rows; they are co",
        ),
        (
            ones(M, K),
            ones(K, N),
            ones(K),
            ValueError,
            r"bias has shape \(3,\); it needs \(5,\), one",
        ),
        (ones(M, K), ones(K, N), ones(1, N), ValueError, r"bias has shape \(1, 5\); it needs \(5,"),
        (
            ones(M, K, dtype=np.int32),
            ones(K, N),
            None,
            TypeError,
            r"x is int32; it needs to be one",
        ),
        (
            ones(M, K),
            ones(K, N, dtype=jnp.float8_e4m3fn),
            None,
            TypeError,
            r"w is float8_e4m3fn; it needs to be",
        ),
        (ones(M, K), ones(K, N), ones(N, dtype=bool), TypeError, r"bias is bool; it needs to be"),
    ],
)
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_operands_of_layers(op, x, w, bias, error, message):
    operands = (x, w) if bias is None else (x, w, bias)
    refused(
        lambda x, w, *bias: op(x, w, bias=bias[0] if bias else None),
        *operands,
        error=error,
        match=f"{op.func.__name__}: {message}",
    )


@pytest.mark.parametrize("dtype, message", [
    ("float64", r"preferred_element_type is float64 for operands of float32; .* used with float64"),
    ("int32", r"preferred_element_type is int32 for operands of float32; it needs to be one of"),
])  # fmt: skip
def test_types_of_results(dtype, message):
    with jax.enable_x64(True):
        for op in (GATHER, SCATTER, gemm):
            refused(
                lambda x, w, op=op: op(x, w, preferred_element_type=dtype),
                *(ones(M, K), ones(K, N)),
                error=TypeError,
                match=message,
            )


def test_double_with_single_precision():
    with jax.enable_x64(True):
        x, w = ones(M, K, dtype=np.float64), ones(K, N)
        match = r"x is float64 and w float32; float64 can only be used with float64. Convert one"
        for op in (GATHER, SCATTER):
            refused(op, x, w, error=TypeError, match=match)


STATE = MatmulScaling.init()
DELAYED, MXFP8 = "DELAYED_TENSOR_SCALING", "MXFP8_1D_SCALING"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"scaling_mode": "FP8"}, ValueError, "scaling_mode is 'FP8'; it needs to be one of "),
        ({"scaling_mode": DELAYED}, ValueError, r"got no scaling_state with ScalingMode\.DELAYED_TE"
         r"NSOR_SCALING; only DELAYED_TENSOR_SCALING uses the scales of earlier steps\. Begin with "
         r"MatmulScaling\.init\(\)"),
        ({"scaling_mode": DELAYED, "scaling_state": 3}, TypeError, "scaling_state is int; it need"),
        ({"scaling_state": STATE}, ValueError, r"got a scaling_state with ScalingMode\.NO_SCALING; "
         r".*\. Omit it"),
        ({"scaling_state": STATE, "scaling_mode": MXFP8}, ValueError, "got a scaling_state with"),
        ({"scaling_mode": MXFP8}, ValueError, r"3 elements are contracted on a rank, .*; "
         r"ScalingMode\.MXFP8_1D_SCALING needs a multiple of 32, .*\. Pad with zeros"),
        ({"scaling_mode": "CURRENT_TENSOR_SCALING", "preferred_element_type": "float8_e5m2"},
         TypeError, r"preferred_element_type is float8_e5m2; .*: quantize the result"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_scaling_of_layers(op, options, error, message):
    refused(
        lambda x, w: op(x, w, **options),
        *(ones(T, K) if op is GATHER or "2, 3" in message else ones(M, K), ones(K, N)),
        error=error,
        match=f"^{op.func.__name__}: {message}",
    )


def test_scaled_tokens_are_not_gathered_again():
    refused(
        lambda x, w: GATHER(x, w, gathered="again", scaling_mode="CURRENT_TENSOR_SCALING"),
        *(ones(T, K), ones(K, N)),
        match=r"^all_gather_matmul: got gathered='again' with ScalingMode\.CURRENT_TENSOR_SCALING; "
        r"scaled tokens are kept\. Omit it, or recompute with jax\.checkpoint",
    )


def test_scaling_of_double_precision():
    with jax.enable_x64(True):
        x, w = ones(M, 32, dtype=np.float64), ones(32, N, dtype=np.float64)
        match = (
            r"got float64 with ScalingMode\.MXFP8_1D_SCALING, which would reduce it to 8 bits, su"
        )
        for op in (GATHER, SCATTER):
            refused(partial(op, scaling_mode=MXFP8), x, w, error=TypeError, match=match)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_columns_that_break_a_block_have_no_derivative(op):
    """The derivative contracts N."""
    loss = lambda x, w: jnp.sum(op(x, w, scaling_mode=MXFP8))
    operands = ones(M, 32), ones(32, N)
    assert trace(lambda x, w: op(x, w, scaling_mode=MXFP8), *operands).shape[-1] == N
    refused(
        lambda x, w: jax.grad(loss)(x, w),
        *operands,
        match=f"^{op.func.__name__}: .*multiple of 32",
    )


def test_buffers_of_layers_that_scale():
    buffer = create_comm_overlap_buffer("AG", "RING_EXCHANGE", (M, K), "float32", W)
    call = partial(GATHER.func, axis_name=AXIS, buffer=buffer)
    refused(
        partial(call, scaling_mode="CURRENT_TENSOR_SCALING"),
        *(ones(T, K), ones(K, N)),
        match=rf"all_gather_matmul: buffer {buffer} is float32 but the call moves float8_e4m3fn\. C"
        r"reate one with buffer_dtype='float8_e4m3fn'",
    )


def test_tokens_that_do_not_divide_among_the_ranks():
    refused(
        SCATTER,
        *(ones(M - 1, K), ones(K, N)),
        match=r"matmul_reduce_scatter: 7 tokens are not a multiple of the 4 ranks\. Pass the "
        r"tokens of each as row_counts=\(\.\.\.\), or pad",
    )


def test_layers_outside_shard_map():
    for op in (GATHER, SCATTER):
        with pytest.raises(ValueError, match=r"no mesh with axis 'cp' was found\. Call"):
            op(jnp.ones((M, K)), jnp.ones((K, N)))


def test_layers_on_a_vmap_axis():
    run: Any = jax.vmap(partial(GATHER, axis_name="v"), axis_name="v")
    with pytest.raises(
        ValueError, match=r"axis_name 'v' is an axis of jax.vmap here, but the ranks"
    ):
        run(ones(T, K), ones(K, N))


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize("method", ["none", "ring"])
def test_forward_mode_of_layers(op, method):
    x, w = ones(M, K), ones(K, N)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .jvp. .*custom_vjp"):
        run = lambda x, w: jax.jvp(partial(op, method=method), (x, w), (x, w))
        on_ranks(run, mesh_of(W)).lower(x, w)


def test_other_platform():
    run = on_ranks(partial(GATHER, implementation="in_process"), mesh_of(W))
    with pytest.raises(NotImplementedError, match="the platform is 'cuda', but it serves CPU dev"):
        run.trace(ones(T, K), ones(K, N)).lower(lowering_platforms=("cuda",))
