"""Reads a compiled program: what it moves, and what runs between the start and end of each move.

The text of a compiled program lists the instructions of each computation in the order in which they
run. A collective in two parts, `-start` and `-done`, overlaps with what lies between them; likewise
an exchange of this package in two custom calls.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable

KINDS = (
    *("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all"),
    "reduce-scatter",
)
EXCHANGE = "exchange"  # of this package, in one custom call or in two
_EXCHANGE_CALL = re.compile(r'custom_call_target="jax_cp_dispatch\.(?:dispatch|combine)(_start)?"')
_EXCHANGE_DONE = 'custom_call_target="jax_cp_dispatch.exchange_done"'
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|(?:true|false|branch)_computations?)=(\{[^}]*\}|%[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
# Operations that move no bytes, or whose bytes are not XLA's.
_FREE = (
    *("bitcast", "constant", "custom-call", "get-tuple-element", "parameter", "tuple"),
    *("after-all", "opt-barrier", "partition-id", "replica-id"),
)
# What the names of operations tell of the work: attention has named scopes.
WORKS = {"attention": "cpd.attention", "product": "dot_general"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    rest: str

    @property
    def kind(self) -> str | None:
        """The collective or exchange, whether in one part or the first of two."""
        if self.op == "custom-call":
            return EXCHANGE if _EXCHANGE_CALL.search(self.rest) else None
        op = self.op.removesuffix("-start")
        if op in KINDS:
            return op
        if op == "async":  # wraps a collective that has no form in two parts
            return next((kind for kind in KINDS if f"{kind}" in self.rest), None)
        return None

    @property
    def is_start(self) -> bool:
        """Whether it is the first of two parts."""
        if self.kind == EXCHANGE:
            return "_start" in _EXCHANGE_CALL.findall(self.rest)
        return self.op.endswith("-start")

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest array of the result; of an exchange, those of all rows that came."""
        sizes = self._sizes()
        if self.kind == EXCHANGE:  # the first call of two also returns its operands
            return sum(sizes[: len(sizes) // 2] if self.is_start else sizes)
        return max(sizes, default=0)

    @property
    def all_bytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(self._sizes())

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return _NAME.findall(" ".join(_CALLED.findall(self.rest)))

    @property
    def turns(self) -> int:
        """How often a loop runs its body, where that is known; otherwise 1."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(known[1]) if known and self.op == "while" else 1

    def _sizes(self) -> list[int]:
        sizes = []
        for dtype, dims in _ARRAY.findall(self.shape):
            bits = int(re.findall(r"\d+", dtype)[0]) if dtype != "pred" else 8
            size = max(1, bits // 8)
            for dim in filter(None, dims.split(",")):
                size *= int(dim)
            sizes.append(size)
        return sizes


class Program:
    """The computations of a compiled program."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if named := _COMPUTATION.match(line):
                current = self.computations[named[1]] = []
                if line.startswith("ENTRY"):
                    self.entry = named[1]
            elif parts := _INSTRUCTION.match(line):
                current.append(Instruction(*parts.groups()))
        # How often each computation runs whose steps are instructions of the schedule.
        self._executed: dict[str, int] = collections.defaultdict(int)
        self._execute(self.entry, 1)

    def _execute(self, name: str, times: int) -> None:
        self._executed[name] += times
        for step in self.computations[name]:
            if step.op in ("while", "call", "conditional"):
                for called in step.called:
                    self._execute(called, times * step.turns)

    def collectives(self) -> dict[str, int]:
        """Returns how often each kind of collective, and an exchange, stands in the program."""
        kinds = (each.kind for name in self._executed for each in self.computations[name])
        return dict(sorted(collections.Counter(kind for kind in kinds if kind).items()))

    def moved_bytes(self) -> int:
        """Returns the bytes that XLA's own operations read and write in memory.

        Custom calls and collectives do not count. Each array that an operation names counts as a
        whole; of a conditional counts the branch that moves the most, of a loop every turn.
        """
        return self._moved(self.entry)

    def _moved(self, name: str) -> int:
        steps = self.computations[name]
        sizes = {step.name: step.all_bytes for step in steps}
        moved = 0
        for step in steps:
            called = step.called
            if step.op == "conditional":
                moved += max(map(self._moved, called))
            elif step.op in ("while", "call", "async-start"):
                moved += step.turns * sum(map(self._moved, called))
            elif step.op not in _FREE and step.kind is None and not step.op.endswith("-done"):
                operands = _NAME.findall(step.rest.split("), ")[0])
                moved += step.all_bytes + sum(sizes.get(operand, 0) for operand in operands)
        return moved

    def count(self, op: str) -> int:
        return sum(each.op == op for steps in self.computations.values() for each in steps)

    def overlap(self) -> dict[str, dict[str, int]]:
        """Returns, by kind, the bytes that are moved, and those moved beside some work.

        Every turn of a loop counts, and every branch of a conditional.
        """
        found: dict[str, dict[str, int]] = {}
        for name, times in self._executed.items():
            steps = self.computations[name]
            for place, step in enumerate(steps):
                if step.kind is None:
                    continue
                row = found.setdefault(step.kind, {"bytes": 0})
                for part in ("bytes", *self._beside(step, steps[place + 1 :])):
                    row[part] = row.get(part, 0) + times * step.num_bytes
        return found

    def _beside(self, start: Instruction, later: Iterable[Instruction]) -> set[str]:
        """Returns the work between the two parts of a move."""
        if not start.is_start:
            return set()
        works: set[str] = set()
        results: set[str] = set()  # of an exchange
        for step in later:
            if step.op.endswith("-done") and f"%{start.name})" in step.rest:
                break
            if step.op == "get-tuple-element" and f"%{start.name})" in step.rest:
                results.add(step.name)
            if _EXCHANGE_DONE in step.rest and results & set(_NAME.findall(step.rest)):
                break
            works |= self._work(step)
        return works

    def _work(self, step: Instruction, depth: int = 4) -> set[str]:
        if step.op in ("bitcast", "copy", "get-tuple-element", "tuple", "parameter", "constant"):
            return set()
        works = {work for work, scope in WORKS.items() if scope in step.rest}
        if depth:
            for name in step.called:
                for inner in self.computations.get(name, ()):
                    works |= self._work(inner, depth - 1)
        return works
