"""What `gemm` refuses when it is traced, and buffers that do not fit a call of either layer."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import SCATTER, K, M, N, T, W, ones, refused
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch.comm_gemm import (
    all_gather_matmul,
    create_comm_overlap_buffer,
    destroy_comm_overlap_buffer,
    gemm,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")

BF16, E4M3, E5M2 = "bfloat16", "float8_e4m3fn", "float8_e5m2"
DELAYED, CURRENT = "DELAYED_TENSOR_SCALING", "CURRENT_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
ENGINE: Any = partial(gemm, axis_name=AXIS)
PLAIN: Any = gemm


def create(kind, method, shape=None, dtype="float32", num_ranks=W, **options):
    shape = shape or ((M, K) if kind == "AG" else (M, N))
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)


# ---- Buffers that do not fit.


@pytest.mark.parametrize(
    "kind, method, options, message",
    [
        ("RS", "PIPELINE", {}, r"buffer \d+ is for CommOverlapType\.RS; it needs CommOverlapType\.A"
         r"G\. Create one"),
        ("AG", "BULK", {}, r"method is CommOverlapMethod\.BULK, which moves an array during an in"),
        ("NONE", "NONE", {}, r"buffer \d+ is for CommOverlapType\.NONE; it needs CommOverlapType"),
        ("AG", "RING_EXCHANGE", {"shape": (M, K - 1)}, r"buffer \d+ has shape \(8, 2\) but the call"
         r" needs \(8, 3\)\. Create one with buffer_shape=\(8, 3\)"),
        ("AG", "RING_EXCHANGE", {"dtype": "bfloat16"}, r"buffer \d+ is bfloat16 but the call moves "
         r"float32\. Create one with buffer_dtype='float32'"),
        ("AG", "RING_EXCHANGE", {"num_ranks": 2}, r"buffer \d+ is for tp_size=2 but the mesh axis h"
         r"as 4 devices\. Create one with tp_size=4"),
    ],
)  # fmt: skip
def test_buffers_that_do_not_fit(kind, method, options, message):
    """In a layer, and where it can be the same in the engine's layer."""
    buffer = create(kind, method, **{"shape": (M, K), **options})
    layer = lambda x, w: all_gather_matmul(x, w, axis_name=AXIS, buffer=buffer)
    refused(layer, ones(T, K), ones(K, N), match=f"all_gather_matmul: {message}")
    if (kind, method) == ("AG", "RING_EXCHANGE"):
        engine = lambda x, w: gemm(x, w, axis_name=AXIS, comm_overlap=buffer)
        refused(engine, ones(T, K), ones(K, N), match=f"gemm: {message}")


def test_method_of_another_buffer():
    buffer = create("RS", "PIPELINE")
    refused(
        lambda x, w: SCATTER(x, w, buffer=buffer),
        *(ones(M, K), ones(K, N)),
        match=rf"method is 'ring' but buffer {buffer} is for CommOverlapMethod\.PIPELINE\. Leave m",
    )


# ---- The engine's layer.


@pytest.mark.parametrize("kind, method", [("AG", "RING_EXCHANGE"), ("RS", "RING_EXCHANGE"),
                                          ("RS", "PIPELINE")])  # fmt: skip
def test_only_bulk_moves_another_array(kind, method):
    buffer = create(kind, method)
    refused(
        lambda x, w, aux: ENGINE(x, w, comm_overlap=buffer, aux_in=aux),
        *(ones(M, K), ones(K, N), ones(M, N)),
        match=rf"gemm: got an aux_in with buffer {buffer} of CommOverlapMethod\.{method}; an array "
        r"that moves beside an independent GEMM goes with CommOverlapMethod\.BULK, and only with it"
        r"\. Leave it away, or create that buffer",
    )


@pytest.mark.parametrize("kind", ["AG", "RS"])
def test_bulk_needs_another_array(kind):
    buffer = create(kind, "BULK")
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=buffer),
        *(ones(M, K), ones(K, N)),
        match=rf"gemm: got no aux_in with buffer {buffer} of CommOverlapMethod\.BULK; .* Pass one",
    )


