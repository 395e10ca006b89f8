"""Measures local attention on one CPU device: its share of the matmul rate, and dense attention.

FLOPs count the matrix products of the query-key pairs in the ranges: two forward, five backward.
The matmul rates, in float32 and in the operands' dtype, are those of a `jnp.matmul` of 4096^3 in
the same rounds. Dense attention is `jax.nn.dot_product_attention` with a mask.
"""

from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch import local_attention
from jax_cp_dispatch.cost import attention_flops
from jax_cp_dispatch.tools.programs import gradients, random_operands

NUM_HEADS, HEAD_SIZE, PACKED_LENGTH = 8, 64, 1024
MATMUL_SIZE = 4096


def key_ranges(case, num_tokens):
    position = np.arange(num_tokens)
    if case == "full":
        return 0 * position, 0 * position + num_tokens
    length = PACKED_LENGTH if case == "packed" else num_tokens
    return position // length * length, position + 1


def passes(attend: Callable[..., Any], q, k, v, cotangent) -> dict[str, Callable[[], Any]]:
    """Returns runs of the forward pass, and of both passes in one program."""
    forward, both = jax.jit(attend), jax.jit(gradients(attend))
    return {
        "forward": lambda: forward(q, k, v),
        "forward_backward": lambda: both(q, k, v, cotangent),
    }


def measure(dtype, case, num_tokens, repeats):
    operands = [jnp.asarray(x) for x in random_operands(num_tokens, NUM_HEADS, HEAD_SIZE, dtype)]
    square = np.random.default_rng(0).normal(size=(MATMUL_SIZE, MATMUL_SIZE))
    squares = jnp.asarray(square, jnp.float32), jnp.asarray(square, dtype)
    runs: dict[str, Callable[[], Any]] = {
        f"matmul_{x.dtype}": lambda x=x: jnp.matmul(x, x) for x in squares
    }
    add = lambda name, attend: runs.update(
        {f"{name}_{what}": run for what, run in passes(attend, *operands).items()}
    )
    start, end = key_ranges(case, num_tokens)
    pairs = (end - start).sum()
    ranges = jnp.asarray(start[None], jnp.int32), jnp.asarray(end[None], jnp.int32)
    add("local", lambda q, k, v: local_attention(q, k, v, *ranges)[0])
    if case == "packed":  # the masked part does not change the time
        position = np.arange(num_tokens)
        mask = jnp.asarray((position >= start[:, None]) & (position < end[:, None]))
        dense = lambda *x: jax.nn.dot_product_attention(*x, mask=mask[None, None])
        add("dense", dense)
    seconds = common.interleaved(runs, repeats)

    flops = {
        backward: attention_flops(
            pairs, num_heads=NUM_HEADS, head_size=HEAD_SIZE, backward=backward
        )
        for backward in (False, True)
    }
    rows = []
    for what, count in (("forward", flops[False]), ("forward_backward", sum(flops.values()))):
        time = seconds[f"local_{what}"]
        row = {"dtype": dtype, "case": case, "pass": what, "seconds": round(time, 3)}
        row["GFLOP_per_s"] = round(count / time / 1e9, 1)
        for name in ("float32", dtype):
            rate = 2 * MATMUL_SIZE**3 / seconds[f"matmul_{name}"]
            row[f"{name}_matmul_GFLOP_per_s"] = round(rate / 1e9, 1)
            row[f"share_of_{name}_matmul"] = round(count / time / rate, 3)
        if case == "packed":
            slower = seconds[f"dense_{what}"]
            row |= {"dense_seconds": round(slower, 3), "times_faster": round(slower / time, 1)}
        rows.append(row)
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cases", nargs="+", default=["causal", "packed", "full"])
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = common.options(parser, tokens=2048, dtypes=["float32"])
    rows = []
    for dtype in arguments.dtypes:
        for case in arguments.cases:
            for row in measure(dtype, case, arguments.tokens, arguments.repeats):
                rows.append(row)
                print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    sizes = f"{arguments.tokens} tokens, {NUM_HEADS} heads of {HEAD_SIZE}"
    title = f"local attention on one device, {sizes}, packed documents of {PACKED_LENGTH} tokens"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
