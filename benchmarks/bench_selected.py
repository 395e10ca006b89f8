"""Measures attention over selected keys beside dense attention under an additive mask, interleaved.

One document over 8 virtual devices, of latent attention in its absorbed form: 8 heads of 72, one
row of keys whose first 64 features are the values; an index of 4 heads of 32. "mask" is what
MaxText does: all scores `[T / 8, T]` of a rank, top-k, a mask that is added to the logits, and a
softmax over all keys, which are gathered. Attention is measured forward and backward, the index
with its top-k forward. Memory is what the compiled program of a device needs beside its arguments
and results, and the mask. The dense programs of 8,192 tokens need about 17 GB for all devices;
beyond, they are compiled but not run. Each case has a process of its own, because freed memory is
kept for the next arrays. `--only 8192 1024` measures one, and keeps the rows of the others that
`--output` has.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from attention_programs import AXIS, LARGEST_DENSE, NUM_RANKS, mesh
from jax.sharding import NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch import masks
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.selected import select_keys

HEADS, LATENT, VALUES = 8, 72, 64
INDEX_HEADS, INDEX_SIZE = 4, 32
CASES = [(4096, 512), (4096, 2048), (8192, 512), (8192, 1024), (8192, 2048)]
CASES += [(16384, 512), (16384, 2048), (32768, 512), (32768, 2048)]
ROWS = P(None, AXIS)


def dense_index(q_index, k_index, weights, num_picked: int):
    """Returns the additive mask of one rank's queries, as MaxText makes it."""
    keys = jax.lax.all_gather(k_index, AXIS, axis=1, tiled=True)
    logits = jax.nn.relu(jnp.einsum("btjd,bsd->btsj", q_index, keys))
    scores = jnp.einsum("btsj,btj->bts", logits, weights)
    query = jax.lax.axis_index(AXIS) * q_index.shape[1] + jnp.arange(q_index.shape[1])
    causal = jnp.where(jnp.arange(keys.shape[1]) <= query[:, None], 0.0, -1e9)
    scores += causal
    lowest = jax.lax.top_k(scores, num_picked)[0][..., -1:]
    above, equal = scores > lowest, scores == lowest  # ties go to the lowest position
    room = num_picked - above.sum(-1, keepdims=True)
    picked = above | (equal & (jnp.cumsum(equal, axis=-1) <= room))
    return jnp.where(picked, 0.0, -1e9) + causal


def dense_attention(q, latent, mask):
    keys = jax.lax.all_gather(latent, AXIS, axis=1, tiled=True)[:, :, 0]
    logits = jnp.einsum("btnl,bsl->bnts", q, keys) * LATENT**-0.5 + mask[:, None]
    return jnp.einsum("bnts,bsv->btnv", jax.nn.softmax(logits), keys[..., :VALUES])


def with_gradients(attend):
    def both(q, latent, picked, dout):
        out, pull = jax.vjp(lambda q, latent: attend(q, latent, picked), q, latent)
        return out, *pull(dout)

    return both


def shapes(tokens: int) -> dict[str, Any]:
    of: dict[str, Any] = {"q": (HEADS, LATENT), "latent": (1, LATENT), "dout": (HEADS, VALUES)}
    of |= {"q_index": (INDEX_HEADS, INDEX_SIZE), "k_index": (INDEX_SIZE,)}
    of["weights"] = (INDEX_HEADS,)
    return {name: (1, tokens, *shape) for name, shape in of.items()}


@functools.cache
def placement(tokens: int, num_picked: int) -> cpd.Placement:
    """Balances the index, which scores all keys, and attention, as in DeepSeek-V3.2."""
    seen = "causal", masks.SlidingWindow(num_picked)
    sizes: Any = {"world_size": NUM_RANKS, "columns": tokens}
    return cpd.place_tokens([[tokens]], masks=seen, layers=(16384, 278528), **sizes)


def programs(tokens: int, num_picked: int) -> dict[str, Any]:
    """Returns the index and attention, by this package and by a mask."""
    documents = placement(tokens, num_picked).documents
    where: Any = {"mesh": mesh(), "axis_name": AXIS, "algorithm": "placed", "documents": documents}

    def index(q_index, k_index, weights):
        return select_keys(q_index, k_index, weights, num_keys=num_picked, **where)

    def attend(q, latent, picks):
        mask = masks.Selected(picks, order=documents.order)
        return cpd.context_parallel_attention(q, latent, value_size=VALUES, mask=mask, **where)

    on_ranks = functools.partial(jax.shard_map, mesh=mesh(), out_specs=ROWS)
    of_index = functools.partial(dense_index, num_picked=num_picked)
    return {
        "index": index,
        "attention": with_gradients(attend),
        "mask_index": on_ranks(of_index, in_specs=(ROWS,) * 3),
        "mask_attention": with_gradients(on_ranks(dense_attention, in_specs=(ROWS,) * 3)),
    }


