"""How published systems share packed documents among context-parallel ranks: lengths to counts.

Attention is causal. Each function returns what the ranks compute and receive; nothing is timed. The
rules are written from the cited code and papers.

`zigzag`: each document over all ranks. `fixed_groups`: each document over a group of fixed size.
`hybrid`: each document over as many ranks as it needs, a power of two. `whole`: each document on
one rank.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

NODE = 8  # ranks; groups of at most that many ranks lie inside a node
SLACK = 0.05  # of `hybrid`: ranks whose loads differ by less are balanced
OVERFULL = 1.1  # of `hybrid`: a bucket is closed before it exceeds its share by this


class Round(NamedTuple):
    """Counts of each rank between two points where all ranks wait for each other.

    Attributes:
      pairs: `[W]`; query-key pairs, forward.
      tokens: `[W]`; rows of the linear layers, with the padding that a rule needs.
      sent, received: `[W, 2]`; keys (each with its value) to and from other ranks, forward: inside
        a node, and between nodes. A ring over several nodes runs at the pace of the latter.
    """

    pairs: np.ndarray
    tokens: np.ndarray
    sent: np.ndarray
    received: np.ndarray


def pairs_up_to(end):
    """Returns the pairs of the first `end` tokens of a document."""
    return end * (end + 1) // 2


def zigzag(lengths: Iterable[int], num_ranks: int) -> Round:
    """Cuts each document into 2 W equal chunks; rank r gets the chunks r and 2 W - 1 - r.

    Documents are padded to a multiple of 2 W. Padding has no pairs, but moves like other tokens.
    All keys of the ranks' chunks travel to all ranks, by a ring or an all-gather.

    References: Transformer Engine, `pad_thd_sequences_for_cp` and `thd_get_partitioned_indices`
    (pull request 2129); PyTorch, `_PerDocumentHeadTailLoadBalancer` in
    `torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py`, which
    takes padded documents only (torchtitan, issue 2536). Here each rank gets its chunks of every
    document, as intended; before PyTorch's pull request 189902, some documents were cut elsewhere.
    """
    lengths = np.array(list(lengths), np.int64)
    chunk = -(-lengths // (2 * num_ranks))
    ends = (np.minimum(lengths, i * chunk) for i in range(2 * num_ranks + 1))
    of_chunk = np.diff([pairs_up_to(end).sum() for end in ends])
    pairs = of_chunk[:num_ranks] + of_chunk[num_ranks:][::-1]
    tokens = np.full(num_ranks, 2 * chunk.sum())
    moved = np.zeros((num_ranks, 2), np.int64)
    moved[:, int(num_ranks > NODE)] = (num_ranks - 1) * tokens
    return Round(pairs, tokens, moved, moved)


def side_by_side(parts: Iterable[Round]) -> Round:
    """Joins groups of ranks that work at the same time."""
    return Round(*map(np.concatenate, zip(*parts, strict=True)))


def fixed_groups(lengths: Iterable[int], num_ranks: int, group: int) -> Round:
    """Gives each document, in order, to the group with the fewest tokens; zigzag in each group.

    So groups have equal tokens, as with packing to equal lengths, and unequal work. It is the
    baseline of Megatron's blog post (see `hybrid`): data parallelism over groups of fixed size.
    """
    members: list[list[int]] = [[] for _ in range(num_ranks // group)]
    tokens = [0] * len(members)
    for length in lengths:
        shortest = tokens.index(min(tokens))
        members[shortest].append(length)
        tokens[shortest] += length
    return side_by_side(zigzag(documents, group) for documents in members)


def whole(lengths: Iterable[int], num_ranks: int, cost: Callable[[int], float]) -> Round:
    """Gives each document, most expensive first, to the rank with the least cost so far.

    References: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969. WLB-LLM
    (arXiv:2503.17924, variable-length packing) packs whole documents by the same rule, by an
    estimate of the time of attention and of all other layers.
    """
    load = np.zeros(num_ranks)
    pairs, tokens = np.zeros((2, num_ranks), np.int64)
    for length in sorted(lengths, reverse=True):
        rank = int(load.argmin())
        load[rank] += cost(length)
        pairs[rank] += pairs_up_to(length)
        tokens[rank] += length
    nothing = np.zeros((num_ranks, 2), np.int64)
    return Round(pairs, tokens, nothing, nothing)


class Group:
    """Ranks that compute the same documents, one after the other."""

    def __init__(self, size: int):
        self.size, self.load, self.documents = size, 0.0, []


class Hybrid:
    """Megatron's rule for `num_ranks` ranks of at most `limit` tokens of one document."""

    def __init__(self, num_ranks: int, limit: int):
        self.num_ranks, self.limit = num_ranks, limit

    def ranks(self, length: int) -> int:
        return max(1, 2 ** math.ceil(math.log2(length / self.limit)))

    def cost(self, length: int) -> float:
        """Returns the estimated load of each rank that shares the document."""
        return length * length / self.ranks(length)

    def buckets(self, documents: list[int]) -> list[deque[int]]:
        """Cuts the row of documents into buckets of about equal cost, one per number of ranks."""
        kinds = len({self.ranks(x) for x in documents})
        share = sum(map(self.cost, documents)) / kinds
        found: list[deque[int]] = []
        current: deque[int] = deque()
        load = 0.0
        for i, length in enumerate(documents):
            is_full = load + self.cost(length) > OVERFULL * share
            if current and (is_full or len(documents) - i <= kinds - 2 * len(found)):
                found.append(current)
                current, load = deque(), 0.0
            current.append(length)
            load += self.cost(length)
        return [*found, current]

    def next_round(self, documents: list[int]) -> tuple[list[Group], list[int]]:
        """Returns the groups of one round, and the documents left for later ones."""
        buckets, groups, free = self.buckets(documents), [], self.num_ranks
        largest = self.ranks(documents[0])

        def loads() -> list[float]:
            return [group.load for group in groups] + [0.0] * (free > 0)

        def fits(length: int) -> bool:
            size = self.ranks(length)
            return size <= free or any(group.size == size for group in groups)

        is_smaller = False
        while bucket := next((x for x in buckets if x and fits(x[0])), None):
            length = bucket.popleft()
            size = self.ranks(length)
            if size <= free:
                groups.append(Group(size))
                free -= size
                group = groups[-1]
            else:
                group = min((x for x in groups if x.size == size), key=lambda x: x.load)
            group.documents.append(length)
            group.load += self.cost(length)
            is_smaller = is_smaller or size < largest
            if is_smaller and any(buckets) and spread(loads()) <= SLACK * max(loads()):
                break
        left = [length for bucket in buckets for length in bucket]
        while min(loads()) and spread(loads()) > SLACK * max(loads()):
            heaviest, before = max(groups, key=lambda x: x.load), spread(loads())
            if len(heaviest.documents) == 1:
                break
            last = heaviest.documents[-1]
            heaviest.load -= self.cost(last)
            if spread(loads()) >= before:
                break
            left.append(heaviest.documents.pop())
        while free:  # the first of the smallest groups takes as many ranks again
            group = min(groups, key=lambda x: x.size)
            free -= group.size
            group.size *= 2
        return groups, left


