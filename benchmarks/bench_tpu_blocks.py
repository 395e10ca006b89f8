"""Counts what the TPU kernels of local attention compute, beside JAX's splash attention. No times.

A rank of 64K tokens: packed documents, and 8 ranks after a placement. The kernels walk over the
blocks that a range touches; splash attention skips blocks by the mask that is known when the
program is compiled, and masks documents in the others. It takes no ranges: placed tokens are none
of its masks.
"""

from collections.abc import Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
    splash_attention_mask as splash_masks,
    splash_attention_mask_info as splash_info,
)

import jax_cp_dispatch as cp
from jax_cp_dispatch.attention.local.options import pass_options
from jax_cp_dispatch.attention.local.ranges import RowRanges, tile_ranges, to_rows
from jax_cp_dispatch.attention.local.tpu import FIRST, LANES, LAST, find_visits, tile

RANKS = 8


def packed(lengths: list[int], num_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Causal ranges of documents, of the first tokens, and the number of keys."""
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)[:num_tokens]
    return begin, np.arange(1, num_tokens + 1), num_tokens


def masks(num_tokens: int) -> Iterator[tuple[str, list[Any]]]:
    """Yields names and the ranges of each rank."""
    number = RANKS * num_tokens * 6 // 7 // 2048  # so that their sum stays below all tokens
    lengths = np.ceil(np.random.default_rng(0).exponential(2048, number)).astype(int).tolist()
    yield "documents of 2048", [packed([2048] * (num_tokens // 2048), num_tokens)]
    yield "exponential lengths", [packed(lengths, num_tokens)]
    plan = cp.place_tokens(lengths, world_size=RANKS, columns=RANKS * num_tokens).plan
    ranks = [(*plan.local_ranges(rank), plan.kv_capacity) for rank in range(RANKS)]
    yield "placed", [(s[:num_tokens], e[:num_tokens], keys) for s, e, keys in ranks]


@jax.jit
def walks(start, end, k):
    """The walks of the kernels, for one head of one number."""
    q = jnp.zeros((1, start.shape[1], 1, 1))
    options = pass_options(q, k)
    ranges = tile_ranges(options, RowRanges(start, end), q.shape, 1, k.shape[1])
    q = to_rows(q, 1, options.block_q)
    k = to_rows(k, 1, options.block_kv)
    return find_visits(options, tile(options, q, ranges, (k, k)))


def ours(ranks: list[Any]) -> tuple[int, dict[str, int], int]:
    """Returns blocks computed, steps of the passes, and pairs of the mask."""
    computed, steps, pairs = 0, {"forward_and_dq": 0, "dk_and_dv": 0}, 0
    for start, end, num_keys in ranks:
        start, end = (jnp.asarray(x, jnp.int32)[None] for x in (start, end))
        tables = walks(start, end, jnp.zeros((1, num_keys, 1, 1)))
        for name, table in zip(steps, tables, strict=True):
            steps[name] += int(np.maximum(table[0, LAST] - table[0, FIRST], 1).sum())
        first, last = tables.of_queries[0, FIRST], tables.of_queries[0, LAST]
        computed += int(np.maximum(last - first, 0).sum())
        pairs += int(np.maximum(end - start, 0).sum(dtype=np.int64))
    return computed, steps, pairs


def of_splash(num_tokens: int) -> int:
    """Returns the blocks that it computes for causal documents, of its default size."""
    size = splash.BlockSizes.get_default().block_q
    mask = splash_masks.MultiHeadMask([splash_masks.CausalMask((num_tokens, num_tokens))])
    info, _ = splash_info.process_mask(mask, (size, size), head_shards=1, q_seq_shards=1)
    return size * size * int(np.count_nonzero(np.asarray(info.block_mask)))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a rank")
    arguments = common.options(parser, tokens=8192)
    rows = []
    for name, ranks in masks(arguments.tokens):
        computed, steps, pairs = ours(ranks)
        row = {"mask": name, "tokens_per_rank": arguments.tokens, "ranks": len(ranks)}
        row |= {"blocks_computed": computed, "pairs_of_mask": pairs}
        row["pairs"] = round(computed * LANES**2 / pairs, 3)
        row |= {name: round(number / computed, 3) for name, number in steps.items()}
        if name != "placed":
            row["splash_pairs"] = round(of_splash(arguments.tokens) / pairs, 3)
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    common.write(arguments.output, "blocks that the TPU kernels compute, counted", rows)


if __name__ == "__main__":
    main()
