"""Calibrates the cost model on this machine, and compares predictions with other measurements.

Movement: programs of four exchanges, dispatch or combine, over virtual devices of one process and
between processes, in several launches; the first rounds of each are not timed. Attention:
algorithms of `context_parallel_attention` over virtual devices, forward, and forward and backward.
`cost.calibrate` fits the constants to the measurements marked "fit"; those marked "check" are then
predicted: they have other sizes, numbers of ranks, heads and documents. Times are medians of
interleaved rounds. All ranks share the cores. With `--again`, the constants are fitted to the times
in an earlier result, for example after a change of the model.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import common
import cost_model_attention as attention
import cost_model_movement as movement
from rounds import summary

from jax_cp_dispatch.cost import HARDWARE, Hardware, Measurement, calibrate
from jax_cp_dispatch.cpu_devices import start_cpu_devices

Row = dict[str, Any]
LAUNCHES = 9
JOBS = (
    ("--processes=1", f"--devices={max(movement.RANKS)}"),
    *((f"--processes={processes}", "--devices=1") for processes in (2, 4)),
)
START = dataclasses.replace(HARDWARE["cpu"], cores=os.cpu_count() or 1)
# The error has local minima, since times have a corner where an exchange fills a cache.
STARTING_CACHES = tuple(itertools.product((8e6, 16e6, 32e6), (1e6, 2e6, 4e6)))
MOVEMENT = (
    *("link_bandwidth", "link_latency", "rank_latency"),
    *("cache_bandwidth", "cache_bytes", "near_cache_bandwidth", "near_cache_bytes"),
)
ATTENTION = (
    *(f"attention.{x}" for x in ("flops", "backward_flops", "exponentials", "half_rate_rows")),
    "memory_bandwidth",
)


def measured_movement(rounds: int, quick: bool) -> Iterable[Row]:
    """Measures movement in several launches of each job, since memory differs between launches."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    launches = min(LAUNCHES, rounds)
    for job in JOBS * launches:
        command = [
            *(sys.executable, "-m", "jax_cp_dispatch.launch", *job),
            *(movement.__file__, f"--repeats={math.ceil(rounds / launches)}"),
            *(["--quick"] if quick else []),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("[0] {")]
        for row in (json.loads(line.removeprefix("[0] ")) for line in lines):
            seconds = row.pop("times")
            times[json.dumps(row)] += seconds
    return [json.loads(key) | {"times": seconds} for key, seconds in times.items()]


def measured(arguments: argparse.Namespace) -> Iterable[Row]:
    """Yields a row for each time; three times as many rounds of movement as of attention."""
    if "movement" in arguments.parts:
        yield from measured_movement(3 * arguments.repeats, arguments.quick)
    if "attention" in arguments.parts:
        start_cpu_devices(max(movement.RANKS))
        yield from attention.measure(arguments.repeats, arguments.quick)


def summarized(row: Row) -> Row:
    return {name: x for name, x in row.items() if name != "times"} | summary(row["times"])


def predicted_seconds(row: Row, hardware: Hardware) -> float:
    part = attention if "passes" in row else movement
    return part.predicted_seconds(row, hardware)


def fitted(hardware: Hardware, rows: Iterable[Row], constants: tuple[str, ...]) -> Hardware:
    measurements = [
        Measurement(1e-3 * row["measured_ms"], lambda x, row=row: predicted_seconds(row, x))
        for row in rows
        if row["use"] == "fit"
    ]
    return calibrate(hardware, measurements, constants=constants) if measurements else hardware


def fitted_to_movement(start: Hardware, rows: list[Row]) -> Hardware:
    fit_rows = [row for row in rows if row["use"] == "fit"]

    def error(hardware: Hardware) -> float:
        ratios = [1e3 * predicted_seconds(x, hardware) / x["measured_ms"] for x in fit_rows]
        return sum(math.log(ratio) ** 2 for ratio in ratios)

    if not fit_rows:
        return start
    starts = (
        dataclasses.replace(start, cache_bytes=cache, near_cache_bytes=near)
        for cache, near in STARTING_CACHES
    )
    return min((fitted(x, fit_rows, MOVEMENT) for x in starts), key=error)


def compared(row: Row, hardware: Hardware) -> Row:
    predicted = 1e3 * predicted_seconds(row, hardware)
    return row | {
        "predicted_ms": float(f"{predicted:.4g}"),
        "ratio": round(predicted / row["measured_ms"], 3),
    }


def main() -> None:
    parser = common.parser(__doc__, repeats=9)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", nargs="+", choices=("movement", "attention"),
                        default=("movement", "attention"))  # fmt: skip
    parser.add_argument("--again", type=pathlib.Path, metavar="RESULT", help="measure nothing")
    arguments = common.options(parser)
    if arguments.again:
        rows = json.loads(arguments.again.read_text())["rows"]
    else:
        rows = [summarized(row) for row in measured(arguments)]
    of_place = lambda place: [row for row in rows if row["place"] == place and "passes" not in row]
    between_processes = dataclasses.replace(START, copies=2)
    processes = fitted_to_movement(between_processes, of_place(movement.PROCESSES))
    devices = fitted_to_movement(START, of_place(movement.DEVICES))
    devices = fitted(devices, [row for row in rows if "passes" in row], ATTENTION)
    hardware = {movement.PROCESSES: processes, movement.DEVICES: devices}
    rows = [compared(row, hardware[row["place"]]) for row in rows]
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
    checks = [abs(row["ratio"] - 1) for row in rows if row["use"] == "check"]
    if checks:
        print(f"{len(checks)} checks: largest error {max(checks):.3f}")
    title = "predictions of the cost model, calibrated on the machine, and measured times"
    constants = {place: dataclasses.asdict(x) for place, x in hardware.items()}
    common.write(arguments.output, title, rows, hardware=constants)


if __name__ == "__main__":
    main()
