"""Cycles over ranks, on which chunks travel so that every link carries one chunk per step.

Everything is plain integers: nothing is traced, equal arguments give equal results in every
process, and every call returns new lists.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from jax_cp_dispatch._arguments import check_positive

# ---- Cycles and maps as rows of integers, and their checks, also of those of callers.

CycleRows = Sequence[Sequence[int]] | Integer[np.ndarray, "rows columns"]
Checked = tuple[tuple[int, ...], ...]


def check_cycles(op: str, cycles: CycleRows, num_ranks: int) -> Checked:
    """Rejects cycles that would put two chunks on one link; returns tuples of Python integers.

    Each row is a permutation of the ranks; the last one sends to the first. One rank has no cycles.
    """
    rows = integer_rows(op, "cycles", cycles)
    everyone = set(range(num_ranks))
    for number, row in enumerate(rows):
        if len(row) != num_ranks or set(row) != everyone:
            raise ValueError(
                f"{op}: row {number} of cycles is {_shown(row)}, which is not a permutation of "
                f"0, ..., {num_ranks - 1}. Every cycle must visit each of the {num_ranks} ranks "
                "once."
            )
    if (num_ranks == 1) != (not rows):
        raise ValueError(
            f"{op}: got {len(rows)} cycles for {num_ranks} ranks; it needs none for one rank, at "
            "least one for more. Use hamiltonian_cycles."
        )
    if rows:
        ranks = np.array(rows)
        arcs = ranks * num_ranks + np.roll(ranks, -1, axis=1)
        uses = np.bincount(arcs.ravel())
        if uses.max() > 1:
            arc = int(uses.argmax())
            sender, receiver = divmod(arc, num_ranks)
            one, two, *_ = np.flatnonzero((arcs == arc).any(axis=1)).tolist()
            raise ValueError(
                f"{op}: rows {one} and {two} of cycles both go from rank {sender} to rank "
                f"{receiver}. Cycles must not share a link. Use hamiltonian_cycles."
            )
    return rows


def check_chunk_maps(
    op: str, out_chunk: CycleRows, in_chunk: CycleRows, num_ranks: int
) -> tuple[int, Checked]:
    """Rejects maps that would lose or overwrite a chunk; see `chunk_maps`.

    Returns the number of chunks (the largest number sent, plus 1), and `out_chunk` as tuples of
    Python integers.
    """
    maps = {
        "out_chunk": integer_rows(op, "out_chunk", out_chunk),
        "in_chunk": integer_rows(op, "in_chunk", in_chunk),
    }
    for name, rows in maps.items():
        if len(rows) != num_ranks or any(len(row) != num_ranks for row in rows):
            raise ValueError(
                f"{op}: {name} has rows of length {[len(row) for row in rows]}, but needs "
                f"{num_ranks} rows of {num_ranks}, one entry for each pair of ranks."
            )
        what = "sends chunk" if name == "out_chunk" else "fills slot"
        for rank, row in enumerate(rows):
            if row[rank] != -1 or min(row) < -1:
                raise ValueError(
                    f"{op}: {name}[{rank}] is {_shown(row)}; it needs -1 at index {rank}, its own "
                    "rank, and -1 or a chunk elsewhere."
                )
            used = [chunk for chunk in row if chunk >= 0]
            if len(set(used)) != len(used):
                twice = next(chunk for chunk in used if used.count(chunk) > 1)
                raise ValueError(
                    f"{op}: rank {rank} {what} {twice} twice in one exchange: {name}[{rank}] is "
                    f"{_shown(row)}. Each number except -1 may appear only once."
                )
    sent, received = maps.values()
    for receiver, row in enumerate(received):
        for sender, slot in enumerate(row):
            if slot != sent[sender][receiver]:
                raise ValueError(
                    f"{op}: out_chunk[{sender}][{receiver}] is {sent[sender][receiver]} but "
                    f"in_chunk[{receiver}][{sender}] is {slot}. The maps must be each other's "
                    "transpose. Use chunk_maps, which makes both."
                )
    return 1 + max(map(max, sent)), sent


def ranks_and_cycles(op: str, cycles: CycleRows) -> tuple[int, Checked]:
    """Returns checked cycles and their number of ranks: the length of the first row, or 1."""
    rows = integer_rows(op, "cycles", cycles)
    num_ranks = max(1, len(rows[0])) if rows else 1
    return num_ranks, check_cycles(op, rows, num_ranks)


def integer_rows(op: str, name: str, rows: Any) -> Checked:
    """Returns tuples of Python integers; compares types, because numpy would accept True as 1."""
    try:
        rows = tuple(tuple(row) for row in rows)
    except TypeError:
        raise TypeError(f"{op}: {name} is {rows!r}; it needs to be rows of integers.") from None
    for number, row in enumerate(rows):
        for kind in set(map(type, row)) - {int}:
            if kind is bool or not issubclass(kind, int | np.integer):
                raise TypeError(
                    f"{op}: row {number} of {name} has entries of type {kind.__name__}; it needs "
                    "integers."
                )
    return tuple(tuple(map(int, row)) for row in rows)


def _shown(row):
    return f"[{', '.join(map(str, row[:16]))}{', ...' if len(row) > 16 else ''}]"


# ---- Decompositions of the complete digraph into Hamiltonian cycles, and into paths.


def hamiltonian_cycles(n: int) -> list[list[int]]:
    """Hamiltonian cycles over n ranks that together use each of the n (n - 1) links once.

    The result is checked before it is returned. Time and memory grow with n².

    Args:
      n: number of ranks; any except 4 and 6.
    Returns:
      n - 1 permutations of the ranks, each a cycle: a rank sends to the next in the row, the last
      to the first. The index of a row is the number of the chunk that moves along it.
    Raises:
      ValueError: n is 4 or 6, for which no decomposition exists, or less than 1.
      TypeError: n is not an integer.
    References:
      T. W. Tillson, A Hamiltonian decomposition of K*_2m, 2m >= 8, JCTB 29 (1980) 68-74.
    """
    check_positive("hamiltonian_cycles", n=n)
    n = int(n)
    if n in (4, 6):
        raise ValueError(
            f"hamiltonian_cycles: n is {n}, but the links between 4 or 6 ranks do not decompose "
            f"into Hamiltonian cycles (Tillson 1980). Omit cycles of Hamilton: each "
            "chunk then comes directly from its rank."
        )
    if n <= 2:
        return [[0, 1]] if n == 2 else []
    cycles = _odd(n) if n % 2 else _even(n)
    # n - 1 cycles that share no link use all links.
    if len(check_cycles("hamiltonian_cycles", cycles, n)) != n - 1:
        raise RuntimeError(f"hamiltonian_cycles: found {len(cycles)} cycles for n={n}. Report it.")
    return cycles


def _odd(n):
    """Walecki's cycles: all translations of (∞, 0, 1, -1, 2, -2, ...) modulo n - 1; ∞ = n - 1."""
    q = n - 1
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(q)]
    return [[q] + [(x + c) % q for x in zigzag] for c in range(q)]


