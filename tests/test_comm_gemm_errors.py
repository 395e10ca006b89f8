"""Products that are refused: by Python when traced; and ranks that do not come, when they run."""

import re
import time
from functools import partial
from typing import Any

import comm_gemm_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_mesh import AXIS, mesh_of, on_ranks

from jax_cp_dispatch.comm_gemm import (
    all_gather_matmul,
    create_comm_overlap_buffer,
    destroy_all_comm_overlap_buffers,
    destroy_comm_overlap_buffer,
    gemm,
    matmul_reduce_scatter,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")

W, T, K, N = 4, 2, 3, 5
M = W * T
BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture(autouse=True)
def no_comm_overlap_buffers():
    destroy_all_comm_overlap_buffers()
    yield
    destroy_all_comm_overlap_buffers()


def ones(*shape, dtype: Any = np.float32):
    return np.ones((W, *shape), dtype)


def trace(fn, *operands):
    """What Python says, without compiling."""
    return jax.eval_shape(on_ranks(fn, mesh_of(W), jit=False), *operands)


def refused(fn, *operands, error: Any = ValueError, match):
    with pytest.raises(error, match=match):
        trace(fn, *operands)


def create(kind, method, shape=None, dtype="float32", num_ranks=W, **options):
    shape = shape or ((M, K) if kind == "AG" else (M, N))
    return create_comm_overlap_buffer(kind, method, shape, dtype, num_ranks, **options)


# ---- The user's layer.

GATHER: Any = partial(all_gather_matmul, axis_name=AXIS, method="ring")
SCATTER: Any = partial(matmul_reduce_scatter, axis_name=AXIS, method="ring")


@pytest.mark.parametrize(
    "op, options, message",
    [
        (GATHER, {"method": "pipeline"}, r"got CommOverlapMethod\.PIPELINE with CommOverlapType\.AG"
         r"; .* not gathered\. Take CommOverlapMethod\.RING_EXCHANGE"),
        (GATHER, {"method": "bulk"}, r"method is CommOverlapMethod\.BULK, which moves an array duri"
         r"ng an independent GEMM\. Take CommOverlapMethod\.RING_EXCHANGE, or gemm\("),
        (SCATTER, {"method": "bulk"}, r"method is CommOverlapMethod\.BULK, .* Take CommOverlapMet"),
        (GATHER, {"method": "rings"}, r"method is 'rings'; it needs to be one of CommOverlapMetho"),
        (GATHER, {"method": None}, r"method is None; it needs to be one of CommOverlapMethod"),
        (SCATTER, {"method": "pipeline", "num_splits": 0}, r"num_splits is 0; it needs to be an i"),
        (SCATTER, {"rs_overlap_first_gemm": True}, r"got rs_overlap_first_gemm with CommOverlapMeth"
         r"od\.RING_EXCHANGE; it orders the chunks of CommOverlapMethod\.PIPELINE\. Leave it away"),
        (GATHER, {"aggregate": True, "atomic": True}, r"got aggregate_ag with CommOverlapType\.AG, "
         r"CommOverlapMethod\.RING_EXCHANGE, atomic_gemm=True; .* Leave it away"),
        (GATHER, {"gathered": "never"}, r"gathered is 'never'; it needs to be 'keep' or 'again'"),
        (GATHER, {"row_counts": (2, 2, 2)}, r"row_counts is \(2, 2, 2\); it needs 4 counts, one p"),
        (GATHER, {"row_counts": (1, 1, 1, 1)}, r"the largest of them 2: the tokens of x, which ha"),
        (GATHER, {"row_counts": (2, -1, 2, 2)}, r"row_counts is .* of at least 0, the largest of"),
        (GATHER, {"row_counts": (2, 1.5, 2, 2)}, r"row_counts is \(2, 1\.5, 2, 2\); it needs 4 co"),
        (SCATTER, {"row_counts": (2, 2, 2, 1)}, r"row_counts is \(2, 2, 2, 1\); .* whose sum is 8"),
        (GATHER, {"implementation": "nccl"}, r"implementation is 'nccl'; there are 'in_process'"),
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


def test_pairs_of_chunks_need_an_even_number_of_ranks():
    run = on_ranks(lambda x, w: GATHER(x, w, aggregate=True), mesh_of(3), jit=False)
    with pytest.raises(
        ValueError, match=r"got aggregate_ag with tp_size=3; pairs need an even one"
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
        (ones(M, K), ones(1, K, N), None, ValueError, r"x has .* Reshape other dimensions"),
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
            r"bias has shape \(3,\); it needs \(5,\), an",
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
            ones(K, N, dtype=E4M3),
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
    ("float64", r"preferred_element_type is float64 for operands of float32; .* goes with float64"),
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
        match = r"x is float64 and w float32; float64 goes with float64 alone. Convert one"
        for op in (GATHER, SCATTER):
            refused(op, x, w, error=TypeError, match=match)


def test_tokens_that_do_not_divide():
    refused(
        SCATTER,
        *(ones(M - 1, K), ones(K, N)),
        match=r"matmul_reduce_scatter: 7 tokens do not divide among 4 ranks\. Say how many go to e"
        r"ach: row_counts=\(\.\.\.\), or pad",
    )


def test_layers_outside_of_shard_map():
    for op in (GATHER, SCATTER):
        with pytest.raises(ValueError, match=r"no mesh with axis 'cp' is in sight\. Call"):
            op(jnp.ones((M, K)), jnp.ones((K, N)))


def test_layers_on_a_vmap_axis():
    run: Any = jax.vmap(partial(GATHER, axis_name="v"), axis_name="v")
    with pytest.raises(
        ValueError, match=r"axis_name 'v' is an axis of jax.vmap here, but the ranks"
    ):
        run(ones(T, K), ones(K, N))


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


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize("method", ["none", "ring"])
def test_forward_mode_of_layers(op, method):
    x, w = ones(M, K), ones(K, N)
    with pytest.raises(TypeError, match=r"forward-mode autodiff .jvp. .*custom_vjp"):
        run = lambda x, w: jax.jvp(partial(op, method=method), (x, w), (x, w))
        on_ranks(run, mesh_of(W)).lower(x, w)


# ---- The engine's layer.

ENGINE: Any = partial(gemm, axis_name=AXIS)
PLAIN: Any = gemm


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
@pytest.mark.parametrize(
    "mode", ["DELAYED_TENSOR_SCALING", "current_tensor_scaling", "MXFP8_1D_SCALING"]
)
def test_scaling_without_scales(mode, given, missing):
    scales = {f"{name}_scale_inv": jnp.ones(1) for name in given}
    with pytest.raises(
        ValueError,
        match=rf"gemm: missing inverse scaling factor of {missing} for ScalingMode\.{mode.upper()}"
        rf"\. Pass {missing[:3]}_scale_inv",
    ):
        PLAIN(ones(K, dtype=E4M3), jnp.ones((K, N), E5M2), scaling_mode=mode, **scales)


def test_scaling():
    lhs, rhs, scale = jnp.ones((M, K), E4M3), jnp.ones((K, N), E4M3), jnp.ones(1)
    scales = {"lhs_scale_inv": scale, "rhs_scale_inv": scale}
    with pytest.raises(
        ValueError, match=r"got float8_e5m2 for lhs and rhs; at least one needs to be"
    ):
        PLAIN(lhs.astype(E5M2), rhs.astype(E5M2), scaling_mode="DELAYED_TENSOR_SCALING", **scales)
    with pytest.raises(
        NotImplementedError, match=r"got ScalingMode\.DELAYED_TENSOR_SCALING; this v"
    ):
        PLAIN(lhs, rhs, scaling_mode="DELAYED_TENSOR_SCALING", **scales)
    with pytest.raises(
        ValueError, match=r"got lhs_scale_inv with ScalingMode\.NO_SCALING; scales ne"
    ):
        PLAIN(lhs, rhs, lhs_scale_inv=scale)
    with pytest.raises(
        ValueError, match=r"scaling_mode is 'FP8'; it needs to be one of ScalingMode"
    ):
        PLAIN(lhs, rhs, scaling_mode="FP8")
    with pytest.raises(TypeError, match=r"gemm: lhs is float8_e4m3fn; it needs to be one of"):
        PLAIN(lhs, rhs)


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


def test_gelu_is_not_there_yet():
    buffer = create("AG", "RING_EXCHANGE")
    for options in ({"comm_overlap": buffer, "axis_name": AXIS}, {}):
        refused(
            lambda x, w, options=options: PLAIN(x, w, fuse_gelu=True, **options),
            *(ones(T, K), ones(K, N)),
            error=NotImplementedError,
            match="gemm: got fuse_gelu, which this version does not have yet",
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
    with pytest.raises(TypeError, match=r"gemm: rhs is int8; it needs to be one of"):
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


def test_other_platform():
    run = on_ranks(partial(GATHER, implementation="in_process"), mesh_of(W))
    with pytest.raises(NotImplementedError, match="the platform is 'cuda', and it serves CPU dev"):
        run.trace(ones(T, K), ones(K, N)).lower(lowering_platforms=("cuda",))


# ---- Ranks that do not come.

DEADLINE = 0.4


def expect_everywhere(result, match, *, but=()):
    """Each rank has the same error; the next computation runs."""
    errors = set()
    for rank, shard in enumerate(result.addressable_shards):
        if rank not in but:
            with pytest.raises(jax.errors.JaxRuntimeError, match=match) as error:
                np.asarray(shard.data)
            errors.add(str(error.value))
    assert len(errors) == 1
    x, w = ones(M, K), ones(K, N)
    got = on_ranks(SCATTER, mesh_of(W))(x, w)
    np.testing.assert_array_equal(got, oracle.matmul_reduce_scatter(x, w))


@pytest.mark.parametrize("op, options", [
    (GATHER, {}), (SCATTER, {"method": "pipeline"}), (SCATTER, {"method": "none"}),
])  # fmt: skip
def test_rank_that_never_comes(op, options):
    """All others wait for the deadline, not longer, and name it."""
    x, w = ones(M, K), ones(K, N)

    def local(x, w):
        here = lambda x: op(x, w, deadline=DEADLINE, **options)
        away = lambda x: jnp.zeros_like(jax.eval_shape(here, x)) + 0 * x[0, 0]
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 3, away, here, x)

    program = on_ranks(local, mesh_of(W), check_vma=False).lower(x, w).compile()
    start = time.monotonic()
    expect_everywhere(
        program(x, w),
        rf"{op.func.__name__} over axis 'cp': deadline of 400 ms passed: 3/4 ranks arrived, ranks "
        r"\[0, 1, 2\] wait for missing ranks \[3\]",
        but=(3,),  # it has nothing to fail by
    )
    assert DEADLINE <= time.monotonic() - start < DEADLINE + 4


def test_rank_that_fails_before_the_call():
    """Its own error is there too; the others name it; the same program then runs."""

    def check(x, rank, bad_rank):
        if rank == bad_rank:
            raise ValueError("no data on this rank")
        return x

    def local(x, w, bad_rank):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.pure_callback(check, like, x, jax.lax.axis_index(AXIS), bad_rank)
        return SCATTER(x, w, deadline=DEADLINE)

    x, w = ones(M, K), ones(K, N)
    program = on_ranks(local, mesh_of(W), check_vma=False)
    expected = oracle.matmul_reduce_scatter(x, w)
    np.testing.assert_array_equal(program(x, w, np.full(W, -1)), expected)
    result = program(x, w, np.full(W, 2))
    for shard in result.addressable_shards:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"no data on this rank|wait for missing ranks \[2\]"
        ):
            np.asarray(shard.data)
    np.testing.assert_array_equal(program(x, w, np.full(W, -1)), expected)


def test_deadline_is_a_minute_and_can_be_set():
    for options, milliseconds in (({}, 60_000), ({"deadline": 0.25}, 250)):
        text = on_ranks(partial(GATHER, **options), mesh_of(W)).lower(ones(T, K), ones(K, N))
        assert f"deadline_ms = {milliseconds} : i64" in text.as_text()
