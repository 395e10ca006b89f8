"""The native core, without XLA and Python, on its own and under the compiler's sanitizers."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
# Seconds; a test that hangs has found a deadlock.
LIMIT = 120


def compile_and_run(sources, program, *options):
    command = [COMPILER, "-std=c++17", "-g1", *options, f"-I{ROOT / 'csrc'}", *sources]
    subprocess.run([*command, "-pthread", "-ldl", "-o", program], check=True, timeout=LIMIT)
    return subprocess.run([program], capture_output=True, text=True, timeout=LIMIT)


def require_sanitizer(option, folder):
    source = folder / "empty.cc"
    source.write_text("int main() {}\n")
    try:
        works = compile_and_run([source], folder / "empty", option).returncode == 0
    except subprocess.CalledProcessError:
        works = False
    if not works:
        pytest.skip(f"{COMPILER} or this system does not support {option}")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", [None, "thread", "address,undefined"])
def test_native_core(sanitizer, tmp_path):
    options = []
    if sanitizer is not None:
        options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        require_sanitizer(options[0], tmp_path)
    core = [*(ROOT / "csrc/transport").glob("*.cc"), *(ROOT / "csrc/dispatch").glob("*.cc")]
    test = ROOT / "tests/native/test_transport.cc"
    ran = compile_and_run([*core, test], tmp_path / "test_transport", *options)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ok\n"