def test_arrays_of_bulk():
    buffer = create("RS", "BULK")
    call = lambda x, w, aux: ENGINE(x, w, comm_overlap=buffer, aux_in=aux)
    operands = ones(M, K), ones(K, N)
    refused(call, *operands, ones(M), match=r"aux_in has shape \(8,\); it needs two dimensions")
    refused(call, *operands, ones(M - 1, N), match=r"7 rows of aux_in do not divide among 4 ranks")
    refused(
        call, *operands, ones(M, N, dtype=BF16), match=r"is float32 but the call moves bfloat16"
    )
    refused(
        call, *operands, ones(M, 2 * N), match=r"has shape \(8, 5\) but the call needs \(8, 10\)"
    )


def test_neither_without_a_buffer_that_moves_something():
    none = create("NONE", "NONE")
    for options in ({}, {"comm_overlap": none}):
        refused(
            lambda x, w, options=options: PLAIN(x, w, aux_in=x, **options),
            *(ones(M, K), ones(K, N)),
            match=r"got aux_in without a buffer that moves something\. Create one with create_comm",
        )
        refused(
            lambda x, w, options=options: PLAIN(x, w, return_aux=True, **options),
            *(ones(M, K), ones(K, N)),
            match=r"got return_aux without a buffer that moves something",
        )


def test_auxiliary_results_of_a_reduce_scatter():
    buffer = create("RS", "PIPELINE")
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=buffer, return_aux=True),
        *(ones(M, K), ones(K, N)),
        match=r"got return_aux with CommOverlapType\.RS; only an all-gather has one",
    )


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
         r" with ScalingMode\.NO_SCALING; scales need another scaling_mode\. Leave it away"),
        (BF16, BF16, "NO_SCALING", {"rhs_scale_inv": jnp.ones(1)}, ValueError, "got rhs_scale_inv"),
    ],
)  # fmt: skip
def test_types_that_do_not_go_with_a_scaling_mode(lhs, rhs, mode, options, error, message):
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
def test_scales_that_do_not_fit(lhs, rhs, mode, changed, message):
    if mode == MXFP8:
        scales = {"lhs": U8((128, 4)), "rhs": U8((4, 128))}
    else:
        scales = dict.fromkeys(("lhs", "rhs"), np.ones(1, np.float32))
    given = {f"{name}_scale_inv": jnp.asarray(x) for name, x in (scales | changed).items()}
    with pytest.raises(ValueError, match=f"^gemm: {message}"):
        PLAIN(jnp.ones(lhs, E4M3), jnp.ones(rhs, E4M3), scaling_mode=mode, **given)


def test_transposed_operands_that_break_a_block():
    """The dimension that is contracted is the first of lhs, the last of rhs."""
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
        ({"grad": True}, r"got grad without an epilogue; it needs fuse_gelu, fuse_bias or both\. Le"
         r"ave it away for a plain product"),
        ({"grad": True, "bias": jnp.ones(N)}, r"got a bias with fuse_bias=True, grad=True; it is ad"
         r"ded with fuse_bias alone, and with grad its gradient comes out\. Leave it away"),
        ({"fuse_bias": True}, r"got no bias with fuse_bias=True, grad=False; .*\. Pass one"),
        ({"fuse_bias": False, "bias": jnp.ones(N)}, r"got a bias with fuse_bias=False, grad=False; "
         r".*\. Leave it away"),
        ({"grad": True, "fuse_gelu": True}, r"got no gelu_input with fuse_gelu=True, grad=True; GEL"
         r"U's derivative needs both and it\. Pass pre_gelu of the forward pass"),
        ({"fuse_gelu": True, "gelu_input": jnp.ones((M, N))}, r"got a gelu_input with fuse_gelu=Tru"
         r"e, grad=False; .*\. Leave it away"),
        ({"grad": True, "fuse_bias": True, "gelu_input": jnp.ones((M, N))}, "got a gelu_input"),
        ({"grad": True, "fuse_gelu": True, "gelu_input": jnp.ones((M, K))}, r"gelu_input has shape "
         r"\(8, 3\); it needs that of the output, 40 elements\. Pass pre_gelu of the forward pass"),
    ],
)  # fmt: skip
def test_epilogues_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=f"^gemm: {message}"):
        PLAIN(jnp.ones((M, K)), jnp.ones((K, N)), **options)


