"""Compares many random plans with the brute-force oracle: the long form of the metadata tests.

`python tests/stress/sweep_plans.py --plans 100000` covers zero-length shards, ranks that send or
receive nothing, all to one rank, fewer ranks than replicas, documents across ranks, and padding
anywhere.
"""

import argparse
import collections
import pathlib
import sys
import time

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import metadata_oracle as oracle
import numpy as np

from jax_cp_dispatch import compute_metadata
from jax_cp_dispatch.metadata import compute_attn_layout_seqlens, compute_metadata_kv

# (W, S, C); all plans of one shape share a program.
SHAPES = [(1, 3, None), (3, 4, None), (8, 5, None), (4, 3, 3), (2, 1, 5), (2, 4, 8), (6, 4, 2)]
KINDS = ("random", "all to one", "all of length zero", "all padding")


def check_shards(rng, world_size, num_shards, num_replicas, kind):
    seq_len, dispatch = oracle.random_shards(rng, world_size, num_shards, num_replicas)
    if kind == "all to one":
        dispatch[dispatch >= 0] = rng.integers(world_size)
    elif kind == "all of length zero":
        seq_len[:] = 0
    elif kind == "all padding":
        seq_len[:], dispatch[:] = 0, -1
    bound = dispatch.size
    plans = compute_metadata(seq_len, dispatch, max_recv_seqs=bound)
    for plan, fields in zip(plans, oracle.plan(seq_len, dispatch, bound), strict=True):
        oracle.assert_fields(plan, fields)
    if dispatch.ndim == 2:
        arguments = seq_len, seq_len + 1, dispatch
        layout = compute_attn_layout_seqlens(*arguments, max_recv_seqs=bound)
        oracle.assert_fields(layout, oracle.attn_layout(*arguments, bound))


def check_keys(rng, world_size, num_shards, num_replicas):
    inputs = oracle.spanning_documents(rng, world_size, num_shards, num_replicas)
    bound = world_size * num_shards * num_replicas
    num_seqs = oracle.last_used(inputs[5] > 0)
    arguments = *inputs[:6], num_seqs, inputs[6]
    plans = compute_metadata_kv(*arguments, max_recv_seqs=bound)
    for plan, fields in zip(plans, oracle.plan_kv(*inputs, bound), strict=True):
        oracle.assert_fields(plan, fields)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    begin = last_line = time.monotonic()
    for seed in range(options.seed, options.seed + options.plans):
        rng = np.random.default_rng(seed)
        world_size, num_shards, num_replicas = SHAPES[seed % len(SHAPES)]
        kind = KINDS[0] if rng.random() < 0.9 else str(rng.choice(KINDS[1:]))
        try:
            if num_replicas is not None and rng.random() < 0.5:
                kind = "keys of documents across ranks"
                check_keys(rng, world_size, num_shards, num_replicas)
            else:
                check_shards(rng, world_size, num_shards, num_replicas, kind)
        except Exception:
            print(f"seed {seed}: {kind}, W, S, C = {SHAPES[seed % len(SHAPES)]}", flush=True)
            raise
        counts[kind] += 1
        if time.monotonic() - last_line > 30:
            last_line = time.monotonic()
            print(f"{last_line - begin:6.0f} s  {counts.total()} plans", flush=True)
    print(
        f"{counts.total()} plans equal the oracle, {dict(counts)}, {time.monotonic() - begin:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
