"""The check of compiled kernels finds spills, stack frames, few blocks and missing kernels."""

import pathlib
import subprocess
import sys

import pytest

CHECK = pathlib.Path(__file__).parents[2] / "csrc/cuda/check_kernels.py"
KERNELS = [
    *("Plan", "Push", "Stage", "Wait", "Unpack", "Pull"),
    *("WaitSome", "UnpackReady", "SmallDispatch", "SmallCombine"),
    *("Attend", "QueryGradients", "KeyGradients"),
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "End", "Hold"),
]
NAME = "_ZN3cpd43_GLOBAL__N__2168_10_kernels_cu_0e9e{n}{kernel}KernelENS_6device4CallE"
LINES = """\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
    {stack} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem
"""

OVER_NVSHMEM = [*KERNELS[:6], "Signal", "StageToPut", "Put", "Fetch", "Quiet"]
NVSHMEM_NAME = "__nv_static_45__18_nvshmem_kernels_cu_9d{n}{kernel}KernelINS0_7NvshmemEEEvNS4_CallE"
LINKED = f"""\
nvlink info    : Function properties for '{NVSHMEM_NAME}': (target: sm_90a)
nvlink info    : used 44 registers, used 1 barriers, {{stack}} stack, 0 bytes smem
"""


def name_of(kernel):
    return NAME.format(n=len(kernel) + 6, kernel=kernel)


def lines_of(kernel, stack=0, spills=0, registers=64, shared=128):
    numbers = {"stack": stack, "spills": spills, "registers": registers, "shared": shared}
    return LINES.format(name=name_of(kernel), **numbers)


def check(tmp_path, log):
    path = tmp_path / "build.log"
    path.write_text(log)
    ran = subprocess.run([sys.executable, CHECK, path, "90"], capture_output=True, text=True)
    assert ran.stdout.count("<-") == ran.returncode, ran.stderr
    return ran.returncode, ran.stdout


@pytest.mark.parametrize(
    "name, stack, spills, code",
    [("none", 0, 0, 0), ("Pull", 16, 0, 1), ("Push", 0, 8, 1), ("missing", 0, 0, 1)],
)
def test_kernels_that_are_rejected(tmp_path, name, stack, spills, code):
    log = "".join(
        lines_of(kernel, stack, spills) if kernel == name else lines_of(kernel)
        for kernel in KERNELS[: -1 if name == "missing" else None]
    )
    # A kernel of several types: the worst one counts, not the last.
    log += lines_of("Pull") * (name == "Pull")
    assert check(tmp_path, log)[0] == code


@pytest.mark.parametrize(
    "registers, shared, blocks",
    [(64, 128, 4), (65, 128, 3), (128, 12288, 2), (129, 128, 1), (32, 114 << 10, 1)],
)
def test_two_blocks_of_a_kernel_run_at_once(tmp_path, registers, shared, blocks):
    log = "".join(lines_of(kernel) for kernel in KERNELS)
    code, table = check(tmp_path, log + lines_of("Pull", registers=registers, shared=shared))
    assert f"'blocks': {blocks}" in next(x for x in table.splitlines() if "Pull" in x)
    assert code == (blocks < 2)


@pytest.mark.parametrize(
    "name, stack, spills, code",
    [("Put", 216, 0, 0), ("Pull", 16, 0, 1), ("Fetch", 216, 8, 1), ("missing", 0, 0, 1)],
)
def test_kernels_over_nvshmem_have_the_stack_of_its_functions(tmp_path, name, stack, spills, code):
    log = "".join(lines_of(kernel) for kernel in KERNELS)
    for kernel in OVER_NVSHMEM[: -1 if name == "missing" else None]:
        mine = kernel == name
        log += lines_of(kernel, spills=spills * mine).replace(
            name_of(kernel),
            NVSHMEM_NAME.format(n=len(kernel) + 6, kernel=kernel),
        )
        # A function of NVSHMEM, not a kernel.
        log += "ptxas info    : Function properties for _Z14nvshmemi_quietIL13threadgroup_t3EEvv\n"
        log += "    512 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads\n"
        log += LINKED.format(n=len(kernel) + 6, kernel=kernel, stack=stack * mine)
    found, table = check(tmp_path, log)
    assert found == code
    if name == "Put":
        numbers = "'stack': 216, 'spills': 0, 'registers': 64, 'shared': 128, 'blocks': 4"
        assert f"NvshmemPut        sm_90   {{{numbers}}}" in table