def test_gelu_input_of_one_chunk():
    """With a ring, the output has the rows of all ranks."""
    buffer = create("AG", "RING_EXCHANGE")
    options: Any = {"comm_overlap": buffer, "fuse_gelu": True, "grad": True}
    refused(
        lambda x, w, pre: ENGINE(x, w, gelu_input=pre, **options),
        *(ones(T, K), ones(K, N), ones(T, N)),
        match=r"gelu_input has shape \(2, 5\); it needs that of the output, 40 elements",
    )


def test_derivatives_of_scaled_products_and_of_derivatives():
    """Rounding has none, and a fused backward pass is written by hand."""
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
def test_gelu_of_what_is_not_complete(kind, method):
    buffer = create(kind, method, (M, K))
    options = {"aux_in": jnp.ones((M, K))} if method == "BULK" else {}
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=buffer, fuse_gelu=True, **options),
        *(ones(M, K), ones(K, K)),
        match=rf"got fuse_gelu with CommOverlapType\.{kind}, CommOverlapMethod\.{method}; .* Apply",
    )


def test_atomic_ring_without_the_one_that_takes_its_order_back():
    ring = create("AG", "RING_EXCHANGE", atomic_gemm=True)
    others: list[Any] = [
        (None, "nothing"),
        (ring, "comm_type=CommOverlapType.AG"),
        (create("RS", "RING_EXCHANGE"), "comm_type=CommOverlapType.RS"),
        (create("RS", "PIPELINE", atomic_gemm=True), "comm_type=CommOverlapType.RS"),
        (create("RS", "RING_EXCHANGE", num_ranks=2, atomic_gemm=True), "comm_type=CommOverlapType"),
    ]
    for other, text in others:
        refused(
            lambda x, w, other=other: ENGINE(x, w, comm_overlap=ring, paired_comm_overlap=other),
            *(ones(T, K), ones(K, N)),
            match=rf"the atomic ring of buffer {ring} leaves chunks in the order r-1, r-2, \.\.\., "
            rf"r, and is paired with {re.escape(text)}.*; only an atomic RING_EXCHANGE of CommOverl"
            r"apType\.RS with tp_size=4 takes that order back\. Pass its id: paired_comm_overlap",
        )
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=ring, paired_comm_overlap=77),
        *(ones(T, K), ones(K, N)),
        match=r"gemm: there is no buffer 77\.",
    )


def test_ids_of_no_buffer():
    buffer = create("AG", "RING_EXCHANGE")
    destroy_comm_overlap_buffer(buffer)
    for wrong, message in (
        (
            buffer,
            f"gemm: buffer {buffer} has been destroyed. Create it with create_comm_overlap_buf",
        ),
        (
            31,
            r"gemm: there is no buffer 31\. Create it with create_comm_overlap_buffer, in every p",
        ),
        ("31", "gemm: buffer is '31'; it needs to be the int that create_comm_overlap_buffer ret"),
    ):
        refused(
            lambda x, w, wrong=wrong: ENGINE(x, w, comm_overlap=wrong),
            *(ones(T, K), ones(K, N)),
            match=message,
        )


def test_places_of_the_engine():
    buffer = create("AG", "RING_EXCHANGE")
    x, w = jnp.ones((T, K)), jnp.ones((K, N))
    with pytest.raises(
        ValueError, match=r"got comm_overlap without axis_name; it needs the ranks'"
    ):
        PLAIN(x, w, comm_overlap=buffer)
    with pytest.raises(ValueError, match=r"no mesh with axis 'cp' is in sight"):
        ENGINE(x, w, comm_overlap=buffer)
    with (
        jax.set_mesh(mesh_of(W)),
        pytest.raises(
            ValueError, match=r"this is not inside jax\.shard_map over it\. Call it there"
        ),
    ):
        jax.eval_shape(lambda x, w: ENGINE(x, w, comm_overlap=buffer), x, w)
    refused(
        lambda x, w: PLAIN(x, w, comm_overlap=buffer, axis_name="tp"),
        *(ones(T, K), ones(K, N)),
        match=r"gemm: axis_name 'tp' is not an axis of the mesh here",
    )


