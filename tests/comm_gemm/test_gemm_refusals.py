"""Invalid calls of GEMMs, scaling, choices and profiles: each is rejected while it is traced.

Of buffers: test_buffers.py.
"""

import re
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import ENGINE, GATHER, SCATTER, K, M, N, T, W, create, ones, refused, trace
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import mesh_of, on_ranks, permuted_mesh
from refusals import NO_PLAN, check_names

import jax_cp_dispatch as cp
from jax_cp_dispatch import all_gather_matmul, gemm, grouped_gemm, matmul_reduce_scatter, scaling
from jax_cp_dispatch.buffers import destroy_comm_overlap_buffer
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.scaling import DelayedScaling, MatmulScaling, Quantized

pytestmark = pytest.mark.usefixtures("unchecked_types")

F8, E5M2 = "float8_e4m3fn", "float8_e5m2"
CURRENT, DELAYED = "CURRENT_TENSOR_SCALING", "DELAYED_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
LHS, RHS = (M, K), (K, N)
RING, BULK = "RING_EXCHANGE", "BULK"
# Of NumPy: collecting the tests compiles nothing.
one: Any = np.ones(1, np.float32)
two: Any = np.ones(2, np.float32)


# ---- `gemm` and `grouped_gemm`.


def plain(lhs=LHS, rhs=RHS, types=("float32", "float32"), **options: Any):
    """A call on one device."""
    operands = [jax.ShapeDtypeStruct(x, t) for x, t in zip((lhs, rhs), types, strict=True)]
    return jax.eval_shape(partial(gemm, **options), *operands)


def scaled(mode, lhs_scale: Any = one, rhs_scale: Any = one, k=32, types=(F8, F8), **options: Any):
    """The same of 8-bit operands."""
    scales = {"lhs_scale_inv": lhs_scale, "rhs_scale_inv": rhs_scale}
    scales = {name: jnp.asarray(x) for name, x in scales.items() if x is not None}
    return plain((M, k), (k, N), types, scaling_mode=mode, **scales, **options)


def engine(*buffer: Any, lhs=(T, K), rhs=RHS, aux=None, dtype="float32", num_ranks=W, **options):
    """A call with a buffer of `create(*buffer, dtype=, num_ranks=)`, on the ranks of a mesh."""
    if buffer:
        options["comm_overlap"] = create(*buffer, dtype=dtype, num_ranks=num_ranks)
    call = lambda x, w, *aux: ENGINE(x, w, **options, **({"aux_in": aux[0]} if aux else {}))
    return trace(call, ones(*lhs), ones(*rhs), *(() if aux is None else [ones(*aux)]))


ROWS: Any = np.ones((8, 4), np.float32)
MATRICES: Any = np.ones((2, 4, 3), np.float32)
F8_ROWS, F8_MATRICES = (x.astype(jnp.dtype(F8)) for x in (ROWS, MATRICES))


def grouped(lhs: Any = ROWS, rhs: Any = MATRICES, sizes: Any = None, **options: Any):
    sizes = np.array([5, 3], np.int32) if sizes is None else sizes
    return jax.eval_shape(lambda: grouped_gemm(lhs, rhs, sizes, **options))


def f8_grouped(mode, lhs_scale_inv: Any = two, rhs_scale_inv: Any = two):
    scales = {"lhs_scale_inv": lhs_scale_inv, "rhs_scale_inv": rhs_scale_inv}
    return grouped(F8_ROWS, F8_MATRICES, scaling_mode=mode, **scales)


U8 = partial(np.zeros, dtype=np.uint8)
TURNED = ((0,), (0,))

