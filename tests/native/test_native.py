"""The native core without XLA and Python; `sanitizer_suite.py` runs it under the sanitizers."""

import re

import native_program
import pytest

# Random programs; `tests/native/stress.sh` runs 2,000 in each build.
NUM_PROGRAMS = 25
TESTS = (
    *(*native_program.KERNELS, *native_program.RANKS, *native_program.ON_THREADS),
    *(*native_program.ON_ONE_THREAD, "test_large_offsets"),
)

pytestmark = pytest.mark.skipif(native_program.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return native_program.build(tmp_path_factory.mktemp("native"), TESTS)


def check_core(program, name):
    ran = native_program.run(program, name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"


def check_random_programs(program):
    ran = native_program.run(program, "stress", NUM_PROGRAMS)
    assert ran.returncode == 0, ran.stderr
    counts = {what: int(n) for n, what in re.findall(r"(\d+) ([^,;:]+)", ran.stdout)}
    assert counts["programs"] == NUM_PROGRAMS
    assert min(counts.values()) > 0, counts  # every kind of fault occurred


@pytest.mark.parametrize("name", TESTS)
def test_core(program, name):
    check_core(program, name)


def test_random_programs(program):
    check_random_programs(program)


def test_every_native_test_runs():
    files = {x.stem for x in (native_program.ROOT / "tests/native").glob("test_*.cc")}
    assert files == {*TESTS, *native_program.WITH_SANITIZERS_ONLY}
