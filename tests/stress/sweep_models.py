"""Compares whole calls with dense attention: masks, algorithms, orders, sinks and latents.

    python tests/stress/sweep_models.py --seed 3 --seconds 200
    python tests/stress/sweep_models.py --tpu --seconds 600  # the kernels for TPUs, interpreted

Draws calls of `context_parallel_attention` over 1, 3 or 8 ranks until the time is over: packed
documents, any mask, placed or not, a sink, latent rows in place of keys, heads, a soft cap, `lse`.
Each is compared, forward and backward, with the oracle. Exits with 1 if one differs or does not
run, or if accesses of the interpreted kernels race.
"""

import argparse
import contextlib
import pathlib
import sys
import time
from typing import Any, NamedTuple

sys.path.extend(str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support"))

import jax
import jax.numpy as jnp
import numpy as np
from array_masks import KINDS, random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from jax.experimental.pallas import tpu as pltpu
from mask_oracle import batch_ranges, batch_visible, range_pairs
from on_mesh import AXIS, mesh_of
from packed_batches import pack
from sweep_attention import MASKS, draw_mask

import jax_cp_dispatch as cpd
from jax_cp_dispatch.attention.local import local_attention as api, tpu
from jax_cp_dispatch.attention.rotating import attend
from jax_cp_dispatch.cpu_devices import start_cpu_devices

TOLERANCE, LATENT = 2e-5, 5
ALGORITHMS = ("balanced", "placed", "ring", "zigzag", "hamilton", "ulysses", "auto")
ZIGZAG = ("ring", "zigzag", "hamilton", "ulysses")


class Sizes(NamedTuple):
    """From which a call draws: ranks; heads (N, K); features (H, Hv); half the tokens of a rank."""

    num_ranks: tuple[int, ...] = (1, 3, 8)
    heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (4, 2), (3, 3))
    features: tuple[tuple[int, int], ...] = ((8, 4),)
    halves: tuple[int, int] = (2, 9)


SIZES = Sizes()
SIZES_ON_TPUS = Sizes(
    num_ranks=(1, 2),
    heads=((1, 1), (4, 2), (16, 1)),
    features=((64, 64), (128, 128), (192, 128), (256, 256)),
    halves=(2, 150),
)