# Call, and the message after "gemm: ".
GEMM: list[tuple[Any, str]] = [
    # Shapes and types.
    (lambda: plain((4, 3), (4, 5)), r"lhs contracts dimensions of \(3,\) but rhs of \(4,\)"),
    (lambda: plain((4, 2, 3), (3, 2, 5), contracting_dims=((1, 2), (1, 0))), r"rhs are \(1, 0\)"),
    (lambda: plain(contracting_dims=3), "contracting_dims is 3; it needs the dimensions"),
    (lambda: gemm("x", np.ones(RHS)), "lhs is str; it needs to be an array, or"),  # pyright: ignore
    (lambda: gemm([[1.0, 2.0], [1.0]], np.ones(RHS)), "lhs is list; it needs t"),  # pyright: ignore
    *(
        (lambda flag=flag: plain(**{flag: 1}), f"{flag} is 1; it needs to be True or False")
        for flag in ("fuse_bias", "fuse_gelu", "grad", "return_aux", "use_split_accumulator")
    ),
    (lambda: plain(bias=np.ones(4)), r"bias has shape \(4,\); it needs 5 elements, one per column"),
    # Epilogues.
    (lambda: plain(grad=True), "got grad without an epilogue; it needs fuse_gelu, fuse_bias or bo"),
    (lambda: plain(grad=True, bias=np.ones(N)), "got a bias with fuse_bias=True, grad=True; .* Om"),
    (lambda: plain(fuse_bias=True), "got no bias with fuse_bias=True, grad=False; .* Pass one"),
    (lambda: plain(fuse_bias=False, bias=np.ones(N)), "got a bias with fuse_bias=False, grad=Fals"),
    (lambda: plain(grad=True, fuse_gelu=True), "got no gelu_input with fuse_gelu=True, .* Pass pr"),
    (lambda: plain(fuse_gelu=True, gelu_input=np.ones((M, N))), "got a gelu_input with .* Omit it"),
    (
        lambda: plain(grad=True, fuse_gelu=True, gelu_input=np.ones((M, K))),
        r"gelu_input has shape \(8, 3\); it needs that of the output, 40 elements\. Pass pre_gelu",
    ),
    (
        lambda: engine("AG", RING, fuse_gelu=True, grad=True, gelu_input=np.ones((T, N))),
        r"gelu_input has shape \(2, 5\); it needs that of the output, 40 elements",
    ),
    *(
        (
            lambda buffer=buffer, aux=aux: engine(*buffer, lhs=LHS, aux=aux, fuse_gelu=True),
            rf"got fuse_gelu with CommOverlapType\.{buffer[0]}, CommOverlapMethod\.{buffer[1]}; ",
        )
        for buffer, aux in ((("RS", "PIPELINE"), None), (("AG", BULK), (M, K)))
    ),
    # Scales.
    (lambda: scaled(CURRENT.lower(), None), r"missing .* of lhs for .*CURRENT.* Pass lhs_scale_in"),
    (lambda: scaled(MXFP8, U8((128, 4)), None), "missing .* of rhs for .*MXFP8.* Pass rhs_scale_i"),
    (lambda: scaled(CURRENT, types=(E5M2, E5M2)), "got float8_e5m2 for lhs and rhs; .* Quantize i"),
    (lambda: scaled("NO_SCALING"), "lhs is float8_e4m3fn with .*NO_SCALING; .* Pass its scaling_m"),
    (lambda: scaled(CURRENT, types=("bfloat16", F8)), "lhs is bfloat16 with .* Quantize it first"),
    (lambda: plain(lhs_scale_inv=one), "got lhs_scale_inv with .*NO_SCALING; .* Omit it"),
    (lambda: scaled(CURRENT, preferred_element_type=F8), "preferred_element_type is float8_e4m3fn"),
    (lambda: scaled(CURRENT, np.ones((), "f")), r"lhs_scale_inv is float32\[\]; .* needs float32"),
    (
        lambda: scaled(MXFP8, U8((M, 1)), U8((4, 128))),
        r"lhs_scale_inv is uint8\[8, 1\]; .* needs uint8\[128, 4\]\. These are unpadded: call pad_",
    ),
    (
        lambda: scaled(MXFP8, U8((128, 4)), U8((128, 4))),
        r"rhs_scale_inv is uint8\[128, 4\]; .* needs uint8\[4, 128\]\. Pass pad_scales.*'column'",
    ),
    (lambda: scaled(MXFP8, k=40), r"lhs has shape \(8, 40\); layout 'row' .* 32, .* Pad it .* to"),
    (
        lambda: plain((40, M), (N, 40), (F8, F8), contracting_dims=((0,), (1,)), scaling_mode=MXFP8,
                      lhs_scale_inv=one, rhs_scale_inv=one),
        r"lhs has .*layout 'column' needs dimension 0 to be a multiple",
    ),
    # Buffers.
    (lambda: engine("RS", "PIPELINE", lhs=LHS, aux=LHS), r"got an aux_in with buffer \d+ of .* Om"),
    (lambda: engine("AG", BULK), r"got no aux_in with buffer \d+ of CommOverlapMethod\.BULK; .* P"),
    (lambda: engine("RS", BULK, aux=(M,)), r"aux_in has shape \(8,\); it needs two dimensions"),
    (lambda: engine("RS", BULK, aux=(M - 1, N)), "7 rows of aux_in are not a multiple of the 4 ra"),
    (lambda: engine("RS", BULK, aux=(M, 2 * N)), r"has shape \(8, 5\) but the call needs \(8, 10"),
    (lambda: plain(aux_in=np.ones(3)), "got aux_in without a buffer that moves something. Create"),
    (lambda: plain(return_aux=True), "got return_aux without a buffer that moves something"),
    (lambda: engine(), "got axis_name without a buffer that moves something"),
    (lambda: engine("RS", "PIPELINE", lhs=LHS, return_aux=True), "got return_aux with .*only an a"),
    (lambda: engine("AG", RING, lhs=(K, T), contracting_dims=TURNED), "lhs contracts its first di"),
    (lambda: engine("AG", RING, lhs=(0, K)), r"got arrays of shapes \(0, 3\), \(3, 5\) with a buf"),
    (lambda: engine("RS", RING, lhs=(M - 2, K)), "6 rows of lhs are not a multiple of the 4 ranks"),
    (lambda: gemm(ones(T, K)[0], ones(*RHS)[0], comm_overlap=create("AG", RING)), "got comm_overl"),
]  # fmt: skip

