"""Two published methods to balance packed documents, reimplemented from their descriptions.

`min_heap`: MagiAttention's placement. Chunks of equal size go, most expensive first, to the rank
  with the least work that still has space. `greedy`: DistCA's scheduler. Tokens are not moved after
  packing (a cut document as head and tail on each rank), and ranks with too much work give pieces
  of queries to ranks with too little, those with the most work per byte first.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
ITEMSIZE = 2
# Bytes of a moved query and its output; bytes of a moved key and value.
Q_BYTES = 2 * HEADS["num_heads"] * HEADS["head_size"] * ITEMSIZE
KV_BYTES = 2 * HEADS["num_kv_heads"] * HEADS["head_size"] * ITEMSIZE


class Outcome(NamedTuple):
    """Largest work divided by the mean; queries and keys moved, per token."""

    imbalance: float
    q: float
    kv: float

    def row(self, num_kv_heads: int = HEADS["num_kv_heads"]) -> dict[str, float]:
        """Returns what a file of results says about it."""
        return {
            "imbalance": round(float(self.imbalance), 4),
            "q_moved_share": round(self.q, 4),
            "kv_moved_share": round(self.kv, 4),
            "bytes_per_token": round(bytes_per_token(self.q, self.kv, num_kv_heads)),
        }


def bytes_per_token(q: float, kv: float, num_kv_heads: int = HEADS["num_kv_heads"]) -> float:
    """Returns the bytes of moved queries and keys per token, forward."""
    return Q_BYTES * q + KV_BYTES * num_kv_heads / HEADS["num_kv_heads"] * kv


class Piece(NamedTuple):
    document: int
    start: int
    end: int

    @property
    def work(self) -> int:
        return (self.end * (self.end + 1) - self.start * (self.start + 1)) // 2

    @property
    def tokens(self) -> int:
        return self.end - self.start


def missing_keys(computed: Iterable[Piece], own: Iterable[Piece]) -> int:
    """Counts the keys that a rank needs for the queries of these pieces, beyond its own."""
    last: dict[int, int] = defaultdict(int)
    for piece in computed:
        last[piece.document] = max(last[piece.document], piece.end)
    held = sum(max(0, min(p.end, last[p.document]) - p.start) for p in own if p.document in last)
    return sum(last.values()) - held


def min_heap(lengths: list[int], num_ranks: int, chunk: int = 2048) -> Outcome:
    """Assigns chunks of the packed row; a chunk holds the pieces of the documents in it."""
    chunks: list[list[Piece]] = []
    left = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            if left == 0:
                chunks.append([])
                left = chunk
            end = min(length, start + left)
            chunks[-1].append(Piece(document, start, end))
            left -= end - start
            start = end
    room = len(chunks) // num_ranks
    work = [sum(piece.work for piece in pieces) for pieces in chunks]
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    heap = [(0, 0, rank) for rank in range(num_ranks)]
    load = [0] * num_ranks
    for i in sorted(range(len(chunks)), key=lambda i: -work[i]):
        _, count, rank = heapq.heappop(heap)
        ranks[rank] += chunks[i]
        load[rank] += work[i]
        if count + 1 < room:
            heapq.heappush(heap, (load[rank], count + 1, rank))
    keys = sum(missing_keys(pieces, pieces) for pieces in ranks)
    return Outcome(max(load) * num_ranks / sum(load), 0.0, keys / sum(lengths))


def head_and_tail(lengths: list[int], num_ranks: int) -> list[list[Piece]]:
    """Packs documents in order; each rank has a piece of both ends of a cut document."""
    size = sum(lengths) // num_ranks
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    rank, room = 0, size
    for document, length in enumerate(lengths):
        parts, left = [], length
        while left:
            part = min(left, room)
            parts.append((rank, part))
            left, room = left - part, room - part
            if room == 0:
                rank, room = rank + 1, size
        low, high = 0, length
        for owner, part in parts:
            head = part if len(parts) == 1 else (part + 1) // 2
            ranks[owner].append(Piece(document, low, low + head))
            low += head
            if part > head:
                ranks[owner].append(Piece(document, high - (part - head), high))
                high -= part - head
    return ranks


def greedy(
    lengths: list[int],
    num_ranks: int,
    tolerance: float = 0.01,
    block: int = 32,
    num_kv_heads: int = HEADS["num_kv_heads"],
) -> Outcome:
    """Moves pieces to the rank with the largest deficit, until no rank exceeds the tolerance."""
    own = head_and_tail(lengths, num_ranks)
    computed = [list(pieces) for pieces in own]
    load = [sum(piece.work for piece in pieces) for pieces in computed]
    mean = sum(load) / num_ranks
    held = [defaultdict(int) for _ in range(num_ranks)]  # keys [0, x) of a document, if present
    for rank, pieces in enumerate(computed):
        for piece in pieces:
            held[rank][piece.document] = max(held[rank][piece.document], piece.end)
    done = set()
    while True:
        open_ranks = [r for r in range(num_ranks) if r not in done]
        taker = min(open_ranks, key=load.__getitem__, default=None)
        if taker is None or max(load) <= (1 + tolerance) * mean:
            break
        best = None
        for giver in range(num_ranks):
            surplus = load[giver] - mean
            if surplus <= tolerance * mean:
                continue
            want = min(surplus, (1 + tolerance) * mean - load[taker])
            for piece in computed[giver]:
                tokens = piece.tokens
                if piece.work > want:  # its tail, with about the wanted work
                    tokens = int(want / (piece.end + 1)) // block * block
                if tokens < min(block, piece.tokens):
                    continue
                tail = Piece(piece.document, piece.end - tokens, piece.end)
                keys = max(0, tail.end - held[taker][tail.document])
                if tail.work > want:
                    continue
                rate = tail.work / bytes_per_token(tokens, keys, num_kv_heads)
                if best is None or rate > best[0]:
                    best = rate, giver, piece, tail
        if best is None:
            done.add(taker)
            continue
        _, giver, piece, tail = best
        computed[giver].remove(piece)
        if piece.tokens > tail.tokens:
            computed[giver].append(Piece(piece.document, piece.start, tail.start))
        computed[taker].append(tail)
        held[taker][tail.document] = max(held[taker][tail.document], tail.end)
        load[giver] -= tail.work
        load[taker] += tail.work
    total = sum(lengths)
    away = 0
    for mine, pieces in zip(own, computed, strict=True):
        kept = sum(
            max(0, min(p.end, o.end) - max(p.start, o.start))
            for p in pieces
            for o in mine
            if p.document == o.document
        )
        away += sum(piece.tokens for piece in pieces) - kept
    keys = sum(missing_keys(c, o) for c, o in zip(computed, own, strict=True))
    return Outcome(max(load) / mean, away / total, keys / total)
