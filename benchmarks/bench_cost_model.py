"""Calibrates the cost model on this machine, and compares predictions with other measurements.

Movement: dispatch and combine inside `lax.scan`, over virtual devices of one process and between
processes. Attention: algorithms of `context_parallel_attention` over virtual devices, forward, and
forward and backward. `cost.calibrate` fits the constants to the measurements marked "fit"; those
marked "check" are then predicted: they have other sizes, numbers of ranks, heads and documents.
Times are minima of interleaved rounds. All ranks share the cores. With `--clock cpu`, a time over
virtual devices is the processor time divided by the cores, which other programs disturb less.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import common
import cost_model_runs as runs

from jax_cp_dispatch.cost import AttentionRate, Hardware, Measurement, calibrate

START = Hardware(
    matmul_flops=250e9,
    link_bandwidth=8e9,
    link_latency=10e-6,
    topology="shared_memory",
    cores=os.cpu_count() or 1,
    rank_latency=5e-6,
    cache_bytes=32e6,
    cache_bandwidth=20e9,
    memory_bandwidth=8e9,
    attention=AttentionRate(
        flops=400e9,
        backward_flops=300e9,
        exponentials=1.5e9,
        half_rate_rows=64.0,
        tile_rows=256,
        planned_tile_rows=128,
        least_tile_queries=64,
        tile_keys=128,
    ),
)
MOVEMENT = (
    *("link_bandwidth", "link_latency", "rank_latency"),
    *("cache_bandwidth", "cache_bytes"),
)
ATTENTION = (
    *(f"attention.{x}" for x in ("flops", "backward_flops", "exponentials", "half_rate_rows")),
    "memory_bandwidth",
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement: what was measured, by which case, and its prediction."""

    row: dict[str, Any]
    seconds: float
    predict: Callable[[Hardware], float]

    def compared(self, hardware: Hardware) -> dict[str, Any]:
        predicted = self.predict(hardware)
        return self.row | {
            "predicted_ms": float(f"{1e3 * predicted:.4g}"),
            "measured_ms": float(f"{1e3 * self.seconds:.4g}"),
            "ratio": round(predicted / self.seconds, 3),
        }


def fitted(hardware: Hardware, points: Iterable[Point], constants: tuple[str, ...]) -> Hardware:
    used = [x for x in points if x.row["use"] == "fit"]
    measurements = [Measurement(x.seconds, x.predict) for x in used]
    return calibrate(hardware, measurements, constants=constants)


def movement_points(rows: list[dict[str, Any]]) -> list[Point]:
    return [
        Point(row, row.pop("seconds"), runs.predict_movement(row["ranks"], row["MB_per_rank"]))
        for row in rows
    ]


def in_processes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures movement in jobs of several processes; returns the rows of the first process."""
    rows = []
    for processes in (2, 4):
        command = [
            *(sys.executable, "-m", "jax_cp_dispatch.launch", f"--processes={processes}"),
            *(runs.__file__, f"--repeats={arguments.repeats}"),
            *(["--quick"] if arguments.quick else []),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("[0] {")]
        rows += [json.loads(line.removeprefix("[0] ")) for line in lines]
    return rows


def shown(points: list[Point], hardware: Hardware) -> list[dict[str, Any]]:
    rows = [point.compared(hardware) for point in points]
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = common.parser(__doc__, repeats=5)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--parts", nargs="+", choices=("movement", "attention"), default=None)
    arguments = common.options(parser)
    parts = arguments.parts or ("movement", "attention")
    rows: list[dict[str, Any]] = []
    constants: dict[str, Any] = {}
    hardware = START
    if "movement" in parts:
        points = movement_points(in_processes(arguments))
        processes = fitted(START, points, MOVEMENT)
        rows += shown(points, processes)
        constants["processes"] = dataclasses.asdict(processes)
    runs.start()
    if "movement" in parts:
        points = movement_points(
            runs.measure_movement(runs.DEVICES, arguments.repeats, arguments.quick, arguments.clock)
        )
        hardware = fitted(hardware, points, MOVEMENT)
        rows += shown(points, hardware)
    if "attention" in parts:
        measured = runs.measure_attention(arguments.repeats, arguments.quick, arguments.clock)
        points = [Point(*x) for x in measured]
        hardware = fitted(hardware, points, ATTENTION)
        rows += shown(points, hardware)
    constants["virtual devices"] = dataclasses.asdict(hardware)
    checks = [abs(row["ratio"] - 1) for row in rows if row["use"] == "check"]
    if checks:
        print(f"{len(checks)} checks: largest error {max(checks):.3f}")
    title = "predictions of the cost model, calibrated on the machine, and measured times"
    common.write(arguments.output, title, rows, clock=arguments.clock, hardware=constants)


if __name__ == "__main__":
    main()
