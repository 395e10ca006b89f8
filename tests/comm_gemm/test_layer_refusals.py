"""Invalid calls of `all_gather_matmul` and `matmul_reduce_scatter`: rejected while traced."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import GATHER, SCATTER, K, M, N, T, W, create, ones, refused, trace
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import all_gather_matmul, gemm, grouped_gemm, matmul_reduce_scatter
from jax_cp_dispatch.scaling import MatmulScaling

pytestmark = pytest.mark.usefixtures("unchecked_types")

RING = "RING_EXCHANGE"
CURRENT, DELAYED = "CURRENT_TENSOR_SCALING", "DELAYED_TENSOR_SCALING"
MXFP8 = "MXFP8_1D_SCALING"
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


# Call, and the message after "all_gather_matmul: ".
GATHERS: list[tuple[Any, str]] = [
    # How it communicates.
    (lambda: gather(method="pipeline"), r"got CommOverlapMethod\.PIPELINE with .*AG; .* Use Comm"),
    (lambda: gather(method="bulk"), r"method is CommOverlapMethod\.BULK, which moves an array "),
    (lambda: gather(method="rings"), "method is 'rings'; it needs to be 'auto', 'none', 'ring'"),
    (lambda: gather(aggregate=True, atomic=True), "got aggregate_ag with .*atomic_gemm=True; .* O"),
    (lambda: gather(aggregate=True, use_ce=False), "got aggregate_ag with use_ce=False; pairs"),
    (lambda: gather(gathered="never"), "gathered is 'never'; it needs to be 'keep' or 'again'"),
    (lambda: gather(buffer=99, method="auto"), "there is no buffer 99. Create it with create_comm"),
    (lambda: gather(buffer="99", method="auto"), "buffer is '99'; it needs to be the int that cre"),
    (lambda: buffered("RS", "PIPELINE"), r"buffer \d+ is for .*RS; it needs .*AG\. Create one"),
    (lambda: buffered("AG", "BULK"), "method is .*BULK, which moves an array during an independen"),
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
    (lambda: gather(w=ones(K)), r"x has shape \(2, 3\) and w \(3,\); it needs"),
    (lambda: gather(w=ones(N, K)), "x has 3 columns but w has 5 rows; they are contracted"),
    (lambda: gather(ones(T, K, dtype=np.int32)), "x is int32; it needs to be one"),
    (lambda: gather(w=ones(K, N, dtype=jnp.float8_e4m3fn)), "w is float8_e4m3fn; it needs to be"),
    (lambda: gather(bias=np.ones(K)), r"bias has shape \(3,\); it needs \(5,\), one"),
    (lambda: gather(bias=np.ones(N, bool)), "bias is bool; it needs to be"),
    (lambda: GATHER("x", V), "x is str; it needs to be an array, or nested lists"),
    (lambda: GATHER(X, None), "w is NoneType; it needs to be an array, or nested lists"),
    (lambda: gather(preferred_element_type="foo"), "preferred_element_type is 'foo' for operands"),
    (lambda: several(lambda w: [w, w]), "w is a list of 2 arrays; pass several weights as a tuple"),
    (lambda: several(lambda w: ()), "w is a tuple of 0, .* at least one is needed"),
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


def on_sum(x, w, **options: Any):
    mesh = permuted_mesh((2, 4), ("dp", "tp"))
    return all_gather_matmul(x, w, axis_name="tp", mesh=mesh, **options).sum()


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
    (lambda: scatter(axis_name=(AXIS, AXIS)), r"axis_name is \('cp', 'cp'\); it needs one mesh ax"),
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

CASES = [("all_gather_matmul", *case) for case in GATHERS]
CASES += [("matmul_reduce_scatter", *case) for case in SCATTERS]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_rejected(index):
    op, call, says = CASES[index]
    with pytest.raises((ValueError, TypeError), match=f"^{op}: .*{says}"):
        call()


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
        for mode in (lambda x: jax.jvp(product, (x,), (x,)), jax.jacfwd(product)):  # noqa: B023
            with pytest.raises(TypeError, match=match):
                mode(x)


def test_other_platform():
    run = on_ranks(partial(GATHER, implementation="in_process"), mesh_of(W))
    with pytest.raises(NotImplementedError, match="the platform is 'cuda', but it serves CPU dev"):
        run.trace(X, V).lower(lowering_platforms=("cuda",))
