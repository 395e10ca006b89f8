"""The check of compiled kernels finds spills, stacks and kernels that are missing."""

import pathlib
import subprocess
import sys

import pytest

CHECK = pathlib.Path(__file__).parents[1] / "csrc/cuda/check_kernels.py"
KERNELS = [
    *("Plan", "Push", "Stage", "Signal", "Wait", "Unpack", "Pull"),
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "Spoil"),
]
NAME = "_ZN3cpd43_GLOBAL__N__2168_10_kernels_cu_0e9e{n}{kernel}KernelENS_6device4CallE"
LINES = f"""\
ptxas info    : Compiling entry function '{NAME}' for 'sm_90'
    {{stack}} bytes stack frame, {{spills}} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers
"""


@pytest.mark.parametrize(
    "name, stack, spills, code",
    [("none", 0, 0, 0), ("Pull", 16, 0, 1), ("Push", 0, 8, 1), ("missing", 0, 0, 1)],
)
def test_what_is_refused(tmp_path, name, stack, spills, code):
    log = "".join(
        LINES.format(
            n=len(kernel) + 6,
            kernel=kernel,
            stack=stack if kernel == name else 0,
            spills=spills if kernel == name else 0,
        )
        for kernel in KERNELS[: -1 if name == "missing" else None]
    )
    # A kernel of several types: the last of them is no better than the worst.
    log += LINES.format(n=len("Pull") + 6, kernel="Pull", stack=0, spills=0) * (name == "Pull")
    path = tmp_path / "build.log"
    path.write_text(log)
    ran = subprocess.run([sys.executable, CHECK, path, "90"], capture_output=True, text=True)
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert ran.stdout.count("<-") == code