@contextlib.contextmanager
def tpu_kernels():
    """Interprets the kernels for TPUs on CPU devices, from here on."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place of `races`

    passes = {"attend_blocks": tpu.attend, "block_gradients": tpu.gradients}
    for module in (api, attend):  # before anything is traced
        vars(module).update(passes)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


def expand(weights, rows):
    return tuple(jnp.einsum("rl,lnh->rnh", rows, weights[name]) for name in "kv")


def dense(operands, allowed, cotangents, **options):
    """Returns out, lse and the gradients of all operands, in float64."""
    q, keys, sink = operands["q"], operands["keys"], operands["sink"]
    k, v = keys if "weights" not in operands else _project(keys, operands["weights"])
    out, lse = masked_attention(q, k, v, allowed, **options)
    g, dlse = cotangents
    dlse = np.where(np.isfinite(lse), np.swapaxes(dlse, 1, 2), 0)
    share, results = np.ones(lse.shape), {}  # of keys, not of the sink
    if sink is not None:
        with np.errstate(over="ignore"):
            share = np.where(np.isfinite(lse), 1 / (1 + np.exp(sink[:, None] - lse)), 0)
        moved = np.swapaxes((g * out).sum(-1), 1, 2) * share * (1 - share)
        results["sink"] = (dlse * (1 - share) - moved).sum((0, 2))
        lse, dlse = np.where(share > 0, np.logaddexp(lse, sink[:, None]), lse), dlse * share + moved
    weight = np.swapaxes(share, 1, 2)[..., None]
    dq, dk, dv = masked_attention_gradients(q, k, v, allowed, g * weight, dlse, **options)
    results |= {"q": dq, "keys": (dk, dv)}
    if "weights" in operands:
        w = operands["weights"]
        results["keys"] = sum(
            np.einsum("btnh,lnh->btl", x, w[y]) for x, y in ((dk, "k"), (dv, "v"))
        )
        results["weights"] = {
            y: np.einsum("btl,btnh->lnh", keys, x) for x, y in ((dk, "k"), (dv, "v"))
        }
    return out * weight, np.swapaxes(lse, 1, 2), results


def _project(rows, weights):
    return tuple(np.einsum("btl,lnh->btnh", rows, weights[name]) for name in "kv")


def draw_operands(rng, algorithm, num_ranks, shape, sizes):
    N, K = sizes.heads[rng.integers(len(sizes.heads))]
    H, Hv = sizes.features[rng.integers(len(sizes.features))]
    if algorithm == "ulysses":
        N, K = N * num_ranks, K * int(rng.choice([1, num_ranks]))
    draw = lambda *size: rng.normal(size=size)
    operands: dict[str, Any] = {"q": draw(*shape, N, H), "sink": None}
    if rng.integers(2):
        operands["sink"] = 2 * draw(N)
    if rng.integers(2) and algorithm != "ulysses":
        operands["keys"] = draw(*shape, LATENT)
        operands["weights"] = {"k": draw(LATENT, K, H) / 2, "v": draw(LATENT, K, Hv)}
    else:
        operands["keys"] = draw(*shape, K, H), draw(*shape, K, Hv)
    return operands, (draw(*shape, N, Hv), draw(*shape, N))


def draw_masks(rng, kind, ids):
    """Returns a mask, and the pairs that it admits."""
    if kind in KINDS:
        constructor, arrays, pairs = random_mask(kind, rng, ids)
        return constructor(*arrays), batch_visible(ids, pairs)
    mask = draw_mask(rng, kind)
    return mask, batch_visible(ids, range_pairs(*batch_ranges(mask, ids)))


def run(rng, sizes, algorithm, num_ranks, kind):
    """Returns the largest relative error of a random call."""
    zigzag = algorithm in ZIGZAG and bool(rng.integers(2))
    in_halves = zigzag or algorithm == "placed"
    T = 2 * num_ranks * int(rng.integers(*sizes.halves)) + (
        0 if in_halves else int(rng.integers(2))
    )
    ids, _ = pack(rng, int(rng.integers(1, 3)), T, max_length=max(2, int(rng.choice([8, T]))))
    operands, cotangents = draw_operands(rng, algorithm, num_ranks, ids.shape, sizes)
    mask, allowed = draw_masks(rng, kind, ids)
    cap = (None, 2.0)[rng.integers(2)]
    want = dense(operands, allowed, cotangents, logit_soft_cap=cap)
    options: dict[str, Any] = {"algorithm": algorithm, "logit_soft_cap": cap}
    moves = documents = cpd.Documents(ids)
    if zigzag:
        moves = documents = documents.zigzag(num_ranks)
    if algorithm == "placed":
        masks = (mask, cpd.masks.SlidingWindow(3))[:: int(rng.choice([-1, 1]))]
        moves = cpd.place_tokens(segment_ids=ids, world_size=num_ranks, masks=masks, layers=(2, 5))
        documents = moves.documents
    back = lambda x: moves.restore(np.asarray(x))
    cast = lambda x: jax.tree.map(lambda y: y.astype(np.float32), x)
    move = lambda x: moves.apply(cast(x))
    arrays = cast(operands) | {name: move(operands[name]) for name in ("q", "keys")}
    mask = mask if isinstance(mask, str) else moves.apply(mask)
    g, dlse = move(cotangents)
    known = algorithm == "auto"

    @jax.jit
    def program(arrays, traced, mask_arrays, g, dlse):
        mask_ = mask if known or isinstance(mask, str) else mask_arrays

        def attend(arrays):
            keys, latents = arrays["keys"], {}
            if "weights" in arrays:
                keys, latents = (keys,), {"expand": expand, "weights": arrays["weights"]}
            return cpd.context_parallel_attention(
                *(arrays["q"], *keys), mesh=mesh_of(num_ranks), axis_name=AXIS, return_lse=True,
                documents=documents if known else traced, mask=mask_, sink=arrays["sink"],
                batch_axis=(), head_axis=(), **latents, **options,
            )  # fmt: skip

        (out, lse), pull = jax.vjp(attend, arrays)
        return out, lse, pull((g, jnp.where(jnp.isfinite(lse), dlse, 0)))[0]

    out, lse, gradients = program(
        arrays, documents, None if isinstance(mask, str) else mask, g, dlse
    )
    gradients |= {x: jax.tree.map(back, gradients[x]) for x in ("q", "keys")}
    is_row = np.isfinite(want[1])
    assert np.array_equal(np.isfinite(back(lse)), is_row), "lse of rows without keys"
    got = back(out), np.where(is_row, back(lse), 0), gradients
    want = want[0], np.where(is_row, want[1], 0), want[2]
    got[2].update({x: y for x, y in want[2].items() if y is None})
    pairs = zip(jax.tree.leaves(dict(enumerate(got))), jax.tree.leaves(dict(enumerate(want))),
                strict=True)  # fmt: skip
    return max(np.abs(x - y).max() / max(1, np.abs(y).max()) for x, y in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tpu", action="store_true")
    options = parser.parse_args()
    sizes = SIZES_ON_TPUS if options.tpu else SIZES
    start_cpu_devices(max(sizes.num_ranks))
    with tpu_kernels() if options.tpu else contextlib.nullcontext():
        return sweep(sizes, options.seed, options.seconds)


def sweep(sizes: Sizes, first_seed: int, seconds: float) -> int:
    begin, count, failures, worst = time.monotonic(), 0, 0, 0.0
    cases = [(a, n, m) for a in ALGORITHMS for n in sizes.num_ranks for m in MASKS]
    order = np.random.default_rng(first_seed).permutation(len(cases))
    while time.monotonic() - begin < seconds:
        case = cases[order[count % len(cases)]]
        seed, count = (first_seed, count), count + 1
        try:
            error = run(np.random.default_rng(seed), sizes, *case)
        except Exception as problem:
            error, text = np.inf, f"{type(problem).__name__}: {str(problem)[:400]}"
        else:
            text = f"{error:.1e}"
            worst = max(worst, error)
        if not error <= TOLERANCE:
            failures += 1
            print(f"{case}, seed {seed}: {text}", flush=True)
        if count % 20 == 0:
            jax.clear_caches()
    print(f"{count} calls, {failures} failures, worst error {worst:.1e}, seed {first_seed}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
