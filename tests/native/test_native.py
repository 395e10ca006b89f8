"""The native core without XLA and Python: plain, and under the compiler's sanitizers."""

import concurrent.futures
import functools
import os
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

# Each group is compiled in one piece: standard headers and templates take most of the time.
KERNELS = ("test_bulk", "test_device", "test_early_rows", "test_network", "test_one_launch")
RANKS = (
    *("test_transport", "test_shared_memory", "test_shared_overlap", "test_dispatch_buffers"),
    *("test_dispatch_plans", "test_comm_overlap", "test_overlap_buffers", "test_overlap_timing"),
    "stress",
)
ON_ONE_THREAD = (
    *("test_overlap_team", "test_cublaslt", "test_placement", "test_move_queries"),
    "test_attention_kernels",
)
GROUPS = {
    "thread": ((*KERNELS, "test_product_kernels"), RANKS),
    # Sums of every type run on threads as those of the other kernels' tests do.
    "address,undefined": ((*KERNELS, "test_copies"), RANKS, ON_ONE_THREAD),
    # What no sanitizer allows: a multiple of the address space, and neither threads nor memory.
    "": (("test_large_offsets", "test_transport", "test_overlap_buffers"),),
}
# The sources without XLA and Python. The planner has one thread.
FOLDERS = ("transport", "dispatch", "numerics", "gemm", "gpu_schedule")
SOURCES = (ROOT / "csrc/cuda/errors.cc", ROOT / "tests/native/main.cc")
# Parsed once per build.
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
            options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
            if "undefined" in sanitizer:  # traps compile faster than messages
                options.append("-fsanitize-undefined-trap-on-error")
            require_sanitizer(options[0], folder)
        folders = FOLDERS + ("planner",) * (ON_ONE_THREAD in GROUPS[sanitizer])
        units = {name: sorted((ROOT / "csrc" / name).glob("*.cc")) for name in folders}
        for number, names in enumerate(GROUPS[sanitizer]):
            units[f"tests_{number}"] = [ROOT / f"tests/native/{name}.cc" for name in names]
        units["more"] = list(SOURCES)
        headers = [f"#include <{name}>\n" for name in STANDARD_HEADERS]
        (folder / "standard.h").write_text("".join(headers))
        compile_(folder, *options, "-x", "c++-header", "standard.h", "-o", "standard.h.gch")
        for name, sources in units.items():
            text = "".join(f'#include "{source}"\n' for source in sources)
            (folder / f"{name}.cc").write_text(text)
        library = ROOT / "tests/native/fake_cublaslt.cc"
        compile_(folder, "-shared", "-fPIC", library, "-o", "libfake_cublaslt.so")
        to_object = [*options, "-include", folder / "standard.h", "-c"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: compile_(folder, *to_object, f"{name}.cc"), units))
        objects = [f"{name}.o" for name in units]
        compile_(folder, *options, *objects, "-pthread", "-ldl", "-o", "native_tests")
        return folder / "native_tests"

    return build


TESTS = [(build, name) for build, groups in GROUPS.items() for name in sum(groups, ())]


@pytest.mark.parametrize("sanitizer, name", [test for test in TESTS if test[1] != "stress"])
def test_core(programs, sanitizer, name):
    ran = run(programs(sanitizer), name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


@pytest.mark.parametrize("sanitizer", [build for build in GROUPS if build])
def test_random_programs(programs, sanitizer):
    ran = run(programs(sanitizer), "stress", str(NUM_PROGRAMS))
    assert ran.returncode == 0, ran.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) ([^,;:]+)", ran.stdout)}
    assert counts["programs"] == NUM_PROGRAMS
    assert min(counts.values()) > 0, counts  # every kind of fault occurred
