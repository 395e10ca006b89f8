"""Invalid calls of GEMMs, scaling, choices and profiles: each is rejected while it is traced.

Of buffers: test_buffers.py. Wrong dtypes and dimensions, deadlines and axes: tests/contract and
tests/dispatch.
"""

import re
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import ENGINE, GATHER, SCATTER, K, M, N, T, W, create, ones, trace
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, permuted_mesh
from refusals import NO_PLAN, check_names

import jax_cp_dispatch as cp
from jax_cp_dispatch import all_gather_matmul, gemm, grouped_gemm, matmul_reduce_scatter, scaling
from jax_cp_dispatch.buffers import comm_overlap_buffer_bytes, destroy_comm_overlap_buffer
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.profiling import overlap_profile
from jax_cp_dispatch.scaling import MatmulScaling, Quantized

pytestmark = pytest.mark.usefixtures("unchecked_types")

F8, E5M2 = "float8_e4m3fn", "float8_e5m2"
CURRENT, DELAYED = "CURRENT_TENSOR_SCALING", "DELAYED_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
LHS, RHS = (M, K), (K, N)
RING, BULK, PIPELINE = "RING_EXCHANGE", "BULK", "PIPELINE"
TURNED = ((0,), (0,))
X, Y, V = ones(T, K), ones(M, K), ones(K, N)
# Of NumPy: collecting the tests compiles nothing.
one, two = (cast(Any, np.ones(n, np.float32)) for n in (1, 2))
bytes_of = partial(np.zeros, dtype=np.uint8)
OF_LHS, OF_RHS = bytes_of((128, 4)), bytes_of((4, 128))
BOTH: Any = {"fuse_gelu": True, "grad": True}
ATOMIC: Any = {"atomic_gemm": True}


def wide(call, *arguments, **options):
    """A call with 64-bit types."""
    with jax.enable_x64(True):
        return call(*arguments, **options)


def grad(call, **options):
    """Returns the gradient in the first operand."""
    return jax.grad(lambda *x: jnp.sum(call(*x, **options)))


def forward(call, *operands):
    """Derives a call in its first operand, by forward mode."""
    x, *others = operands
    return jax.jvp(lambda x: call(x, *others), (x,), (x,))


# ---- `gemm` and `grouped_gemm`.


def plain(lhs=LHS, rhs=RHS, types=("float32", "float32"), **options: Any):
    """A call on one device."""
    operands = [jax.ShapeDtypeStruct(x, t) for x, t in zip((lhs, rhs), types, strict=True)]
    return jax.eval_shape(partial(gemm, **options), *operands)


def scaled(
    mode, lhs_scale: Any = one, rhs_scale: Any = one, shapes: Any = ((M, 32), (32, N)),
    types=(F8, F8), **options: Any,
):  # fmt: skip
    """The same of 8-bit operands."""
    scales = {"lhs_scale_inv": lhs_scale, "rhs_scale_inv": rhs_scale}
    scales = {name: jnp.asarray(x) for name, x in scales.items() if x is not None}
    lhs, rhs = shapes
    return plain(lhs, rhs, types, scaling_mode=mode, **scales, **options)


def engine(*buffer: Any, lhs=(T, K), aux=None, **options: Any):
    """A call with a buffer of `create(*buffer)`, on the ranks of a mesh."""
    if buffer:
        options["comm_overlap"] = create(*buffer)
    call = lambda x, w, *aux: ENGINE(x, w, **options, **({"aux_in": aux[0]} if aux else {}))
    return trace(call, ones(*lhs), V, *(() if aux is None else [ones(*aux)]))


def on_destroyed():
    destroy_comm_overlap_buffer(buffer := create("AG", RING))
    return engine(comm_overlap=buffer)


def paired(*other: Any, **options: Any):
    """The all-gather of an atomic ring with another buffer, or with none."""
    pair = create(*other, **options) if other else None
    return engine(comm_overlap=create("AG", RING, **ATOMIC), paired_comm_overlap=pair)


def on_ring(x, w):
    return ENGINE(x, w, comm_overlap=create("AG", RING))


def outside():
    with jax.set_mesh(mesh_of(W)):
        return jax.eval_shape(on_ring, X[0], V[0])


