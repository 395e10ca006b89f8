"""Compares random calls of attention with NumPy.

    python tests/stress/sweep.py attention --seed 3 --seconds 200
    python tests/stress/sweep.py attention --tpu --seconds 600  # the kernels for TPUs, interpreted

The calls are those of test_values.py, over 1 to 9 or 16 ranks until the time is over: every
algorithm, mask and order of tokens; lengths, heads, dtype, sinks, latent rows, soft caps,
implementations, inside `shard_map` or on global arrays; half of the rings have many blocks of few
rows. Exits with 1 if a call differs or does not run, or if the interpreted kernels race.
"""

import argparse
import contextlib
import itertools
import pathlib
import sys
import time
from typing import Any

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from array_masks import ALL_KINDS as KINDS
from calls import Call, check
from inner import blocks_of, interpreted_tpu_kernels

from jax_cp_dispatch import Hamilton, Ring, Ulysses, Zigzag
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.masks import BlockCausal, Chunked, SlidingWindow

ALGORITHMS = ("balanced", "placed", "ring", "zigzag", "hamilton", "two levels", "direct")
ALGORITHMS += ("own cycles", "ulysses", "ulysses inside", "halo", "auto")
BY_PLAN = ("balanced", "placed", "auto")
MASKS = ("causal", "full", "window", "two-sided", "chunked", "block-causal", *KINDS)
NUM_RANKS = {False: (*range(1, 10), 16), True: (1, 2)}  # on CPU devices; with the kernels for TPUs
HEADS = {False: ((1, 1), (2, 1), (4, 2), (3, 3)), True: ((1, 1), (4, 2), (16, 1))}
FEATURES = {False: ((8, 4),), True: ((64, 64), (128, 128), (192, 128), (256, 256))}


def draw_algorithm(rng, name, num_ranks) -> Any:
    if name == "two levels":
        nodes = [u for u in range(1, num_ranks + 1) if num_ranks % u == 0]
        return Hamilton(nodes=int(rng.choice(nodes[1:] or nodes)))
    if name == "direct":
        return Hamilton(cycles="direct")
    if name == "own cycles":
        there = tuple(rng.permutation(num_ranks).tolist())
        return Hamilton(cycles=(there, there[::-1])[: min(2, num_ranks - 1)])
    if name == "ulysses inside":
        return Ulysses(outer=(Ring(), Zigzag(), Hamilton())[rng.integers(3)])
    return name


def draw_mask(rng, kind):
    if kind in ("causal", "full", *KINDS):
        return kind
    if kind != "two-sided":
        kinds = {"window": SlidingWindow, "chunked": Chunked, "block-causal": BlockCausal}
        return kinds[kind](int(rng.integers(1, 20)))
    left, right = (None if rng.integers(4) == 0 else int(rng.integers(0, 15)) for _ in range(2))
    return SlidingWindow(None if left is None else left + 1, right)


def draw_call(rng, name, kind, on_tpus):
    choose = lambda *values: values[rng.integers(len(values))]
    num_ranks = choose(*NUM_RANKS[on_tpus])
    N, K = choose(*HEADS[on_tpus])
    inner = 1
    if name == "ulysses inside":
        inner = choose(*[x for x in range(2, num_ranks + 1) if num_ranks % x == 0] or [1])
        num_ranks = num_ranks if inner > 1 else 4
        inner = max(inner, 2)
    if name.startswith("ulysses"):
        sharing = num_ranks if name == "ulysses" else inner
        N, K = N * sharing, K * choose(1, sharing)
    order = "placed" if name == "placed" else "packed"
    if name not in BY_PLAN and rng.integers(2):
        order = "zigzag"
    on_global_arrays = name == "auto" or bool(rng.integers(2))
    rows = choose(1, 2, 2 * max(1, num_ranks - 1), int(rng.integers(9, 30)))
    return Call(
        algorithm=draw_algorithm(rng, name, num_ranks),
        num_ranks=num_ranks,
        mask=draw_mask(rng, kind),
        order=order,
        rows=2 * rows if order != "packed" or on_tpus else rows,
        more=int(on_global_arrays and order == "packed" and rng.integers(num_ranks)),
        documents="segments" if kind in KINDS else choose("segments", "positions", "both", "none"),
        batch=choose(1, 2),
        heads=(N, K),
        features=choose(*FEATURES[on_tpus]),
        dtype="float32" if on_tpus else choose("float32", "float32", "bfloat16"),
        scale=choose(None, 0.2),
        logit_soft_cap=choose(None, 2.0),
        sink=choose(False, True),
        latents=choose(False, True),
        returns=choose((), ("lse",), ("max_logits",), ("lse", "max_logits")),
        implementation=choose(None, "in_process", "xla"),
        check_vma=None if on_global_arrays else choose(True, False),
        traced=name != "auto" and choose(False, True),
        inner=inner,
    )


def blocks(rng):
    """Returns a patch with default or small block sizes."""
    if rng.integers(2):
        return contextlib.nullcontext()
    return blocks_of(block_q=int(rng.choice([8, 16])), block_kv=int(rng.choice([8, 24])))


def sweep(on_tpus: bool, first_seed: int, seconds: float) -> int:
    begin, count, failures = time.monotonic(), 0, 0
    refused = {("halo", kind) for kind in KINDS}
    cases = [x for x in itertools.product(ALGORITHMS, MASKS) if x not in refused]
    order = np.random.default_rng(first_seed).permutation(len(cases))
    while time.monotonic() - begin < seconds:
        seed, (name, kind) = (first_seed, count), cases[order[count % len(cases)]]
        count, rng = count + 1, np.random.default_rng(seed)
        call = draw_call(rng, name, kind, on_tpus)
        try:
            with contextlib.nullcontext() if on_tpus else blocks(rng):
                check(call, rng)
        except Exception as problem:
            failures += 1
            print(
                f"{call}, seed {seed}: {type(problem).__name__}: {str(problem)[:400]}", flush=True
            )
        if count % 20 == 0:
            jax.clear_caches()
    print(f"{count} calls, {failures} failures, seed {first_seed}")
    return 1 if failures or not count else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["attention"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--tpu", action="store_true")
    options = parser.parse_args()
    start_cpu_devices(max(NUM_RANKS[options.tpu]))
    with interpreted_tpu_kernels() if options.tpu else contextlib.nullcontext():
        return sweep(options.tpu, options.seed, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