def _even(n):
    """Inserts rank n - 1 into the cycles over the others.

    A Hamiltonian path that contains one arc of each cycle is removed. The new rank closes every
    gap, and closes the path, which becomes the last cycle.
    """
    path, colour_after = _rainbow_path(n - 2)
    tails = {colour_after[x]: x for x in path[:-1]}
    cycles = []
    for colour, row in enumerate(_odd(n - 1)):
        gap = row.index(tails[colour]) + 1
        cycles.append([n - 1, *row[gap:], *row[:gap]])
    return [*cycles, [n - 1, *path]]


def _rainbow_path(q):
    """Finds a Hamiltonian path with one arc of each cycle (colour) of `_odd(q + 1)`, even q >= 6.

    Returns the path and, for each rank except its last, the colour of the arc to the next.

    The search walks over pairs of paths that together visit every rank and have arcs of all colours
    except one. An arc of the missing colour at an end of one path either joins the two paths, which
    ends the walk, or cuts the other path where it meets it, which frees another colour. The walk
    turns back only if it must. It took at most 12 q steps for every even q up to 2000, mostly about
    q.
    """
    infinity, half = q, q // 2

    # Colour c has the arcs x -> 2c - x for x - c = 1, ..., q/2 - 1, and x -> 2c + 1 - x for the
    # other numbers modulo q, except for c + q/2 -> ∞ -> c.
    def successor(colour, x):
        if x == infinity:
            return colour
        offset = (x - colour) % q
        return infinity if offset == half else (colour - offset + (not 0 < offset < half)) % q

    def predecessor(colour, y):
        if y == infinity:
            return (colour + half) % q
        offset = (y - colour) % q
        return infinity if offset == 0 else (colour - offset + (offset <= half)) % q

    # Colour c has the arc c -> c + 1.
    one, two = [infinity], list(range(q))
    colour_after = [*range(q), -1]
    colour = q - 1
    forward = True
    random = 1
    while True:
        random = (6364136223846793005 * random + 1442695040888963407) % 2**64  # Knuth's MMIX
        turn = (random >> 33) % 3
        onward = [(one, two, forward), (one, two, not forward), (two, one, not forward)]
        back = (two, one, forward)
        for a, b, forward in (*onward[turn:], *onward[:turn], back):
            if forward:
                tail, head = a[-1], successor(colour, a[-1])
                if head not in b:
                    continue
                cut = b.index(head)
                one, two, freed = a + b[cut:], b[:cut], colour_after[b[cut - 1]]
            else:
                tail = predecessor(colour, a[0])
                if tail not in b:
                    continue
                cut = b.index(tail) + 1
                one, two, freed = b[:cut] + a, b[cut:], colour_after[tail]
            colour_after[tail] = colour
            if not two:
                return one, colour_after
            colour = freed
            break


