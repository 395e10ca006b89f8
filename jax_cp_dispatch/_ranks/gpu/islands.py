"""Islands: processes that map each other's memory. Other islands are reached over a network."""

from collections.abc import Sequence


def find_islands(mapped: Sequence[Sequence[bool]]) -> list[int]:
    """The first process of each process's island.

    Args:
      mapped: of each process, whose memory it has mapped. Processes of an island have all mapped
        the same, so that an island is one for each of them.
    """
    return [next(q for q, other in enumerate(mapped) if other == mine) for mine in mapped]


def describe_islands(islands: Sequence[int]) -> str:
    """Who is reached how, in words."""
    if len(set(islands)) == 1:
        return "all through pointers"
    members = [[p for p, i in enumerate(islands) if i == first] for first in sorted(set(islands))]
    return f"{', '.join(map(_ranges, members))} through pointers, each other over the network"


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2+5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(starts, ends, strict=True)
    return "+".join(f"{a}-{b}" if a != b else str(a) for a, b in pairs)