def of_scale(scale):
    """A product that depends on the scale of rhs."""
    options: Any = {"scaling_mode": CURRENT, "lhs_scale_inv": one, "rhs_scale_inv": scale}
    return gemm(jnp.ones(LHS, F8), jnp.ones(RHS, F8), **options)


def fused(scale):
    """The fused backward pass."""
    return gemm(jnp.ones(LHS) * scale, jnp.ones(RHS), fuse_bias=True, grad=True)[0]


GEMM: dict[str, Any] = {
    # Shapes and types.
    r"lhs contracts dimensions of \(3,\) but rhs of \(4,\)": lambda: plain((4, 3), (4, 5)),
    r"rhs are \(1, 0\)": lambda: plain((4, 2, 3), (3, 2, 5), contracting_dims=((1, 2), (1, 0))),
    "contracting_dims is 3; it needs the dimensions": lambda: plain(contracting_dims=3),
    "lhs is str; it needs to be an array, or": lambda: gemm(*cast(Any, ("x", ones(*RHS)))),
    "lhs is float64 .* can only be used": lambda: wide(plain, types=("float64", "float32")),
    **{
        f"{flag} is 1; it needs to be True or False": lambda flag=flag: plain(**{flag: 1})
        for flag in ("fuse_bias", "fuse_gelu", "grad", "return_aux", "use_split_accumulator")
    },
    r"bias has shape \(4,\); it needs 5 elements, one per col": lambda: plain(bias=np.ones(4)),
    # Epilogues.
    "got grad without an epilogue; it needs fuse_gelu, fuse_bias": lambda: plain(grad=True),
    "a bias with fuse_bias=True, grad=True; .* Om": lambda: plain(grad=True, bias=np.ones(N)),
    "no bias with fuse_bias=True, grad=False; .* Pass one": lambda: plain(fuse_bias=True),
    "a bias with fuse_bias=False, grad=F": lambda: plain(fuse_bias=False, bias=np.ones(N)),
    "no gelu_input with fuse_gelu=True, .* Pass": lambda: plain(grad=True, fuse_gelu=True),
    "a gelu_input with .* Omit": lambda: plain(fuse_gelu=True, gelu_input=np.ones((M, N))),
    r"gelu_input has shape \(8, 3\); .* 40 el.* Pass": lambda: plain(**BOTH, gelu_input=Y[0]),
    r"gelu_input has shape \(2, 5\); it needs that of the output, 40 elements": (
        lambda: engine("AG", RING, **BOTH, gelu_input=np.ones((T, N)))
    ),
    r"fuse_gelu with \w+\.RS, \w+\.PIP": lambda: engine("RS", PIPELINE, lhs=LHS, fuse_gelu=True),
    r"fuse_gelu with \w+\.AG, \w+\.BULK;": lambda: engine("AG", BULK, aux=LHS, fuse_gelu=True),
    # Scales.
    "missing .* of lhs for .*CURRENT.* Pass lhs_scale_in": lambda: scaled(CURRENT.lower(), None),
    "missing .* of rhs for .* Pass rhs_scale_inv": lambda: scaled(MXFP8, OF_LHS, None),
    "e5m2 for lhs and rhs; .* Quantize it": lambda: scaled(CURRENT, types=(E5M2, E5M2)),
    "lhs is float8_e4m3fn with .* Pass its scaling_mode": lambda: scaled("NO_SCALING"),
    "lhs is bfloat16 with .* Quantize it first": lambda: scaled(CURRENT, types=("bfloat16", F8)),
    "got lhs_scale_inv with .*NO_SCALING; .* Omit it": lambda: plain(lhs_scale_inv=one),
    "type is float8.*: quantize the result": lambda: scaled(CURRENT, preferred_element_type=F8),
    r"lhs_scale_inv is float32\[\]; .* needs float32": lambda: scaled(CURRENT, one[0]),
    r"is uint8\[8, 1\]; .* unpadded: call pad_": lambda: scaled(MXFP8, bytes_of((M, 1)), OF_RHS),
    r"rhs.* uint8\[128, 4\]; .* uint8\[4, 128\]\. P.*'col": lambda: scaled(MXFP8, OF_LHS, OF_LHS),
    r"lhs has shape \(8, 40\); .* 32, .* Pad": lambda: scaled(MXFP8, shapes=((M, 40), (40, N))),
    # Buffers.
    r"an aux_in with buffer \d+ of .* Omit": lambda: engine("RS", PIPELINE, lhs=LHS, aux=LHS),
    r"no aux_in with buffer \d+ of \w+\.BULK; .* Pass": lambda: engine("AG", BULK),
    "7 rows of aux_in are not a multiple of the 4": lambda: engine("RS", BULK, aux=(M - 1, N)),
    r"shape \(8, 5\) but the call needs \(8, 10": lambda: engine("RS", BULK, aux=(M, 2 * N)),
    "got aux_in without a buffer that moves something. Cre": lambda: plain(aux_in=np.ones((3, 1))),
    "got return_aux without a buffer that moves something": lambda: plain(return_aux=True),
    "got axis_name without a buffer that moves something": lambda: engine(),
    "got return_aux with .*only": lambda: engine("RS", PIPELINE, lhs=LHS, return_aux=True),
    "lhs contracts its first": lambda: engine("AG", RING, lhs=(K, T), contracting_dims=TURNED),
    r"got arrays of shapes \(0, 3\), \(3, 5\) with a buf": lambda: engine("AG", RING, lhs=(0, K)),
    "6 rows of lhs are not a multiple of the 4": lambda: engine("RS", RING, lhs=(M - 2, K)),
    "got comm_overlap without": lambda: gemm(X[0], V[0], comm_overlap=create("AG", RING)),
    r"buffer \d+ has been destroyed\. Create it": on_destroyed,
    r"not inside jax\.shard_map over": outside,
    r"atomic ring of buffer \d+ .* paired with nothing; on": lambda: paired(),
    "paired with comm_type=CommOverlapType.AG": lambda: paired("AG", RING, **ATOMIC),
    "paired with comm_type=CommOverlapType.RS.* atomic_gemm=False": lambda: paired("RS", RING),
    "paired with .*RS.* tp_size=2, .*; on": lambda: paired("RS", RING, num_ranks=2, **ATOMIC),
    # Derivatives.
    "communication, no derivative is .* Use all_gather": lambda: trace(grad(on_ring), X, V),
    "scaled operands or grad, no derivative is": lambda: jax.eval_shape(grad(of_scale), one),
    "with scaled operands or grad, no derivative is": lambda: jax.eval_shape(grad(fused), one),
    r"forward mode .* a Hessian is jax\.jacrev\(jax\.grad": lambda: forward(gemm, X[0], V[0]),
}  # fmt: skip