def hamiltonian_paths(m: int) -> list[list[int]]:
    """Hamiltonian paths over m ranks that together use each of the m (m - 1) links once.

    Args:
      m: number of ranks; any except 3 and 5.
    Returns:
      m permutations of the ranks. Path i starts at rank i, and no two end at the same rank. For
      even m path i ends at i + m/2.
    Raises:
      ValueError: m is 3 or 5, for which no decomposition exists, or less than 1.
      TypeError: m is not an integer.
    """
    check_positive("hamiltonian_paths", m=m)
    m = int(m)
    if m in (3, 5):
        raise ValueError(
            f"hamiltonian_paths: m is {m}, but the links between 3 or 5 ranks do not decompose "
            f"into {m} Hamiltonian paths: one more rank would make them cycles over {m + 1} ranks "
            f"(Tillson 1980). Use two_level_cycles({m}, ...), which needs only {m - 1} paths and "
            "chunks."
        )
    # Cycles over m + 1 ranks, with the last rank removed. Every arc from and to it is used once, so
    # the starts and the ends of the paths are permutations.
    cycles = hamiltonian_cycles(m + 1)
    gaps = [row.index(m) for row in cycles]
    return sorted(row[gap + 1 :] + row[:gap] for row, gap in zip(cycles, gaps, strict=True))


# ---- Maps: which chunk each rank sends to each other; whose chunk it holds at each step.


def cycles_of_maps(
    op: str, out_chunk: CycleRows, in_chunk: CycleRows, num_ranks: int
) -> list[list[int]]:
    """Returns the cycle of each chunk, starting at rank 0: the inverse of `chunk_maps`."""
    num_chunks, sent = check_chunk_maps(op, out_chunk, in_chunk, num_ranks)
    receiver = [{chunk: peer for peer, chunk in enumerate(row) if chunk >= 0} for row in sent]
    rows = []
    for chunk in range(num_chunks):
        # A rank sends and receives a chunk once, so its path ends, or returns to rank 0.
        row, following = [0], receiver[0].get(chunk, -1)
        while following > 0:
            row.append(following)
            following = receiver[following].get(chunk, -1)
        if following < 0 or len(row) != num_ranks:
            end = "ends there" if following < 0 else "returns there too early"
            raise ValueError(
                f"{op}: chunk {chunk} goes from rank 0 along {row} and {end}. Each chunk must "
                f"visit all {num_ranks} ranks. Use chunk_maps of hamiltonian_cycles."
            )
        rows.append(row)
    return rows


