"""Measures sections of the benchmark of several GPUs; `multi_gpu.sh` starts it for all of them.

    python benchmarks/multi_gpu.py --sections movement,gemm --output report.json

Every process of a job runs it, or one process with all GPUs. Process 0 puts the rows of each
section into the file, beside those of others. Without GPUs, it uses CPU devices (--sizes tiny).
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import traceback
from importlib import metadata
from typing import Any

from multi_gpu_sizes import SIZES, Sizes, runs_of, sections_of

MACHINE = {
    "topology": ["nvidia-smi", "topo", "-m"],
    "gpus": [
        "nvidia-smi",
        "--query-gpu=index,name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,"
        "power.limit,mig.mode.current",
        "--format=csv,noheader",
    ],
}
ABOUT = (*MACHINE, "packages", "environment", "transports")
RECORDED = ("XLA_", "JAX_", "NCCL_", "NVSHMEM_", "CUDA_VISIBLE", "UCX_", "SLURM_JOB_NUM_NODES")
PACKAGES = ("jax", "nvidia-", "transformer", "maxtext")
NOT_OVER = "it did not end: another process failed, or the time limit ended it; see the output"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the sections of each start")
    parser.add_argument("--sections", default="", help="some of those that --list prints")
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; its other rows are kept")
    return parser.parse_args()


def join() -> None:
    """Joins the other processes of a job, if there are any; each uses the GPU of its number.

    multi_gpu.sh sets the place in the job, or Slurm.
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if "SLURM_STEP_NODELIST" in os.environ:
        jax.distributed.initialize()
    elif (count := int(os.environ.get("NUM_PROCESSES", 1))) > 1:
        jax.distributed.initialize(num_processes=count, process_id=int(os.environ["PROCESS_ID"]))


def gpu_memory() -> int | None:
    import jax

    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit")


def make_room(needs: dict[str, int]) -> None:
    """Says what each section needs before memory is taken, and sets what all of them need."""
    import jax

    memory, gib = gpu_memory(), 1 << 30
    need = sum(needs.values())
    os.environ.setdefault("JAX_CP_DISPATCH_SYMMETRIC_BYTES", str(max(need + need // 8, gib)))
    given = int(os.environ["JAX_CP_DISPATCH_SYMMETRIC_BYTES"])
    if jax.process_index() == 0:
        for name, need in needs.items():
            print(f"{name}: needs {need / gib:.2f} GiB of each GPU for exchanges, and its arrays")
        of = f" of {memory / gib:.0f} GiB that JAX may use" if memory else ""
        print(f"for exchanges: {given / gib:.2f} GiB{of}", flush=True)


def about() -> dict[str, object]:
    """Returns the machine as the drivers see it, and what else changes results."""
    found: dict[str, object] = {}
    for name, command in MACHINE.items():
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
            found[name] = ran.stdout.splitlines() or ran.stderr.splitlines()
        except (OSError, subprocess.TimeoutExpired) as error:
            found[name] = f"{type(error).__name__}: {error}"
    named = ((each.metadata["Name"] or "", each.version) for each in metadata.distributions())
    found["packages"] = {
        name: version for name, version in sorted(named) if name.startswith(PACKAGES)
    }
    found["environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(RECORDED)}
    return found


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}


def make(name: str, ranks: Any, sizes: Sizes) -> Any:
    """Returns a section: `symmetric_bytes`, what its exchanges need, and `rows()`."""
    from multi_gpu_attention import Attention
    from multi_gpu_gate import Gate
    from multi_gpu_gemm import Gemms
    from multi_gpu_movement import Movement
    from multi_gpu_peers import MaxText

    kind, *tokens = name.split()
    made = {"gate": Gate, "movement": Movement, "gemm": Gemms, "maxtext": MaxText}
    return made[kind](ranks, sizes) if kind in made else Attention(kind, int(*tokens), ranks, sizes)


def is_first() -> bool:
    """Whether this is process 0 of the job, before it has joined; see `join`."""
    return os.environ.get("PROCESS_ID", os.environ.get("SLURM_PROCID", "0")) == "0"


def keep_errors(output: pathlib.Path | None, names: list[str], error: str) -> None:
    """Puts an error into the file in place of the rows of these sections; all else stays."""
    import common

    if output is None or not is_first():
        return
    report = json.loads(output.read_text()) if output.is_file() else {}
    others = [row for row in report.get("rows", []) if row["section"] not in names]
    rows = others + [{"section": name, "error": error} for name in names]
    title = report.get("title", "no section has begun")
    common.write(output, title, rows, **{k: report[k] for k in ABOUT if k in report})


def make_sections(names: list[str], sizes: Sizes) -> tuple[Any, dict[str, Any]]:
    """Joins the job; returns its ranks, and the sections, whose memory is there."""
    join()

    import jax

    from jax_cp_dispatch import initialize
    from jax_cp_dispatch._ranks.job import is_in_job
    from jax_cp_dispatch.tools.programs import Ranks

    connect = initialize if is_in_job() else lambda: None
    if jax.default_backend() != "gpu":
        connect()  # no process may trace a program before; on GPUs it needs to know the memory
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
    names = options.sections.split(",")
    if not set(names) <= set(sections_of(sizes)):
        sys.exit(f"--sections is {options.sections!r}. Pass some of {sections_of(sizes)}.")
    # Exchanges take memory that JAX has not reserved.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    keep_errors(options.output, names, NOT_OVER)
    try:
        ranks, sections = make_sections(names, sizes)
    except Exception as error:
        traceback.print_exc()
        keep_errors(options.output, names, f"{type(error).__name__}: {error}")
        return 1

    import common
    import jax
    from multi_gpu_programs import hosts

    from jax_cp_dispatch import available_implementations

    report = common.Report(
        options.output,
        f"{ranks.name}, {jax.devices()[0].device_kind}, {jax.process_count()} processes on "
        f"{len(set(hosts()))} hosts",
        is_silent=jax.process_index() > 0,
        transports={name: list(row) for name, row in available_implementations().items()},
        **about(),
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
