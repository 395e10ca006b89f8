"""Reads the machine code of kernels; fails where it is slow, or could block.

check_machine_code.py LIBRARY, with cuobjdump and nvdisasm in PATH

Local memory must not be accessed. Every way of moving rows must have four loads of 16 bytes in
flight before it uses the first. A loop that moves rows must contain no fence and no
compare-and-swap. Tags must be counted by a sum over each warp. The kernel that waits for other
ranks must not let the next one start: its blocks would fill the GPU before a rank there has sent.
Code of attention for sm_90a must multiply by warpgroups.

What ranks of different GPUs write and read must have the system as its scope: a signal is a store
after a barrier of memory, a wait a load after which the cache is invalid, and the block that
signals is found by an atomic addition with both. No load may use the cache for constants, which
does not see what another GPU writes.
"""

import dataclasses
import re
import subprocess
import sys

# The kernels, and how many ways of moving rows each has: Pull copies and sums ten types. A small
# call does everything in one kernel.
_COPIES = {
    **{"Push": 1, "PushTake": 2, "Stage": 1, "Unpack": 1, "Pull": 11},
    **{"SmallDispatch": 2, "SmallCombine": 12},
}
_COUNT_TAGS = ("PushTake", "Unpack", "SmallDispatch")
_WAIT = ("Wait",)
_SMALL = ("SmallDispatch", "SmallCombine")
# Those that signal other ranks, that hear them, in which the last block does something, and that
# do all of this between one strip of rows and the next.
_SIGNAL = ("Plan", "Push", "PushTake", "Stage", *_SMALL)
_ACQUIRE = (*_WAIT, "PushTake", *_SMALL)
_LAST_BLOCK = ("Push", "PushTake", "Stage", "Unpack", "SmallDispatch")
_BETWEEN_STRIPS = ("PushTake",)
_ATTENTION = ("Attend", "QueryGradients", "KeyGradients")
# Parts of mangled names: kernels over memory of this host's GPUs, and for one size of heads.
_NAMED = r"\d([A-Z][A-Za-z]*?)Kernel(?:\w*6Mapped|INS_\w+?Li\d)"
_IN_FLIGHT = 4


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: `name` has its modifiers, `operands` the rest of the line."""

    address: int
    name: str
    operands: str
    is_conditional: bool

    @property
    def target(self) -> int | None:
        """The address that a branch names."""
        named = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        is_branch = re.match(r"BRA|CALL|WARPSYNC\.\w*COLLECTIVE", self.name)
        return int(named[1], 16) if is_branch and named else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        always = re.fullmatch(r"BRA|EXIT|RET\S*", self.name) and "," not in self.operands
        return self.is_conditional or not always

    @property
    def registers(self) -> list[int]:
        """The numbers of its registers; the first one of a load is where the value goes."""
        return [int(n) for n in re.findall(r"\bR(\d+)", self.operands)]

    @property
    def is_wide_load(self) -> bool:
        """Whether it loads 16 bytes of global memory."""
        return self.name.startswith("LDG") and ".128" in self.name


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the machine code of one kernel shows."""

    num_fours: int  # places with four loads of 16 bytes in flight
    num_local: int  # accesses of local memory
    num_loops: int  # that load 16 bytes, the outermost ones
    num_fences: int  # in such loops
    num_swaps: int  # compare-and-swap there
    num_warp_sums: int
    num_releases: int  # of the next kernel
    num_warpgroup_products: int
    num_signals: int  # 64 bits stored for the system after a barrier of its memory
    num_acquires: int  # 64 bits loaded from the system, before the cache is invalid
    num_additions: int  # for the system, with both
    num_narrow: int  # loads and stores with an order, but for fewer than the system
    num_constant: int  # loads through the cache for constants

    def is_good(self, kernel: str, architecture: str) -> bool:
        """Returns whether this kernel may look like this."""
        if kernel in _ATTENTION:
            has_warpgroups = architecture.endswith("a")
            return not self.num_local and has_warpgroups == (self.num_warpgroup_products > 0)
        if self.num_local or not self._has_scopes(kernel):
            return False
        if kernel == "Plan":
            return True
        if kernel in (*_WAIT, *_SMALL) and self.num_releases:
            return False
        if kernel in _WAIT:
            return True
        has_fences = self.num_fences and kernel not in _BETWEEN_STRIPS
        is_slow = has_fences or self.num_swaps
        has_sums = self.num_warp_sums > 0 or kernel not in _COUNT_TAGS
        has_moves = self.num_loops > 0 and self.num_fours >= _COPIES[kernel]
        return not is_slow and has_sums and has_moves

    def _has_scopes(self, kernel: str) -> bool:
        """Returns whether other GPUs see what they must, and whether it sees what they write."""
        needed = [
            (_SIGNAL, self.num_signals),
            (_ACQUIRE, self.num_acquires),
            (_LAST_BLOCK, self.num_additions),
        ]
        is_wrong = self.num_narrow or self.num_constant
        return not is_wrong and all(num or kernel not in kernels for kernels, num in needed)