GROUPED: list[tuple[Any, str]] = [
    (lambda: grouped(contracting_dims=3), "contracting_dims is 3; it needs to be one of"),
    (lambda: grouped(rhs=ROWS), r"lhs has shape \(8, 4\) and rhs \(8, 4\); .* two and three dimen"),
    (lambda: grouped(rhs=jnp.ones((2, 5, 3))), "which differ in what is contracted"),
    (lambda: grouped(rhs=jnp.ones((3, 4, 3))), "rhs has 3 matrices but there are 2 groups"),
    (lambda: grouped(sizes=jnp.ones(2)), r"group_sizes is float32\[2\]; it needs int32"),
    (lambda: grouped(bias=jnp.ones(3)), r"bias has shape \(3,\); it needs \(2, 3\), one row per g"),
    (lambda: grouped(rhs=ROWS, contracting_dims=TURNED, bias=two), "got a bias where rows are con"),
    (lambda: f8_grouped("NO_SCALING"), "lhs is float8_e4m3fn with .* Pass its scaling_mode"),
    (lambda: f8_grouped(CURRENT, two, None), "missing inverse scaling factor of rhs for .* Pass r"),
    (lambda: f8_grouped(DELAYED, one), r"lhs_scale_inv is float32\[1\]; it needs float32 \[2\]"),
    (lambda: f8_grouped(MXFP8), "got ScalingMode.MXFP8_1D_SCALING; groups have one scale each"),
]


# ---- Layers.

STATE = MatmulScaling.init()
X, Y, V = ones(T, K), ones(M, K), ones(K, N)


def gather(x: Any = X, w: Any = V, **options: Any):
    return trace(lambda x, w: GATHER(x, w, **options), x, w)


def scatter(x: Any = Y, w: Any = V, **options: Any):
    return trace(lambda x, w: SCATTER(x, w, **options), x, w)


