"""Measures the gated delta rule beside a scan over tokens and attention, and what exchanges cost.

On one CPU device, one document, with a decay per head and per channel: beside a `lax.scan` over the
tokens and causal `local_attention`; then other sizes of chunks, and longer documents. Memory is
temporary memory, by XLA's analysis. On 8 devices, documents that are whole on their ranks, and one
document that all ranks share; the exchange alone is a kernel that computes nothing and sends as
much.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_cp_dispatch import local_attention, sequence
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.sequence import recurrences

NUM_HEADS, SIZE, NUM_RANKS = 8, 64, 8
PASSES = "forward", "forward and backward"
LAYERS = {"per head": 3, "per channel": 4}  # and the axes of log_decay


class Program(NamedTuple):
    """A compiled program, whose call runs it, and its temporary memory."""

    compiled: Any
    operands: Any

    def __call__(self) -> Any:
        return self.compiled(*self.operands)

    @property
    def temp_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes


def operands(num_tokens: int, axes: int) -> tuple[Any, ...]:
    """Returns q, k, v, log_decay and beta, as a layer would make them."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=(1, num_tokens, *shape)).astype(np.float32)
    q, k, v = (normal(NUM_HEADS, SIZE) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -0.1 * np.abs(normal(NUM_HEADS, SIZE))
    if axes == 3:
        log_decay = log_decay[..., 0]
    return q, k, v, log_decay, 1 / (1 + np.exp(normal(NUM_HEADS)))


def by_scan(q, k, v, log_decay, beta):
    """The definition of the delta rule, a token at a time."""
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]

    def step(state, x):
        q, k, v, log_decay, beta = x
        state = jnp.exp(log_decay)[..., None] * state
        read = jnp.einsum("bnh,bnhv->bnv", k, state)
        state += jnp.einsum("bnh,bnv->bnhv", k, beta[..., None] * (v - read))
        return state, jnp.einsum("bnh,bnhv->bnv", q, state)

    start = jnp.zeros((1, NUM_HEADS, SIZE, SIZE))
    tokens = [x.swapaxes(0, 1) for x in (SIZE**-0.5 * q, k, v, log_decay, beta)]
    return jax.lax.scan(step, start, tokens)[1].swapaxes(0, 1)


def both_passes(layer):
    def run(*operands):
        out, pull = jax.vjp(layer, *operands)
        return out, pull(out)

    return run


def programs(name, layer, operands, passes=PASSES) -> dict[str, Program]:
    of = dict(zip(PASSES, (layer, both_passes(layer)), strict=True))
    return {
        f"{name}, {what}": Program(jax.jit(of[what]).lower(*operands).compile(), operands)
        for what in passes
    }


class OnlyMaps:
    """A kernel of `recurrence` whose maps are as large as those of the delta rule; no products."""

    def summary(self, inputs):
        return inputs[0, 0, 0] + jnp.zeros((NUM_HEADS, SIZE, 2 * SIZE), jnp.float32)

    def apply(self, map_, state):
        return map_[..., SIZE:]

    def run(self, inputs, states, piece_ids):
        return inputs + states[0, 0, 0, 0]


def one_device() -> dict[str, Any]:
    mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    return {"axis_name": "cp", "mesh": mesh, "batch_axis": (), "head_axis": ()}


def beside_others(num_tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures the layer, a scan over tokens, and attention."""
    layer = lambda *x: sequence.gated_delta_rule(*x, **one_device())
    attend = lambda *x: local_attention(*x, mask="causal")[0]
    runs = programs("attention", attend, jax.device_put(operands(num_tokens, 3)[:3]))
    scans = {}
    for name, axes in LAYERS.items():
        of_layer = jax.device_put(operands(num_tokens, axes))
        runs |= programs(name, layer, of_layer)
        scans |= programs(f"scan {name}", by_scan, of_layer)
    # Apart: memory that the scans return is mapped again by what runs next.
    seconds = common.interleaved(runs, repeats) | common.interleaved(scans, repeats)
    for name, what in itertools.product(LAYERS, PASSES):
        own, scan, attention = (f"{x}, {what}" for x in (name, f"scan {name}", "attention"))
        yield {
            "layer": f"decay {name}",
            "pass": what,
            "ms": round(1e3 * seconds[own], 1),
            "of_scan": round(seconds[own] / seconds[scan], 3),
            "of_attention": round(seconds[own] / seconds[attention], 3),
            "temp_MB": round(runs[own].temp_bytes / 1e6),
            "memory_of_scan": round(runs[own].temp_bytes / scans[scan].temp_bytes, 3),
        }


def of_sizes(num_tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures sizes of chunks, and longer documents, forward and backward."""
    runs = {}
    for name, axes in LAYERS.items():
        of_layer = jax.device_put(operands(num_tokens, axes))
        for size in (16, 32, 64, 128):
            with mock.patch.object(recurrences, "default_chunk", lambda size=size: size):
                layer = lambda *x: sequence.gated_delta_rule(*x, **one_device())
                runs |= programs(f"decay {name}, chunks of {size}", layer, of_layer, PASSES[1:])
    layer = lambda *x: sequence.gated_delta_rule(*x, **one_device())
    for tokens in (num_tokens // 4, num_tokens, 4 * num_tokens):
        of_layer = jax.device_put(operands(tokens, 3))
        runs |= programs(f"decay per head, {tokens} tokens", layer, of_layer, PASSES[1:])
    for name, seconds in common.interleaved(runs, repeats).items():
        layer, what, _ = name.split(", ", 2)
        yield {
            "layer": layer,
            "size": what,
            "pass": PASSES[1],
            "ms": round(1e3 * seconds, 1),
            "temp_MB": round(runs[name].temp_bytes / 1e6),
        }


def on_ranks(num_tokens: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures `num_tokens` of each rank."""
    mesh = jax.make_mesh((NUM_RANKS,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "cp"))
    row = np.arange(NUM_RANKS * num_tokens)[None]
    documents = {"whole documents": 1 + row // num_tokens, "one document": 1 + 0 * row}
    runs: dict[str, Program] = {}
    for case, ids in documents.items():
        ids = jax.device_put(ids.astype(np.int32), sharding)
        given = {"axis_name": "cp", "mesh": mesh, "segment_ids": ids}
        given |= {"batch_axis": (), "head_axis": ()}
        of_layer = jax.device_put(operands(NUM_RANKS * num_tokens, 3), sharding)
        layer = lambda *x, given=given: sequence.gated_delta_rule(*x, **given)
        runs |= programs(case, layer, of_layer)
        move = lambda x, given=given: sequence.recurrence(x, OnlyMaps(), **given)
        runs |= programs(f"{case}, exchange", move, (of_layer[4],))
    seconds = common.interleaved(runs, repeats)
    for case, what in itertools.product(documents, PASSES):
        layer, exchange = (seconds[f"{x}, {what}"] for x in (case, f"{case}, exchange"))
        yield {
            "layer": f"decay per head, {NUM_RANKS} devices, {case}",
            "pass": what,
            "ms": round(1e3 * layer, 1),
            "exchange_ms": round(1e3 * exchange, 2),
            "exchange_share": round(exchange / layer, 4),
        }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of one device")
    arguments = common.options(parser, tokens=256)
    start_cpu_devices(NUM_RANKS)
    title = f"gated delta rule, {arguments.tokens} tokens of a device, {NUM_HEADS} heads of {SIZE}"
    report = common.Report(arguments.output, title)
    for measure in (beside_others, of_sizes, on_ranks):
        run = lambda measure=measure: measure(arguments.tokens, arguments.repeats)
        report.section(measure.__name__, run)
    if report.has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