ROWS, MATRICES = np.ones((8, 4), np.float32), np.ones((2, 4, 3), np.float32)
G_KN = r"needs floats \[G, K, N\] with G = 2 as in group_sizes; K = 4 as in lhs\. Coll.* See con"


def grouped(lhs: Any = ROWS, rhs: Any = MATRICES, sizes: Any = (5, 3), **options: Any):
    sizes = np.array(sizes, np.int32) if isinstance(sizes, tuple) else sizes
    return jax.eval_shape(lambda: grouped_gemm(jnp.asarray(lhs), rhs, sizes, **options))


def of_scales(scales, mode=CURRENT):
    """8-bit products of groups."""
    options: Any = {"scaling_mode": mode, "lhs_scale_inv": scales, "rhs_scale_inv": two}
    rows, matrices = jnp.asarray(ROWS, F8), jnp.asarray(MATRICES, F8)
    return grouped_gemm(rows, matrices, jnp.array([5, 3]), **options)


GROUPED: dict[str, Any] = {
    "contracting_dims is 3; it needs to be one of": lambda: grouped(contracting_dims=3),
    rf"rhs is float32\[8, 4\]; it {G_KN}": lambda: grouped(rhs=ROWS),
    r"bias has shape \(2, 2\); it needs \(2, 3\), one row": lambda: grouped(bias=np.ones((2, 2))),
    "a bias where r": lambda: grouped(rhs=ROWS, contracting_dims=TURNED, bias=MATRICES[..., 0]),
    "got ScalingMode.MXFP8_1D_SCALING; groups have one scale each": lambda: of_scales(two, MXFP8),
    "no derivative is defined with Sca": lambda: jax.eval_shape(grad(of_scales), two),
    "got forward mode": lambda: forward(grouped_gemm, ROWS, MATRICES, jnp.array([5, 3])),
}  # fmt: skip


