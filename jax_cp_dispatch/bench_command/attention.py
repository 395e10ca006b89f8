"""Attention, forward and backward: this package's algorithms against dense sharded attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.bench_command.ranks import AXIS, Ranks, Row
from jax_cp_dispatch.cost import attention_flops, count_pairs
from jax_cp_dispatch.planning import place_tokens

DENSE = "jax.nn, sharded by XLA"
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # sums in another order; relative to the largest
_ROWS = P(None, AXIS)
_MATMUL = {"cpu": 2048, "gpu": 8192}

MEDIAN, SIGMA = 2048, 1.2  # tokens of a document, log-normal
CAUSAL = ("ring", "zigzag", "balanced")
PACKED = ("zigzag", "balanced", "placed")


def drawn_lengths(num_tokens: int, *, seed: int, median: int | float = MEDIAN) -> list[int]:
    """Returns log-normal lengths of documents that fill `num_tokens`; the last one is cut."""
    normal = np.random.default_rng(0).standard_normal(100_000)
    lengths = np.ceil(median * np.exp(SIGMA * normal)).astype(int)
    count = 1
    while (drawn := np.random.default_rng(seed).choice(lengths, count)).sum() < num_tokens:
        count *= 2  # the first ones stay the same
    ends = np.minimum(np.cumsum(drawn), num_tokens)
    counts = np.diff(ends, prepend=0)
    return counts[counts > 0].tolist()


def make_segment_ids(lengths: list[int]) -> np.ndarray:
    """Returns segment ids [1, T] of documents that follow each other."""
    return np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)[None]


def square_product(size: int, dtype: str) -> Callable[[], jax.Array]:
    """Returns a run of a square matrix product, in float32."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    return lambda: product(x)


def peak(ranks: Ranks, dtype: str) -> float:
    """Returns the FLOP/s of square matrix products: of the host, or of all GPUs together."""
    n = _MATMUL["gpu" if ranks.is_gpu else "cpu"]
    # Virtual devices share the cores, and one product uses them all.
    seconds = ranks.measure({"product": square_product(n, dtype)})["product"]
    return 2 * n**3 / seconds * (ranks.count if ranks.is_gpu else 1)


def measure(ranks: Ranks, tokens: int, heads: int, head_size: int, dtype: str) -> Iterator[Row]:
    """Measures one causal document, and packed documents."""
    flops_per_second = peak(ranks, dtype)
    packed = drawn_lengths(tokens, seed=0, median=tokens / 16)
    for case, lengths, algorithms in (("causal", [tokens], CAUSAL), ("packed", packed, PACKED)):
        operands = random_operands(tokens, heads, head_size, dtype)
        runs = {a: _Gradients(ranks, _ours(ranks, a, lengths), operands) for a in algorithms}
        runs[DENSE] = _Gradients(ranks, _dense(lengths), operands)
        # The tokens of placed attention are in another order.
        compared = [name for name in reversed(runs) if name != "placed"]
        for name in compared[1:]:
            for a, b in zip(runs[name](), runs[compared[0]](), strict=True):
                ranks.check_equal(f"{name}, {case}", a, b, TOLERANCE[dtype])
        seconds = ranks.measure(runs)
        sizes = {"num_heads": heads, "head_size": head_size}
        pairs = float(sum(count_pairs(0, length) for length in lengths))
        flops = sum(attention_flops(pairs, **sizes, backward=x) for x in (False, True))
        for name, value in seconds.items():
            yield Row(
                f"{name}, {case}",
                f"{tokens} tokens, {dtype}, {ranks.name}",
                value,
                flops / value,
                "FLOP/s",
                of_limit=flops / value / flops_per_second,
                limit="a matrix product",
                speedup=seconds[DENSE] / value,
                alternative="dense attention sharded by XLA",
            )


def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of q, k, v and the cotangent of the output: the gradients."""

    def of(q, k, v, cotangent):
        out, pull_back = jax.vjp(attend, q, k, v)
        return pull_back(cotangent.astype(out.dtype))

    return of


def random_operands(
    tokens: int, heads: int, head_size: int, dtype: str, *, kv_heads: int | None = None
) -> list[np.ndarray]:
    """Draws q, k, v and the cotangent of the output; k and v have `kv_heads`, or as many heads."""
    rng = np.random.default_rng(tokens)
    kv_heads = kv_heads or heads
    return [
        rng.standard_normal((1, tokens, n, head_size), np.float32).astype(jnp.dtype(dtype))
        for n in (heads, kv_heads, kv_heads, heads)
    ]


class _Gradients:
    """The compiled gradients of one algorithm with its operands; a call computes them."""

    def __init__(self, ranks: Ranks, attend: Callable[..., Any], operands: list[np.ndarray]):
        self._operands = [ranks.put(x, _ROWS) for x in operands]
        program = jax.jit(gradients(attend), out_shardings=NamedSharding(ranks.mesh, _ROWS))
        self._program = program.lower(*self._operands).compile()

    def __call__(self) -> Any:
        return self._program(*self._operands)


def _ours(ranks: Ranks, algorithm: str, lengths: list[int]) -> Callable[..., Any]:
    options: dict[str, Any] = {
        "segment_ids": make_segment_ids(lengths) if len(lengths) > 1 else None
    }
    if algorithm == "placed":
        options = {"documents": place_tokens(lengths, world_size=ranks.count).documents}
    return partial(
        context_parallel_attention,
        mesh=ranks.mesh,
        axis_name=AXIS,
        algorithm=algorithm,
        **options,
    )


def _dense(lengths: list[int]) -> Callable[..., Any]:
    if len(lengths) == 1:
        return partial(jax.nn.dot_product_attention, is_causal=True)
    ids = make_segment_ids(lengths)[0]

    def attend(q, k, v):
        mask = jnp.asarray(ids)
        same = (mask[:, None] == mask)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)

    return attend
