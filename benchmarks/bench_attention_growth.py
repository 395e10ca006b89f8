"""Measures time and memory from 4K to 64K tokens: one causal document, forward and backward.

Each method and length runs in its own process. Measures a run after compilation: its time and its
peak increase of memory. Draws attention_growth.svg from the results.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import attention_programs as programs
import common
import jax

from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.plots import figure_class, save

METHODS = ("zigzag", "hamilton", "balanced", programs.LOCAL, programs.PACKAGE, programs.DENSE)


def status(field: str) -> int:
    """Returns the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def run_alone(method: str, num_tokens: int, dtype: str, repeats: int) -> dict:
    """Returns the seconds of the fastest run and its peak bytes, measured in a new process."""
    start_cpu_devices(programs.NUM_RANKS)
    built = programs.program(method, programs.Case("causal", num_tokens, dtype))
    if isinstance(built, str):
        return {"why_not": built}
    fn, operands = built
    jax.block_until_ready(operands)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*operands))
        seconds.append(time.perf_counter() - start)
    return {"s": round(min(seconds), 3), "peak_MB": round((status("VmHWM") - before) / 1e6)}


def draw(rows: list[dict], picture: Path) -> None:
    figure = figure_class("bench_attention_growth")(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, key, label in ((axes[0], "s", "seconds"), (axes[1], "peak_MB", "MB at the peak")):
        for method in METHODS:
            points = [
                (row["tokens"], row[key]) for row in rows if row["method"] == method and key in row
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        ticks = sorted({row["tokens"] for row in rows})
        axis.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
        axis.minorticks_off()
        common.label_log_axis(axis.yaxis)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle("One causal document, forward and backward, 8 virtual devices", fontsize=10)
    save(figure, picture)


def main() -> None:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096 << i for i in range(5)])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--alone", action="store_true", help="one method and length, here")
    arguments = common.options(parser, tokens=[1024])
    if arguments.alone:
        (method,), (num_tokens,) = arguments.methods, arguments.tokens
        print(json.dumps(run_alone(method, num_tokens, arguments.dtype, arguments.repeats)))
        return
    rows = []
    for num_tokens in arguments.tokens:
        repeats = str(arguments.repeats if num_tokens <= 16384 else 1)
        for method in arguments.methods:
            command = [sys.executable, __file__, "--alone", "--repeats", repeats]
            command += ["--tokens", str(num_tokens), "--methods", method]
            command += ["--dtype", arguments.dtype]
            child = subprocess.run(command, capture_output=True, text=True)
            if child.returncode:
                result = {"why_not": child.stderr.strip().splitlines()[-1]}
            else:
                result = json.loads(child.stdout.splitlines()[-1])
            rows.append(
                {"tokens": num_tokens, "method": method, "dtype": arguments.dtype, **result}
            )
            print(f"{num_tokens:7d}  {method:<28}{result}", flush=True)
    title = "one causal document over 8 devices, 8 heads of 64, forward and backward"
    common.write(arguments.output, title, rows)
    draw(rows, arguments.pictures / "attention_growth.svg")


if __name__ == "__main__":
    main()