# ---- Layers.

DOUBLE = X.astype(np.float64), V.astype(np.float64)
DERIVED = "16 elements are contracted on a rank, in the forward pass or in the derivative"


def gather(x: Any = X, w: Any = V, **options: Any):
    return trace(lambda x, w: GATHER(x, w, **options), x, w)


def scatter(x: Any = Y, w: Any = V, **options: Any):
    return trace(lambda x, w: SCATTER(x, w, **options), x, w)


def several(ws, **options: Any):
    """A call with several weights, made of one."""
    return trace(lambda x, w: GATHER(x, ws(w), **options), X, V)


def buffered(kind, method, **options):
    buffer = create(kind, method, **{"shape": (M, K), **options})
    return gather(buffer=buffer, method="auto")


def on_global(*shapes: Any, op=all_gather_matmul, **options: Any):
    """A call on global arrays of x and w, or of x and several weights; and its derivative."""
    mesh = permuted_mesh((2, 4), ("dp", "tp"))
    x, *ws = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
    call = partial(op, axis_name="tp", mesh=mesh, **options)
    if len(ws) > 1:
        return jax.eval_shape(lambda x, *ws: call(x, ws), x, *ws)
    return jax.eval_shape(grad(call), x, *ws)


def on_whole(x, w):
    return all_gather_matmul(x, w, axis_name=AXIS, mesh=mesh_of(W))


def without_blocks():
    """Of a sum, each rank contracts its part of K, and in the derivative all of N."""
    sums = partial(on_global, op=matmul_reduce_scatter, scaling_mode=MXFP8)
    assert sums((8, 128), (128, 32)).shape == (8, 128)
    return sums((8, 64), (64, 64))


def without_a_derivative():
    """N columns are no blocks, which matters only where they are contracted."""
    call = partial(SCATTER, scaling_mode=MXFP8)
    x, w = ones(M, 32), ones(32, N)
    assert trace(call, x, w).shape == (W, T, N)
    return trace(grad(call), x, w)


GATHERS: dict[str, Any] = {
    # How it communicates.
    r"method is CommOverlapMethod\.BULK, which moves an array ": lambda: gather(method="bulk"),
    "method is 'rings'; it needs to be 'auto', 'none', 'ring'": lambda: gather(method="rings"),
    "gathered is 'never'; it needs to be 'keep' or 'again'": lambda: gather(gathered="never"),
    "no buffer 99. Create it with create_comm": lambda: gather(buffer=99, method="auto"),
    "got aggregate with buffer 99, whose own": lambda: gather(buffer=99, aggregate=True),
    r"buffer \d+ is for .*RS; it needs .*AG\. Create one": lambda: buffered("RS", PIPELINE),
    r"has shape \(8, 2\) but the call needs \(8,": lambda: buffered("AG", RING, shape=(M, K - 1)),
    r"buffer \d+ is bfloat16 but the call": lambda: buffered("AG", RING, dtype="bfloat16"),
    r"buffer \d+ is for tp_size=2 but the mesh axis h": lambda: buffered("AG", RING, num_ranks=2),
    # Ranks and tokens.
    r"row_counts is \(2, 2, 2\); it needs 4 counts, one": lambda: gather(row_counts=(2, 2, 2)),
    "the largest of them 2: the tokens of x, which": lambda: gather(row_counts=(1,) * 4),
    "row_counts is .* of at least 0, the largest": lambda: gather(row_counts=(2, -1, 2, 2)),
    r"row_counts is \(2, 1\.5, 2, 2\); it needs 4": lambda: gather(row_counts=(2, 1.5, 2, 2)),
    "no mesh with axis 'cp' was found. Call": lambda: GATHER(X[0], V[0]),
    r"\(12, 2, 4\), whose dim.* of 2 is not": lambda: on_global((8, 12), (12, 8), (12, 2, 4)),
    "got row_counts with global arrays": lambda: on_global((8, 8), (8, 8), row_counts=(2,) * 4),
    "got forward mode": lambda: forward(on_whole, V[0], np.ones((N, W), "f")),
    # Operands.
    "w is float8_e4m3fn; it needs": lambda: gather(w=ones(K, N, dtype=jnp.float8_e4m3fn)),
    r"bias has shape \(3,\); it needs \(5,\), one": lambda: gather(bias=np.ones(K)),
    "preferred_element_type is 'foo' for op": lambda: gather(preferred_element_type="foo"),
    "w is a list of 2 arrays; pass several weights as a tup": lambda: several(lambda w: [w, w]),
    r"w\[1\] is float32\[5, 3\]; .* K = 3 as in x": lambda: several(lambda w: (w, w.T)),
    "w is bfloat16 and float32; .* Con": lambda: several(lambda w: (w, w.astype("bfloat16"))),
    r"bias is \w+; it needs to be a tuple of": lambda: several(lambda w: (w, w), bias=np.ones(N)),
    "bias is a tuple of 1; .* an array": lambda: gather(bias=(np.ones(N),)),
    "x is float64 and w float32; float64 can only": lambda: wide(gather, DOUBLE[0]),
    "float64 with .*MXFP8.*, which would": lambda: wide(gather, *DOUBLE, scaling_mode=MXFP8),
    "is float64 for operands of float32": lambda: wide(gather, preferred_element_type="float64"),
    # Scaling.
    "scaling_mode is 'FP8'; it needs to be one of ": lambda: gather(scaling_mode="FP8"),
    "no scaling_state with .*DELAYED.* Begin with Matm": lambda: gather(scaling_mode=DELAYED),
    "scaling_state is int; it": lambda: gather(scaling_mode=DELAYED, scaling_state=3),
    "scaling_state with .*NO_SCALING; .* Omit": lambda: gather(scaling_state=MatmulScaling.init()),
    "3 elements are contracted on a rank, .* Pad": lambda: gather(scaling_mode=MXFP8),
    "gathered='again' with .*CURR": lambda: gather(gathered="again", scaling_mode=CURRENT),
    DERIVED: lambda: on_global((64, 64), (64, 64), scaling_mode=MXFP8),
}  # fmt: skip