def several(ws, **options: Any):
    """A call with several weights, made of one."""
    return trace(lambda x, w: GATHER(x, ws(w), **options), X, V)


def buffered(kind, method, op=gather, **options):
    buffer = create(kind, method, **{"shape": (M, K), **options})
    return op(buffer=buffer, method="auto")


def on_global(x: Any = (8, 12), w: Any = (12, 8), op=all_gather_matmul, **options: Any):
    mesh = permuted_mesh((2, 4), ("dp", "tp"))
    x = jax.ShapeDtypeStruct(x, np.float32)
    w = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), w, is_leaf=_is_shape)
    call = partial(op, axis_name="tp", mesh=mesh, **options)
    return jax.eval_shape(call, x, w)


def _is_shape(x):
    return isinstance(x, tuple) and isinstance(x[0], int)


def on_sum(x, w, **options: Any):
    mesh = permuted_mesh((2, 4), ("dp", "tp"))
    return all_gather_matmul(x, w, axis_name="tp", mesh=mesh, **options).sum()


# Call, and the message after "all_gather_matmul: ".
GATHERS: list[tuple[Any, str]] = [
    # How it communicates.
    (lambda: gather(method="pipeline"), r"got CommOverlapMethod\.PIPELINE with .*AG; .* Use Comm"),
    (lambda: gather(method="bulk"), r"method is CommOverlapMethod\.BULK, which moves an array "),
    (lambda: gather(method="rings"), "method is 'rings'; it needs to be 'auto', 'none', 'ring'"),
    (lambda: gather(aggregate=True, atomic=True), "got aggregate_ag with .*atomic_gemm=True; .* O"),
    (lambda: gather(gathered="never"), "gathered is 'never'; it needs to be 'keep' or 'again'"),
    (lambda: gather(buffer=99, method="auto"), "there is no buffer 99. Create it with create_comm"),
    (lambda: gather(buffer="99", method="auto"), "buffer is '99'; it needs to be the int that cre"),
    (lambda: buffered("RS", "PIPELINE"), r"buffer \d+ is for .*RS; it needs .*AG\. Create one"),
    (lambda: buffered("AG", RING, shape=(M, K - 1)), r"has shape \(8, 2\) but the call needs \(8,"),
    (lambda: buffered("AG", RING, dtype="bfloat16"), r"buffer \d+ is bfloat16 but the call moves"),
    (lambda: buffered("AG", RING, num_ranks=2), r"buffer \d+ is for tp_size=2 but the mesh axis h"),
    (
        lambda: buffered("AG", RING, op=partial(gather, scaling_mode=CURRENT)),
        r"is float32 but the call moves float8_e4m3fn\. Create one with buffer_dtype='float8_e4m3f",
    ),
    # Ranks and tokens.
    (lambda: gather(row_counts=(2, 2, 2)), r"row_counts is \(2, 2, 2\); it needs 4 counts, one pe"),
    (lambda: gather(row_counts=(1,) * 4), "the largest of them 2: the tokens of x, which has shap"),
    (lambda: gather(row_counts=(2, -1, 2, 2)), "row_counts is .* of at least 0, the largest of th"),
    (lambda: gather(row_counts=(2, 1.5, 2, 2)), r"row_counts is \(2, 1\.5, 2, 2\); it needs 4 cou"),
    (lambda: gather(implementation="nccl"), "implementation is 'nccl'; it needs to be 'in_process"),
    (lambda: gather(deadline=0.0), "deadline is 0.0; it needs to be a positive number of seconds"),
    (lambda: gather(axis_name="nope"), "axis_name 'nope' is not an axis of the mesh here, which h"),
    (lambda: gather(axis_name=()), r"axis_name is \(\); it needs one mesh axis, or several"),
    (lambda: GATHER(X[0], V[0]), "no mesh with axis 'cp' was found. Call"),
    (
        lambda: jax.vmap(partial(GATHER, axis_name="v"), axis_name="v")(X, V),
        "axis_name 'v' is an axis of jax.vmap here, but the ranks",
    ),
    (lambda: on_global(w=(12, 6)), "whose dimension of 6 is not divisible by the 4 devices"),
    (lambda: on_global(w=((12, 8), (12, 2, 4))), r"\(12, 2, 4\), whose dimension of 2 is not divi"),
    (lambda: on_global(row_counts=(2,) * 4), "got row_counts with global arrays"),
    # Operands.
    (lambda: gather(ones(K)), r"x has shape \(3,\) and w \(3, 5\); it needs \[\*batch"),
    (lambda: gather(w=ones(N, K)), "x has 3 columns but w has 5 rows; they are contracted"),
    (lambda: gather(w=ones(K, N, dtype=jnp.float8_e4m3fn)), "w is float8_e4m3fn; it needs to be"),
    (lambda: gather(bias=np.ones(K)), r"bias has shape \(3,\); it needs \(5,\), one"),
    (lambda: GATHER("x", V), "x is str; it needs to be an array, or nested lists"),
    (lambda: gather(preferred_element_type="foo"), "preferred_element_type is 'foo' for operands"),
    (lambda: several(lambda w: [w, w]), "w is a list of 2 arrays; pass several weights as a tuple"),
    (lambda: several(lambda w: (w, w.T)), r"x has 3 columns but w\[1\] has 5 rows"),
    (lambda: several(lambda w: (w, w.astype("bfloat16"))), "w is bfloat16 and float32; .* Convert"),
    (lambda: several(lambda w: (w, w), bias=np.ones(N)), r"bias is \w+; it needs to be a tuple of"),
    (lambda: gather(bias=(np.ones(N),)), "bias is a tuple of 1; .* an array"),
    # Scaling.
    (lambda: gather(scaling_mode="FP8"), "scaling_mode is 'FP8'; it needs to be one of "),
    (lambda: gather(scaling_mode=DELAYED), "got no scaling_state with .*DELAYED.* Begin with Matm"),
    (lambda: gather(scaling_mode=DELAYED, scaling_state=3), "scaling_state is int; it needs to be"),
    (lambda: gather(scaling_state=STATE), "got a scaling_state with .*NO_SCALING; .* Omit it"),
    (lambda: gather(scaling_mode=MXFP8), "3 elements are contracted on a rank, .* Pad with zeros"),
    (
        lambda: gather(scaling_mode=CURRENT, preferred_element_type="float8_e5m2"),
        "preferred_element_type is float8_e5m2; .*: quantize the result",
    ),
    (lambda: gather(gathered="again", scaling_mode=CURRENT), "got gathered='again' with .*CURRENT"),
    (
        lambda: jax.eval_shape(
            jax.grad(lambda x: on_sum(x, x, scaling_mode=MXFP8)), np.ones((64, 64), "f")
        ),
        "16 elements are contracted on a rank, in the forward pass or in the derivative",
    ),
]  # fmt: skip