def chunk_maps(cycles: CycleRows) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the chunk that moves on each link when every chunk follows its cycle.

    Args:
      cycles: rows of ranks; see `hamiltonian_cycles`. An empty list for one rank.
    Returns:
      `out_chunk[a][b]`, the chunk that rank a sends to rank b, and `in_chunk[a][b]`, the one that a
      receives from b; -1 for none. Each is the transpose of the other.
    Raises:
      ValueError: a row is not a permutation of the ranks, or two rows use one link.
      TypeError: rows of anything but integers.
    """
    num_ranks, rows = ranks_and_cycles("chunk_maps", cycles)
    out_chunk = [[-1] * num_ranks for _ in range(num_ranks)]
    in_chunk = [[-1] * num_ranks for _ in range(num_ranks)]
    for chunk, row in enumerate(rows):
        for sender, receiver in zip(row, row[1:] + row[:1], strict=True):
            out_chunk[sender][receiver] = in_chunk[receiver][sender] = chunk
    return out_chunk, in_chunk


def source_is_earlier(cycles: CycleRows) -> list[list[list[bool]]]:
    """Returns whether a held chunk belongs to this rank or an earlier one, for causal attention.

    At step 0, a rank holds its own chunks. A chunk that follows its cycle is at `row[i]` after it
    was at `row[i - 1]`, so at step t rank `row[i]` holds the chunk of rank `row[i - t]`.

    Args:
      cycles: rows of ranks; see `hamiltonian_cycles`. An empty list for one rank.
    Returns:
      `[rank][step][chunk]`: true if the source is at most the rank.
    Raises:
      As `chunk_maps`.
    """
    num_ranks, rows = ranks_and_cycles("source_is_earlier", cycles)
    places = [{rank: place for place, rank in enumerate(row)} for row in rows]
    return [
        [
            [row[at[rank] - step] <= rank for row, at in zip(rows, places, strict=True)]
            for step in range(num_ranks)
        ]
        for rank in range(num_ranks)
    ]


# ---- Cycles over nodes of ranks, in which only one link per rank leaves the node.


class TwoLevelMaps(NamedTuple):
    """Cycles over `m * u` ranks, and their maps. Rank `a * m + l` is the l-th of node a.

    Attributes:
      cycles: one row for each chunk.
      out_chunk, in_chunk: as returned by `chunk_maps`, for links inside and between nodes.
      inter_out: for each rank, [the rank of the next node that it sends to, the chunk], or [-1,
        -1].
      inter_in: for each rank, [the rank of the previous node that it receives from, the chunk], or
        [-1, -1].
    """

    cycles: list[list[int]]
    out_chunk: list[list[int]]
    in_chunk: list[list[int]]
    inter_out: list[list[int]]
    inter_in: list[list[int]]


def two_level_cycles(m: int, u: int, *, rail_aligned: bool = False) -> list[list[int]]:
    """Returns cycles over u nodes of m ranks; each follows a path through one node after another.

    Every link inside a node is used once. Every rank has one link to the next node and one from the
    previous node, each with one chunk per step. There are two exceptions:

    * m = 3 and 5, for which such paths do not exist, have m - 1 cycles. Each omits one link inside
      a node, and the last rank of a node has no link to other nodes.
    * u = 1 gives `hamiltonian_cycles(m)`: m closed paths in one node would have to share links.

    Args:
      m: ranks of a node.
      u: nodes.
      rail_aligned: if true, every link between nodes connects ranks of the same index in their
        nodes.
    Returns:
      m rows (m - 1 in the two exceptions), each a permutation of the `m * u` ranks. Rank `a * m +
      l` is the l-th of node a.
    Raises:
      ValueError: `rail_aligned` with odd m or odd u; m is 4 or 6 and u is 1; m or u is less than 1.
      TypeError: m or u is not an integer.
    """
    check_positive("two_level_cycles", m=m, u=u)
    m, u = int(m), int(u)
    if rail_aligned and (m % 2 or u % 2):
        raise ValueError(
            f"two_level_cycles: rail_aligned needs an even number of ranks per node and of nodes, "
            f"got m={m}, u={u}. Pass rail_aligned=False."
        )
    if u == 1:
        return hamiltonian_cycles(m)
    if m in (3, 5):
        # Rank m - 1 comes first in every cycle; the rest are translations of the first row. Without
        # the arc between the next two ranks, no two paths start or end at one rank, or at m - 1.
        paths = sorted(row[2:] + row[:2] for row in hamiltonian_cycles(m))
    else:
        paths = hamiltonian_paths(m)
    # For even m the path that starts where path i ends, i + m/2, ends where path i starts.
    opposite = paths[m // 2 :] + paths[: m // 2] if rail_aligned else paths
    return [
        [node * m + rank for node in range(u) for rank in (path, other)[node % 2]]
        for path, other in zip(paths, opposite, strict=True)
    ]


def two_level_maps(m: int, u: int, *, rail_aligned: bool = False) -> TwoLevelMaps:
    """Returns the cycles of `two_level_cycles` with the maps of each rank.

    Args, Raises: see `two_level_cycles`.
    Returns:
      `TwoLevelMaps`; with one node, no chunk leaves it.
    """
    cycles = two_level_cycles(m, u, rail_aligned=rail_aligned)
    inter_out = [[-1, -1] for _ in range(m * u)]
    inter_in = [[-1, -1] for _ in range(m * u)]
    for chunk, row in enumerate(cycles):
        for sender, receiver in zip(row, row[1:] + row[:1], strict=True):
            if sender // m != receiver // m:
                inter_out[sender] = [receiver, chunk]
                inter_in[receiver] = [sender, chunk]
    return TwoLevelMaps(cycles, *chunk_maps(cycles), inter_out, inter_in)


__all__ = [
    "TwoLevelMaps",
    "chunk_maps",
    "hamiltonian_cycles",
    "hamiltonian_paths",
    "source_is_earlier",
    "two_level_cycles",
    "two_level_maps",
]
