"""Measures a training step over 8 virtual devices, by algorithm of attention.

The model is that of the training example, with tokens sharded over one context axis; the batch is
the same packed documents for all. Alternatives: `jax.nn.dot_product_attention` with the sequence
sharded by XLA, and the package `ringattention`. Times are interleaved medians; memory is the
temporary memory of the compiled step on one device, by XLA's analysis. The losses of the first step
are compared. A picture shows the time by named scope.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import common
import jax
import jax.numpy as jnp
from attention_programs import DENSE, PACKAGE, ring_of_package
from scopes import OTHER, seconds_by_scope

sys.path.append(str(common.ROOT / "examples"))

from training.data import DataConfig, make_loader
from training.model import ModelConfig
from training.sharding import LAYOUTS, Sharded, make_mesh
from training.state import create, make_optimizer, make_step

from jax_cp_dispatch.cpu_devices import start_cpu_devices

NUM_RANKS = 8
OURS = ("placed", "balanced", "zigzag")
TOLERANCE = 1e-5  # of the loss in float32; sums in another order


class Dense(Sharded):
    """Attention of the whole sequence, with a mask; XLA shards it."""

    def attend(self, q, k, v, batch):
        ids = batch["segment_ids"]
        same = ids[:, None, :, None] == ids[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)


class Package(Sharded):
    """Ring attention of the package `ringattention`, which needs equally many heads of keys."""

    def attend(self, q, k, v, batch):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        ring = ring_of_package(self.mesh, "context", q.shape[1] // NUM_RANKS, q.dtype)
        if isinstance(ring, str):
            raise ImportError(f"{PACKAGE} is {ring}; install the extra bench")
        return ring(q, k, v, batch["segment_ids"])


class Training:
    """The compiled step of one method with its state and batch; a call makes a step."""

    def __init__(self, method: str, model: ModelConfig, data: DataConfig):
        self.mesh = make_mesh(1, NUM_RANKS, 1)
        algorithm = method if method in OURS else "ring"  # that order of tokens
        kind = {DENSE: Dense, PACKAGE: Package}.get(method, Sharded)
        ops = kind(self.mesh, algorithm)
        loader = make_loader(dataclasses.replace(data, layout=LAYOUTS[algorithm]))
        batch = next(loader)
        del batch["imbalance_in_order"]
        with jax.set_mesh(self.mesh):
            structure, self.state = create(model, make_optimizer(1e-3), seed=0)
            shardings = jax.tree.map(lambda x: x.sharding, self.state)
            step = make_step(structure, ops, shardings)
            self.batch = ops.put(batch)
            self.program = step.lower(self.state, self.batch).compile()  # pyright: ignore
        metrics = self()
        self.loss, self.num_labels = float(metrics["loss"]), int(metrics["labels"])

    def __call__(self) -> dict[str, Any]:
        self.state, metrics = self.program(self.state, self.batch)
        return metrics


def measure(model: ModelConfig, data: DataConfig, repeats: int) -> list[dict[str, Any]]:
    runs = {name: Training(name, model, data) for name in (*OURS, DENSE, PACKAGE)}
    expected = runs[DENSE].loss
    for name, run in runs.items():
        if not abs(run.loss - expected) <= TOLERANCE * expected:
            raise ValueError(f"the loss with {name} is {run.loss}, with dense attention {expected}")
    seconds = common.interleaved(runs, repeats)
    rows = []
    for name, run in runs.items():
        memory = run.program.memory_analysis()
        row = {
            "method": name,
            "ms": round(1e3 * seconds[name], 1),
            "tokens_per_s": round(run.num_labels / seconds[name]),
            "of_dense": round(seconds[DENSE] / seconds[name], 2),
            "temp_MB": round(memory.temp_size_in_bytes / 1e6, 1),
            "ms_by_scope": {
                scope: round(1e3 * value, 1)
                for scope, value in sorted(seconds_by_scope(run.program, run).items())
            },
        }
        rows.append(row)
        print(
            "{method:<24}{ms:10.1f} ms{tokens_per_s:10d} tokens/s{of_dense:8.2f} x dense"
            "{temp_MB:10.1f} MB  {ms_by_scope}".format(**row),
            flush=True,
        )
    return rows


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the time of each step as a bar, divided by scope."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    scopes = [*sorted({scope for row in rows for scope in row["ms_by_scope"]} - {OTHER}), OTHER]
    starts = [0.0] * len(rows)
    for scope in scopes:
        widths = [row["ms_by_scope"].get(scope, 0.0) for row in rows]
        axes.barh([row["method"] for row in rows], widths, left=starts, label=scope)
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xscale="linear", xlabel="ms of a device in operations of each scope")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=4096, help="of the batch's one row")
    parser.add_argument("--width", type=int, default=256, help="of the model, 4 heads")
    arguments = common.options(parser, tokens=512, width=64)
    start_cpu_devices(NUM_RANKS)
    width = arguments.width
    model = ModelConfig(
        layers=2, width=width, heads=4, kv_heads=2, head_size=width // 4, hidden=3 * width,
        dtype="float32",
    )  # fmt: skip
    data = DataConfig(
        batch=1, columns=arguments.tokens, data=1, context=NUM_RANKS, workers=0, seed=0
    )
    rows = measure(model, data, arguments.repeats)
    draw(rows, arguments.pictures / "training.svg")
    title = (
        f"a training step over {NUM_RANKS} devices, {arguments.tokens} tokens in packed documents, "
        f"{model.layers} layers of width {width}, {model.heads} query and {model.kv_heads} KV "
        f"heads of {model.head_size}, {model.dtype}"
    )
    common.write(arguments.output, title, rows, PACKAGE)


if __name__ == "__main__":
    main()