SCATTERS: list[tuple[Any, str]] = [
    (lambda: scatter(method=None), "method is None; it needs to be 'auto', 'none', 'ring', 'pipe"),
    (lambda: scatter(method="pipeline", num_splits=0), "num_splits is 0; it needs to be an intege"),
    (lambda: scatter(method="auto", num_splits=2), "got num_splits with method='auto', which also"),
    (lambda: scatter(method="none", num_splits=2), "got num_splits with .*NONE, which has no chun"),
    (lambda: scatter(num_splits=2), "got num_splits with .*RING_EXCHANGE; it is an option of .*PI"),
    (lambda: scatter(rs_overlap_first_gemm=True), "got rs_overlap_first_gemm with .*RING_EXCHANGE"),
    (lambda: scatter(atomic=True, use_ce=False), "got atomic with use_ce=False; then each rank"),
    (lambda: scatter(buffer=create("RS", "PIPELINE")), r"method is 'ring' but buffer \d+ .* Omit"),
    (lambda: scatter(row_counts=(2, 2, 2, 1)), r"row_counts is \(2, 2, 2, 1\); .* whose sum is 8"),
    (lambda: scatter(ones(M - 1, K)), "7 tokens are not a multiple of the 4 ranks. Pass the token"),
    (lambda: scatter(w=(V, V)), "w is a tuple of 2, .* several weights need a common x"),
    (
        lambda: scatter(ones(4, M, K), ones(K, N, 1)),
        r"x has \(8, 3\) columns but w has \(3, 5\) rows; they are contracted",
    ),
    (
        lambda: on_global((8, 64), (64, 64), matmul_reduce_scatter, scaling_mode=MXFP8),
        "16 elements are contracted on a rank, in the forward pass or in the derivative",
    ),
]  # fmt: skip


