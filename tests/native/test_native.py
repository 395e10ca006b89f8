"""The native core without XLA and Python, as one program that is compiled in a few pieces.

`sanitizer_suite.py` runs it under the sanitizers.
"""

import concurrent.futures
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

# Its templates take long to compile.
WITH_SANITIZERS_ONLY = {"test_attention_sizes"}
TESTS = sorted({x.stem for x in (ROOT / "tests/native").glob("test_*.cc")} - WITH_SANITIZERS_ONLY)
ALWAYS = (
    ROOT / "csrc/cuda/errors.cc",
    *(ROOT / "tests/native" / name for name in ("main.cc", "stress.cc")),
)
FOLDERS = "numerics", "transport", "dispatch", "gemm", "gpu_schedule", "planner"


def compile_(folder, *arguments):
    command = [COMPILER, "-std=c++17", f"-I{ROOT / 'csrc'}", *arguments]
    subprocess.run(command, check=True, timeout=LIMIT, cwd=folder)


def library_of_the_package():
    """Returns the library of the core that the installation of this tree has built, or None.

    It is optimized, and compiling the core anew takes a third of these tests' time. One that is
    older than a source does not count.
    """
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".h", ".cc")]
    changed = max(path.stat().st_mtime for path in sources)
    built = ROOT.glob("build/cp*/libcpd_core.a")
    return next((path for path in built if path.stat().st_mtime > changed), None)


def build(folder, tests, *options, core=None):
    """Compiles these tests in one piece, and without a library `core` each folder of its sources.

    Standard headers and templates take most of the time.
    """
    tests = sorted(tests, key=lambda name: "attention" in name)  # has a `Round` of its own
    units = [[*ALWAYS, *(ROOT / f"tests/native/{name}.cc" for name in tests)]]
    units += [sorted((ROOT / "csrc" / x).glob("*.cc")) for x in (() if core else FOLDERS)]
    for number, files in enumerate(units):
        text = "".join(f'#include "{file}"\n' for file in files)
        (folder / f"unit_{number}.cc").write_text(text)
    if "test_cublaslt" in tests:
        library = ROOT / "tests/native/fake_cublaslt.cc"
        compile_(folder, "-shared", "-fPIC", library, "-o", "libfake_cublaslt.so")
    names = [f"unit_{number}" for number in range(len(units))]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: compile_(folder, *options, "-c", f"{name}.cc"), names))
    objects = [*(f"{name}.o" for name in names), *([core] if core else [])]
    compile_(folder, *options, *objects, "-pthread", "-ldl", "-o", "native_tests")
    return folder / "native_tests"


def run(program, *arguments):
    """The address sanitizer says where a trap of the other one is."""
    env = {**os.environ, "ASAN_OPTIONS": "handle_sigill=1"}
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)


# Random programs; `tests/native/stress.sh` runs 2,000 in each build.
NUM_PROGRAMS = 25

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("native"), TESTS, core=library_of_the_package())


def check_core(program, name):
    ran = run(program, name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


def check_random_programs(program):
    ran = run(program, "stress", NUM_PROGRAMS)
    assert ran.returncode == 0, ran.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) ([^,;:]+)", ran.stdout)}
    assert counts["programs"] == NUM_PROGRAMS
    assert min(counts.values()) > 0, counts  # every kind of fault occurred


@pytest.mark.parametrize("name", TESTS)
def test_core(program, name):
    check_core(program, name)


def test_random_programs(program):
    check_random_programs(program)
