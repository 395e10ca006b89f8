"""The machine of a report on GPUs: what is there, what it lacks, and the file of a report.

    gpu_machine.py found            # one line: GPUs, links, driver, NCCL, variables
    gpu_machine.py lacks build run  # one line, and exit status 1, if it lacks anything for both
    gpu_machine.py report FOLDER    # report.json, from what gpu_report.sh has left in the folder

Imports neither JAX nor the package, which may not be there yet.
"""

import ctypes
import datetime
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
FIELDS = (
    *("index", "name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm"),
    *("clocks.mem", "power.limit", "mig.mode.current", "compute_mode"),
)
MACHINE = {
    "topology": ["nvidia-smi", "topo", "-m"],
    "gpus": ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"],
}
ABOUT = (*MACHINE, "packages", "environment", "transports")
PACKAGES = ("jax", "numpy", "nvidia-", "transformer", "maxtext")
IN_LINE = ("CUDA_", "JAX_CP_DISPATCH_", "MLX5_", "NCCL_", "NVSHMEM_", "UCX_", "XLA_")
IN_FILE = (*IN_LINE, "JAX_", "NVIDIA_", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_STEP_")
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # hardware queues; decides what can overlap

# ---- What is there.


def lines_of(*command: str) -> list[str]:
    """Returns what a command prints; its errors, or why it did not run, if that is nothing."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{type(error).__name__}: {error}"]
    return ran.stdout.splitlines() or ran.stderr.splitlines()


def installed() -> dict[str, str]:
    named = [(each.metadata["Name"] or "", each.version) for each in metadata.distributions()]
    first = dict(reversed(named))  # of those with one name, the one that is imported
    return {name: first[name] for name in sorted(first) if name.startswith(PACKAGES)}


def about() -> dict[str, Any]:
    """Returns the machine as the drivers see it, and what else changes results."""
    found: dict[str, Any] = {name: lines_of(*command) for name, command in MACHINE.items()}
    found["packages"] = installed()
    found["environment"] = environment()
    return found


def environment() -> dict[str, str]:
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(IN_FILE)}


def describe(machine: dict[str, Any]) -> str:
    """Returns the result of `about` in one line."""
    rows = [line.split(", ") for line in machine["gpus"]]
    gpus = [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]
    if not gpus:
        parts = [f"no GPU ({' '.join(machine['gpus']) or 'nvidia-smi prints nothing'})"]
    else:
        each = lambda field: ", ".join(
            value if count == len(gpus) else f"{value} ({count} of {len(gpus)})"
            for value, count in Counter(gpu[field] for gpu in gpus).items()
        )
        parts = [f"{len(gpus)} x {each('name')}", links(machine["topology"])]
        parts += [f"driver {each('driver_version')}"]
        parts += [f"compute mode {each('compute_mode')}"] * (each("compute_mode") != "Default")
        parts += [f"MIG {each('mig.mode.current')}"] * ("Enabled" in each("mig.mode.current"))
    parts += [f"NCCL {nccl(machine['packages'])}"]
    given = machine["environment"]
    parts += [f"{CONNECTIONS} {given.get(CONNECTIONS, 'unset')}"]
    parts += [f"{k}={v}" for k, v in given.items() if k.startswith(IN_LINE) and k != CONNECTIONS]
    return "; ".join(parts)


def links(topology: list[str]) -> str:
    """Says how pairs of GPUs are connected, by the matrix of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in topology]
    rows = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = Counter(row[j] for i, row in enumerate(rows) for j in range(i + 1, len(rows)))
    if len(rows) == 1:
        return "no links"
    if len(pairs) == 1:
        return f"links {next(iter(pairs))} between all"
    return "links " + (", ".join(f"{n} x {name}" for name, n in pairs.most_common()) or "unknown")


def nccl(packages: dict[str, str]) -> str:
    """Returns the version that JAX loads: that of the wheel, or else of the system's library."""
    for name, version in packages.items():
        if name.startswith("nvidia-nccl"):
            return version
    try:
        code = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return "not found"
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


# ---- What it lacks.


def version_in(pattern: str, lines: list[str]) -> tuple[int, ...]:
    """Returns the numbers that the pattern finds, () if none."""
    match = re.search(pattern, "\n".join(lines))
    return tuple(map(int, match[1].split("."))) if match else ()


