"""Profiles an exchange of keys and values beside a matrix product, on one GPU with all ranks.

Says for each program how long the kernels of the exchange and those of the product run, on which
streams, and how much of the exchange lies beside the product; and, without the profiler, the time
of the program beside that of its parts alone. Kernels that XLA records into command buffers have
no streams of their own: start with XLA_FLAGS=--xla_gpu_enable_command_buffer=
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import common
import device_trace
import jax
import jax.numpy as jnp
import numpy as np
from device_trace import Kernel

import jax_cp_dispatch as cpd
from jax_cp_dispatch.gpu import raise_gpu_errors

RANKS, ROW = 8, 1024  # elements of a row of keys, and of a row of values
CALLS = 3  # of each program, in the profile
OF_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.IGNORECASE)


class Programs:
    """Exchanges beside a product that does not need them, and each alone."""

    def __init__(self, size: int, num_bytes: int, implementation: str):
        num_tokens = num_bytes // (2 * 2 * ROW * RANKS) // RANKS * RANKS  # of each rank
        lengths = np.full((RANKS, RANKS), num_tokens // RANKS, np.int32)
        ranks = np.tile(np.arange(RANKS, dtype=np.int32), (RANKS, 1))
        self.metadata, _ = cpd.compute_metadata(lengths, ranks)
        self.options: dict[str, Any] = {
            "capacity": num_tokens, "axis_name": "cp", "implementation": implementation,
        }  # fmt: skip
        draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        self.kv = [draw(i, RANKS * num_tokens, ROW) for i in range(2)]
        self.x, self.w = draw(2, size, size), draw(3, size, size)

    def parts(self) -> dict[str, Callable[[], Any]]:
        send, product = jax.jit(self._dispatch), jax.jit(jnp.matmul)
        return {
            "exchange": lambda: send(self.kv, self.metadata),
            "product": lambda: product(self.x, self.w),
        }

    def together(self) -> dict[str, Callable[[], Any]]:
        """Programs in which XLA may put the product beside the exchange; the last one has to."""
        constant = lambda kv, x, w: self._beside(kv, self.metadata, x, w)
        operands = self.kv, self.metadata, self.x, self.w
        programs = {
            "dispatch": functools.partial(jax.jit(self._beside), *operands),
            "dispatch of one array, by a constant plan": functools.partial(
                jax.jit(constant), self.kv[:1], self.x, self.w
            ),
        }
        for num_comm_sm in (None, 64, 16):
            pair = jax.jit(functools.partial(self._pair, num_comm_sm))
            name = f"dispatch_start, exchange_done, num_comm_sm={num_comm_sm}"
            programs[name] = functools.partial(pair, *operands)
        return programs

    def check(self, result: tuple[list[jax.Array], jax.Array]) -> None:
        """Raises RuntimeError unless each rank has its part of each rank's rows, in their order."""
        for got, x in zip(result[0], self.kv, strict=False):
            parts = x.reshape(RANKS, RANKS, -1, ROW)
            if not (got.reshape(parts.shape) == parts.swapaxes(0, 1)).all():
                raise RuntimeError("an exchange has delivered other rows than were sent")

    def _dispatch(self, kv, metadata):
        return cpd.dispatch(kv, metadata, **self.options)

    def _beside(self, kv, metadata, x, w):
        return self._dispatch(kv, metadata), x @ w

    def _pair(self, num_comm_sm, kv, metadata, x, w):
        """Of rows that the program computes: those of its arguments would have to be copied."""
        kv = [-y for y in kv]
        exchange, x = cpd.dispatch_start(
            kv, metadata, beside=x, num_comm_sm=num_comm_sm, **self.options
        )
        kv, product = cpd.exchange_done(exchange, beside=x @ w)
        return [-y for y in kv], product


def by_name(kernels: list[Kernel]) -> dict[str, float]:
    """Returns the µs of a call that each kernel runs, by its shortened name."""
    names = dict.fromkeys(x.name for x in kernels)
    return {
        name[:80]: round(1e-3 * device_trace.busy(x for x in kernels if x.name == name) / CALLS, 1)
        for name in names
    }


def overlap_row(kernels: list[Kernel]) -> dict[str, Any]:
    """Describes the kernels of one program."""
    exchange = [x for x in kernels if device_trace.OWN_KERNEL.search(x.name)]
    rest = [x for x in kernels if not device_trace.OWN_KERNEL.search(x.name)]
    product = [x for x in rest if OF_PRODUCT.search(x.name)]
    others = [x for x in rest if not OF_PRODUCT.search(x.name)]
    if not exchange or not product:
        raise RuntimeError(f"no kernels of both in the profile, but {by_name(kernels)}")
    us = lambda ns: round(1e-3 * ns / CALLS, 1)
    streams = lambda kernels: sorted({x.stream for x in kernels})
    beside = device_trace.overlap(exchange, product)
    return {
        "exchange_us": us(device_trace.busy(exchange)),
        "product_us": us(device_trace.busy(product)),
        "beside_us": us(beside),
        "share_beside": round(beside / device_trace.busy(exchange), 3),
        "exchange_streams": streams(exchange),
        "product_streams": streams(product),
        "exchange_kernels": by_name(exchange),
        "product_kernels": by_name(product),
        "other_kernels": by_name(others),
    }


def times(programs: Programs, repeats: int) -> Iterator[dict[str, Any]]:
    together = programs.together()
    for run in together.values():
        programs.check(run())
    runs = programs.parts() | together
    seconds = common.interleaved(runs, repeats, longest=None, calls=10)
    raise_gpu_errors()
    for name, value in seconds.items():
        yield {"program": name, "ms": round(1e3 * value, 3)}


def profile(programs: Programs) -> Iterator[dict[str, Any]]:
    for name, run in programs.together().items():
        jax.block_until_ready(run())  # compiles
        trace = device_trace.traced(
            lambda run=run: [jax.block_until_ready(run()) for _ in range(CALLS)]
        )
        yield {"program": name, **overlap_row(trace.kernels)}


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--implementation", default="cuda_peer", help="cuda_peer, or xla")
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the product")
    parser.add_argument("--bytes", type=int, default=512 << 20, help="keys and values of all ranks")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    report = common.Report(arguments.output, f"an exchange beside a product, {device.device_kind}")
    programs = Programs(arguments.size, arguments.bytes, arguments.implementation)
    report.section("times", functools.partial(times, programs, arguments.repeats))
    report.section("profile", functools.partial(profile, programs))
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
