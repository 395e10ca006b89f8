"""Versions of nvcc that would compile wrong kernels are refused when the build is configured."""

import pathlib
import shutil
import subprocess

import pytest

RULE = pathlib.Path(__file__).parents[2] / "csrc/cuda_compiler.cmake"


def said_of(version):
    """Returns the exit status of the rule for a version, and its text in one line."""
    command = ["cmake", f"-DCMAKE_CUDA_COMPILER_VERSION={version}", "-P", RULE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_versions_of_nvcc():
    for fits in "12.4.99", "12.6.85", "12.9.86", "13.0.48":  # the last but one is CUDA 12.9.1
        assert said_of(fits) == (0, "")
    for version in "12.8.61", "12.8.93", "12.9.41":
        code, text = said_of(version)
        assert code != 0 and f"nvcc is {version}, of CUDA 12.8.0 to 12.9.0" in text
        assert "Use CUDA 12.4 to 12.6, or 12.9.1 or newer: CUDACXX=/path/to/nvcc" in text
    code, text = said_of("12.3.107")
    assert code != 0 and "nvcc is 12.3.107 but the kernels need 12.4 or newer" in text
