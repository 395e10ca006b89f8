"""Checks versions, devices, GPUs, shared memory and limits. Reports what is missing and how to get
it. Tests every available transport. Exits with 1 if something is wrong."""

import argparse
import ctypes.util
import itertools
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._dispatch.movement import combine, dispatch
from jax_cp_dispatch._ranks.implementations import available_implementations
from jax_cp_dispatch._ranks.processes import initialize
from jax_cp_dispatch.attention.local.gpu import largest_of_cudnn, why_not
from jax_cp_dispatch.cpu_devices import start_cpu_devices, warn_of_deadlock
from jax_cp_dispatch.metadata import compute_metadata
from jax_cp_dispatch.scenarios import orchestrate_simulate
from jax_cp_dispatch.tools import MOST_DEVICES, at_most, has_gpu, start_on_cpu, version_of
from jax_cp_dispatch.tools.programs import AXIS, Ranks

HELP = "report what this machine offers and lacks, and test each transport"
_MARKS = {"ok": "ok", "missing": "--", "wrong": "XX"}


class Finding(NamedTuple):
    name: str  # what was checked
    found: str  # what was found
    # "ok"; "missing" if the package works without it; "wrong" if it does not
    verdict: Literal["ok", "missing", "wrong"] = "ok"
    remedy: str = ""  # what to do, if anything

    def __str__(self) -> str:
        line, margin = f"{_MARKS[self.verdict]}  {self.name:<26} {self.found}", " " * 31
        remedy = textwrap.wrap(self.remedy, 92 - len(margin), break_on_hyphens=False)
        return "\n".join([line, *(margin + x for x in remedy)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON on standard output")
    devices = "virtual CPU devices to test if JAX uses the CPU (default 4)"
    add("--devices", type=at_most(MOST_DEVICES), default=4, help=devices)


def run(options: argparse.Namespace) -> int:
    """Returns 1 if anything is wrong; missing parts do not count."""
    if start_on_cpu():
        start_cpu_devices(options.devices)
    findings = []
    in_processes = (try_processes() for _ in [0])  # lazily
    for finding in itertools.chain(look_at_machine(), try_implementations(), in_processes):
        findings.append(finding)
        if not options.json:
            print(finding, flush=True)
    is_well = all(finding.verdict != "wrong" for finding in findings)
    if options.json:
        print(json.dumps({"ok": is_well, "findings": [f._asdict() for f in findings]}, indent=2))
    else:
        print("\nok: works.  --: missing, but optional.  XX: broken.")
        print("Everything works." if is_well else "Something is wrong: see XX.")
    return 0 if is_well else 1


# ---- The machine.

_HEADS = (64, 128, 256)
# The receive buffers of a model soon fill less shared memory than this.
_SMALL_SHARED_MEMORY = 1 << 30


def look_at_machine() -> Iterator[Finding]:
    """Yields findings; starts JAX's backend."""
    gigabytes = lambda count: f"{count / 2**30:.1f} GiB"
    memory = gigabytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    cores = len(os.sched_getaffinity(0))
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("processor", f"{platform.machine()}, {cores} cores, {memory}")
    yield Finding("jax", f"{jax.__version__}, jaxlib {version_of('jaxlib')}")

    threads = Finding("threads of XLA", f"PJRT_NPROC={os.environ.get('PJRT_NPROC', '(not set)')}")
    try:
        devices = jax.devices()
        found = f"{len(devices)} of {devices[0].platform}, {jax.process_count()} process(es)"
        remedy = "For several virtual ones: jax_cp_dispatch.cpu_devices.start_cpu_devices(n)."
        yield _optional("devices", found, len(devices) > 1, remedy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_deadlock(jax.local_device_count() if jax.default_backend() == "cpu" else 0)
        if caught:
            remedy = f"Set {str(caught[0].message).rsplit('Set ', 1)[-1]}"
            threads = threads._replace(verdict="wrong", remedy=remedy)
    except Exception as error:  # JAX raises errors of several classes
        remedy = "Set JAX_PLATFORMS=cpu, or repair the platform that JAX names."
        yield Finding("devices", _first_line(error), "wrong", remedy)
    yield threads

    if has_gpu():
        plugin = version_of("jax-cuda13-plugin", "jax-cuda12-plugin")
        found = f"and JAX's CUDA plugin {plugin}" if plugin else "but JAX has no CUDA plugin"
        remedy = "pip install 'jax[cuda13]', or [cuda12] for an older driver."
        yield _optional("GPU", f"a driver, {found}", plugin is not None, remedy)
        reasons = {size: why_not(jnp.dtype("bfloat16"), (size, size)) for size in _HEADS}
        served = [size for size, reason in reasons.items() if reason is None]
        found = f"slow passes: {reasons[_HEADS[0]]}"
        if served:
            kernels = "kernels for bfloat16 and float16; slow passes for float32 and heads above"
            found = f"{kernels} {max(served)}; cuDNN for one dense document, heads of at most "
            found += " and ".join(str(largest_of_cudnn(backward)) for backward in (False, True))
            found += " forward and backward"
        remedy = "Build the package with CUDA, and do not set JAX_CP_DISPATCH_ATTENTION_KERNEL=0."
        yield _optional("attention on GPUs", found, bool(served), remedy)
    else:
        remedy = "Only for GPUs: a machine with an NVIDIA GPU and its driver."
        yield Finding("GPU", "no NVIDIA driver", "missing", remedy)
    package = version_of("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    nvshmem = f"package {package}" if package else ctypes.util.find_library("nvshmem_host")
    found = nvshmem or "neither package nor library"
    remedy = "Only for GPUs of several hosts: pip install nvidia-nvshmem-cu13 (or -cu12)."
    yield _optional("NVSHMEM", found, nvshmem is not None, remedy)

    folder = pathlib.Path("/dev/shm")
    if folder.is_dir() and os.access(folder, os.W_OK):
        usage = shutil.disk_usage(folder)
        found = f"/dev/shm has {gigabytes(usage.free)} free of {gigabytes(usage.total)}"
        remedy = "Enlarge it: mount -o remount,size=8G /dev/shm; for a container --shm-size=8g."
        yield _optional("shared memory", found, usage.free >= _SMALL_SHARED_MEMORY, remedy)
    else:
        remedy = "Mount it: mount -t tmpfs tmpfs /dev/shm."
        yield Finding("shared memory", "/dev/shm cannot be written", "missing", remedy)
    setting = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = setting.read_text().strip() if setting.is_file() else "0"
    remedy = "Only for copies straight into a peer's memory: sysctl kernel.yama.ptrace_scope=0."
    yield _optional("memory of other processes", f"ptrace_scope is {scope}", scope == "0", remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = soft == resource.RLIM_INFINITY or soft >= 1024
    remedy = "Only for jobs of several processes: raise the limit, ulimit -n 1024."
    yield _optional("open files", f"{soft}, at most {hard}", is_enough, remedy)

    version, remedy = version_of("matplotlib"), "pip install 'jax_cp_dispatch[plots]'."
    found = f"matplotlib {version}" if version else "no matplotlib"
    yield _optional("pictures", found, version is not None, remedy)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")


def _optional(name: str, found: str, is_there: bool, remedy: str) -> Finding:
    return Finding(name, found) if is_there else Finding(name, found, "missing", remedy)


# ---- The transports.

_SLOTS, _REPLICAS, _FEATURES = 4, 2, 8
_PROCESSES, _LIMIT = 2, 60  # seconds
_RIGHT = "right"


def try_implementations() -> Iterator[Finding]:
    """Yields a finding for each transport, except that between processes."""
    try:
        table = available_implementations()
    except Exception as error:
        remedy = "Repair the devices first. If JAX has some, report this with the output."
        yield Finding("transports", _first_line(error), "wrong", remedy)
        return
    for name, implementation in table.items():
        if name == "shared_memory":
            continue
        if not implementation.available:
            yield Finding(f"transport {name}", implementation.reason, "missing")
            continue
        start = time.perf_counter()
        try:
            wrong = move_rows(name)
        except Exception as error:  # any error is a finding
            wrong = _first_line(error)
        yield _tried(name, f"on {jax.device_count()} ranks", start, wrong)


def try_processes() -> Finding:
    """Tests shared memory between two processes of this host, which run this file."""
    start, wrong = time.perf_counter(), ""
    launch = ["-m", "jax_cp_dispatch.launch", f"--processes={_PROCESSES}", __file__]
    try:
        done = subprocess.run(
            [sys.executable, *launch], capture_output=True, text=True, timeout=_LIMIT
        )
        said = [line.partition("] ")[2] for line in done.stdout.splitlines()]
        if done.returncode or said.count(_RIGHT) != _PROCESSES:
            last = (done.stderr or done.stdout or "nothing").strip().splitlines()[-1]
            wrong = f"{_PROCESSES} processes ended with {done.returncode}: {last}"
    except subprocess.TimeoutExpired:
        wrong = f"{_PROCESSES} processes did not end within {_LIMIT} s"
    return _tried("shared_memory", f"between {_PROCESSES} processes", start, wrong)


def _tried(name: str, where: str, start: float, wrong: str) -> Finding:
    if wrong:
        return Finding(f"transport {name}", wrong, "wrong", "Report this with the output.")
    seconds = time.perf_counter() - start
    found = f"dispatch and combine are correct {where}, {seconds:.1f} s"
    return Finding(f"transport {name}", found)


def move_rows(name: str) -> str:
    """Sends random shards to random ranks and back; returns the error found here, or ""."""
    ranks, rng = Ranks.of_devices(jax.device_count(), repeats=1), np.random.default_rng(0)
    lengths = rng.integers(0, 6, (ranks.count, _SLOTS))
    where = rng.integers(-1, ranks.count, (ranks.count, _SLOTS, _REPLICAS))
    plan, _ = compute_metadata(lengths, where)
    num_tokens = int(lengths.sum(1).max())
    capacity = int(np.asarray(plan.num_total_recv_tokens).max())
    x = rng.normal(size=(ranks.count, num_tokens, _FEATURES)).astype(np.float32)

    options: Any = {"axis_name": AXIS, "implementation": name}
    there = ranks.program(partial(dispatch, capacity=capacity, **options))
    back = ranks.program(partial(combine, num_tokens=num_tokens, **options))
    metadata = jax.tree.map(ranks.put, plan)
    received = there(ranks.put(x.reshape(-1, _FEATURES)), metadata)
    blank = np.zeros((ranks.count, capacity, _FEATURES), np.float32)
    if not _is_equal(received, orchestrate_simulate(x, blank, plan)):
        return "dispatch returned the wrong rows"
    copies = np.zeros((ranks.count, num_tokens, 1), np.float32)
    for of_rank, sent, rows in zip(copies, (where >= 0).sum(-1), lengths, strict=True):
        of_rank[: rows.sum(), 0] = np.repeat(sent, rows)
    is_home = _is_equal(back(received, metadata), x * copies)
    return "" if is_home else "combine returned the wrong sums"


def _is_equal(result: jax.Array, expected: Any) -> bool:
    """Compares the part of the result that this process holds."""
    whole = np.asarray(expected).reshape(result.shape)
    return all(np.array_equal(s.data, whole[s.index]) for s in result.addressable_shards)


if __name__ == "__main__":  # a process of `try_processes`
    initialize()
    print(move_rows("shared_memory") or _RIGHT, flush=True)
