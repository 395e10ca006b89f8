"""Measures what today's models ask of attention, each beside the plain call, interleaved.

Over 8 virtual devices, one causal document: `ulysses`, sinks, and results beside the output, beside
the plain ring; of packed documents, ids and positions that the program checks, beside those that
the host has checked. On one device: a prompt with its completions in one row, beside a row of
prompt and completion for each. Forward, and forward and backward.
"""

from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from attention_programs import AXIS, HEAD_SIZE, NUM_HEADS, NUM_RANKS, mesh
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch import context_parallel_attention, local_attention
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.masks import SharedPrefix
from jax_cp_dispatch.tools.programs import drawn_lengths, make_segment_ids

FORWARD, BOTH = "forward", "forward and backward"
NUM_COMPLETIONS, PREFIX_HEADS = 8, 2
Runs = dict[str, Callable[[], Any]]


def both_passes(what: str, attend: Callable, *operands: Any) -> Runs:
    """Returns both programs of `attend(q, k, v, *others)`; the last operand is a cotangent."""
    arrays = operands[:-1]

    def with_gradients(*operands):
        *arrays, dout = operands
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, *arrays[3:]), *arrays[:3])
        return out, *vjp(dout)

    forward = jax.jit(attend).lower(*arrays).compile()
    both = jax.jit(with_gradients).lower(*operands).compile()
    return {what + FORWARD: lambda: forward(*arrays), what + BOTH: lambda: both(*operands)}


def over_devices(tokens: int) -> tuple[Runs, dict[str, str]]:
    """Returns the programs over 8 devices, and the name of the plain one for each other."""
    rng = np.random.default_rng(0)
    put = lambda x: jax.device_put(x, NamedSharding(mesh(), P(None, AXIS)))
    shape = (1, NUM_RANKS * tokens, NUM_HEADS, HEAD_SIZE)
    q, k, v, dout = (put(rng.standard_normal(shape, np.float32)) for _ in range(4))
    sink = jnp.asarray(rng.standard_normal(NUM_HEADS), jnp.float32)
    ids = make_segment_ids(drawn_lengths(shape[1], seed=0, median=tokens))
    starts = np.diff(ids, axis=1, prepend=0) != 0
    column = np.arange(shape[1])
    positions = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    documents = ids, positions.astype(np.int32)

    def call(algorithm="ring", documents=(None, None), **options):
        def attend(q, k, v, *traced):
            segment_ids, positions = traced or documents
            results = context_parallel_attention(
                *(q, k, v), mesh=mesh(), axis_name=AXIS, algorithm=algorithm,
                segment_ids=segment_ids, positions=positions, **options,
            )  # fmt: skip
            return results[0] if isinstance(results, tuple) else results

        return attend

    ring, checked = "ring", "ring, packed, ids checked on the host"
    calls = {
        ring: call(),
        "ulysses": call("ulysses"),
        "ring with a sink": call(sink=sink),
        "ring with lse and the largest logits": call(return_lse=True, return_max_logits=True),
        checked: call(documents=documents),
    }
    runs: Runs = {}
    for what, attend in calls.items():
        runs |= both_passes(what, attend, q, k, v, dout)
    in_program = "ring, packed, ids checked in the program"
    runs |= both_passes(in_program, call(), q, k, v, *map(put, documents), dout)
    plain = dict.fromkeys(list(calls)[1:4], ring) | {in_program: checked}
    return runs, plain


def shared_prefix(tokens: int) -> tuple[Runs, dict[str, str]]:
    """Returns the programs of one row of `tokens`, 3/4 of it the prompt, and of separate rows."""
    rng = np.random.default_rng(1)
    prompt, completion = tokens * 3 // 4, tokens // 4 // NUM_COMPLETIONS
    draw = lambda *shape: jnp.asarray(rng.standard_normal((*shape, PREFIX_HEADS, HEAD_SIZE)), "f")
    ids = np.repeat(np.arange(NUM_COMPLETIONS + 1), [prompt] + NUM_COMPLETIONS * [completion])[None]
    mask = SharedPrefix(jnp.asarray(ids))
    what, separate = "a prompt with its completions, one device", "a row for each completion"
    of_mask = lambda mask: lambda q, k, v: local_attention(q, k, v, mask=mask)[0]
    runs = both_passes(what, of_mask(mask), *(draw(1, tokens) for _ in range(4)))
    rows = [draw(NUM_COMPLETIONS, prompt + completion) for _ in range(4)]
    return runs | both_passes(separate, of_mask("causal"), *rows), {what: separate}


def main() -> None:
    parser = common.parser(__doc__, repeats=7)
    parser.add_argument("--tokens", type=int, default=1024, help="of a device")
    arguments = common.options(parser, tokens=128)
    start_cpu_devices(NUM_RANKS)
    runs, plain = over_devices(arguments.tokens)
    more, separate = shared_prefix(NUM_RANKS * arguments.tokens)
    seconds = common.interleaved(runs | more, arguments.repeats)
    rows = []
    for what, other in (plain | separate).items():
        for passes in (FORWARD, BOTH):
            time, beside = seconds[what + passes], seconds[other + passes]
            row = {"what": what, "beside": other, "passes": passes, "ms": round(1e3 * time, 1)}
            rows.append(row | {"beside_ms": round(1e3 * beside, 1), "of": round(time / beside, 3)})
            print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
    sizes = f"{arguments.tokens} tokens of each of {NUM_RANKS} devices, {NUM_HEADS} heads of"
    prefix = f"the prompt of {NUM_COMPLETIONS} completions: {PREFIX_HEADS} heads"
    common.write(arguments.output, f"{sizes} {HEAD_SIZE}, float32; {prefix}", rows)


if __name__ == "__main__":
    main()