def case(tokens: int, num_picked: int, repeats: int) -> dict[str, Any]:
    rng, of = np.random.default_rng(0), shapes(tokens)
    rows = NamedSharding(mesh(), ROWS)
    like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    of |= {"picks": (1, tokens, num_picked), "mask": (1, tokens, tokens)}
    names = {"index": ("q_index", "k_index", "weights")}
    names |= {"attention": ("q", "latent", "picks", "dout")}
    names |= {"mask_index": names["index"], "mask_attention": ("q", "latent", "mask", "dout")}
    compiled, memory = {}, {}
    for what, program in programs(tokens, num_picked).items():
        print(f"{tokens} tokens, {num_picked} picked: compiles {what}", file=sys.stderr, flush=True)
        arguments = [like(of[x], np.int32 if x == "picks" else np.float32) for x in names[what]]
        compiled[what] = jax.jit(program).lower(*arguments).compile()
        memory[what] = compiled[what].memory_analysis().temp_size_in_bytes
    of_mask = 4 * tokens**2 // NUM_RANKS
    row: dict[str, Any] = {"tokens": tokens, "picked": num_picked}
    for what, size in memory.items():
        row[f"{what}_MB"] = round((size + of_mask * (what == "mask_attention")) / 1e6, 1)
    row["times_smaller"] = round(row["mask_attention_MB"] / row["attention_MB"], 1)
    plan = placement(tokens, num_picked).plan
    row["times_fewer_flops"] = tokens / num_picked  # the limit of times_faster
    row["moved_MB"] = round(4 * LATENT * int(plan.num_kv_tokens_moved) / NUM_RANKS / 1e6, 2)
    row["mask_moved_MB"] = round(4 * LATENT * tokens * (NUM_RANKS - 1) / NUM_RANKS / 1e6, 2)

    drawn = {name: rng.normal(size=of[name]).astype(np.float32) for name in shapes(tokens)}
    move = placement(tokens, num_picked)
    stored = jax.device_put(dict(zip(drawn, move.apply(list(drawn.values())), strict=True)), rows)
    arguments = {what: [stored[x] for x in names[what] if x in stored] for what in compiled}
    picks = compiled["index"](*arguments["index"])
    arguments["attention"].insert(2, picks)
    if tokens <= LARGEST_DENSE:
        packed = jax.device_put(drawn, rows)
        for what in ("mask_index", "mask_attention"):
            arguments[what] = [packed[x] for x in names[what] if x in packed]
        mask = compiled["mask_index"](*arguments["mask_index"])
        arguments["mask_attention"].insert(2, mask)
        check(move, picks, mask, {x: compiled[x](*arguments[x]) for x in compiled if "att" in x})
    else:
        compiled = {what: compiled[what] for what in ("index", "attention")}
    runs = {what: functools.partial(run, *arguments[what]) for what, run in compiled.items()}
    seconds = common.interleaved(runs, repeats)
    row |= {f"{what}_ms": round(1e3 * time, 1) for what, time in seconds.items()}
    if tokens <= LARGEST_DENSE:
        row["times_faster"] = round(seconds["mask_attention"] / seconds["attention"], 1)
    return row


def check(move: cpd.Placement, picks: Any, mask: Any, results: dict[str, Any]) -> None:
    """Requires that both select the same keys, up to scores that differ in their last bits."""
    picks, mask = move.restore(np.asarray(picks))[0], np.asarray(mask)[0] == 0
    picked = np.zeros_like(mask)
    query, place = np.nonzero(picks >= 0)
    picked[query, picks[query, place]] = True
    assert (picked != mask).mean() < 1e-5, (picked != mask).mean()
    same = (picked == mask).all(1)
    got, want = (results[what][0] for what in ("attention", "mask_attention"))
    got = move.restore(np.asarray(got))
    np.testing.assert_allclose(got[:, same], np.asarray(want)[:, same], rtol=1e-4, atol=1e-5)


def main() -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--only", type=int, nargs=2, metavar=("TOKENS", "PICKED"), help="one case")
    arguments = common.options(parser)
    one = (512, 64) if arguments.quick else tuple(arguments.only or ())
    if not one:
        of_case = lambda x: [sys.executable, *sys.argv, "--only", *map(str, x)]
        raise SystemExit(any([subprocess.run(of_case(x)).returncode for x in CASES]))
    start_cpu_devices(NUM_RANKS, keep_memory=False)  # which dense programs need twice
    report = common.Report(arguments.output, f"{HEADS} heads of {LATENT}, float32")
    is_other = lambda row: (row.get("tokens"), row.get("picked")) != one
    if arguments.only and arguments.output and arguments.output.exists():
        report.rows = [*filter(is_other, json.loads(arguments.output.read_text())["rows"])]

    def measured() -> Iterator[dict[str, Any]]:
        yield case(*one, arguments.repeats)
        report.rows.sort(key=lambda x: (x.get("tokens", 0), x.get("picked", 0)))

    report.section(f"{one[0]} tokens, {one[1]} picked", measured)
    raise SystemExit(report.has_failed)


if __name__ == "__main__":
    main()