@pytest.mark.parametrize(
    "lhs, rhs, options, error, message",
    [
        ((4, 3), (4, 5), {}, ValueError, r"contracts dimensions of \(3,\) but rhs of \(4,\)"),
        ((4, 3, 2), (3, 5), {"contracting_dims": ((1,), (0,))}, ValueError,
         r"contracting_dims of lhs are \(1,\) for shape \(4, 3, 2\); they need to stand side by "
         r"side, first or last, in their order\. Transpose it"),
        ((3, 4, 2), (3, 2, 5), {"contracting_dims": ((0, 2), (0, 1))}, ValueError, "dims of lhs a"),
        ((4, 3), (3, 5), {"contracting_dims": ((1,), (2,))}, ValueError, r"dims of rhs are \(2,\)"),
        ((4, 3), (3, 5), {"contracting_dims": ((), ())}, ValueError, r"dims of lhs are \(\) for s"),
        ((4, 3), (3, 5), {"contracting_dims": ((1, 1), (0,))}, ValueError, r"dims of lhs are \(1,"),
        ((4, 2, 3), (3, 2, 5), {"contracting_dims": ((1, 2), (1, 0))}, ValueError,
         r"contracting_dims of rhs are \(1, 0\)"),
        ((4, 3), (3, 5), {"bias": np.ones(4, np.float32)}, ValueError, r"bias has shape \(4,\); it "
         "needs 5 elements, one per column"),
        ((), (3, 5), {}, ValueError, r"contracting_dims of lhs are \(-1,\) for shape \(\)"),
        ((4, 3), (3, 5), {"implementation": "cuda"}, ValueError, "implementation is 'cuda'; there"),
        ((4, 3), (3, 5), {"deadline": -1.0}, ValueError, "deadline is -1.0; it needs to be a posi"),
    ],
)  # fmt: skip
def test_shapes_of_the_plain_product(lhs, rhs, options, error, message):
    with pytest.raises(error, match=f"gemm: .*{message}"):
        PLAIN(jnp.ones(lhs), jnp.ones(rhs), **options)


def test_types_of_the_plain_product():
    match = r"gemm: rhs is int8 with ScalingMode\.NO_SCALING; it needs to be one of"
    with pytest.raises(TypeError, match=match):
        PLAIN(jnp.ones((4, 3)), jnp.ones((3, 5), np.int8))
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64 goes with float64 alone"):
        PLAIN(jnp.ones((4, 3), np.float64), jnp.ones((3, 5), np.float32))


def test_shapes_of_communicating_products():
    gather, scatter = create("AG", "RING_EXCHANGE"), create("RS", "RING_EXCHANGE")
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=gather, contracting_dims=((0,), (0,))),
        *(ones(K, T), ones(K, N)),
        match=r"lhs contracts its first dimensions; its chunks are rows, .* Transpose it",
    )
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=scatter),
        *(ones(M - 2, K), ones(K, N)),
        match=r"6 rows of lhs do not divide among 4 ranks\. Pad them, or take matmul_reduce_scatte",
    )


def test_derivatives_of_communicating_products():
    """Neither mode; the message names the layers that have one."""
    buffer = create("AG", "RING_EXCHANGE")
    call = partial(ENGINE, comm_overlap=buffer)
    match = (
        r"gemm: with communication it has no derivative of its own\. Take all_gather_matmul or m"
    )
    x, w = ones(T, K), ones(K, N)
    for derivative in (
        lambda x, w: jax.jvp(call, (x, w), (x, w)),
        lambda x, w: jax.grad(lambda x: jnp.sum(call(x, w)))(x),
    ):
        refused(derivative, x, w, error=NotImplementedError, match=match)