def parse(listing: str) -> dict[tuple[str, str], list[Instruction]]:
    """Returns the instructions by (kernel, architecture) from what cuobjdump -sass prints."""
    found: dict[tuple[str, str], list[Instruction]] = {}
    code: list[Instruction] | None = None
    architecture = ""
    for line in listing.splitlines():
        if of := re.match(r"\s*code for sm_(\w+)", line):
            architecture = of[1]
        elif function := re.match(r"\s*Function : (\S+)", line):
            named = re.search(_NAMED, function[1])
            code = found.setdefault((named[1], architecture), []) if named else None
        elif code is not None and (
            one := re.match(
                r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line
            )
        ):
            code.append(Instruction(int(one[1], 16), one[3], one[4].strip(), bool(one[2])))
    return found


def _count_fours(code: list[Instruction]) -> int:
    """Counts the groups of loads, each in one basic block, that are in flight together."""
    starts = {instruction.target for instruction in code}
    num_fours, pending = 0, list[int]()
    for instruction in code:
        registers = instruction.registers
        if instruction.is_wide_load:
            registers = registers[1:]  # the address
        is_used = any(first <= n < first + 4 for n in registers for first in pending)
        if is_used or instruction.address in starts or instruction.target is not None:
            pending = []
        if instruction.is_wide_load:
            pending.append(instruction.registers[0])
            num_fours += len(pending) == _IN_FLIGHT
    return num_fours


def _blocks(code: list[Instruction]) -> dict[int, list[Instruction]]:
    """Returns the basic blocks by their first address."""
    starts = {one.target for one in code}
    blocks: dict[int, list[Instruction]] = {}
    block: list[Instruction] | None = None
    for one in code:
        if block is None or one.address in starts:
            block = blocks[one.address] = []
        block.append(one)
        if one.target is not None or not one.goes_on:
            block = None
    return blocks


def _followers(blocks: dict[int, list[Instruction]]) -> dict[int, list[int]]:
    """Returns which blocks may follow each."""
    starts = list(blocks)
    follow: dict[int, list[int]] = {}
    for start, after in zip(starts, [*starts, -1][1:], strict=True):
        last = blocks[start][-1]
        nexts = [after] * last.goes_on + ([] if last.target is None else [last.target])
        follow[start] = [address for address in nexts if address in blocks]
    return follow


def _reached(follow: dict[int, list[int]], block: int) -> set[int]:
    """Returns the blocks that may run after a block."""
    found, left = set[int](), [block]
    while left:
        new = [b for b in follow[left.pop()] if b not in found]
        found.update(new)
        left += new
    return found


