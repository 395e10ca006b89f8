"""Measures a training step over 8 virtual devices, by algorithm of attention.

The step is that of training_step.py. Times are interleaved medians; memory is the temporary memory
of the compiled step on one device, by XLA's analysis. A picture shows the time by named scope.
"""

import argparse
import pathlib
from typing import Any

import common
import jax.numpy as jnp
from attention_programs import PACKAGE, ring_of_package
from scopes import OTHER, seconds_by_scope
from training_step import Attend, Model, compiled_steps, drawn_documents

from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.tools.programs import AXIS, DENSE, Ranks

NUM_RANKS = 8


def of_package(ranks: Ranks, tokens: int, dtype: str) -> Attend:
    """Ring attention of the package `ringattention`."""
    ring = ring_of_package(ranks.mesh, AXIS, tokens // ranks.count, jnp.dtype(dtype))
    if isinstance(ring, str):
        raise ImportError(f"{PACKAGE} is {ring}; install the extra bench")
    return lambda q, k, v, batch: ring(q, k, v, batch.documents.segment_ids)


def measure(ranks: Ranks, tokens: int, model: Model) -> list[dict[str, Any]]:
    others = {PACKAGE: of_package(ranks, tokens, model.dtype)}
    steps = compiled_steps(ranks, drawn_documents(tokens), model, others)
    seconds = ranks.measure(steps, longest=20.0)
    rows = []
    for name, step in steps.items():
        row = {
            "method": name,
            "ms": round(1e3 * seconds[name], 1),
            "tokens_per_s": round(tokens / seconds[name]),
            "of_dense": round(seconds[DENSE] / seconds[name], 2),
            "temp_MB": round(step.temp_bytes / 1e6, 1),
            "ms_by_scope": {
                scope: round(1e3 * value, 1)
                for scope, value in sorted(seconds_by_scope(step.program, step).items())
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
    parser.add_argument("--heads", type=int, default=4, help="of the model, of 64 dimensions")
    arguments = common.options(parser, tokens=512, heads=1)
    start_cpu_devices(NUM_RANKS)
    model = Model(layers=2, heads=arguments.heads, head_size=64, dtype="float32")
    ranks = Ranks.of_devices(NUM_RANKS, arguments.repeats)
    rows = measure(ranks, arguments.tokens, model)
    draw(rows, arguments.pictures / "training.svg")
    title = (
        f"a training step over {NUM_RANKS} devices, {arguments.tokens} tokens in packed documents, "
        f"{model.layers} layers of width {model.width}, {model.heads} heads of {model.head_size}, "
        f"{model.dtype}"
    )
    common.write(arguments.output, title, rows, PACKAGE)


if __name__ == "__main__":
    main()
