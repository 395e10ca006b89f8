"""The native core without XLA and Python: plain, and under the compiler's sanitizers."""

import concurrent.futures
import functools
import os
import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# Seconds. Only a deadlock takes this long, however busy the machine is.
LIMIT = 1200
# Random programs here; `tests/native/stress.sh` runs 2,000 in each build.
NUM_PROGRAMS = 25

KERNELS = (
    *("test_bulk", "test_device", "test_early_rows", "test_network", "test_one_launch"),
    "test_small_calls",
)
RANKS = (
    *("test_transport", "test_transport_failures", "test_completions", "test_waiting_tasks"),
    *("test_shared_memory", "test_shared_overlap", "test_shared_overlap_failures"),
    *("test_dispatch_buffers", "test_dispatch_plans", "test_comm_overlap"),
    *("test_overlap_buffers", "test_overlap_timing", "stress"),
)
ON_ONE_THREAD = (
    *("test_overlap_team", "test_cublaslt", "test_placement", "test_move_queries"),
    *("test_attention_kernels", "test_exchange_pairs"),
)
EXCHANGES = ("numerics", "transport", "dispatch")


class Build(NamedTuple):
    """The tests of a program, and the folders and files of csrc that they need.

    All tests are compiled in one piece, and each group of sources: standard headers and templates
    take most of the time.
    """

    tests: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]


BUILDS = {
    "thread": Build(
        (*KERNELS, "test_sum_kernels", "test_layout_kernels", "test_meeting", "test_slab", *RANKS),
        ((*EXCHANGES, "gemm"),),
    ),
    # Sums of every type run on threads as those of the other kernels' tests do.
    "address,undefined": Build(
        (*KERNELS, "test_copies", *RANKS, *ON_ONE_THREAD),
        ((*EXCHANGES, "gemm", "gpu_schedule"), ("planner",)),
    ),
    # What no sanitizer allows: a multiple of the address space, and neither threads nor memory.
    "": Build(
        ("test_large_offsets", "test_completions", "test_overlap_buffers"),
        ((*EXCHANGES, "gemm/overlap_buffers.cc"),),
    ),
}
ALWAYS = (
    *(ROOT / "csrc/cuda" / name for name in ("errors.cc", "slab.cc")),
    ROOT / "tests/native/main.cc",
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def files_of(path):
    return sorted(path.glob("*.cc")) if path.is_dir() else [path]


def compile_(folder, *arguments):
    command = [COMPILER, "-std=c++17", f"-I{ROOT / 'csrc'}", *arguments]
    subprocess.run(command, check=True, timeout=LIMIT, cwd=folder)


def run(program, *arguments):
    """The address sanitizer says where a trap of the other one is."""
    env = {**os.environ, "ASAN_OPTIONS": "handle_sigill=1"}
    command = [program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)


def require_sanitizer(option, folder):
    (folder / "empty.cc").write_text("int main() {}\n")
    try:
        compile_(folder, option, "empty.cc", "-o", "empty")
        works = run(folder / "empty").returncode == 0
    except subprocess.CalledProcessError:
        works = False
    if not works:
        pytest.skip(f"{COMPILER} or this system does not support {option}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Maps a sanitizer to the program of its tests, which is built once."""

    @functools.cache
    def build(sanitizer):
        folder = tmp_path_factory.mktemp("native")
        options = []
        if sanitizer:
            options = ["-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
            if "undefined" in sanitizer:  # traps compile faster than messages
                options.append("-fsanitize-undefined-trap-on-error")
            require_sanitizer(options[1], folder)
        tests, sources = BUILDS[sanitizer]
        units = [[*ALWAYS, *(ROOT / f"tests/native/{name}.cc" for name in tests)]]
        for group in sources:
            units.append([file for name in group for file in files_of(ROOT / "csrc" / name)])
        for number, files in enumerate(units):
            text = "".join(f'#include "{file}"\n' for file in files)
            (folder / f"unit_{number}.cc").write_text(text)
        if "test_cublaslt" in tests:
            library = ROOT / "tests/native/fake_cublaslt.cc"
            compile_(folder, "-shared", "-fPIC", library, "-o", "libfake_cublaslt.so")
        names = [f"unit_{number}" for number in range(len(units))]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: compile_(folder, *options, "-c", f"{name}.cc"), names))
        objects = [f"{name}.o" for name in names]
        compile_(folder, *options, *objects, "-pthread", "-ldl", "-o", "native_tests")
        return folder / "native_tests"

    return build


TESTS = [(name, test) for name, build in BUILDS.items() for test in build.tests]


@pytest.mark.parametrize("sanitizer, name", [test for test in TESTS if test[1] != "stress"])
def test_core(programs, sanitizer, name):
    ran = run(programs(sanitizer), name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


@pytest.mark.parametrize("sanitizer", [name for name in BUILDS if name])
def test_random_programs(programs, sanitizer):
    ran = run(programs(sanitizer), "stress", str(NUM_PROGRAMS))
    assert ran.returncode == 0, ran.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) ([^,;:]+)", ran.stdout)}
    assert counts["programs"] == NUM_PROGRAMS
    assert min(counts.values()) > 0, counts  # every kind of fault occurred