def find_moving_loops(code: list[Instruction]) -> list[set[int]]:
    """Returns the addresses in each outermost loop that loads 16 bytes.

    Code that the compiler has moved behind the end of a kernel belongs to a loop if the loop
    reaches it and it goes back; a branch back alone makes no loop.
    """
    blocks = _blocks(code)
    follow = _followers(blocks)
    before = {block: [b for b in follow if block in follow[b]] for block in follow}
    loops: list[set[int]] = []
    for block, instructions in blocks.items():
        is_known = any(block in loop for loop in loops)
        if is_known or not any(one.is_wide_load for one in instructions):
            continue
        if loop := _reached(follow, block) & _reached(before, block):
            loops.append(loop)
    return [{one.address for block in loop for one in blocks[block]} for loop in loops]


# Memory that other threads see, and what orders it.
_MEMORY = re.compile(r"(LD|ST|ATOM|RED|UBLKCP)(?!S|C|L|UX)|CCTL|MEMBAR|BAR\b")
_BARRIER, _INVALID = re.compile(r"MEMBAR\.\w+\.SYS"), re.compile(r"CCTL\.IVALL")


def _count_ordered(code: list[Instruction], access: str, *, before: bool, after: bool) -> int:
    """Counts accesses right after a barrier of the system's memory, or before an invalid cache.

    Other accesses, and the end of a basic block, must not come between.
    """
    num = 0
    for block in _blocks(code).values():
        ordering = [one.name for one in block if _MEMORY.match(one.name)]
        for i, name in enumerate(ordering):
            last, following = ordering[max(i - 1, 0) : i], ordering[i + 1 : i + 2]
            is_ordered = not before or any(map(_BARRIER.match, last))
            is_ordered = is_ordered and (not after or any(map(_INVALID.match, following)))
            num += bool(re.fullmatch(access, name) and is_ordered)
    return num


def study(code: list[Instruction]) -> Facts:
    """Returns the facts of one kernel."""
    loops = find_moving_loops(code)
    moving = set[int]().union(*loops)

    def count(pattern: str, *, in_loops: bool) -> int:
        return sum(
            re.match(pattern, one.name) is not None and (not in_loops or one.address in moving)
            for one in code
        )

    return Facts(
        num_fours=_count_fours(code),
        num_loops=len(loops),
        num_local=count("LDL|STL", in_loops=False),
        num_fences=count("MEMBAR|FENCE", in_loops=True),
        num_swaps=count(r"ATOM\w*\.(\w+\.)*CAS", in_loops=True),
        num_warp_sums=count("REDUX", in_loops=False),
        num_releases=count("PREEXIT", in_loops=False),
        num_warpgroup_products=count("HGMMA", in_loops=False),
        num_signals=_count_ordered(code, r"STG?\.E\.64\.STRONG\.SYS", before=True, after=False),
        num_acquires=_count_ordered(code, r"LDG?\.E\.64\.STRONG\.SYS", before=False, after=True),
        num_additions=_count_ordered(
            code, r"ATOMG?\.E\.ADD\.64\.STRONG\.SYS", before=True, after=True
        ),
        num_narrow=count(r"(LD|ST)G?\.\S*STRONG\.(?!SYS)", in_loops=False),
        num_constant=count(r"LD\S*\.(CONSTANT|NC)\b", in_loops=False),
    )


def main() -> int:
    """Prints a table; returns 1 if a kernel is missing or bad."""
    command = ["cuobjdump", "-sass", sys.argv[1]]
    code = parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    num_bad = 0
    for architecture in sorted({architecture for _, architecture in code} or {"?"}):
        for kernel in ("Plan", *_COPIES, *_WAIT, *_ATTENTION):
            instructions = code.get((kernel, architecture), [])
            facts = study(instructions)
            is_good = bool(instructions) and facts.is_good(kernel, architecture)
            num_bad += not is_good
            verdict = "" if is_good else "  <- bad, or not found"
            print(f"{kernel:<15} sm_{architecture:<4} {facts}{verdict}")
    return min(num_bad, 1)


if __name__ == "__main__":
    sys.exit(main())