# ---- Scaling, choices and profiles.

VALUES: Any = np.zeros((2, 32), np.float32)
SCALES: Any = np.zeros((130, 4), np.uint8)


def quantize(**arguments: Any):
    return scaling.quantize(**{"x": VALUES, "mode": MXFP8, **arguments})


def dequantize(dtype: Any = "float32", **change: Any):
    fields: dict[str, Any] = {
        "data": np.zeros((2, 32), "float8_e4m3fn"),
        "scale_inv": np.zeros((2, 1), np.uint8),
        "mode": MXFP8,
        "layout": "row",
    }
    mode = scaling.ScalingMode[change.pop("mode", MXFP8)]
    return scaling.dequantize(Quantized(**{**fields, **change, "mode": mode}), dtype)


def delayed(**arguments: Any):
    return DelayedScaling.init().update(VALUES, **arguments)


def layout_of(name: str, layout: str, scales: Any = SCALES, **arguments: Any):
    return getattr(scaling, name)(scales, layout=layout, **arguments)


def unpad(shape: Any):
    return scaling.unpad_scales(SCALES, shape=shape)


SCALING = {
    "quantize": [
        (lambda: quantize(x=[1.0]), r"x is of type list.*Pass numpy.asarray\(x\)"),
        (lambda: quantize(x=VALUES.astype(int)), "x is int64"),
        (lambda: quantize(x=VALUES[None]), r"x has shape \(1, 2, 32\).* two dimensions"),
        (lambda: quantize(x=np.zeros((2, 40), "f")), "dimension 1 to be a multiple of 32.* Pad"),
        (lambda: quantize(layout="column"), "layout 'column' needs dimension 0 to be a multiple"),
        (lambda: quantize(layout="diagonal"), "layout is 'diagonal'; it needs to be 'row'"),
        (lambda: quantize(mode="NO_SCALING"), "mode is ScalingMode.NO_SCALING"),
        (lambda: quantize(dtype=jnp.int8), "dtype is int8; it needs to be float8_e4m3fn"),
        (lambda: quantize(dtype="float7"), "dtype is 'float7'"),
        (lambda: quantize(mode=CURRENT, axis_name="cp"), "axis_name 'cp' is not manual here"),
        (lambda: quantize(axis_name=()), r"axis_name is \(\); it needs one mesh axis"),
        (lambda: quantize(axis_name=5), "axis_name is 5; it needs the name"),
        (lambda: quantize(mode=DELAYED), r"got no state .* state=DelayedScaling.init\(\)"),
        (lambda: quantize(state="any"), "got a state with .* Omit it"),
        (lambda: quantize(mode=DELAYED, state=3), "type int.*DelayedScaling. Begin"),
    ],
    "DelayedScaling": [(lambda: delayed(dtype=jnp.float16), "dtype is float16")],
    "dequantize": [
        (lambda: scaling.dequantize(NO_PLAN), "type ndarray.*Quantized. Pass"),
        *(
            (
                lambda dtype=dtype: dequantize(dtype),
                f"dtype is {dtype!r}; it needs to be a floating-point type. Pass jnp.float32 or ",
            )
            for dtype in ("nonsense", "int8", 5)
        ),
        (lambda: dequantize(mode="NO_SCALING"), "q.mode is ScalingMode.NO_SCALING"),
        (lambda: dequantize(data=VALUES), "q.data is float32; it needs to be float8"),
        (
            lambda: dequantize(scale_inv=np.zeros((128, 4), np.uint8)),
            r"uint8\[128, 4\]; .* uint8\[2, 1\]",
        ),
        (lambda: dequantize(mode=CURRENT), r"uint8\[2, 1\]; .* float32\[1\]"),
        (lambda: dequantize(layout="column"), "q.data has shape .* layout 'column' needs"),
    ],
    "pad_scales": [
        (lambda: layout_of("pad_scales", "row", [[1]]), "scales is of type list"),
        (lambda: layout_of("pad_scales", "both"), "layout is 'both'"),
    ],
    "swizzle_scales": [
        (lambda: layout_of("swizzle_scales", "row", np.ones((W, 6, 2))), r"\(4, 6, 2\).*\[r, c\]"),
        (lambda: layout_of("swizzle_scales", "row"), r"multiples of \(128, 4\). Call pad_scales"),
    ],
    "unswizzle_scales": [
        (lambda: layout_of("unswizzle_scales", "row", np.ones((W, 6, 2))), r"\(4, 6, 2\).*512"),
    ],
    "unpad_scales": [
        (lambda: unpad(3), "shape is 3; it needs to be a tuple"),
        (lambda: unpad((1.5, 2)), "entry of shape is 1.5; it needs"),
        *(
            (
                lambda rows=rows: unpad((rows, 4)),
                rf"shape is \({rows}, 4\); it needs sizes from 0 to .*\(130, 4\)",
            )
            for rows in (131, -1)
        ),
    ],
}

