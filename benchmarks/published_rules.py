"""How published systems share packed documents among context-parallel ranks: lengths to counts.

Attention is causal. Each function returns what the ranks compute and receive; nothing is timed. The
rules are written from the cited code and papers.

`zigzag`: each document over all ranks. `whole`: each document on one rank. `whole_or_zigzag`: the
long ones over all ranks, the others on one. `in_groups`: one of these in each group of fixed size.
`hybrid`: each document over as many ranks as it needs, a power of two. `blocks`: blocks of queries
and keys on any rank, by a partitioner of hypergraphs.
"""

import functools
import heapq
import importlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

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
        a node, and between nodes. A ring over several nodes runs at the pace of the latter. Queries
        and outputs count as keys of as many bytes.
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


def in_groups(
    lengths: Iterable[int], num_ranks: int, group: int, rule: Callable[[list[int], int], Round]
) -> Round:
    """Gives each document, in order, to the group with the fewest tokens; a rule in each group.

    So groups have equal tokens, as with packing to equal lengths, and unequal work. With `zigzag`,
    it is the baseline of Megatron's blog post (see `hybrid`): data parallelism over groups of fixed
    size.
    """
    members: list[list[int]] = [[] for _ in range(num_ranks // group)]
    tokens = [(0, i) for i in range(len(members))]
    for length in lengths:
        total, shortest = tokens[0]
        members[shortest].append(length)
        heapq.heapreplace(tokens, (total + length, shortest))
    return side_by_side(rule(documents, group) for documents in members)


def whole(lengths: Iterable[int], num_ranks: int, cost: Callable[[int], float]) -> Round:
    """Gives each document, most expensive first, to the rank with the least cost so far.

    References: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969. WLB-LLM
    (arXiv:2503.17924, variable-length packing) packs whole documents by the same rule, by an
    estimate of the time of attention and of all other layers.
    """
    pairs, tokens = np.zeros((2, num_ranks), np.int64)
    load = [(0.0, rank) for rank in range(num_ranks)]
    for length in sorted(lengths, reverse=True):
        least, rank = load[0]
        heapq.heapreplace(load, (least + cost(length), rank))
        pairs[rank] += pairs_up_to(length)
        tokens[rank] += length
    nothing = np.zeros((num_ranks, 2), np.int64)
    return Round(pairs, tokens, nothing, nothing)


def whole_or_zigzag(
    lengths: Iterable[int], num_ranks: int, limit: float, cost: Callable[[int], float]
) -> Round:
    """Cuts documents longer than `limit` as `zigzag`; the others stay whole, as in `whole`.

    Only the keys of cut documents travel.

    References: FlashCP (arXiv:2606.08476), of which only the abstract was at hand: "Whole-Doc" and
    "Per-Doc" sharding, combined by a heuristic search, and communication without redundant keys.
    A limit takes the place of that search, which the abstract does not describe: try several, and
    keep the best.
    """
    lengths = list(lengths)
    cut = zigzag((x for x in lengths if x > limit), num_ranks)
    kept = whole((x for x in lengths if x <= limit), num_ranks, cost)
    return Round(*(x + y for x, y in zip(cut, kept, strict=True)))


class Groups:
    """The groups of one round, each of ranks that compute the same documents, one after the other.

    Attributes:
      sizes, loads, documents: of each group.
      free: ranks in no group.
    """

    def __init__(self, num_ranks: int):
        self.free = num_ranks
        self.sizes: list[int] = []
        self.loads: list[float] = []
        self.documents: list[list[int]] = []
        self._of_size: dict[int, list[tuple[float, int]]] = {}  # heaps of load and group
        self._most = 0.0

    def fits(self, size: int) -> bool:
        return size <= self.free or size in self._of_size

    def add(self, length: int, size: int, cost: float) -> None:
        """Opens a group while ranks are free; later, the group of that size with least load."""
        heap = self._of_size.setdefault(size, [])
        if size <= self.free:
            self.free -= size
            group, load = len(self.sizes), cost
            self.sizes.append(size)
            self.loads.append(cost)
            self.documents.append([length])
            heapq.heappush(heap, (load, group))
        else:
            load, group = heap[0]
            load += cost
            heapq.heapreplace(heap, (load, group))
            self.loads[group] = load
            self.documents[group].append(length)
        self._most = max(self._most, load)

    def are_balanced(self) -> bool:
        """Whether loads differ by little, also that of free ranks. Not after `give_back`."""
        least = 0.0 if self.free else min(heap[0][0] for heap in self._of_size.values())
        return self._most - least <= SLACK * self._most

    def give_back(self, cost: Callable[[int], float]) -> list[int]:
        """Takes documents from the heaviest group while that makes loads more equal."""
        found: list[int] = []
        least = [0.0] * (self.free > 0)
        while True:
            heaviest = max(range(len(self.loads)), key=self.loads.__getitem__)
            before = [*self.loads, *least]
            if not min(before) or spread(before) <= SLACK * max(before):
                return found
            if len(self.documents[heaviest]) == 1:
                return found
            self.loads[heaviest] -= cost(self.documents[heaviest][-1])
            if spread([*self.loads, *least]) >= spread(before):
                return found
            found.append(self.documents[heaviest].pop())

    def grow(self) -> None:
        """The first of the smallest groups takes as many ranks again, until none is free."""
        heap = [(size, group) for group, size in enumerate(self.sizes)]
        heapq.heapify(heap)
        while self.free:
            size, group = heap[0]
            self.free -= size
            self.sizes[group] = 2 * size
            heapq.heapreplace(heap, (2 * size, group))


class Hybrid:
    """Megatron's rule for `num_ranks` ranks of at most `limit` tokens of one document.

    `cost` estimates the load of each of several ranks that share a document.
    """

    def __init__(self, num_ranks: int, limit: int, cost: Callable[[int, int], float]):
        self.num_ranks, self.limit, self._cost = num_ranks, limit, cost

    def ranks(self, length: int) -> int:
        return max(1, 2 ** math.ceil(math.log2(length / self.limit)))

    def cost(self, length: int) -> float:
        return self._cost(length, self.ranks(length))

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

    def next_round(self, documents: list[int]) -> tuple[Groups, list[int]]:
        """Returns the groups of one round, and the documents left for later ones."""
        buckets, groups = self.buckets(documents), Groups(self.num_ranks)
        largest, is_smaller = self.ranks(documents[0]), False
        fits = lambda length: groups.fits(self.ranks(length))
        while bucket := next((x for x in buckets if x and fits(x[0])), None):
            length = bucket.popleft()
            size = self.ranks(length)
            groups.add(length, size, self.cost(length))
            is_smaller = is_smaller or size < largest
            if is_smaller and any(buckets) and groups.are_balanced():
                break
        left = [length for bucket in buckets for length in bucket]
        left += groups.give_back(self.cost)
        groups.grow()
        return groups, left


def spread(numbers: list[float]) -> float:
    return max(numbers) - min(numbers)


def squares(length: int, ranks: int) -> float:
    """The cost of a document for each of its ranks, by Megatron's estimate."""
    return length * length / ranks


def hybrid(
    lengths: Iterable[int],
    num_ranks: int,
    limit: int,
    cost: Callable[[int, int], float] = squares,
) -> list[Round]:
    """Gives each document the least power of two of ranks that keeps it within `limit` per rank.

    Documents are sorted, longest first, and cut into buckets. A document opens a new group of ranks
    while ranks are free; later ones go to the group of their size with the least load: the sum of
    `cost(length, ranks)`. A round ends if no document fits, or if loads are balanced after the
    first document that needs fewer ranks than the longest. The heaviest group then returns
    documents if that helps, and groups grow into free ranks. In a group, documents are computed one
    after the other, by zigzag. All ranks wait at the end of a round.

    References: Megatron-LM, `BalancedCPScheduler` in
    `megatron/core/pipeline_parallel/hybrid_cp_schedule.py` (strategy "dp", pull request 2282;
    later called dynamic context parallelism; its estimate is still `squares` at d98e8a6, 2026-08);
    NVIDIA's blog post "Speeding Up Variable-Length Training with Dynamic Context Parallelism and
    NVIDIA Megatron Core", 2026-01-28.

    Raises:
      ValueError: the number of ranks is no power of two, or a document needs more ranks.
    """
    rule, rounds = Hybrid(num_ranks, limit, cost), []
    left = sorted(lengths, reverse=True)
    if num_ranks & (num_ranks - 1) or rule.ranks(left[0]) > num_ranks:
        raise ValueError(
            f"hybrid: a document of {left[0]} tokens needs {rule.ranks(left[0])} of {num_ranks} "
            f"ranks, which need to be a power of two. Pass a larger limit than {limit}."
        )
    while left:
        groups, left = rule.next_round(left)
        members = zip(groups.documents, groups.sizes, strict=True)
        rounds.append(side_by_side(zigzag(documents, size) for documents, size in members))
    return rounds


# ---- DCP: blocks of queries and keys on any rank.

Q_KEYS = 2  # bytes of a query, or of its output, over those of a key and its value: 32 and 8 heads
_HEAVIEST = 2**31  # the partitioner's weights are 32-bit


class BlockGraph:
    """Blocks of documents, `[D]`, and blocks of pairs, `[P]`, of which some go to some ranks.

    Attributes:
      tokens: of each data block.
      q, k: the data block of the queries and of the keys of each block of pairs.
      pairs: of each block of pairs.
    """

    def __init__(self, lengths: list[int], block: int):
        counts = [-(-x // block) for x in lengths]
        ends = np.cumsum(counts)
        self.tokens = np.full(ends[-1], block, np.int64)
        self.tokens[ends - 1] = np.array(lengths) - (np.array(counts) - 1) * block
        below = [np.tril_indices(n) + end - n for n, end in zip(counts, ends, strict=True)]
        self.q, self.k = np.concatenate(below, axis=1)
        t = self.tokens
        on_diagonal = self.q == self.k
        self.pairs = np.where(on_diagonal, pairs_up_to(t[self.q]), t[self.q] * t[self.k])

    def divide(
        self, num_parts: int, data: np.ndarray, pairs: np.ndarray, tolerance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parts of some data blocks and blocks of pairs, given by number.

        Parts have equally many data blocks: one weighs more than all pairs together. Data blocks of
        other parts that these pairs need weigh nothing, and may be anywhere.
        """
        needed = np.unique(np.concatenate([data, self.q[pairs], self.k[pairs]]))
        is_own, number = np.isin(needed, data), np.zeros(len(self.tokens), np.int64)
        number[needed] = np.arange(len(needed))
        share = self.pairs[pairs] / self.pairs[pairs].sum()
        scale = min(1e6, _HEAVIEST / (2.5 * len(data)))  # all weights are 2 D + 1 times these
        work = np.maximum(1, np.rint(share * scale)).astype(np.int64)
        heavy = 2 * int(work.sum())
        weights = [*np.where(is_own, heavy, 1).tolist(), *work.tolist()]
        most = [
            (len(data) + num_parts - 1 - i) // num_parts * heavy
            + int((1 + tolerance) * work.sum() / num_parts)
            + len(needed)
            - len(data)
            for i in range(num_parts)
        ]
        nets = [[block] for block in range(len(needed)) for _ in "qk"]
        for i, (q, k) in enumerate(zip(number[self.q[pairs]], number[self.k[pairs]], strict=True)):
            nets[2 * q].append(len(needed) + i)
            nets[2 * k + 1].append(len(needed) + i)
        moved = np.outer(self.tokens[needed], (2 * Q_KEYS, 1)).ravel().tolist()
        kept = [i for i, net in enumerate(nets) if len(net) > 1]
        nets, moved = [nets[i] for i in kept], [moved[i] for i in kept]
        parts = _parts_of_hypergraph(nets, moved, weights, most)
        return parts[: len(needed)][is_own], parts[len(needed) :]


@functools.cache
def _partitioner() -> tuple[Any, Any]:
    package = importlib.import_module("mtkahypar")
    return package, package.initialize(1)


def _parts_of_hypergraph(
    nets: list[list[int]], moved: list[int], weights: list[int], most: list[int]
) -> np.ndarray:
    """Returns the part of each vertex: fewest `moved` for each further part of a net."""
    package, library = _partitioner()
    context = library.context_from_preset(package.PresetType.DETERMINISTIC)
    context.logging = False
    slack = max(most) * len(most) / sum(weights) - 1
    context.set_partitioning_parameters(len(most), slack, package.Objective.KM1)
    context.set_individual_target_block_weights(most)
    package.set_seed(0)
    graph = library.create_hypergraph(context, len(weights), len(nets), nets, weights, moved)
    return np.array(graph.partition(context).get_partition())


def blocks(lengths: Iterable[int], num_ranks: int, block: int, tolerance: float = 0.1) -> Round:
    """Gives blocks of `block` tokens, and the blocks of pairs of two of them, to ranks.

    A partitioner of hypergraphs divides them between nodes, then between the ranks of each: with
    the fewest bytes of queries, outputs, keys and values between ranks, equally many data blocks on
    each, and pairs within the tolerance at each level. Documents are padded to whole blocks.
    Queries, keys and outputs of a position are on one rank. All heads are in one block.

    References: DCP (arXiv:2510.10620); its source, chenyu-jiang/dcp at 942a2c7:
    `construct_and_partition_graph_multiconstraint` in `dcp/graph_partition/graph.py`, with
    Mt-KaHyPar, one of three partitioners there. There, pairs may differ by several times the
    tolerance between nodes, which does not help here.

    Raises:
      ModuleNotFoundError: the package mtkahypar is not installed.
    """
    graph, size = BlockGraph(list(lengths), block), min(NODE, num_ranks)
    every = np.arange(len(graph.tokens)), np.arange(len(graph.pairs))
    nodes = (
        [np.zeros_like(x) for x in every]
        if size == num_ranks
        else graph.divide(num_ranks // size, *every, tolerance=tolerance)
    )
    home, place = np.zeros_like(every[0]), np.zeros_like(every[1])
    for node in range(num_ranks // size):
        data, pairs = (np.flatnonzero(x == node) for x in nodes)
        inside = graph.divide(size, data, pairs, tolerance)
        home[data], place[pairs] = (node * size + x for x in inside)
    sent, received = np.zeros((2, num_ranks, 2), np.int64)

    def move(source: np.ndarray, target: np.ndarray, keys: np.ndarray) -> None:
        moves = source != target
        source, target, keys = source[moves], target[moves], keys[moves]
        is_far = (source // NODE != target // NODE).astype(int)
        np.add.at(sent, (source, is_far), keys)
        np.add.at(received, (target, is_far), keys)

    needs = lambda of: np.divmod(np.unique(of * num_ranks + place), num_ranks)
    data, rank = needs(graph.k)
    move(home[data], rank, graph.tokens[data])
    data, rank = needs(graph.q)
    move(home[data], rank, Q_KEYS * graph.tokens[data])
    move(rank, home[data], Q_KEYS * graph.tokens[data])  # outputs
    work = np.zeros(num_ranks, np.int64)
    np.add.at(work, place, graph.pairs)
    return Round(work, block * np.bincount(home, minlength=num_ranks), sent, received)
