"""Reads what ptxas -v and nvlink -v say of the kernels; fails where one spills or has a stack.

check_kernels.py BUILD_LOG ARCHITECTURE...

It also fails where fewer than two blocks of a kernel that moves rows fit one multiprocessor.
Kernels over NVSHMEM are there if the log has any. Those that call its device functions have the
stack that these need, which the linker tells; no other has one.
"""

import pathlib
import re
import sys

_CALLS = ("Plan", "Push", "Stage", "Wait", "Unpack", "Pull")
# Over mapped memory only.
_MAPPED = ("PushTake", "SmallDispatch", "SmallCombine")
_KERNELS = (
    *_CALLS,
    *_MAPPED,
    *("Attend", "QueryGradients", "KeyGradients"),
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "End", "Hold"),
)
_NVSHMEM = "Nvshmem"  # the fabric, and the prefix of its kernels here
_FOR_NETWORKS = ("Signal", "StageToPut", "Put", "Fetch", "Quiet")
_OVER_NVSHMEM = tuple(_NVSHMEM + name for name in (*_CALLS, *_FOR_NETWORKS))
_CALL_NVSHMEM = tuple(_NVSHMEM + name for name in ("Signal", "Put", "Fetch", "Quiet"))

# Kernels that fill the GPU, with kMaxThreads threads per block (csrc/kernels/block.h). So many
# blocks of them run on each multiprocessor; csrc/cuda/kernels.cu counts on it.
_COPIES = ("Push", "PushTake", "Stage", "Unpack", "Pull", "StageToPut", "Put", "Fetch")
_MOVER_THREADS = 256
_MOVER_BLOCKS = 2
_SHARED_KILOBYTES = {"80": 164, "90": 228, "100": 228}  # of one multiprocessor; others: 100
_REGISTERS = 65536  # of one multiprocessor; a warp gets a multiple of 256

Found = dict[tuple[str, str], dict[str, int]]


def _kernel_in(line: str) -> str:
    """Returns the kernel that a mangled name denotes; "": none."""
    named = re.search(r"\d([A-Z][A-Za-z]*?)Kernel(\w*)'?", line)
    if named is None:
        return ""
    return (_NVSHMEM if f"{len(_NVSHMEM)}{_NVSHMEM}E" in named[2] else "") + named[1]


def read(log: str) -> Found:
    """Finds numbers by (kernel, architecture), of the worst of its types.

    They are registers, bytes of stack, spilled bytes and bytes of shared memory.
    """
    found: Found = {}
    place = ("", "")
    architecture = ""

    def note(**numbers: int) -> None:
        of_kernel = found.setdefault(place, {})
        of_kernel.update({name: max(n, of_kernel.get(name, 0)) for name, n in numbers.items()})

    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function .* for 'sm_(\d+)a?'", line):
            architecture = entry[1]
            place = (_kernel_in(line), architecture)
        elif "Function properties for" in line:  # of a kernel, or of a function
            if target := re.search(r"target: sm_(\d+)", line):  # where there are several
                architecture = target[1]
            place = (_kernel_in(line), architecture)
        elif not place[0]:
            continue
        elif sizes := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill", line):
            note(stack=int(sizes[1]), spills=int(sizes[2]))
        elif linked := re.search(r"nvlink.*used (\d+) registers.* (\d+) stack", line):
            note(registers=int(linked[1]), stack=int(linked[2]))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            note(registers=int(used[1]), shared=int(shared[1]) if shared else 0)
    return found


def blocks_per_multiprocessor(used: dict[str, int], architecture: str) -> int:
    """Returns how many blocks of a kernel run at once; each reserves 1 kB of shared memory."""
    warps = _MOVER_THREADS // 32
    registers = -(-used["registers"] * 32 // 256) * 256 * warps
    shared = _SHARED_KILOBYTES.get(architecture, 100) * 1024 // (used.get("shared", 0) + 1024)
    return min(2048 // _MOVER_THREADS, _REGISTERS // registers, shared)


def main() -> int:
    """Prints a table; returns 1 if a kernel is missing, spills, or has a stack frame."""
    log, *architectures = sys.argv[1:]
    found = read(pathlib.Path(log).read_text())
    has_nvshmem = any(kernel.startswith(_NVSHMEM) for kernel, _ in found)
    num_bad = 0
    for kernel in _KERNELS + _OVER_NVSHMEM * has_nvshmem:
        for architecture in architectures:
            used = found.get((kernel, architecture), {})
            has_stack = used.get("stack") != 0 and (kernel not in _CALL_NVSHMEM or not used)
            is_good = not has_stack and used.get("spills") == 0
            if used and kernel.removeprefix(_NVSHMEM) in _COPIES:
                used["blocks"] = blocks_per_multiprocessor(used, architecture)
                is_good = is_good and used["blocks"] >= _MOVER_BLOCKS
            num_bad += not is_good
            verdict = "" if is_good else "  <- spills, a stack, few blocks, or nothing found"
            print(f"{kernel:<17} sm_{architecture:<4} {used}{verdict}")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