SCATTERS: dict[str, Any] = {
    "method is None; it needs to be 'auto', 'none', 'ring', 'pipe": lambda: scatter(method=None),
    "num_splits is 0; it needs to be": lambda: scatter(method="pipeline", num_splits=0),
    "num_splits with method='auto', which also": lambda: scatter(method="auto", num_splits=2),
    "num_splits with .*NONE, which has no chun": lambda: scatter(method="none", num_splits=2),
    "num_splits with .*RING_EXCHANGE; it is an option of .*PI": lambda: scatter(num_splits=2),
    "use_ce=False; then each rank": lambda: scatter(atomic=True, use_ce=False),
    r"'ring' but buffer \d+ .* Omit": lambda: scatter(buffer=create("RS", PIPELINE)),
    r"is \(2, 2, 2, 1\); .* whose sum is 8": lambda: scatter(row_counts=(2, 2, 2, 1)),
    "7 tokens are not a multiple of the 4 ranks. Pass the": lambda: scatter(ones(M - 1, K)),
    "w is a tuple of 2, .* several weights need a common x": lambda: scatter(w=(V, V)),
    r"x has \(8, 3\) columns but w has \(3, 5\) r": lambda: scatter(ones(4, M, K), ones(K, N, 1)),
    "5 elements are contracted .*in the derivative.* multiple of 32": without_a_derivative,
    DERIVED: without_blocks,
}  # fmt: skip


# ---- Scaling, choices and profiles.

VALUES: Any = np.zeros((2, 32), np.float32)
SCALES: Any = bytes_of((130, 4))
PRODUCT = cp.cost.CommGemmShape("all_gather_matmul", 8, 8, 8, 4, 4)


def quantize(x: Any = VALUES, mode: Any = MXFP8, **options: Any):
    return scaling.quantize(x, mode, **options)


def dequantize(dtype: Any = "float32", **change: Any):
    fields: dict[str, Any] = {"data": VALUES.astype(F8), "scale_inv": bytes_of((2, 1)), **change}
    mode = scaling.ScalingMode[change.get("mode", MXFP8)]
    return scaling.dequantize(Quantized(**{**fields, "mode": mode}), dtype)


