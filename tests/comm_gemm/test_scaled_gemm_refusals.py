"""Scaled operands and epilogues that `gemm` rejects at trace time."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import ENGINE, PLAIN, K, M, N, T, create, ones, refused
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401

pytestmark = pytest.mark.usefixtures("unchecked_types")

BF16, E4M3, E5M2 = "bfloat16", "float8_e4m3fn", "float8_e5m2"
DELAYED, CURRENT = "DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"


@pytest.mark.parametrize(
    "given, missing", [((), "lhs and rhs"), (("rhs",), "lhs"), (("lhs",), "rhs")]
)
@pytest.mark.parametrize("mode", [DELAYED, CURRENT.lower(), MXFP8])
def test_scaling_without_scales(mode, given, missing):
    scales = {f"{name}_scale_inv": jnp.ones(1) for name in given}
    with pytest.raises(
        ValueError,
        match=rf"gemm: missing inverse scaling factor of {missing} for ScalingMode\.{mode.upper()}"
        rf"\. Pass {missing[:3]}_scale_inv",
    ):
        PLAIN(ones(K, dtype=E4M3), jnp.ones((K, N), E5M2), scaling_mode=mode, **scales)


@pytest.mark.parametrize(
    "lhs, rhs, mode, options, error, message",
    [
        (E5M2, E5M2, CURRENT, {}, ValueError, r"got float8_e5m2 for lhs and rhs; at least one need"
         r"s to be float8_e4m3fn\. Quantize it to that"),
        (E5M2, E5M2, MXFP8, {}, ValueError, "got float8_e5m2 for lhs and rhs"),
        (E4M3, E4M3, "NO_SCALING", {}, TypeError, r"lhs is float8_e4m3fn with ScalingMode\.NO_SCAL"
         r"ING; it needs to be one of .*\. Pass its scaling_mode and inverse scale"),
        (BF16, E4M3, CURRENT, {}, TypeError, r"lhs is bfloat16 with ScalingMode\.CURRENT_TENSOR_SC"
         r"ALING; it needs to be one of \('float8_e4m3fn', 'float8_e5m2'\)\. Quantize it first"),
        (E4M3, "float64", MXFP8, {}, TypeError, r"rhs is float64 with .* Quantize it first"),
        (E4M3, "int8", CURRENT, {}, TypeError, r"rhs is int8 with ScalingMode.* it needs"),
        (E4M3, E4M3, "FP8", {}, ValueError, r"scaling_mode is 'FP8'; it needs to be one of "),
        (E4M3, E4M3, CURRENT, {"preferred_element_type": E4M3}, TypeError, r"preferred_element_ty"
         r"pe is float8_e4m3fn; a product of 8 bits would need a scale of its own\. It needs to be"
         r" one of .*: quantize the result"),
        (E4M3, E4M3, CURRENT, {"preferred_element_type": "float64"}, TypeError, "preferred_element"
         "_type is float64 for operands of bfloat16"),
        (BF16, BF16, "NO_SCALING", {"preferred_element_type": E5M2}, TypeError, "preferred_element"
         "_type is float8_e5m2"),
        (BF16, BF16, "NO_SCALING", {"lhs_scale_inv": jnp.ones(1)}, ValueError, r"got lhs_scale_inv"
         r" with ScalingMode\.NO_SCALING; scales need another scaling_mode\. Omit it"),
        (BF16, BF16, "NO_SCALING", {"rhs_scale_inv": jnp.ones(1)}, ValueError, "got rhs_scale_inv"),
    ],
)  # fmt: skip
def test_types_that_do_not_match_a_scaling_mode(lhs, rhs, mode, options, error, message):
    scales = {} if mode == "NO_SCALING" else {f"{x}_scale_inv": jnp.ones(1) for x in ("lhs", "rhs")}
    with jax.enable_x64(True), pytest.raises(error, match=f"^gemm: {message}"):
        PLAIN(
            jnp.ones((M, 32), lhs), jnp.ones((32, N), rhs), scaling_mode=mode, **(scales | options)
        )


U8 = partial(np.zeros, dtype=np.uint8)


@pytest.mark.parametrize(
    "lhs, rhs, mode, changed, message",
    [
        ((M, 32), (32, N), CURRENT, {"lhs": np.ones((), np.float32)}, r"lhs_scale_inv is float32\["
         r"\]; ScalingMode\.CURRENT_TENSOR_SCALING with lhs of shape \(8, 32\) needs float32\[1\]\."
         r" Pass quantize's scale_inv"),
        ((M, 32), (32, N), DELAYED, {"rhs": np.ones(N, np.float32)}, r"rhs_scale_inv is float32\[5"
         r"\]; .* needs float32\[1\]"),
        ((M, 32), (32, N), DELAYED, {"rhs": np.ones(1, np.int32)}, r"rhs_scale_inv is int32\[1\]"),
        ((M, 64), (64, N), MXFP8, {"lhs": U8((M, 2))}, r"lhs_scale_inv is uint8\[8, 2\]; ScalingMo"
         r"de\.MXFP8_1D_SCALING with lhs of shape \(8, 64\) needs uint8\[128, 4\]\. These are unpad"
         r"ded: call pad_scales\(q\.scale_inv, layout='row'\)"),
        ((M, 64), (64, N), MXFP8, {"rhs": U8((2, N))}, r"rhs_scale_inv is uint8\[2, 5\]; .* needs "
         r"uint8\[4, 128\]\. These are unpadded: call pad_scales\(q\.scale_inv, layout='column'\)"),
        ((M, 64), (64, N), MXFP8, {"rhs": U8((128, 4))}, r"rhs_scale_inv is uint8\[128, 4\]; .* ne"
         r"eds uint8\[4, 128\]\. Pass pad_scales\(q\.scale_inv, layout='column'\)"),
        ((M, 64), (64, N), MXFP8, {"lhs": np.zeros((128, 4), np.int8)}, r"lhs_scale_inv is int8"),
        ((M, 64), (64, N), MXFP8, {"lhs": np.ones(1, np.float32)}, "lhs_scale_inv is float32"),
        ((M, 40), (40, N), MXFP8, {}, r"lhs has shape \(8, 40\); layout 'row' needs dimension 1 to "
         r"be a multiple of 32, the elements that share a scale\. Pad it with zeros to 64"),
    ],
)  # fmt: skip
def test_scales_of_another_shape_or_type(lhs, rhs, mode, changed, message):
    if mode == MXFP8:
        scales = {"lhs": U8((128, 4)), "rhs": U8((4, 128))}
    else:
        scales = dict.fromkeys(("lhs", "rhs"), np.ones(1, np.float32))
    given = {f"{name}_scale_inv": jnp.asarray(x) for name, x in (scales | changed).items()}
    with pytest.raises(ValueError, match=f"^gemm: {message}"):
        PLAIN(jnp.ones(lhs, E4M3), jnp.ones(rhs, E4M3), scaling_mode=mode, **given)


def test_transposed_operands_that_break_a_block():
    """The contracted dimension is the first of lhs and the last of rhs."""
    lhs, rhs = jnp.ones((40, M), E4M3), jnp.ones((N, 40), E4M3)
    scales = {"lhs_scale_inv": jnp.ones(1), "rhs_scale_inv": jnp.ones(1)}
    turned: Any = {"contracting_dims": ((0,), (1,)), "scaling_mode": MXFP8, **scales}
    with pytest.raises(ValueError, match=r"lhs has .*layout 'column' needs dimension 0 to be a mu"):
        PLAIN(lhs, rhs, **turned)


def test_buffers_of_another_type_than_the_scaled_operand():
    one = {"lhs_scale_inv": ones(1), "rhs_scale_inv": ones(1)}
    call = lambda x, w, buffer, **scales: ENGINE(
        *(x, w), comm_overlap=buffer, scaling_mode=CURRENT, **scales
    )
    operands = ones(T, K, dtype=E4M3), ones(K, N, dtype=E4M3)
    for dtype in ("bfloat16", E5M2):
        buffer = create("AG", "RING_EXCHANGE", dtype=dtype)
        refused(
            lambda x, w, a, b, buffer=buffer: call(x, w, buffer, lhs_scale_inv=a, rhs_scale_inv=b),
            *operands,
            *one.values(),
            match=r"is (bfloat16|float8_e5m2) but the call moves float8_e4m3fn\. Create one with bu"
            r"ffer_dtype='float8_e4m3fn'",
        )
    with pytest.raises(ValueError, match=r"buffer_dtype is float8_e4m3fn with CommOverlapType\.RS"):
        create("RS", "RING_EXCHANGE", dtype=E4M3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"grad": True}, r"got grad without an epilogue; it needs fuse_gelu, fuse_bias or both\. O"
         r"mit it for a plain product"),
        ({"grad": True, "bias": jnp.ones(N)}, r"got a bias with fuse_bias=True, grad=True; fuse_b"
         r"ias adds a bias without grad, and returns its gradient with grad\. Omit it"),
        ({"fuse_bias": True}, r"got no bias with fuse_bias=True, grad=False; .*\. Pass one"),
        ({"fuse_bias": False, "bias": jnp.ones(N)}, r"got a bias with fuse_bias=False, grad=False; "
         r".*\. Omit it"),
        ({"grad": True, "fuse_gelu": True}, r"got no gelu_input with fuse_gelu=True, grad=True; "
         r"it is required with both, for the derivative of GELU, and only then\. Pass pre"),
        ({"fuse_gelu": True, "gelu_input": jnp.ones((M, N))}, r"got a gelu_input with fuse_gelu=Tru"
         r"e, grad=False; .*\. Omit it"),
        ({"grad": True, "fuse_bias": True, "gelu_input": jnp.ones((M, N))}, "got a gelu_input"),
        ({"grad": True, "fuse_gelu": True, "gelu_input": jnp.ones((M, K))}, r"gelu_input has shape "
         r"\(8, 3\); it needs that of the output, 40 elements\. Pass pre_gelu of the forward pass"),
    ],
)  # fmt: skip
def test_invalid_combinations_of_epilogues(options, message):
    with pytest.raises(ValueError, match=f"^gemm: {message}"):
        PLAIN(jnp.ones((M, K)), jnp.ones((K, N)), **options)


def test_gelu_input_of_one_chunk():
    """In a ring, the output has the rows of all ranks."""
    buffer = create("AG", "RING_EXCHANGE")
    options: Any = {"comm_overlap": buffer, "fuse_gelu": True, "grad": True}
    refused(
        lambda x, w, pre: ENGINE(x, w, gelu_input=pre, **options),
        *(ones(T, K), ones(K, N), ones(T, N)),
        match=r"gelu_input has shape \(2, 5\); it needs that of the output, 40 elements",
    )


def test_derivatives_of_scaled_products_and_of_derivatives():
    """Rounding has no derivative, and the fused backward pass has none either."""
    one = jnp.ones(1)
    quantized = {"scaling_mode": CURRENT, "lhs_scale_inv": one}
    scaled = lambda scale: PLAIN(
        jnp.ones((M, K), E4M3), jnp.ones((K, N), E4M3), rhs_scale_inv=scale, **quantized
    )
    backward = lambda scale: PLAIN(
        jnp.ones((M, K)) * scale, jnp.ones((K, N)), fuse_bias=True, grad=True
    )[0]
    for call in (scaled, backward):
        with pytest.raises(NotImplementedError, match=r"^gemm: (?!with communication).*derivative"):
            jax.grad(lambda scale, call=call: jnp.sum(call(scale)[0]))(one)


@pytest.mark.parametrize("kind, method", [("RS", "RING_EXCHANGE"), ("RS", "PIPELINE"),
                                          ("RS", "BULK"), ("AG", "BULK")])  # fmt: skip
def test_gelu_of_incomplete_sums(kind, method):
    buffer = create(kind, method, (M, K))
    options = {"aux_in": jnp.ones((M, K))} if method == "BULK" else {}
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=buffer, fuse_gelu=True, **options),
        *(ones(M, K), ones(K, K)),
        match=rf"got fuse_gelu with CommOverlapType\.{kind}, CommOverlapMethod\.{method}; .* Apply",
    )
