"""Local attention on one GPU: beside cuDNN's flash attention as `jax.nn` calls it, in bfloat16.

Counted are the products of the query-key pairs that the ranges name: two forward, five backward.
Packed documents have nothing to stand beside but cuDNN's rate on the causal case.
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.attention import local_attention
from jax_cp_dispatch.cost import attention_flops

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


def passes(attend, q, k, v, dout):
    """The forward pass, and both passes in one program."""

    def with_gradients(q, k, v):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout.astype(out.dtype))

    forward, both = jax.jit(attend), jax.jit(with_gradients)
    return {"forward": lambda: forward(q, k, v), "forward_backward": lambda: both(q, k, v)}


def measure(num_tokens, lengths, repeats):
    """One row for each pass and each case; `lengths` of documents, that of all tokens first."""
    rng = np.random.default_rng(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    operands = [
        jnp.asarray(rng.normal(size=(1, num_tokens, n, HEAD_SIZE)), jnp.bfloat16) for n in sizes
    ]
    library = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
    )
    runs = {("cudnn", num_tokens, what): run for what, run in passes(library, *operands).items()}
    position = np.arange(num_tokens)
    ends = jnp.asarray(position[None] + 1, jnp.int32)
    for length in lengths:
        starts = jnp.asarray(position[None] // length * length, jnp.int32)
        attend = lambda q, k, v, starts=starts: local_attention(q, k, v, starts, ends)[0]
        runs |= {("local", length, what): run for what, run in passes(attend, *operands).items()}
    seconds = common.interleaved({str(name): run for name, run in runs.items()}, repeats)

    def rate(name):
        _, length, what = name
        pairs = (position % length + 1).sum()
        count = functools.partial(attention_flops, pairs, num_heads=HEADS, head_size=HEAD_SIZE)
        flops = count(backward=False) + (count(backward=True) if what != "forward" else 0)
        return flops / seconds[str(name)]

    for name in runs:
        implementation, length, what = name
        of_cudnn = rate(name) / rate(("cudnn", num_tokens, what))
        yield {
            "implementation": implementation,
            "tokens": num_tokens,
            "document": length,
            "pass": what,
            "ms": round(1e3 * seconds[str(name)], 3),
            "TFLOP_per_s": round(rate(name) / 1e12, 1),
            "rate_of_causal_cudnn": round(of_cudnn, 3),
        }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, nargs="+", default=[8192, 2048, 1000])
    arguments = parser.parse_args()
    rows = []
    for row in measure(arguments.tokens, arguments.documents, arguments.repeats):
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    device = jax.devices()[0]
    common.write(arguments.output, f"local attention on one {device.device_kind}", rows)


if __name__ == "__main__":
    main()
