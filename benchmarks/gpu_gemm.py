"""Measures GEMMs on one GPU: chunks against one GEMM, hidden copies, fp8 against bf16.

All ranks are on one GPU, so the results say nothing about NVLink. Expected: 8 chunks run at 0.95 or
more of the speed of one GEMM of 8192^3, and overlap takes less time than the same steps without.
"""

import dataclasses
import functools
import itertools
import sys

import common
import jax
import jax.numpy as jnp

from jax_cp_dispatch import gemm
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.communicator import Communicator
from jax_cp_dispatch._ranks.gpu import all_ranks_here
from jax_cp_dispatch.buffers import (
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    read_config,
)
from jax_cp_dispatch.comm_gemm.primitive import (
    GemmCall,
    GemmOperands,
    gpu_attributes,
    scratch_of,
)
from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.profiling import overlap_profile
from jax_cp_dispatch.scaling import ScalingMode, quantize

SIZE, CHUNKS = 8192, 8
OVERLAPS = (
    (CommOverlapType.AG, CommOverlapMethod.RING_EXCHANGE),
    (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE),
    (CommOverlapType.RS, CommOverlapMethod.PIPELINE),
)


def numbers(*shape):
    """Returns random numbers: a GPU multiplies ones with less power, and faster."""
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)


def run_all_ranks(call, x, w):
    """Runs a call with communication on the GPU, which holds all ranks: their outputs."""
    runtime.open_cublaslt()
    like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    of_rank = GemmOperands(lhs=like(x.shape[1:], x.dtype), rhs=like(w.shape[1:], w.dtype))
    shapes = call.result_shapes(of_rank)
    shapes = shapes._replace(workspace=scratch_of(call, of_rank, shapes))
    absent, none = like((1,), jnp.float32), jnp.zeros(1, jnp.float32)
    shapes = [absent if s is None else like((len(x), *s.shape), s.dtype) for s in shapes]
    given = [none if a is None else a for a in GemmOperands(lhs=x, rhs=w)]
    attributes = gpu_attributes(call, of_rank) | all_ranks_here()
    handler = jax.ffi.ffi_call(runtime.GEMM_TARGET, shapes)
    return handler(jnp.int32(0), jnp.int32(0), *given, **attributes)[0]


def all_ranks(size, num_ranks, method, kind):
    """Returns a program of all ranks, and its operands."""
    own = size // num_ranks
    rows, columns = (num_ranks, own, size), (num_ranks, size, own)
    gathers = kind == CommOverlapType.AG
    overlap = CommOverlapConfig(kind, method)
    if method != CommOverlapMethod.NONE:  # with the method's defaults, and without a buffer
        given = {"comm_type": kind, "method": method, "buffer_dtype": "float32"}
        overlap = read_config("benchmark", buffer_shape=(size, size), **given)
        overlap = dataclasses.replace(overlap, buffer_shape=None)
    call = GemmCall(
        op="benchmark",
        out_shape=(size, own) if gathers else (own, size),
        out_dtype="bfloat16",
        comm=Communicator(axis_names=("tp",), num_ranks=num_ranks),
        overlap=overlap,
        row_counts=(own,) * num_ranks,
    )
    x, w = (rows, columns) if gathers else (columns, rows)
    return jax.jit(functools.partial(run_all_ranks, call)), numbers(*x), numbers(*w)


def speed(name, seconds, flops, **more):
    return {"what": name, "ms": round(1e3 * seconds, 3),
            "tflop_per_s": round(1e-12 * flops / seconds, 1), **more}  # fmt: skip


def chunked(size, implementation, repeats):
    """Measures one GEMM by XLA and by this package, and the latter in chunks of rows and columns.

    Chunks are separate arrays, because XLA would copy slices for a custom call.
    """
    step = size // CHUNKS
    x, w = numbers(size, size), numbers(size, size)
    rows = [numbers(step, size) for _ in range(CHUNKS)]
    columns = [numbers(size, step) for _ in range(CHUNKS)]
    product = functools.partial(gemm, implementation=implementation)
    by_xla = functools.partial(gemm, implementation="xla")
    pieces = {
        "one product": (jax.jit(product), x, w),
        "xla": (jax.jit(by_xla), x, w),
        "chunks of rows": (jax.jit(lambda xs, w: [product(x, w) for x in xs]), rows, w),
        "chunks of columns": (jax.jit(lambda x, ws: [product(x, w) for w in ws]), x, columns),
    }
    one = None
    for name, (fn, *operands) in pieces.items():
        seconds = common.seconds_in_a_row(functools.partial(fn, *operands), repeats)
        one = one or seconds
        yield speed(name, seconds, 2.0 * size**3, of_one_product=round(one / seconds, 3))


def narrow(size, implementation, repeats):
    """Measures the GEMM with 8-bit operands, with and without float32 sums per block."""
    mode = ScalingMode.CURRENT_TENSOR_SCALING
    x, w = (quantize(numbers(size, size), mode) for _ in range(2))
    for split in (False, True):
        product = jax.jit(
            functools.partial(
                gemm,
                contracting_dims=((1,), (1,)),
                scaling_mode=mode,
                use_split_accumulator=split,
                preferred_element_type=jnp.bfloat16,
                implementation=implementation,
            )
        )
        run = lambda fn=product: fn(
            x.data, w.data, lhs_scale_inv=x.scale_inv, rhs_scale_inv=w.scale_inv
        )
        name = "fp8, split accumulator" if split else "fp8"
        yield speed(name, common.seconds_in_a_row(run, repeats), 2.0 * size**3)


def hidden(size, num_ranks, method, kind, repeats):
    """Measures an overlapped GEMM against the same schedule without overlap.

    One GPU computes the chunks of all ranks and copies for all of them. Copies that are exposed on
    its streams may be hidden by another rank's GEMM, so only the total time is compared.
    """
    overlapped, x, w = all_ranks(size, num_ranks, method, kind)
    one_by_one, *_ = all_ranks(size, num_ranks, CommOverlapMethod.NONE, kind)
    seconds, without = (
        common.seconds_in_a_row(functools.partial(run, x, w), repeats)
        for run in (overlapped, one_by_one)
    )
    profile = overlap_profile(overlapped, x, w)
    raise_gpu_errors()
    yield {
        "what": f"{kind.name}, {method.name}",
        "num_ranks": num_ranks,
        "ms": round(1e3 * seconds, 3),
        "without_overlap_ms": round(1e3 * without, 3),
        "of_without_overlap": round(seconds / without, 3),
        "communication_ms": round(1e3 * profile.communication, 3),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--implementation", default="cuda_peer", help="cuda_peer, or xla")
    parser.add_argument("--size", type=int, default=SIZE, help="M, K and N")
    arguments = parser.parse_args()
    chosen, repeats, size = arguments.implementation, arguments.repeats, arguments.size
    device = jax.devices()[0]
    report = common.Report(arguments.output, f"GEMMs of {size} on one {device.device_kind}")
    report.section("chunks", lambda: chunked(size, chosen, repeats))
    kinds = itertools.product((2, 4), OVERLAPS if chosen != "xla" else ())
    for num_ranks, (kind, method) in kinds:
        name = f"{kind.name}, {method.name}, {num_ranks} ranks"
        report.section(name, functools.partial(hidden, size, num_ranks, method, kind, repeats))
    report.section("fp8", lambda: narrow(size, chosen, repeats))
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
