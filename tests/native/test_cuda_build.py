"""Checks of the CUDA build, without nvcc: versions, what kernels use, their machine code, faults.

Kernels may not spill, need two blocks at once, and have no fences in loops, swaps, or loads one by
one. A fault that a stress on a GPU must find can be planted in the sources as they are.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from scripts import load

sys.path.append(str(pathlib.Path(__file__).parents[1] / "gpu"))

from planted_fault import FAULTS, plant

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_versions_of_nvcc():
    old = "nvcc is 12.3.107 but the kernels need 12.4 or newer"
    bad = "of CUDA 12.8.0 to 12.9.0, .* Use CUDA 12.4 to 12.6, or 12.9.1 or newer: CUDACXX=/path"
    for version, says in [
        *(("12.4.99", ""), ("12.6.85", ""), ("12.9.86", ""), ("13.0.48", "")),  # 12.9.86: 12.9.1
        *((x, f"nvcc is {x}, {bad}") for x in ("12.8.61", "12.9.41")),
        ("12.3.107", old),
    ]:
        rule = ROOT / "csrc/cuda_compiler.cmake"
        command = ["cmake", f"-DCMAKE_CUDA_COMPILER_VERSION={version}", "-P", rule]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert bool(done.returncode) == bool(done.stderr) == bool(says)
        assert re.search(says, " ".join(done.stderr.split()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_one_header(fault, tmp_path):
    plant(fault, tmp_path)
    files = [path for path in (ROOT / "csrc").rglob("*.*") if path.is_file()]
    same = lambda path: path.read_bytes() == (tmp_path / path.relative_to(ROOT)).read_bytes()
    assert [path for path in files if not same(path)] == [ROOT / "csrc" / FAULTS[fault][0]]


# ---- What ptxas says of kernels.

KERNELS = [
    *("Plan", "Push", "Stage", "Wait", "Unpack", "Pull"),
    *("PushTake", "SmallDispatch", "SmallCombine"),
    *("Attend", "QueryGradients", "KeyGradients"),
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "End", "Hold"),
]
OVER_NVSHMEM = [*KERNELS[:6], "Signal", "StageToPut", "Put", "Fetch", "Quiet"]
NAMES = (
    "_ZN3cpd43_GLOBAL__N__2168_10_kernels_cu_0e9e{n}{kernel}KernelENS_6device4CallE",
    "__nv_static_45__18_nvshmem_kernels_cu_9d{n}{kernel}KernelINS0_7NvshmemEEEvNS4_CallE",
)
PTXAS = """\
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
    {stack} bytes stack frame, {spills} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, {shared} bytes smem
"""
# Over NVSHMEM. The linker tells the stack of a kernel; the first lines are of a function.
NVLINK = """\
ptxas info    : Function properties for _Z14nvshmemi_quietIL13threadgroup_t3EEvv
    512 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads
nvlink info    : Function properties for '{name}': (target: sm_90a)
nvlink info    : used 44 registers, used 1 barriers, {stack} stack, 0 bytes smem
"""


def lines_of(kernel, over_nvshmem=False, **numbers):
    of = {"stack": 0, "spills": 0, "registers": 64, "shared": 128, **numbers}
    of["name"] = NAMES[over_nvshmem].format(n=len(kernel) + 6, kernel=kernel)
    if over_nvshmem:
        return PTXAS.format(**{**of, "stack": 0}) + NVLINK.format(**of)
    return PTXAS.format(**of)


PUT = "{'stack': 216, 'spills': 0, 'registers': 64, 'shared': 128, 'blocks': 4}"
LOGS = [  # a kernel, whether over NVSHMEM, its numbers or None, the exit code, what its row says
    ("Pull", False, {}, 0, "'blocks': 4"),
    ("Pull", False, {"registers": 65}, 0, "'blocks': 3"),
    ("Pull", False, {"registers": 129}, 1, "'blocks': 1"),
    ("Pull", False, {"registers": 32, "shared": 114 << 10}, 1, "'blocks': 1"),
    ("Pull", False, {"stack": 16}, 1, "<-"),
    ("Push", False, {"spills": 8}, 1, "<-"),
    ("Hold", False, None, 1, "<-"),
    ("Put", True, {"stack": 216}, 0, PUT),
    ("Pull", True, {"stack": 16}, 1, "<-"),
    ("Fetch", True, {"stack": 216, "spills": 8}, 1, "<-"),
    ("Quiet", True, None, 1, "<-"),
]


@pytest.mark.parametrize("name, over_nvshmem, numbers, code, says", LOGS)
def test_what_kernels_use(tmp_path, monkeypatch, capsys, name, over_nvshmem, numbers, code, says):
    """Two blocks run at once; no kernel spills, and only functions of NVSHMEM have a stack."""
    path, log = tmp_path / "build.log", ""
    for is_over in (False, True)[: 1 + over_nvshmem]:
        for kernel in OVER_NVSHMEM if is_over else KERNELS:
            mine = (kernel, is_over) == (name, over_nvshmem)
            if not mine or numbers is not None:
                log += lines_of(kernel, is_over, **(mine and numbers) or {})
    # A kernel of several types: the worst one counts, not the last.
    path.write_text(log + lines_of("Pull"))
    monkeypatch.setattr(sys, "argv", ["", str(path), "90"])
    assert load("csrc/cuda/check_kernels.py").main() == code
    table = capsys.readouterr().out
    row = f"{'Nvshmem' * over_nvshmem + name:<17} sm_90 .*{re.escape(says)}"
    assert re.search(row, table) and table.count("<-") == code


# ---- Machine code.

FUNCTION = (
    "\t\tFunction : _ZN3cpd43_GLOBAL__N__9b_10_kernels_cu_0{n}{kernel}KernelI{types}EEvNS4_CallE"
)
MAPPED = "NS_6MappedE"
# An addition that finds the last block, a signal, and a wait for one.
ADD = ["MEMBAR.ALL.SYS", "ATOMG.E.ADD.64.STRONG.SYS PT, R2, desc[UR10][R4.64], R2", "CCTL.IVALL"]
SIGNAL = ["MEMBAR.ALL.SYS", "ERRBAR", "STG.E.64.STRONG.SYS desc[UR10][R6.64], R14"]
ACQUIRE = ["LDG.E.64.STRONG.SYS R12, desc[UR8][R12.64]", "CCTL.IVALL"]
ORDERED = [*ADD, *SIGNAL, *ACQUIRE]
# A loop as Push has it: four loads, then four stores.
LOOP = [
    "LDG.E.128 R4, desc[UR6][R2.64]",
    "LDG.E.128 R8, desc[UR6][R2.64+0x1000]",
    "@P1 LDG.E.128 R12, desc[UR6][R2.64+0x2000]",
    "@!P2 LDG.E.128 R16, desc[UR6][R2.64+0x3000]",
    "STG.E.128 desc[UR6][R20.64], R4",
    "STG.E.128 desc[UR6][R20.64+0x1000], R8",
    "@P0 BRA 0x0",
    "MEMBAR.ALL.SYS",
    "EXIT",
]
COUNT = ["REDUX.SUM UR4, R4", "ATOMS.ADD RZ, [R2], R4"]


@pytest.fixture(scope="module")
def check():
    return load("csrc/cuda/check_machine_code.py")


def listing(kernel, code, architecture="90"):
    function = FUNCTION.format(n=len(kernel) + 6, kernel=kernel, types=MAPPED)
    lines = [f"\tcode for sm_{architecture}", function]
    for i, instruction in enumerate(code):
        lines.append(f"        /*{16 * i:04x}*/                   {instruction} ;  /* 0x0000 */")
        lines.append(" " * 60 + "/* 0x000fe400 */")  # the other half of its encoding
    return "\n".join(lines)


# Code behind the end of a kernel, reached before its loop, or in every turn of it.
BEFORE = ["@P2 BRA 0xb0", *LOOP[:6], "@P0 BRA 0x10", "EXIT", "NOP", "NOP", LOOP[7], "BRA 0x10"]
INSIDE = ["NOP", *LOOP[:6], "@P2 BRA 0xb0", "@P0 BRA 0x10", "EXIT", "NOP", LOOP[7], "BRA 0x80"]


def replaced(old, *new):
    at = LOOP.index(old)
    return LOOP[:at] + list(new) + LOOP[at + 1 :]


MOVES = [  # and whether they are good
    ("Push", LOOP, True),
    ("Unpack", LOOP + COUNT, True),
    ("Unpack", LOOP, False),  # counts its tags in another way
    ("Push", [*LOOP, "STL.64 [R1], R2"], False),
    ("Push", replaced(LOOP[4], "MEMBAR.SC.GPU"), False),
    ("Push", replaced(LOOP[4], "ATOMS.CAST.SPIN.64 P0, [R2], R4, R6"), False),
    ("Push", replaced(LOOP[1], "STG.E.128 desc[UR6][R20.64], R4"), False),
    ("Push", replaced(LOOP[3]), False),
    # The fourth load needs what the first one brings.
    ("Push", replaced(LOOP[3], "LDG.E.128 R16, desc[UR6][R6.64]"), False),
    # Four loads, but two basic blocks.
    ("Push", replaced(LOOP[2], "@P0 BRA 0x70", LOOP[2]), False),
    ("Pull", LOOP, False),  # has more types
    ("Pull", [*LOOP[:-3] * 11, "@P0 BRA 0x0"], True),
    ("Pull", LOOP[:-3] * 11, False),  # no loop
    ("Push", BEFORE, True),
    ("Push", INSIDE, False),
    ("PushTake", INSIDE + LOOP + COUNT, True),  # a fence between strips, and two ways of moving
    ("PushTake", INSIDE + COUNT, False),
    ("Wait", ["ACQBULK", *LOOP[-3:]], True),
    ("Wait", ["PREEXIT", *LOOP[-3:]], False),
]


# What a kernel of each kind needs, and what it may not have.
FOR_GPU = [line.replace(".SYS", ".GPU") for line in ORDERED]
WEAK_TAG = "LDG.E.64 R12, desc[UR8][R12.64]"


ORDERS = [
    ("Push", ADD + SIGNAL, True),
    ("Push", ADD, False),
    ("Push", SIGNAL, False),
    ("Push", ADD[1:] + SIGNAL, False),
    ("Push", ADD[:-1] + SIGNAL, False),  # the cache may be old
    ("Push", [*ADD, *SIGNAL[:-1], "STG.E.64 desc[UR10][R8.64], R4", SIGNAL[-1]], False),
    ("Push", [*ADD, *SIGNAL[:-1], "BAR.SYNC.DEFER_BLOCKING 0x0", SIGNAL[-1]], False),
    ("Push", ADD + SIGNAL + FOR_GPU[-2:], False),
    ("Push", [*ADD, *SIGNAL, "LDG.E.64.CONSTANT R4, desc[UR6][R2.64]"], False),
    ("Push", [*ADD, *SIGNAL, "LDC.64 R4, c[0x0][0x210]"], True),  # a parameter
    ("PushTake", ORDERED, True),
    ("PushTake", ADD + SIGNAL, False),  # hears nobody
    ("Plan", SIGNAL, True),
    ("Plan", SIGNAL[-1:], False),
    ("Wait", ACQUIRE, True),
    ("Wait", ACQUIRE[:1], False),
    ("Wait", [WEAK_TAG, *ACQUIRE[1:]], False),
    ("SmallDispatch", ORDERED, True),
    ("SmallDispatch", ["PREEXIT", *ORDERED], False),
    ("SmallCombine", SIGNAL + ACQUIRE, True),
    ("SmallCombine", ACQUIRE, False),
]


def moves_of(kernel):
    rows = {"Plan": [], "Wait": [], "SmallCombine": LOOP[:-3] * 12 + ["@P0 BRA 0x0"]}
    return rows.get(kernel, [*LOOP[:-2], *LOOP[:-3], *COUNT])


@pytest.mark.parametrize(
    "kernel, code, is_good",
    [
        *((kernel, code + ORDERED, is_good) for kernel, code, is_good in MOVES),
        *((kernel, moves_of(kernel) + code, is_good) for kernel, code, is_good in ORDERS),
    ],
)
def test_what_is_bad(check, kernel, code, is_good):
    found = check.parse(listing(kernel, code))
    assert list(found) == [(kernel, "90")] and len(found[kernel, "90"]) == len(code)
    assert check.study(found[kernel, "90"]).is_good(kernel, "90") == is_good


def test_hopper_multiplies_by_warpgroups(check):
    for architecture, product, is_good in [
        ("90a", "HGMMA.64x64x16.F32.BF16", True),
        ("90a", "HMMA.16816.F32.BF16", False),
        ("80", "HMMA.16816.F32.BF16", True),
    ]:
        text = listing("Attend", [f"{product} R24, R4", "EXIT"], architecture)
        found = check.parse(text.replace(MAPPED, "NS_4BF16ELi128ELi128E"))
        facts = check.study(found["Attend", architecture])
        assert facts.is_good("Attend", architecture) == is_good


def test_other_kernels_are_not_read(check):
    text = listing("Push", LOOP) + "\n" + listing("Sum", LOOP).replace("6Mapped", "4Else")
    assert list(check.parse(text)) == [("Push", "90")]
