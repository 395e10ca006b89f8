"""Compares rings, Hamilton and balanced attention with dense attention in many more programs.

    python tests/stress/sweep_attention.py --programs 60 --seed 1

Runs every number of ranks (1 to 9 and 16) with every algorithm, mask and order of tokens (packed or
zigzag), in random order.
Draws documents, lengths, heads, dtype, implementation and other options for each; half of the
programs have many blocks of few rows. Prints the worst errors, relative to the largest entry. Exits
with 1 if an error exceeds the tolerance or a program does not run.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any
from unittest import mock

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import numpy as np
from array_masks import KINDS, random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from jax.sharding import PartitionSpec as P
from mask_oracle import batch_visible
from on_mesh import AXIS, mesh_of
from sequences import NAMES, TOLERANCE, Case, dense, draw, relative_errors, run

from jax_cp_dispatch.attention.rotating import sequence
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.masks import BlockCausal, Chunked, SlidingWindow

NUM_RANKS = (*range(1, 10), 16)
SCHEDULES = ("ring", "zigzag", "hamilton", "two levels", "direct", "own cycles", "balanced")
MASKS = ("causal", "full", "window", "two-sided", "chunked", "block-causal", *KINDS)


def schedule(rng, name, num_ranks) -> dict[str, Any]:
    """Algorithm, nodes and cycles."""
    if name in ("ring", "zigzag", "balanced"):
        return {"algorithm": name}
    options: dict[str, Any] = {"algorithm": "hamilton"}
    if name == "two levels":
        nodes = [u for u in range(1, num_ranks + 1) if num_ranks % u == 0]
        return options | {"nodes": int(rng.choice(nodes[1:] or nodes))}
    if name == "direct":
        return options | {"cycles": "direct"}
    if name == "own cycles":
        there = tuple(rng.permutation(num_ranks).tolist())
        both = (there, there[::-1])
        return options | {"cycles": both[: min(2, num_ranks - 1)]}
    return options


def draw_case(rng, num_ranks, name, zigzag, mask):
    choose = lambda *values: values[rng.integers(len(values))]
    num_chunks = max(1, num_ranks - 1)
    few, many = int(rng.integers(2, num_chunks + 2)), int(rng.integers(9, 30))
    return Case(
        num_ranks=num_ranks,
        rows=choose(1, few, 2 * num_chunks, many),
        **schedule(rng, name, num_ranks),
        documents=choose("none", "segments", "segments", "positions", "both"),
        mask=mask if mask in KINDS else draw_mask(rng, mask),
        zigzag=bool(zigzag) and name != "balanced",
        batch=choose(1, 2),
        heads=choose((2, 2), (4, 2), (3, 1)),
        scale=choose(None, 0.2),
        logit_soft_cap=choose(None, 2.0),
        implementation=choose(None, "in_process", "xla"),
        check_vma=choose(True, False),
        dtype=choose("float32", "float32", "bfloat16"),
    )


def draw_mask(rng, kind):
    if kind in ("causal", "full"):
        return kind
    if kind != "two-sided":
        kinds = {"window": SlidingWindow, "chunked": Chunked, "block-causal": BlockCausal}
        return kinds[kind](int(rng.integers(1, 20)))
    left, right = (None if rng.integers(4) == 0 else int(rng.integers(0, 15)) for _ in range(2))
    return SlidingWindow(None if left is None else left + 1, right)


def run_mask_of_arrays(case, seed):
    """Returns results of a random mask of this kind, an argument of the program, and dense ones."""
    documents = "none" if case.documents == "none" else "segments"
    plain = dataclasses.replace(case, mask="causal", documents=documents)
    *arrays, segment_ids, _ = draw(plain, seed)
    ids = np.ones(arrays[0].shape[:2], int) if segment_ids is None else segment_ids
    constructor, of_mask, pairs = random_mask(case.mask, np.random.default_rng(seed), ids)
    attend = jax.shard_map(
        lambda q, k, v, given, mask: plain.function(q, k, v, **given, mask=mask),
        mesh=mesh_of(case.num_ranks),
        in_specs=P(None, AXIS),
        out_specs=P(None, AXIS),
        check_vma=case.check_vma,
    )

    @jax.jit
    def program(q, k, v, g, *others):
        out, pull_back = jax.vjp(lambda *x: attend(*x, *others), q, k, v)
        return out, *pull_back(g)

    given, mask = case.given(segment_ids), constructor(*of_mask)
    if "documents" in given:
        mask = given["documents"].apply(mask)
    stored = (x[:, case.order] for x in arrays)
    got = [np.asarray(x)[:, np.argsort(case.order)] for x in program(*stored, given, mask)]
    q, k, v, g = (np.asarray(x, np.float64) for x in arrays)
    options = {"scale": case.scale, "logit_soft_cap": case.logit_soft_cap}
    pairs = batch_visible(ids, pairs)
    out, lse = masked_attention(q, k, v, pairs, **options)
    wanted = masked_attention_gradients(q, k, v, pairs, g, np.zeros(lse.shape), **options)
    return got, [out, *wanted]


def blocks(rng):
    """Returns a patch with default or small block sizes."""
    if rng.integers(2):
        return mock.patch.object(sequence, "rank_blocks", sequence.rank_blocks)
    sizes = {"block_q": int(rng.choice([8, 16])), "block_kv": int(rng.choice([8, 24]))}
    return mock.patch.object(sequence, "rank_blocks", lambda *_, **__: sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description="Many more programs; see above.")
    parser.add_argument("--programs", type=int, help="of 1,680; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_cpu_devices(max(NUM_RANKS))
    rng = np.random.default_rng(options.seed)
    combinations = list(itertools.product(NUM_RANKS, SCHEDULES, (False, True), MASKS))
    rng.shuffle(combinations)
    cases = [draw_case(rng, int(n), *rest) for n, *rest in combinations][: options.programs]
    worst = {dtype: dict.fromkeys(NAMES, 0.0) for dtype in TOLERANCE}
    failures, begin = [], time.monotonic()
    for number, case in enumerate(cases, 1):
        try:
            with blocks(rng):
                if case.mask in KINDS:
                    got, wanted = run_mask_of_arrays(case, number)
                else:
                    operands = draw(case, number)
                    got, wanted = run(case, operands), dense(case, operands)
            errors = relative_errors(got, wanted)
        except Exception as error:
            failures.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
            print(failures[-1], flush=True)
            continue
        for name, error in errors.items():
            worst[case.dtype][name] = max(worst[case.dtype][name], error)
        # Balanced attention keeps its output for the backward pass in the dtype of q.
        rounded = 4 if case.algorithm == "balanced" and case.dtype == "bfloat16" else 1
        if not max(errors.values()) <= rounded * TOLERANCE[case.dtype]:  # NaN, too
            failures.append(f"{case}: {errors}")
            print(failures[-1], flush=True)
        if number % 10 == 0 or number == len(cases):
            print(f"{time.monotonic() - begin:6.0f} s  {number}/{len(cases)} programs", flush=True)
            jax.clear_caches()
    for dtype, errors in worst.items():
        print(dtype, ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    print(f"{len(cases)} programs, {len(failures)} failures, seed {options.seed}")
    return 1 if failures or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
