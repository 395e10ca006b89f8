"""The demonstration's steps, in the order in which a user would take them."""

import argparse
import pathlib
import statistics
import sysconfig
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._command import InputError, end_command
from jax_cp_dispatch._progress import Progress
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.demo.command_line import check_arguments
from jax_cp_dispatch.demo.packing import pack_documents, read_documents
from jax_cp_dispatch.demo.programs import (
    AXIS,
    attention_alone,
    attention_and_gradients,
    embed,
    movement_alone,
    random_received_rows,
)
from jax_cp_dispatch.demo.reference import largest_difference
from jax_cp_dispatch.demo.report import report
from jax_cp_dispatch.planner import Plan, plan_attention
from jax_cp_dispatch.plots import plot_plan

TOLERANCE = 2e-5  # of float32 results, relative to the largest entry


def median_seconds(run: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """Returns the median time of several runs after one warm-up run."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status: 0, 1 if a result is wrong, 2 if an argument
    is not usable."""
    return end_command("demo", _run, arguments)


def _run(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    progress = Progress(7)
    folder = arguments.folder
    is_default = folder == pathlib.Path(sysconfig.get_path("stdlib"))
    pattern = arguments.pattern or ("*.py" if is_default else "*")

    check_arguments(arguments, pattern)
    num_tokens = arguments.ranks * arguments.tokens_per_rank
    start_cpu_devices(arguments.ranks)
    with progress.step(f"reading {folder}"):
        packed = pack_documents(
            read_documents(folder, pattern=pattern, seed=arguments.seed),
            num_tokens=num_tokens,
            longest=max(1, num_tokens // 8),  # the reference has all logits in memory
        )
    if not packed.spans:
        raise InputError(f"no text file matches {pattern!r} below {folder}. Pass --pattern.")

    def make_plan() -> Plan:
        return plan_attention(packed.segment_ids, packed.positions, world_size=arguments.ranks)

    with progress.step("planning"):
        plan = make_plan()
        planning = median_seconds(make_plan)
    mesh = Mesh(np.array(jax.devices()[: arguments.ranks]), (AXIS,))
    operands = [
        jax.device_put(x, NamedSharding(mesh, P(None, AXIS))) for x in embed(packed, arguments.seed)
    ]
    plan = jax.device_put(plan, NamedSharding(mesh, P(AXIS)))

    program = attention_and_gradients(mesh)
    with progress.step("compiling attention, forward and backward"):
        compiled = program.lower(*operands, plan).compile()
    with progress.step(f"running it over {arguments.ranks} devices"):
        results = compiled(*operands, plan)
        together = median_seconds(compiled, *operands, plan, repeats=1)
    with progress.step("checking against dense attention, by document") as show:
        differences = largest_difference(
            packed, [np.asarray(x) for x in operands], [np.asarray(x) for x in results], show
        )
    with progress.step("timing movement and attention separately"):
        movement = median_seconds(movement_alone(mesh), *operands[:3], plan)
        received = random_received_rows(plan, mesh)
        attention = median_seconds(attention_alone(mesh), *received, plan, repeats=1)
    with progress.step(f"drawing {arguments.picture}"):
        try:
            plot_plan(plan, arguments.picture)
            picture = f"{arguments.picture}"
        except ImportError as error:
            picture = f"none: {error}"

    seconds = {
        "planning": planning,
        "movement": movement,
        "attention": attention,
        "the program": together,
    }
    is_right = report(packed, plan, seconds, differences, TOLERANCE)
    print(f"picture               {picture}")
    print(f"whole demonstration   {time.perf_counter() - begin:.1f} s")
    return 0 if is_right else 1
