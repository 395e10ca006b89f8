"""Invalid calls of `gemm` and `grouped_gemm`: each is rejected while it is traced.

Of buffers: test_comm_overlap_config.py.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import ENGINE, K, M, N, T, W, create, ones, refused, trace
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import mesh_of

from jax_cp_dispatch import gemm, grouped_gemm
from jax_cp_dispatch.buffers import destroy_comm_overlap_buffer

pytestmark = pytest.mark.usefixtures("unchecked_types")

F8, E5M2 = "float8_e4m3fn", "float8_e5m2"
CURRENT, DELAYED = "CURRENT_TENSOR_SCALING", "DELAYED_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
LHS, RHS = (M, K), (K, N)
RING, BULK = "RING_EXCHANGE", "BULK"
# Of NumPy: collecting the tests compiles nothing.
one: Any = np.ones(1, np.float32)
two: Any = np.ones(2, np.float32)


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
    (lambda: plain((4, 3, 2), contracting_dims=((1,), (0,))), r"dims of lhs are \(1,\) for .* Tra"),
    (lambda: plain(contracting_dims=((1,), (2,))), r"contracting_dims of rhs are \(2,\)"),
    (lambda: plain(contracting_dims=((1, 1), (0,))), r"contracting_dims of lhs are \(1, 1\)"),
    (lambda: plain((4, 2, 3), (3, 2, 5), contracting_dims=((1, 2), (1, 0))), r"rhs are \(1, 0\)"),
    (lambda: plain(contracting_dims=((), ())), r"contracting_dims is \(\(\), \(\)\); it needs"),
    (lambda: plain(contracting_dims=3), "contracting_dims is 3; it needs the dimensions"),
    (lambda: plain(()), r"contracting_dims of lhs are \(-1,\) for shape \(\)"),
    (lambda: plain(bias=np.ones(4)), r"bias has shape \(4,\); it needs 5 elements, one per column"),
    (lambda: plain(implementation="cuda"), "implementation is 'cuda'; it needs to be 'in_process'"),
    (lambda: plain(deadline=-1.0), "deadline is -1.0; it needs to be a positive number"),
    (lambda: plain(types=("float32", "int8")), r"rhs is int8 with .*NO_SCALING; it needs to be on"),
    (lambda: plain(preferred_element_type="int32"), "preferred_element_type is int32 for operands"),
    (lambda: gemm("x", np.ones(RHS)), "lhs is str; it needs to be an array, or"),  # pyright: ignore
    (lambda: gemm([[1.0, 2.0], [1.0]], np.ones(RHS)), "lhs is list; it needs t"),  # pyright: ignore
    *(
        (lambda flag=flag: plain(**{flag: 1}), f"{flag} is 1; it needs to be True or False")
        for flag in ("fuse_bias", "fuse_gelu", "grad", "return_aux", "use_split_accumulator")
    ),
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
    (lambda: scaled(DELAYED, None, None), "missing inverse scaling factor of lhs and rhs for .* P"),
    (lambda: scaled(CURRENT.lower(), None), r"missing .* of lhs for .*CURRENT.* Pass lhs_scale_in"),
    (lambda: scaled(MXFP8, U8((128, 4)), None), "missing .* of rhs for .*MXFP8.* Pass rhs_scale_i"),
    (lambda: scaled("FP8"), "scaling_mode is 'FP8'; it needs to be one of"),
    (lambda: scaled(CURRENT, types=(E5M2, E5M2)), "got float8_e5m2 for lhs and rhs; .* Quantize i"),
    (lambda: scaled("NO_SCALING"), "lhs is float8_e4m3fn with .*NO_SCALING; .* Pass its scaling_m"),
    (lambda: scaled(CURRENT, types=("bfloat16", F8)), "lhs is bfloat16 with .* Quantize it first"),
    (lambda: plain(lhs_scale_inv=one), "got lhs_scale_inv with .*NO_SCALING; .* Omit it"),
    (lambda: scaled(CURRENT, preferred_element_type=F8), "preferred_element_type is float8_e4m3fn"),
    (lambda: scaled(CURRENT, np.ones((), "f")), r"lhs_scale_inv is float32\[\]; .* needs float32"),
    (lambda: scaled(DELAYED, one, np.ones(1, int)), r"rhs_scale_inv is int32\[1\]; .* Pass quanti"),
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
    (lambda: engine("AG", RING, (M, K - 1)), r"buffer \d+ has shape \(8, 2\) but the call needs "),
    (lambda: engine("AG", RING, dtype="bfloat16"), r"buffer \d+ is bfloat16 but .* Create one wit"),
    (lambda: engine("AG", RING, num_ranks=2), r"buffer \d+ is for tp_size=2 but the mesh axis has"),
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
    (lambda: engine(comm_overlap=31), "there is no buffer 31. Create it with create_comm_overlap_"),
    (lambda: engine(comm_overlap="31"), "buffer is '31'; it needs to be the int that create_comm_"),
    (lambda: engine("AG", RING, axis_name="tp"), "axis_name 'tp' is not an axis of the mesh here"),
    (lambda: gemm(ones(T, K)[0], ones(*RHS)[0], comm_overlap=create("AG", RING)), "got comm_overl"),
    (lambda: ENGINE(ones(T, K)[0], ones(*RHS)[0], comm_overlap=create("AG", RING)), "no mesh with"),
]  # fmt: skip

GROUPED: list[tuple[Any, str]] = [
    (lambda: grouped(contracting_dims=3), "contracting_dims is 3; it needs to be one of"),
    (lambda: grouped(contracting_dims=((1,),)), r"contracting_dims is \(\(1,\),\); it needs to be"),
    (lambda: grouped(rhs=ROWS), r"lhs has shape \(8, 4\) and rhs \(8, 4\); .* two and three dimen"),
    (lambda: grouped(rhs=jnp.ones((2, 5, 3))), "which differ in what is contracted"),
    (lambda: grouped(rhs=jnp.ones((3, 4, 3))), "rhs has 3 matrices but there are 2 groups"),
    (lambda: grouped(sizes=jnp.ones(2)), r"group_sizes is float32\[2\]; it needs int32"),
    (lambda: grouped(bias=jnp.ones(3)), r"bias has shape \(3,\); it needs \(2, 3\), one row per g"),
    (lambda: grouped(rhs=ROWS, contracting_dims=TURNED, bias=two), "got a bias where rows are con"),
    (lambda: grouped(ROWS.astype(int)), "lhs is int32 with .*NO_SCALING; it needs to be one of"),
    (lambda: grouped(None), "lhs is NoneType; it needs to be an array, or nested lists"),
    (lambda: grouped(preferred_element_type=F8), "preferred_element_type is float8_e4m3fn; a prod"),
    (lambda: f8_grouped("NO_SCALING"), "lhs is float8_e4m3fn with .* Pass its scaling_mode"),
    (lambda: grouped(lhs_scale_inv=two), "got lhs_scale_inv with .*NO_SCALING; .* Omit it"),
    (lambda: f8_grouped(CURRENT, two, None), "missing inverse scaling factor of rhs for .* Pass r"),
    (lambda: f8_grouped(DELAYED, one), r"lhs_scale_inv is float32\[1\]; it needs float32 \[2\]"),
    (lambda: f8_grouped(MXFP8), "got ScalingMode.MXFP8_1D_SCALING; groups have one scale each"),
]

CASES = [("gemm", *case) for case in GEMM] + [("grouped_gemm", *case) for case in GROUPED]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    op, call, says = CASES[index]
    with pytest.raises((ValueError, TypeError), match=f"^{op}: .*{says}"):
        call()


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