swizzle: Any = scaling.swizzle_scales
unswizzle: Any = scaling.unswizzle_scales
pad: Any = partial(scaling.pad_scales, SCALES)
unpad: Any = partial(scaling.unpad_scales, SCALES)
SCALING: dict[str, dict[str, Any]] = {
    "quantize": {
        "dimension 1 to be a multiple of 32.* Pad": lambda: quantize(np.zeros((2, 40), "f")),
        "layout 'column' needs dimension 0 to be a mult": lambda: quantize(layout="column"),
        "layout is 'diagonal'; it needs to be 'row'": lambda: quantize(layout="diagonal"),
        "mode is ScalingMode.NO_SCALING": lambda: quantize(mode="NO_SCALING"),
        "dtype is int8; it needs to be float8_e4m3fn": lambda: quantize(dtype=jnp.int8),
        "dtype is 'float7'": lambda: quantize(dtype="float7"),
        "axis_name 'cp' is not manual here": lambda: quantize(mode=CURRENT, axis_name="cp"),
        r"got no state .* state=DelayedScaling.init\(\)": lambda: quantize(mode=DELAYED),
        "got a state with .* Omit it": lambda: quantize(state="any"),
        "type int.*DelayedScaling. Begin": lambda: quantize(mode=DELAYED, state=3),
    },
    "DelayedScaling": {"dtype is f": lambda: MatmulScaling.init().x.update(VALUES, dtype="f2")},
    "dequantize": {
        "type ndarray.*Quantized. Pass": lambda: scaling.dequantize(NO_PLAN),
        "dtype is 'nonsense'; it needs .* Pass jnp.float32": lambda: dequantize("nonsense"),
        "dtype is 'int8'; it needs to be a floating-point": lambda: dequantize("int8"),
        "q.mode is ScalingMode.NO_SCALING": lambda: dequantize(mode="NO_SCALING"),
        "q.data is float32; it needs to be float8": lambda: dequantize(data=VALUES),
        r"uint8\[128, 4\]; .* uint8\[2, 1\]": lambda: dequantize(scale_inv=bytes_of((128, 4))),
        r"uint8\[2, 1\]; .* float32\[1\]": lambda: dequantize(mode=CURRENT),
    },
    "pad_scales": {"layout is 'both'": lambda: pad(layout="both")},
    "swizzle_scales": {
        r"multiples of \(128, 4\). Call pad_scales": lambda: swizzle(SCALES, layout="row"),
    },
    "unswizzle_scales": {r"\[8, 4\].*512": lambda: unswizzle(bytes_of((8, 4)), layout="row")},
    "unpad_scales": {
        "shape is 3; it needs to be a tuple": lambda: unpad(shape=3),
        "entry of shape is 1.5; it needs": lambda: unpad(shape=(1.5, 2)),
        r"\(131, 4\); it needs sizes from 0 to .*\(130, 4\)": lambda: unpad(shape=(131, 4)),
        r"\(-1, 4\); it needs sizes from 0 to .*\(130, 4\)": lambda: unpad(shape=(-1, 4)),
    },
    "comm_overlap_buffer_bytes": {
        "argument 'foo'": lambda: comm_overlap_buffer_bytes("AG", BULK, LHS, "float32", W, foo=3),
    },
    "choose_comm_gemm": {
        "type ndarray.*CommGemmShape. Pass": lambda: choose_comm_gemm(NO_PLAN),
        "type str.*needs to be": lambda: choose_comm_gemm(PRODUCT, hardware=cast(Any, "h100")),
    },
    "overlap_profile": {
        "type ndarray.*a function": lambda: overlap_profile(NO_PLAN),
        "ran no GEMM with comm": lambda: overlap_profile(jax.jit(lambda x: x + 1), jnp.ones(3)),
    },
}  # fmt: skip


# By operation: the message after "<operation>: ", and the call.
OF_OPERATIONS = {
    "gemm": GEMM,
    "grouped_gemm": GROUPED,
    "all_gather_matmul": GATHERS,
    "matmul_reduce_scatter": SCATTERS,
    **SCALING,
}
CASES = [(op, *case) for op, cases in OF_OPERATIONS.items() for case in cases.items()]


def test_the_list_is_of_public_functions():
    check_names(OF_OPERATIONS)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    op, says, call = CASES[index]
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        call()
    assert re.match(rf"{re.escape(op)}: .*{says}", str(caught.value), flags=re.S), caught.value


def test_a_list_of_numbers_is_one_weight():
    several(lambda w: [[1.0]] * K)
