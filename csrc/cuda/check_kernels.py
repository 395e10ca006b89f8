"""Reads what ptxas -v and nvlink -v say of the kernels; fails where one spills or has a stack.

check_kernels.py BUILD_LOG ARCHITECTURE...

Kernels over NVSHMEM are there if the log has any. Those that call its device functions have the
stack that these need, which the linker tells; no other has one.
"""

import pathlib
import re
import sys

_CALLS = ("Plan", "Push", "Stage", "Signal", "Wait", "Unpack", "Pull")
_KERNELS = (
    *_CALLS,
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "Spoil"),
)
_NVSHMEM = "Nvshmem"  # the fabric, and the prefix of its kernels here
_OVER_NVSHMEM = tuple(_NVSHMEM + name for name in (*_CALLS, "StageToPut", "Put", "Fetch", "Quiet"))
_CALL_NVSHMEM = tuple(_NVSHMEM + name for name in ("Signal", "Put", "Fetch", "Quiet"))

Found = dict[tuple[str, str], dict[str, int]]


def _kernel_in(line: str) -> str:
    """Returns the kernel that a mangled name denotes; "": none."""
    named = re.search(r"\d([A-Z][A-Za-z]*?)Kernel(\w*)'?", line)
    if named is None:
        return ""
    return (_NVSHMEM if f"{len(_NVSHMEM)}{_NVSHMEM}E" in named[2] else "") + named[1]


def read(log: str) -> Found:
    """Registers, stack and spilled bytes by (kernel, architecture), of the worst of its types."""
    found: Found = {}
    place = ("", "")
    architecture = ""

    def note(**numbers: int) -> None:
        of_kernel = found.setdefault(place, {})
        of_kernel.update({name: max(n, of_kernel.get(name, 0)) for name, n in numbers.items()})

    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function .* for 'sm_(\d+)'", line):
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
            note(registers=int(used[1]))
    return found


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
            num_bad += not is_good
            verdict = "" if is_good else "  <- spills, a stack, or nothing found"
            print(f"{kernel:<17} sm_{architecture:<4} {used}{verdict}")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
