"""Groups of processes that map each other's memory. A network connects the groups."""

from collections.abc import Sequence


def find_shared_memory_groups(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """Returns, for each process, the first process of its group.

    Args:
      mapped: for each process, the processes whose memory it has mapped. All processes of a group
        have mapped the same ones, so they agree on it.
    """
    return [next(q for q, other in enumerate(mapped) if other == mine) for mine in mapped]


def describe_shared_memory_groups(memory_groups: Sequence[int]) -> str:
    """Describes which processes are reached through pointers, and which over the network."""
    if len(set(memory_groups)) == 1:
        return "all through pointers"
    members = [
        [p for p, i in enumerate(memory_groups) if i == first]
        for first in sorted(set(memory_groups))
    ]
    return f"{', '.join(map(_ranges, members))} through pointers, each other over the network"


def _ranges(numbers: Sequence[int]) -> str:
    """Formats [0, 1, 2, 5] as "0-2+5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return "+".join(f"{a}-{b}" if a != b else str(a) for a, b in pairs)