def spread(numbers: list[float]) -> float:
    return max(numbers) - min(numbers)


def hybrid(lengths: Iterable[int], num_ranks: int, limit: int) -> list[Round]:
    """Gives each document the least power of two of ranks that keeps it within `limit` per rank.

    Documents are sorted, longest first, and cut into buckets. A document opens a new group of ranks
    while ranks are free; later ones go to the group of their size with the least load, the squared
    length per rank. A round ends if no document fits, or if loads are balanced after the first
    document that needs fewer ranks than the longest. The heaviest group then returns documents if
    that helps, and groups grow into free ranks. In a group, documents are computed one after the
    other, by zigzag. All ranks wait at the end of a round.

    References: Megatron-LM, `BalancedCPScheduler` in
    `megatron/core/pipeline_parallel/hybrid_cp_schedule.py` (strategy "dp", pull request 2282;
    later called dynamic context parallelism); NVIDIA's blog post "Speeding Up Variable-Length
    Training with Dynamic Context Parallelism and NVIDIA Megatron Core", 2026-01-28.

    Raises:
      ValueError: the number of ranks is no power of two, or a document needs more ranks.
    """
    rule, rounds = Hybrid(num_ranks, limit), []
    left = sorted(lengths, reverse=True)
    if num_ranks & (num_ranks - 1) or rule.ranks(left[0]) > num_ranks:
        raise ValueError(
            f"hybrid: a document of {left[0]} tokens needs {rule.ranks(left[0])} of {num_ranks} "
            f"ranks, which need to be a power of two. Pass a larger limit than {limit}."
        )
    while left:
        groups, left = rule.next_round(left)
        rounds.append(side_by_side(zigzag(x.documents, x.size) for x in groups))
    return rounds
