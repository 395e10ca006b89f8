"""Calls that `gemm` rejects when it is traced, and buffers that do not match a call."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comm_gemm_refusals import ENGINE, PLAIN, SCATTER, K, M, N, T, W, create, ones, refused
from comm_overlap_cases import no_comm_overlap_buffers  # noqa: F401
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import all_gather_matmul, gemm
from jax_cp_dispatch.buffers import destroy_comm_overlap_buffer

pytestmark = pytest.mark.usefixtures("unchecked_types")

BF16 = "bfloat16"


# ---- Buffers that do not match.


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
def test_buffers_that_do_not_match(kind, method, options, message):
    """In `all_gather_matmul` or `matmul_reduce_scatter`, and in `gemm` where it applies."""
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
        match=rf"method is 'ring' but buffer {buffer} is for CommOverlapMethod\.PIPELINE\. Omit m",
    )


# ---- `gemm`.


@pytest.mark.parametrize("kind, method", [("AG", "RING_EXCHANGE"), ("RS", "RING_EXCHANGE"),
                                          ("RS", "PIPELINE")])  # fmt: skip
def test_only_bulk_moves_another_array(kind, method):
    buffer = create(kind, method)
    refused(
        lambda x, w, aux: ENGINE(x, w, comm_overlap=buffer, aux_in=aux),
        *(ones(M, K), ones(K, N), ones(M, N)),
        match=rf"gemm: got an aux_in with buffer {buffer} of CommOverlapMethod\.{method}; an array "
        r"that moves during an independent GEMM needs CommOverlapMethod\.BULK, and vice versa"
        r"\. Omit it, or create that buffer",
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
    refused(
        call, *operands, ones(M - 1, N), match=r"7 rows of aux_in are not a multiple of the 4 ranks"
    )
    refused(
        call, *operands, ones(M, N, dtype=BF16), match=r"is float32 but the call moves bfloat16"
    )
    refused(
        call, *operands, ones(M, 2 * N), match=r"has shape \(8, 5\) but the call needs \(8, 10\)"
    )


def test_aux_options_need_a_buffer_that_communicates():
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
    refused(
        lambda x, w: ENGINE(x, w),
        *(ones(M, K), ones(K, N)),
        match=r"got axis_name without a buffer that moves something",
    )


def test_auxiliary_results_of_a_reduce_scatter():
    buffer = create("RS", "PIPELINE")
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=buffer, return_aux=True),
        *(ones(M, K), ones(K, N)),
        match=r"got return_aux with CommOverlapType\.RS; only an all-gather has one",
    )


def test_atomic_ring_without_its_pair():
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
            r"apType\.RS with tp_size=4 consumes chunks in that order\. Pass its id: "
            "paired_comm_overlap",
        )
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=ring, paired_comm_overlap=77),
        *(ones(T, K), ones(K, N)),
        match=r"gemm: there is no buffer 77\.",
    )


def test_ids_without_a_buffer():
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


def test_gemm_where_ranks_are_missing():
    buffer = create("AG", "RING_EXCHANGE")
    x, w = jnp.ones((T, K)), jnp.ones((K, N))
    with pytest.raises(
        ValueError, match=r"got comm_overlap without axis_name; it needs the ranks'"
    ):
        PLAIN(x, w, comm_overlap=buffer)
    with pytest.raises(ValueError, match=r"no mesh with axis 'cp' was found"):
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
         r"contracting_dims of lhs are \(1,\) for shape \(4, 3, 2\); they need to be adjacent, "
         r"first or last, in their order\. Transpose it"),
        ((3, 4, 2), (3, 2, 5), {"contracting_dims": ((0, 2), (0, 1))}, ValueError, "dims of lhs a"),
        ((4, 3), (3, 5), {"contracting_dims": ((1,), (2,))}, ValueError, r"dims of rhs are \(2,\)"),
        ((4, 3), (3, 5), {"contracting_dims": ((), ())}, ValueError, r"dims is \(\(\), \(\)\); i"),
        ((4, 3), (3, 5), {"contracting_dims": ((1, 1), (0,))}, ValueError, r"dims of lhs are \(1,"),
        ((4, 2, 3), (3, 2, 5), {"contracting_dims": ((1, 2), (1, 0))}, ValueError,
         r"contracting_dims of rhs are \(1, 0\)"),
        ((4, 3), (3, 5), {"bias": np.ones(4, np.float32)}, ValueError, r"bias has shape \(4,\); it "
         "needs 5 elements, one per column"),
        ((4, 3), (3, 5), {"contracting_dims": 3}, ValueError, "contracting_dims is 3; it needs"),
        ((4, 3), (3, 5), {"contracting_dims": (("a",), 0)}, ValueError, r"dims is \(\('a',\), 0\)"),
        ((), (3, 5), {}, ValueError, r"contracting_dims of lhs are \(-1,\) for shape \(\)"),
        ((4, 3), (3, 5), {"implementation": "cuda"}, ValueError, "implementation is 'cuda'; it"),
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
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match="float64 can only be used with"),
    ):
        PLAIN(jnp.ones((4, 3), np.float64), jnp.ones((3, 5), np.float32))
    for flag in ("fuse_bias", "fuse_gelu", "grad", "return_aux", "use_split_accumulator"):
        with pytest.raises(TypeError, match=f"gemm: {flag} is 1; it needs to be True or False"):
            PLAIN(ones(4, 3), ones(3, 5), **{flag: 1})


def test_shapes_of_communicating_products():
    gather, scatter = create("AG", "RING_EXCHANGE"), create("RS", "RING_EXCHANGE")
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=gather, contracting_dims=((0,), (0,))),
        *(ones(K, T), ones(K, N)),
        match=r"lhs contracts its first dimensions; its chunks are rows, .* Transpose it",
    )
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=gather),
        *(ones(0, K), ones(K, N)),
        match=r"gemm: got arrays of shapes \(0, 3\), \(3, 5\) with a buffer; each needs at least",
    )
    refused(
        lambda x, w: ENGINE(x, w, comm_overlap=scatter),
        *(ones(M - 2, K), ones(K, N)),
        match=r"6 rows of lhs are not a multiple of the 4 ranks\. Pad them, or use matmul_reduce_",
    )


def test_derivatives_of_communicating_products():
    """There is none in either mode; the message names the functions that have one."""
    buffer = create("AG", "RING_EXCHANGE")
    call = partial(ENGINE, comm_overlap=buffer)
    match = r"gemm: with communication, no derivative is defined\. Use all_gather_matmul or m"
    x, w = ones(T, K), ones(K, N)
    for derivative in (
        lambda x, w: jax.jvp(call, (x, w), (x, w)),
        lambda x, w: jax.grad(lambda x: jnp.sum(call(x, w)))(x),
    ):
        refused(derivative, x, w, error=NotImplementedError, match=match)
