"""The native core under ThreadSanitizer, and under AddressSanitizer and UndefinedBehaviorSanitizer.

And the mutants that check the model of `test_weak_memory.py`.
Not part of the suite: `./run sanitizers` runs it, as continuous integration does.
"""

import subprocess

import pytest
import test_native as native
import test_weak_memory as weak_memory
from test_native import check_core, check_random_programs

# What no sanitizer allows: a multiple of the address space.
NEVER = {"test_large_offsets"}
ON_ONE_THREAD = {
    *("test_overlap_team", "test_cublaslt", "test_placement", "test_move_queries"),
    *("test_attention_kernels", "test_exchange_pairs", "test_copies", "test_stream_copy"),
}
# Sums of every type run on threads as those of the other kernels' tests do.
ON_THREADS = {"test_sum_kernels", "test_layout_kernels", "test_meeting", "test_slab"}
TESTS = {
    "thread": sorted({*native.TESTS} - NEVER - ON_ONE_THREAD),
    "address,undefined": sorted({*native.TESTS, *native.WITH_SANITIZERS_ONLY} - NEVER - ON_THREADS),
}

pytestmark = pytest.mark.skipif(native.COMPILER is None, reason="no C++ compiler")


def require_sanitizer(option, folder):
    (folder / "empty.cc").write_text("int main() {}\n")
    try:
        native.compile_(folder, option, "empty.cc", "-o", "empty")
        works = native.run(folder / "empty").returncode == 0
    except subprocess.CalledProcessError:
        works = False
    if not works:
        pytest.skip(f"{native.COMPILER} or this system does not support {option}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Maps a sanitizer to the program of its tests, which is built once, also if it fails."""
    built = {}

    def build(sanitizer):
        if sanitizer not in built:
            folder = tmp_path_factory.mktemp("native")
            options = [f"-fsanitize={sanitizer}", "-g1", "-fno-sanitize-recover=all"]
            if "undefined" in sanitizer:  # traps compile faster than messages
                options.append("-fsanitize-undefined-trap-on-error")
            require_sanitizer(options[0], folder)
            built[sanitizer] = None
            built[sanitizer] = native.build(folder, TESTS[sanitizer], *options)
        assert built[sanitizer], "it did not compile for the first of these tests"
        return built[sanitizer]

    return build


@pytest.mark.parametrize(
    "sanitizer, name", [(sanitizer, name) for sanitizer in TESTS for name in TESTS[sanitizer]]
)
def test_core(programs, sanitizer, name):
    check_core(programs(sanitizer), name)


@pytest.mark.parametrize("sanitizer", TESTS)
def test_random_programs(programs, sanitizer):
    check_random_programs(programs(sanitizer))


model = weak_memory.model


@weak_memory.needs_relacy
@pytest.mark.parametrize("mutant", weak_memory.MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_found(model, tmp_path, mutant):
    weak_memory.check_mutant(model, tmp_path, mutant)
