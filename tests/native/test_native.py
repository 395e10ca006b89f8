"""The native core without XLA and Python: plain, and under the compiler's sanitizers."""

import concurrent.futures
import functools
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# Seconds. Only a deadlock takes this long, however busy the machine is.
LIMIT = 1200
# Random programs here; `tests/native/stress.sh` runs 2,000 in each build.
NUM_PROGRAMS = 25

# The sanitizers check more than the plain build, but need a multiple of the address space.
LARGE = ("test_large_offsets",)
TESTS = (
    "test_transport",
    "test_shared_memory",
    "test_shared_overlap",
    "test_dispatch_buffers",
    "test_dispatch_plans",
    "test_comm_overlap",
    "test_overlap_buffers",
    "test_overlap_timing",
    "test_bulk",
    "test_device",
    "test_early_rows",
    "test_movers",
    "test_one_launch",
    "test_network",
    "stress",
)
ON_ONE_THREAD = ("test_overlap_team", "test_cublaslt", "test_placement", "test_move_queries")
BUILDS = {
    "thread": (*TESTS, "test_product_kernels"),
    "address,undefined": TESTS + ON_ONE_THREAD,
    "": LARGE,
}
# The sources without XLA and Python that the tests of a build need.
EXCHANGES = ("transport", "dispatch", "numerics")
FOLDERS = {
    "thread": (*EXCHANGES, "gemm", "gpu_schedule"),
    "address,undefined": (*EXCHANGES, "gemm", "gpu_schedule", "planner"),
    "": EXCHANGES,
}
# What a test opens as a library, or also needs from the CUDA folders.
LIBRARIES = {"test_cublaslt": "fake_cublaslt"}
SOURCES = (ROOT / "csrc/cuda/errors.cc",)
# Parsing these takes a quarter of the time of a source: each build does it once.
STANDARD_HEADERS = (
    *("algorithm", "atomic", "chrono", "cmath", "condition_variable", "cstdint", "cstdio"),
    *("cstdlib", "cstring", "deque", "functional", "map", "memory", "mutex", "random", "set"),
    *("string", "string_view", "thread", "utility", "vector"),
)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_(folder, *arguments):
    command = [COMPILER, "-std=c++17", "-g1", f"-I{ROOT / 'csrc'}", *arguments]
    subprocess.run(command, check=True, timeout=LIMIT, cwd=folder)


def run(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=LIMIT)


def require_sanitizer(option, folder):
    (folder / "empty.cc").write_text("int main() {}\n")
    try:
        compile_(folder, option, "empty.cc", "-o", "empty")
        works = run(folder / "empty").returncode == 0
    except subprocess.CalledProcessError:
        works = False
    if not works:
        pytest.skip(f"{COMPILER} or this system does not support {option}")


def unit_of(name, folder):
    """Includes the sources of a folder in one file: standard headers take most of the time."""
    unit = folder / f"all_of_{name}.cc"
    sources = sorted((ROOT / "csrc" / name).glob("*.cc"))
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    return unit


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Maps a sanitizer to the folder of its tests/native programs; each is built once."""

    @functools.cache
    def build(sanitizer):
        folder = tmp_path_factory.mktemp("native")
        options = []
        if sanitizer:
            options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
            require_sanitizer(options[0], folder)
        core = [*(unit_of(name, folder) for name in FOLDERS[sanitizer]), *SOURCES]
        tests = [ROOT / f"tests/native/{name}.cc" for name in BUILDS[sanitizer]]
        lines = [f"#include <{name}>\n" for name in STANDARD_HEADERS]
        (folder / "standard.h").write_text("".join(lines))
        compile_(folder, *options, "-x", "c++-header", "standard.h", "-o", "standard.h.gch")
        to_object = [*options, "-include", folder / "standard.h", "-c"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda source: compile_(folder, *to_object, source), core + tests))
        objects = [source.with_suffix(".o").name for source in core]
        for test in tests:
            arguments = [test.with_suffix(".o").name, *objects, "-pthread", "-ldl", "-o", test.stem]
            compile_(folder, *options, *arguments)
            if library := LIBRARIES.get(test.stem):
                source = ROOT / f"tests/native/{library}.cc"
                compile_(folder, "-shared", "-fPIC", source, "-o", f"lib{library}.so")
        return folder

    return build


@pytest.mark.parametrize(
    "sanitizer, name",
    [(build, name) for build, names in BUILDS.items() for name in names if name != "stress"],
)
def test_core(programs, sanitizer, name):
    ran = run(programs(sanitizer) / name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


@pytest.mark.parametrize("sanitizer", [build for build in BUILDS if build])
def test_random_programs(programs, sanitizer):
    ran = run(programs(sanitizer) / "stress", str(NUM_PROGRAMS))
    assert ran.returncode == 0, ran.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) ([^,;:]+)", ran.stdout)}
    assert counts["programs"] == NUM_PROGRAMS
    assert min(counts.values()) > 0, counts  # every kind of fault occurred
