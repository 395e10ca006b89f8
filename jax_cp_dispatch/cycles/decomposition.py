"""Decompositions of the complete digraph into Hamiltonian cycles, and into paths."""

from jax_cp_dispatch.cycles.integer_rows import check_count, check_cycles


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
    n = check_count("hamiltonian_cycles", "n", n)
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
    if len(check_cycles(cycles, n)) != n - 1:
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
    m = check_count("hamiltonian_paths", "m", m)
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


def cut_cycles(m: int) -> list[list[int]]:
    """Returns the m - 1 cycles over an odd number of ranks, each without one arc.

    No two of these paths start or end at the same rank; none starts or ends at rank m - 1.
    """
    # Rank m - 1 comes first in every row; the rest are translations of the first row. The arc
    # between the next two ranks is removed.
    return sorted(row[2:] + row[:2] for row in hamiltonian_cycles(m))