SHAPE = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)
CHOICES = {
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


OF_OPERATIONS = {
    "gemm": GEMM,
    "grouped_gemm": GROUPED,
    "all_gather_matmul": GATHERS,
    "matmul_reduce_scatter": SCATTERS,
    **SCALING,
    **CHOICES,
}
CASES = [(op, *case) for op, cases in OF_OPERATIONS.items() for case in cases]


def test_the_list_is_of_public_functions():
    check_names(OF_OPERATIONS)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    op, call, says = CASES[index]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert re.match(rf"{re.escape(op)}: .*{says}", str(caught.value), flags=re.S), caught.value


# ---- Calls of several steps.


def test_double_precision_with_another():
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64 can only be used with"):
        plain(types=("float64", "float32"))


def test_a_destroyed_buffer():
    buffer = create("AG", RING)
    destroy_comm_overlap_buffer(buffer)
    with pytest.raises(ValueError, match=f"gemm: buffer {buffer} has been destroyed. Create it"):
        engine(comm_overlap=buffer)


def test_an_atomic_ring_without_its_pair():
    ring = create("AG", RING, atomic_gemm=True)
    for other, text in (
        (None, "nothing"),
        (ring, "comm_type=CommOverlapType.AG"),
        (create("RS", RING), "comm_type=CommOverlapType.RS"),
        (create("RS", RING, num_ranks=2, atomic_gemm=True), "comm_type=CommOverlapType.RS"),
    ):
        refused(
            partial(ENGINE, comm_overlap=ring, paired_comm_overlap=other),
            *(ones(T, K), ones(*RHS)),
            match=rf"gemm: the atomic ring of buffer {ring} .* paired with {re.escape(text)}.*; on",
        )


def test_a_buffer_outside_shard_map():
    call = partial(ENGINE, comm_overlap=create("AG", RING))
    with (
        jax.set_mesh(mesh_of(W)),
        pytest.raises(ValueError, match=r"not inside jax\.shard_map over"),
    ):
        jax.eval_shape(call, jnp.ones((T, K)), jnp.ones(RHS))


def test_calls_without_a_derivative():
    """With communication in either mode; scaled operands, and the fused backward pass."""
    call = partial(ENGINE, comm_overlap=create("AG", RING))
    x, w = ones(T, K), ones(*RHS)
    for derivative in (
        lambda x, w: jax.jvp(call, (x, w), (x, w)),
        lambda x, w: jax.grad(lambda x: jnp.sum(call(x, w)))(x),
    ):
        match = r"gemm: with communication, no derivative is defined\. Use all_gather_matmul or m"
        refused(derivative, x, w, error=NotImplementedError, match=match)
    f8 = jnp.ones(LHS, F8), jnp.ones(RHS, F8)
    of_scale = lambda s: gemm(*f8, scaling_mode=CURRENT, lhs_scale_inv=one, rhs_scale_inv=s)
    backward = lambda s: gemm(jnp.ones(LHS) * s, jnp.ones(RHS), fuse_bias=True, grad=True)[0]
    for fn in of_scale, backward:
        with pytest.raises(NotImplementedError, match=r"^gemm: (?!with communication).*derivative"):
            jax.eval_shape(jax.grad(lambda s, fn=fn: jnp.sum(fn(s))), one)
    of_groups = lambda x: grouped_gemm(
        x, F8_MATRICES, jnp.array([5, 3], np.int32), scaling_mode=CURRENT, lhs_scale_inv=two,
        rhs_scale_inv=two,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="grouped_gemm: no derivative is defined with "):
        jax.eval_shape(lambda x: jax.jvp(of_groups, (x,), (x,)), F8_ROWS)


def test_double_precision():
    """With single precision, and reduced to 8 bits; of a result, without the operands."""
    with jax.enable_x64(True):
        x, w = ones(M, 32, dtype=np.float64), ones(32, N, dtype=np.float64)
        for op in (GATHER, SCATTER):
            match = "x is float64 and w float32; float64 can only be used with float64. Convert one"
            refused(op, x, w.astype("f"), error=TypeError, match=match)
            match = "got float64 with .*MXFP8_1D_SCALING, which would reduce it to 8 bits"
            refused(partial(op, scaling_mode=MXFP8), x, w, error=TypeError, match=match)
            wide = partial(op, preferred_element_type="float64")
            match = "preferred_element_type is float64 for operands of float32"
            refused(wide, x.astype("f"), w.astype("f"), error=TypeError, match=match)


def test_pairs_of_chunks_need_an_even_number_of_ranks():
    run = on_ranks(lambda x, w: GATHER(x, w, aggregate=True), mesh_of(3), jit=False)
    with pytest.raises(ValueError, match="got aggregate_ag with tp_size=3; pairs need an even num"):
        jax.eval_shape(run, X[:3], V[:3])


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_columns_that_break_a_block_have_no_derivative(op):
    """The derivative contracts N."""
    loss = lambda x, w: jnp.sum(op(x, w, scaling_mode=MXFP8))
    operands = ones(M, 32), ones(32, N)
    assert trace(lambda x, w: op(x, w, scaling_mode=MXFP8), *operands).shape[-1] == N
    refused(jax.grad(loss), *operands, match=f"^{op.func.__name__}: .*multiple of 32")


def test_forward_mode():
    """JAX's message names the products; it is also said for `gemm` and `grouped_gemm`."""
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((4, 8)), np.array([3, 5], np.int32)
    mesh: Any = {"axis_name": "tp", "mesh": permuted_mesh((2, 4), ("dp", "tp"))}
    for name, product in {
        "all_gather_matmul": lambda x: all_gather_matmul(x, w, **mesh),
        "matmul_reduce_scatter": lambda x: matmul_reduce_scatter(x, w, **mesh),
        "gemm": lambda x: gemm(x, w),
        "grouped_gemm": lambda x: grouped_gemm(x, jnp.stack([w, w]), jnp.asarray(sizes)),
    }.items():
        match = rf"^{name}: got forward mode .* a Hessian is jax\.jacrev\(jax\.grad"
        with pytest.raises(TypeError, match=match):
            jax.jvp(product, (x,), (x,))


def test_other_platform():
    run = on_ranks(partial(GATHER, implementation="in_process"), mesh_of(W))
    with pytest.raises(NotImplementedError, match="the platform is 'cuda', but it serves CPU dev"):
        run.trace(X, V).lower(lowering_platforms=("cuda",))
