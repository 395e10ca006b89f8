"""Measures local attention on one GPU against cuDNN's flash attention, in bfloat16.

FLOPs count the matrix products of the query-key pairs in the ranges: two forward, five backward.
Packed documents are compared with cuDNN's packed layout, which `jax.nn` does not offer: it computes
whole documents, and needs their number when the program is compiled.
"""

import functools
import sys

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as fused

from jax_cp_dispatch import local_attention
from jax_cp_dispatch.bench_command.attention import passes, random_operands
from jax_cp_dispatch.cost import attention_flops

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


class Measurements:
    """Measures each pass of cuDNN's attention and of ours, for each document length."""

    def __init__(self, num_tokens, repeats):
        operands = random_operands(num_tokens, HEADS, HEAD_SIZE, "bfloat16", kv_heads=KV_HEADS)
        self.operands = [jnp.asarray(x) for x in operands]
        self.num_tokens, self.repeats = num_tokens, repeats
        self.position = np.arange(num_tokens)
        self.of_cudnn: dict[tuple[int, str], float] = {}

    def cudnn(self, length):
        edges = np.append(np.arange(0, self.num_tokens, length), self.num_tokens).astype(np.int32)
        lengths, offsets = jnp.asarray(np.diff(edges)[None]), jnp.asarray(edges[None])

        def packed(q, k, v):
            return fused.dot_product_attention(
                q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets,
                kv_offsets=offsets, mask_type=fused.MaskType.PADDING_CAUSAL, scale=HEAD_SIZE**-0.5,
            )  # fmt: skip

        causal = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        for row in self._rows("cudnn", length, causal if length == self.num_tokens else packed):
            self.of_cudnn[length, row["pass"]] = row["ms"]
            yield row

    def local(self, length):
        """By ranges, which go to this package's kernels, also those of one document."""
        starts = jnp.asarray(self.position[None] // length * length, jnp.int32)
        ends = jnp.asarray(self.position[None] + 1, jnp.int32)
        attend = lambda q, k, v: local_attention(q, k, v, starts, ends, out_dtype=q.dtype)[0]
        yield from self._compared("local", length, attend)

    def dense(self, length):
        """One document that is known to be dense, which goes to cuDNN."""
        attend = lambda q, k, v: local_attention(q, k, v, mask="causal", out_dtype=q.dtype)[0]
        yield from self._compared("local, dense", length, attend)

    def _compared(self, implementation, length, attend):
        for row in self._rows(implementation, length, attend):
            cudnn = self.of_cudnn.get((length, row["pass"]))
            of_cudnn = None if cudnn is None else round(cudnn / row["ms"], 3)
            yield {**row, "rate_of_cudnn": of_cudnn}

    def _rows(self, implementation, length, attend):
        pairs = (self.position % length + 1).sum()
        count = functools.partial(attention_flops, pairs, num_heads=HEADS, head_size=HEAD_SIZE)
        for what, run in passes(attend, *self.operands).items():
            seconds = common.seconds_in_a_row(run, self.repeats)
            flops = count(backward=False) + (count(backward=True) if what != "forward" else 0)
            yield {
                "implementation": implementation,
                "tokens": self.num_tokens,
                "document": length,
                "pass": what,
                "ms": round(1e3 * seconds, 3),
                "TFLOP_per_s": round(1e-12 * flops / seconds, 1),
            }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--documents", type=int, nargs="+", default=[8192, 2048, 1000])
    arguments = parser.parse_args()
    device = jax.devices()[0]
    report = common.Report(arguments.output, f"local attention on one {device.device_kind}")
    measurements = Measurements(arguments.tokens, arguments.repeats)
    for length in arguments.documents:
        report.section(f"cuDNN, {length}", functools.partial(measurements.cudnn, length))
        report.section(f"documents of {length}", functools.partial(measurements.local, length))
    if arguments.tokens in arguments.documents:
        dense = functools.partial(measurements.dense, arguments.tokens)
        report.section("one dense document", dense)
    sys.exit(report.has_failed)


if __name__ == "__main__":
    main()
