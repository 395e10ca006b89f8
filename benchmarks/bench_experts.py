"""Measures a layer of experts without its products, on 8 virtual devices: routing, there and back.

4096 tokens per rank of 2048 bfloat16, each for 8 of 64 experts; beside memcpy of the bytes that a
call writes, and the same rows by XLA's collectives. All give the same rows, which is checked first.
"""

import mmap
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch import experts
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import ALL_GATHER, ALL_TO_ALL, AXIS, MEMCPY, Ranks

W, NUM_EXPERTS, CHOICES = 8, 64, 8
ROUTE, THERE, BACK, LAYER = "route", "dispatch_tokens", "combine_tokens", "all three"


def index_maps(index: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """Returns, per rank, the token of each row, and what a padded all-to-all sends and unpacks."""
    num_tokens = index.shape[1]
    owner = index // (NUM_EXPERTS // W)
    sent = [[np.flatnonzero((owner[s] == d).any(1)) for d in range(W)] for s in range(W)]
    pad = max(len(x) for row in sent for x in row)
    token = np.zeros((W, capacity), np.int32)
    padded, is_row = np.zeros_like(token), np.zeros((W, capacity), bool)
    to_send = np.zeros((W, W, pad), np.int32)
    for d in range(W):
        source, t, j = np.nonzero(owner == d)
        order = np.argsort(index[source, t, j], kind="stable")
        source, t, n = source[order], t[order], len(order)
        token[d, :n], is_row[d, :n] = source * num_tokens + t, True
        for s in range(W):
            to_send[s, d, : len(sent[s][d])] = sent[s][d]
            at = np.flatnonzero(source == s)
            padded[d, at] = s * pad + np.searchsorted(sent[s][d], t[at])
    return {"token": token, "padded": padded, "is_row": is_row, "to_send": to_send}


def pages(num_bytes: int) -> np.ndarray:
    """Returns memory whose copies are the fastest, and do not depend on what the heap holds."""
    memory = mmap.mmap(-1, num_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--width", type=int, default=2048)
    arguments = common.options(parser, tokens=64, width=64)
    T, D = arguments.tokens, arguments.width
    start_cpu_devices(W)
    ranks = Ranks.of_devices(W, arguments.repeats)
    rng = np.random.default_rng(0)
    index = np.argsort(rng.random((W, T, NUM_EXPERTS)), axis=2)[..., :CHOICES].astype(np.int32)
    need = np.bincount((index // (NUM_EXPERTS // W)).ravel()).max()
    capacity = int(need)
    maps = {name: ranks.put(x) for name, x in index_maps(index, capacity).items()}
    x = ranks.put(rng.integers(0, 9, (W * T, D)).astype(jnp.bfloat16))
    weights = ranks.put(rng.random((W * T, CHOICES), np.float32))
    given = ranks.put(index.reshape(W * T, CHOICES))

    options: Any = {"num_experts": NUM_EXPERTS, "axis_name": AXIS, "capacity": capacity}
    route = ranks.program(lambda i: experts.route(i, **options))
    there = ranks.program(experts.dispatch_tokens)
    back = ranks.program(experts.combine_tokens)

    def layer(x, weights, index):
        routing = experts.route(index, **options)
        return experts.combine_tokens(experts.dispatch_tokens(x, routing), weights, routing)

    def all_gather(x, token, is_row):
        rows = jax.lax.all_gather(x, AXIS, tiled=True)[token[0]]
        return jnp.where(is_row[0][:, None], rows, 0)

    def all_to_all(x, to_send, padded, is_row):
        received = jax.lax.all_to_all(x[to_send[0]], AXIS, 0, 0).reshape(-1, D)
        return jnp.where(is_row[0][:, None], received[padded[0]], 0)

    routing = route(given)
    rows = there(x, routing)
    whole, gather, to_all = map(ranks.program, (layer, all_gather, all_to_all))
    of_gather = [maps[name] for name in ("token", "is_row")]
    of_to_all = [maps[name] for name in ("to_send", "padded", "is_row")]
    collectives = {
        ALL_GATHER: lambda: gather(x, *of_gather),
        ALL_TO_ALL: lambda: to_all(x, *of_to_all),
    }
    for name, run in collectives.items():
        ranks.check_equal(name, run(), rows, tolerance=0.0)

    moved = int(routing.group_sizes.sum()) * D * x.dtype.itemsize
    source, destination = (pages(moved) for _ in range(2))
    runs = {
        MEMCPY: lambda: np.copyto(destination, source),
        ROUTE: lambda: route(given),
        THERE: lambda: there(x, routing),
        BACK: lambda: back(rows, weights, routing),
        LAYER: lambda: whole(x, weights, given),
    }
    seconds = common.interleaved(runs, arguments.repeats)
    # The collectives allocate so much memory that runs between them find none cached.
    beside = f"{THERE}, interleaved with the next two"
    seconds |= common.interleaved({beside: runs[THERE]} | collectives, arguments.repeats)
    moving = {MEMCPY, THERE, beside, *collectives}
    limit, results = moved / seconds[MEMCPY], []
    for name, value in seconds.items():
        row = {
            "what": name,
            "ms": round(1e3 * value, 1),
            "of_all": round(value / seconds[LAYER], 3),
        }
        if name in moving:
            rate = moved / value
            row |= {"GB_per_s": round(rate / 1e9, 2), "of_memcpy": round(rate / limit, 3)}
        print(*(f"{key}={x}" for key, x in row.items()))
        results.append(row)
    sizes = f"{T} tokens per rank × {D} bfloat16, {CHOICES} of {NUM_EXPERTS} experts"
    title = f"tokens to experts and back, {moved / 1e6:.0f} MB over {W} devices ({sizes})"
    common.write(arguments.output, title, results)


if __name__ == "__main__":
    main()
