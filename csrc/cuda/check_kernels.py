"""Reads what ptxas -v says of the kernels; fails where one spills registers or uses a stack.

check_kernels.py BUILD_LOG ARCHITECTURE...
"""

import pathlib
import re
import sys

_KERNELS = (
    *("Plan", "Push", "Stage", "Signal", "Wait", "Unpack", "Pull"),
    *("Sum", "Columns", "Transpose", "Swizzle", "Copy", "Begin", "Tell", "WaitFor", "Spoil"),
)


def read(log: str) -> dict[tuple[str, str], dict[str, int]]:
    """Registers, stack and spilled bytes by (kernel, architecture), of the worst of its types."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    place = ("", "")

    def note(of_kernel: dict[str, int], **numbers: int) -> None:
        of_kernel.update({name: max(n, of_kernel.get(name, 0)) for name, n in numbers.items()})

    for line in log.splitlines():
        if entry := re.search(
            r"Compiling entry function '\w*?\d([A-Z]\w*?)Kernel\w*' for 'sm_(\d+)'", line
        ):
            place = (entry[1], entry[2])
            found.setdefault(place, {})
        elif place[0] and (sizes := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill", line)):
            note(found[place], stack=int(sizes[1]), spills=int(sizes[2]))
        elif place[0] and (used := re.search(r"Used (\d+) registers", line)):
            note(found[place], registers=int(used[1]))
    return found


def main() -> int:
    """Prints a table; returns 1 where a kernel is missing, spills, or uses a stack."""
    log, *architectures = sys.argv[1:]
    found = read(pathlib.Path(log).read_text())
    num_bad = 0
    for kernel in _KERNELS:
        for architecture in architectures:
            used = found.get((kernel, architecture), {})
            is_good = used.get("stack") == 0 and used.get("spills") == 0
            num_bad += not is_good
            verdict = "" if is_good else "  <- spills, a stack, or nothing found"
            print(f"{kernel:<8} sm_{architecture:<4} {used}{verdict}")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