def lacks(purposes: list[str]) -> list[str]:
    """Returns all that is missing to "build" the extensions, "test" them, or "run" anything."""
    name = os.environ.get("CUDACXX", "nvcc")
    nvcc = version_in(r"V(\d+\.\d+\.\d+)", lines_of(name, "--version"))
    missing = why_no_build(name, nvcc) if "build" in purposes else []
    modules = {"build": ["nanobind"], "test": ["pytest", "hypothesis"], "run": ["jax"]}
    needed = [name for purpose in purposes for name in modules[purpose]]
    missing += [f"no {x} (pip install {x})" for x in needed if not importlib.util.find_spec(x)]
    if "run" in purposes:
        plugins = [x for x in installed() if re.fullmatch(r"jax-cuda\d+-plugin", x)]
        missing += [] if plugins else ["no plugin of JAX for CUDA (pip install 'jax[cuda13]')"]
        toolkit = 13 if nvcc >= (13,) or "jax-cuda13-plugin" in plugins else 12
        oldest = {12: 525, 13: 580}[toolkit]  # the first drivers of CUDA 12 and 13
        found = lines_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = version_in(r"^(\d+)\.\d", found)
        if not driver:
            missing.append(f"no driver (nvidia-smi: {' '.join(found)})")
        elif driver[0] < oldest:
            instead = ", or nvcc and jax[cuda12] of CUDA 12" * (toolkit == 13 and driver[0] >= 525)
            missing.append(f"driver {found[0]}, but CUDA {toolkit} needs {oldest}{instead}")
    return missing


def why_no_build(name: str, nvcc: tuple[int, ...]) -> list[str]:
    """The limits of versions are those that CMake enforces."""
    missing = []
    text = (ROOT / "csrc/cuda_compiler.cmake").read_text()
    oldest, bad, good = (
        tuple(map(int, x.split("."))) for x in re.findall(r"_VERSION VERSION_\w+ ([\d.]+)", text)
    )
    dotted = lambda version: ".".join(map(str, version))
    remedy = f"needs {dotted(oldest)} to 12.6, or 12.9.1 or newer: CUDACXX=/path/to/nvcc"
    if not nvcc:
        missing.append(f"no nvcc ({remedy})")
    elif nvcc < oldest or bad <= nvcc < good:
        missing.append(f"nvcc {dotted(nvcc)} ({remedy})")
    elif (wanted := os.environ.get("ARCHITECTURE")) and (
        f"compute_{wanted}" not in lines_of(name, "--list-gpu-arch")
    ):
        missing.append(f"nvcc {dotted(nvcc)} does not compile for sm_{wanted}")
    text = (ROOT / "CMakeLists.txt").read_text()
    least = version_in(r"cmake_minimum_required\(VERSION ([\d.]+)\)", [text])
    cmake = version_in(r"cmake version (\d+\.\d+\.\d+)", lines_of("cmake", "--version"))
    if cmake < least:
        missing.append(f"cmake {dotted(cmake) or 'not found'} (needs {dotted(least)}: pip install "
                       "cmake)")  # fmt: skip
    if not version_in(r"^(\d+\.\d+)", lines_of("ninja", "--version")):
        missing.append("no ninja (pip install ninja)")
    return missing


# ---- The file of a report.

NOT_FAILED = ("0", "left out", "one GPU", "out of time", "not permitted")
RESULTS = (
    *("kernels", "between_gpus", "gate", "bandwidth", "small_calls", "blocks_beside_gemm", "gemm"),
    *("profile_beside_gemm", "profile_one_queue", "attention"),
)


def write_report(folder: pathlib.Path) -> int:
    """Puts steps and results into report.json, and the transports that passed into report.txt.

    Returns 1 if a step failed; 3 if none did, but one ran out of time.
    """
    lines = (folder / "steps.tsv").read_text().splitlines()
    steps = [tuple(line.split("\t")) for line in lines]
    passed = {name.removeprefix("between GPUs: "): status for name, status, _ in steps
              if name.startswith("between GPUs: ")}  # fmt: skip
    of = ", ".join(f"{x}: {'passed' if s == '0' else s}" for x, s in passed.items())
    text = folder / "report.txt"
    first, _, rest = text.read_text().partition("\n")
    first += f"; transports: {of or 'one GPU, no transport was needed'}"
    text.write_text(f"{first}\n{rest}")
    report = {
        "found": first,
        "date": datetime.date.today().isoformat(),
        **about(),
        "steps": [{"step": n, "status": s, "seconds": int(t)} for n, s, t in steps],
    }
    for name in RESULTS:
        path = folder / f"{name}.json"
        if path.is_file():
            report[name] = json.loads(path.read_text())
            path.unlink()
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "steps.tsv").unlink()
    late = [name for name, status, _ in steps if status == "out of time"]
    failed = [name for name, status, _ in steps if status not in NOT_FAILED]
    print(first)
    print("ran out of time:", ", ".join(late) or "nothing")
    print("failed:", ", ".join(failed) or "nothing")
    return 1 if failed else 3 if late else 0


def main() -> int:
    what, *arguments = sys.argv[1:]
    if what == "found":
        print(f"found: {describe(about())}")
    elif what == "lacks":
        missing = lacks(arguments)
        if missing:
            print(f"this machine lacks: {'; '.join(missing)}")
        return bool(missing)
    else:
        return write_report(pathlib.Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
