"""Measures sections of the benchmark of several GPUs; `multi_gpu.sh` starts it for all of them.

    python benchmarks/multi_gpu.py --sections movement,gemm --output report.json

Every process of a job runs it, or one process with all GPUs. Process 0 puts the rows of each
section into the file, beside those of others. Without GPUs, it uses CPU devices (--sizes tiny).
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import sys
import traceback
from typing import Any

import common
import gpu_machine
import jax
from multi_gpu_attention import Attention, MaxText
from multi_gpu_gate import Gate
from multi_gpu_gemm import Gemms
from multi_gpu_movement import Movement
from multi_gpu_programs import ONE_QUEUE, SIZES, Sizes, hosts, of_all, runs_of, sections_of

from jax_cp_dispatch import available_implementations, initialize
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.job import is_in_job
from jax_cp_dispatch.tools.programs import Ranks

NOT_OVER = "it did not end: another process failed, or the time limit ended it; see the output"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the sections of each start")
    parser.add_argument("--sections", default="", help="some of those that --list prints")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--transport", help="that the gate requires; by default any but xla")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; its other rows are kept")
    return parser.parse_args()


def join() -> None:
    """Joins the other processes of a job, if there are any; each uses the GPU of its number.

    multi_gpu.sh sets the place in the job, or Slurm.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "SLURM_STEP_NODELIST" in os.environ:
        jax.distributed.initialize()
    elif (count := int(os.environ.get("NUM_PROCESSES", 1))) > 1:
        jax.distributed.initialize(num_processes=count, process_id=int(os.environ["PROCESS_ID"]))


def why_gpus_are_idle(num_shown: int, num_used: dict[str, int]) -> str | None:
    """Returns which GPUs would not be measured.

    `num_shown` GPUs are those that CUDA shows a process, `num_used` those of all processes by host.
    """
    for host, number in num_used.items():
        if number < num_shown:
            return (
                f"{number} of {num_shown} GPUs of {host} would be measured. Start one process per "
                f"GPU (PROCESSES={num_shown}, or srun --ntasks-per-node={num_shown}) or one for "
                "all (PROCESSES=1), or set CUDA_VISIBLE_DEVICES to the GPUs to measure"
            )
    return None


def require_all_gpus() -> None:
    """Raises RuntimeError in all processes if one of them sees a GPU that none uses."""
    num_shown = runtime.cuda.device_count()[0] if runtime.cuda else 0
    num_used = collections.Counter()
    for host, number in zip(hosts(), of_all("local GPUs", jax.local_device_count()), strict=True):
        num_used[host] += number
    for reason in of_all("idle GPUs", why_gpus_are_idle(num_shown, num_used)):
        if reason:
            raise RuntimeError(reason)


def gpu_memory() -> int | None:
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def make_room(needs: dict[str, int]) -> None:
    """Says what each section needs before memory is taken, and sets what all of them need."""
    memory, gib = gpu_memory(), 1 << 30
    need = sum(needs.values())
    slab = max(need + min(need // 8, gib), gib)  # and some space for alignment
    os.environ.setdefault("JAX_CP_DISPATCH_SYMMETRIC_BYTES", str(slab))
    given = int(os.environ["JAX_CP_DISPATCH_SYMMETRIC_BYTES"])
    if jax.process_index() == 0:
        for name, need in needs.items():
            print(f"{name}: needs {need / gib:.2f} GiB of each GPU for exchanges, and its arrays")
        of = f" of {memory / gib:.0f} GiB that JAX may use" if memory else ""
        print(f"for exchanges: {given / gib:.2f} GiB{of}", flush=True)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def make(name: str, ranks: Any, sizes: Sizes) -> Any:
    """Returns a section: `symmetric_bytes`, what its exchanges need, and `rows()`."""
    kind = name.partition(" ")[0]
    made = {"gate": Gate, "movement": Movement, "gemm": Gemms, "maxtext": MaxText}
    return made[kind](ranks, sizes) if kind in made else Attention(name, ranks, sizes)


def is_first() -> bool:
    """Whether this is process 0 of the job, before it has joined; see `join`."""
    return os.environ.get("PROCESS_ID", os.environ.get("SLURM_PROCID", "0")) == "0"


def keep_errors(output: pathlib.Path | None, names: list[str], error: str) -> None:
    """Puts an error into the file in place of the rows of these sections; all else stays."""
    if output is None or not is_first():
        return
    report = json.loads(output.read_text()) if output.is_file() else {}
    others = [row for row in report.get("rows", []) if row["section"] not in names]
    rows = others + [{"section": name, "error": error} for name in names]
    title = report.get("title", "no section has begun")
    common.write(output, title, rows, **{k: report[k] for k in gpu_machine.ABOUT if k in report})


def make_sections(names: list[str], sizes: Sizes) -> tuple[Any, dict[str, Any]]:
    """Joins the job; returns its ranks, and the sections, whose memory is there."""
    join()
    connect = initialize if is_in_job() else lambda: None
    if jax.default_backend() != "gpu":
        connect()  # no process may trace a program before; on GPUs it needs to know the memory
    else:
        require_all_gpus()
    ranks = Ranks.of_devices(jax.device_count(), sizes.rounds)
    sections = {name: make(name, ranks, sizes) for name in names}
    make_room({name: section.symmetric_bytes for name, section in sections.items()})
    connect()
    return ranks, sections


def main() -> int:
    options = read_options()
    sizes = SIZES[options.sizes]
    if options.list:
        print(*runs_of(sizes), sep="\n")
        return 0
    sizes = dataclasses.replace(sizes, transport=options.transport)
    names = options.sections.split(",")
    if not set(names) <= set(sections_of(sizes)):
        sys.exit(f"--sections is {options.sections!r}. Pass some of {sections_of(sizes)}.")
    # Exchanges take memory that JAX has not reserved.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if names == [ONE_QUEUE]:
        os.environ[gpu_machine.CONNECTIONS] = "1"
    elif names == ["gate"]:
        os.environ.pop(gpu_machine.CONNECTIONS, None)
    keep_errors(options.output, names, NOT_OVER)
    machine = gpu_machine.about() if is_first() else {}
    there = gpu_machine.describe(machine) if machine else ""
    if there:
        print(f"found: {there}", flush=True)
    try:
        ranks, sections = make_sections(names, sizes)
    except Exception as error:
        traceback.print_exc()
        keep_errors(options.output, names, f"{type(error).__name__}: {error}")
        return 1

    found = available_implementations()
    used, reason = next((name, row.reason) for name, row in found.items() if row.available)
    if machine:
        machine["environment"] = gpu_machine.environment()  # with the memory for exchanges
        print(f"transport: {used}: {reason}", flush=True)
    report = common.Report(
        options.output,
        f"{ranks.name}, {jax.devices()[0].device_kind}, {jax.process_count()} processes on "
        f"{len(set(hosts()))} hosts; transport {used} ({reason}); {there}",
        is_silent=jax.process_index() > 0,
        transports={name: list(row) for name, row in found.items()},
        **machine,
    )
    if report.output is not None:
        earlier = json.loads(report.output.read_text())["rows"]
        report.rows = [row for row in earlier if row["section"] not in names]
    for name, section in sections.items():
        rows = lambda name=name, section=section: (
            {"section": name} | rounded(row) for row in section.rows()
        )
        report.section(name, rows, unless_it_ends={"section": name, "error": NOT_OVER})
        sections[name] = None  # frees its arrays
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
