"""`Ring`, `Zigzag`, `Hamilton`: keys and values rotate through the ranks, whole or in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.attention.algorithms.algorithm import Algorithm, RankProgram, Shape
from jax_cp_dispatch.attention.key_chunks import Chunking, CycleSchedule, DirectSchedule, Schedule
from jax_cp_dispatch.attention.local.ranges import SoftmaxGradients, pass_options, rank_blocks
from jax_cp_dispatch.attention.operands import Call, Operands, Outputs, key_shapes
from jax_cp_dispatch.attention.rotating import (
    Rotation,
    attend_sequence,
    attend_steps,
    gradient_steps,
    ranges_of_rows,
)
from jax_cp_dispatch.cost import Hardware, StepCost, Traffic, Workload
from jax_cp_dispatch.cost.attention import (
    NEXT_RANK,
    Pass,
    Receivers,
    all_others,
    attention_seconds,
    spread,
    step_cost,
)
from jax_cp_dispatch.cost.pairs import decisive_pairs, pairs_between_ranks
from jax_cp_dispatch.cycles import (
    CycleRows,
    check_cycles,
    cycles_of_maps,
    hamiltonian_cycles,
    integer_rows,
    two_level_cycles,
)
from jax_cp_dispatch.documents.documents import Documents, attended_tokens
from jax_cp_dispatch.documents.layouts import contiguous_layout, halves_in_zigzag, zigzag_layout
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.pairs import pairs_per_query


@dataclasses.dataclass(frozen=True)
class RingFamily(Algorithm):
    """Keys and values rotate; queries stay, and their softmax grows step by step.

    In each of n steps, a rank computes attention over the keys and values that it holds and sends
    them on. There are n - 1 exchanges, each started before the step's attention. In the backward
    pass, keys and values rotate again, and their gradients with them in float32 (n exchanges).
    Residuals per rank: q, k, v, the unrounded output, its lse, and the ranges of its rows.

    Rows of padding are not read, even if they contain NaN. A NaN in a token may reach tokens of
    other documents in the same block.
    """

    def schedule(self, op: str, num_ranks: int) -> Schedule:
        """Returns which rank holds what at each step."""
        return CycleSchedule((tuple(range(num_ranks)),))  # one chunk, from each rank to the next

    def computes_in_zigzag(self, mask: Mask) -> bool:
        """Whether contiguous rows are rearranged first, and the output back."""
        return mask.is_causal

    def rotation(self, call: Call, mask: Mask, *qkv: Any) -> Rotation:
        """Returns the rotation of q, k and v of one rank, or of their shapes and dtypes."""
        q, k, v = qkv
        (B, T, N, H), K, schedule = q.shape, k.shape[2], self.schedule(call.op, call.num_ranks)
        rearranges = self.computes_in_zigzag(mask) and call.num_ranks > 1
        rearranges &= call.order.layout == "contiguous"
        make = halves_in_zigzag if rearranges else contiguous_layout
        make = zigzag_layout if call.order.layout == "zigzag" else make
        layout = make(call.num_ranks, T)
        chunking = Chunking.of(layout, schedule.num_chunks)
        blocks = rank_blocks(layout.num_rows, chunking.most_tokens, N, K, rows=256)
        passes = pass_options(q, k, **call.softmax, **blocks)
        shape = B, layout.num_rows, N, H
        return Rotation(call, schedule, chunking, rearranges, passes, shape, K, v.shape[3])

    def run(self, call: Call, operands: Operands, documents: Documents) -> Outputs:
        keys = key_shapes(call.expansion, operands)
        rotation = self.rotation(call, documents.mask, operands.q, *keys)
        return attend_sequence(rotation, operands, documents)

    def rank_program(
        self, call: Call, documents: Documents, qkv: list[Shape], *, backward: bool
    ) -> RankProgram:
        """Of tokens in the order that the algorithm computes, as in zigzag layout."""
        rotation = self.rotation(call, documents.mask, *qkv)
        if isinstance(rotation.schedule, DirectSchedule):  # nothing moves: a ring copies no chunks
            ring = CycleSchedule((tuple(range(call.num_ranks)),) * rotation.schedule.num_chunks)
            rotation = dataclasses.replace(rotation, schedule=ring)
        layout = rotation.chunking.layout

        def run(rank, q, k, v, of_tokens):
            operands = Operands(q, k, v)
            out, lse, _ = attend_steps(rotation, operands, of_tokens, rank)
            if not backward:
                return out, lse
            whole = SoftmaxGradients(out, lse, out.astype(q.dtype))
            dq, dkv, _ = gradient_steps(rotation, operands, of_tokens, whole, rank)
            return out, dq, *dkv

        packed = jax.tree.map(jnp.asarray, documents)
        seen = attended_tokens(packed, packed.segment_ids.shape)
        tokens = [np.asarray(layout.positions(rank)) for rank in range(call.num_ranks)]
        ranges = [ranges_of_rows(packed.mask, seen, token) for token in tokens]
        pairs = pairs_per_query(jax.tree.map(np.asarray, seen)).sum(0)
        of_ranks = np.array([pairs[token[token >= 0]].sum() for token in tokens])
        missing = layout.num_rows - qkv[0].shape[1]
        shapes = [Shape((x.shape[0], x.shape[1] + missing, *x.shape[2:]), x.dtype) for x in qkv]
        return RankProgram(run, shapes, ranges, of_ranks)

    def _steps(self, of: Pass) -> list[StepCost]:
        """n computations; during all but the last, keys and values move.

        Backward, their gradients also move, n times, in float32, each during the computation after
        the one that produces it.
        """
        others, rows = of.workload.num_ranks - 1, of.workload.rows_per_rank
        kv, dkv = of.workload.kv_bytes(rows), of.workload.kv_bytes(rows, itemsize=4)
        compute = attention_seconds(of, self._pairs(of), q_rows=rows, kv_rows=rows)
        sent = [kv] * others + [0]
        if of.backward and others:
            sent = [kv, *[kv + dkv] * (others - 1), dkv, dkv]
            compute = np.append(compute, 0.0)
        return [
            step_cost(of, float(seconds), *self._sent(of, x))
            for seconds, x in zip(compute, sent, strict=True)
        ]

    def _pairs(self, of: Pass) -> Float64[np.ndarray, " num_ranks"]:
        zigzag = self.computes_in_zigzag(of.workload.visible)
        pairs = pairs_between_ranks(of.workload, zigzag=zigzag)
        rank = np.arange(of.workload.num_ranks)
        return np.array([decisive_pairs(pairs[rank, rank - step], of.hardware) for step in rank])

    def _sent(self, of: Pass, num_bytes: int | float) -> tuple[Traffic, Receivers]:
        """Returns the traffic of a step in which each rank sends to the next."""
        size = of.hardware.node_size(of.workload.num_ranks)
        if size == of.workload.num_ranks:
            return Traffic(float(num_bytes), 0.0, float(num_bytes), 0.0), NEXT_RANK
        inside = num_bytes if size > 1 else 0.0  # the last rank of a node sends to the next node
        means = num_bytes * (1 - 1 / size), num_bytes / size
        return Traffic(*means, inside, float(num_bytes)), NEXT_RANK

    def rearrangement_seconds(
        self, workload: Workload, hardware: Hardware, *, layout: str, with_backward: bool
    ) -> float:
        """Of q, k and v to zigzag order, and of out back, half to each of two ranks.

        The backward pass rearranges dout, and dq, dk and dv back.
        """
        num_ranks, rows = workload.num_ranks, workload.rows_per_rank
        moves = layout != "zigzag" and self.computes_in_zigzag(workload.visible)
        if not moves or num_ranks == 1:
            return 0.0
        q, kv = workload.q_bytes(rows), workload.kv_bytes(rows)
        inside = hardware.node_size(num_ranks) == num_ranks
        where = {"inside": 2} if inside else {"outside": 2}
        there, back = (
            hardware.exchange_seconds(num_bytes / 2, num_ranks=num_ranks, **where)
            for num_bytes in (q + kv, q)
        )
        return (1 + with_backward) * (there + back)


@dataclasses.dataclass(frozen=True)
class Ring(RingFamily):
    """Keys and values rotate through the ranks as a whole.

    Use it for attention that is not causal, and if tokens cannot be rearranged: nothing else moves.
    With causal attention of contiguous parts, the last rank works at every step but the first rank
    at only one. For its steps, its derivative and its residuals, see `RingFamily`.

    References:
      Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
    """

    name: ClassVar[str] = "ring"

    def computes_in_zigzag(self, mask: Mask) -> bool:
        return False

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        return () if layout == "zigzag" else (cls(),)  # in this layout it is `Zigzag`


@dataclasses.dataclass(frozen=True)
class Zigzag(RingFamily):
    """A ring in zigzag layout: equal causal work for all ranks at every step.

    The sequence is cut into 2 n blocks; rank r computes blocks r and 2 n - 1 - r. Contiguous rows
    are first rearranged, and the output is rearranged back, which moves q, k, v and out once each;
    rows in zigzag order are not. Use it for causal attention of long documents. Documents that do
    not span the sequence cause unequal work in any fixed layout; see `Balanced`.

    References:
      Zhu, ring-flash-attention (zigzag); Fang and Zhao, USP (arXiv:2405.07719), section 4.
    """

    name: ClassVar[str] = "zigzag"


# ---- `Hamilton`: keys and values rotate in chunks, each on its own cycle of ranks.


@dataclasses.dataclass(frozen=True)
class Hamilton(RingFamily):
    """Keys and values rotate in chunks, over the links between all ranks at once.

    The keys and values of a rank are cut into n - 1 chunks. Each moves along its own Hamiltonian
    cycle; the cycles share no link. There are n steps with n - 1 exchanges and as many bytes as in
    a ring, spread over all n - 1 links of a rank. Causal attention is computed in zigzag layout, as
    by `Zigzag`. Use it if a ring waits for its links.

    Pass at most one of the options; rows become tuples.

    Attributes:
      nodes: u > 1: the ranks form u nodes of m = n / u ranks, in order. There are then m chunks (m
        - 1 for m = 3, 5). At each step a rank sends one of them to another node and the rest within
        its own.
      cycles: your own rows, one for each chunk, instead of those of `hamiltonian_cycles` or
        `two_level_cycles`; or "direct": each chunk comes directly from its owner, a different rank
        at each step, and its gradient returns directly, which needs memory for a third set of
        chunks. None uses cycles, or "direct" for 4 and 6 ranks, for which no cycles exist.
      maps: the pair (out_chunk, in_chunk), instead of cycles: which chunk each rank sends to and
        receives from each other rank in every exchange, as returned by `chunk_maps` or your own.
        The maps must be each other's transpose, and bring every chunk to every rank.
    References:
      TASP (arXiv:2509.26541); Tillson, JCTB 29 (1980), 68-74.
    """

    name: ClassVar[str] = "hamilton"
    nodes: int | None = None
    cycles: CycleRows | str | None = None
    maps: tuple[CycleRows, CycleRows] | None = None

    @property
    def label(self) -> str:
        return self.name if self.nodes is None else f"{self.name}_nodes"

    def __post_init__(self) -> None:
        object.__setattr__(self, "cycles", _hashable_rows(self.cycles))
        if isinstance(self.maps, tuple | list) and len(self.maps) == 2:
            object.__setattr__(self, "maps", tuple(map(_hashable_rows, self.maps)))

    def check(self, op: str) -> None:
        nodes, cycles, maps = self.nodes, self.cycles, self.maps
        if nodes is not None:
            check_integer(op, "nodes", nodes)
        if isinstance(cycles, str) and cycles != "direct":
            raise ValueError(
                f"{op}: cycles is {cycles!r}; it needs to be rows of ranks, 'direct', or None."
            )
        given = {"nodes": nodes, "cycles": cycles, "maps": maps}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ValueError(f"{op}: got both {' and '.join(named)}; pass one of them.")
        if maps is not None:
            if not isinstance(maps, tuple) or len(maps) != 2:
                raise TypeError(f"{op}: maps is {maps!r}; it needs to be (out_chunk, in_chunk).")
            for name, rows in zip(("out_chunk", "in_chunk"), maps, strict=True):
                integer_rows(op, name, rows)
        if cycles is not None and not isinstance(cycles, str):
            integer_rows(op, "cycles", cycles)

    def schedule(self, op: str, num_ranks: int) -> CycleSchedule | DirectSchedule:
        """Makes the schedule.

        Raises:
          ValueError: `nodes` does not divide the ranks; `cycles` are not cycles, or share a link;
            `maps` contradict each other, or miss a rank.
        """
        self.check(op)
        nodes = self.nodes
        if nodes is not None and (nodes < 1 or num_ranks % nodes):
            raise ValueError(
                f"{op}: nodes is {nodes} but there are {num_ranks} ranks; it needs to divide them."
            )
        rows = None
        if self.maps is not None:
            rows = check_cycles(op, cycles_of_maps(op, *self.maps, num_ranks), num_ranks)
        elif self.cycles is not None and not isinstance(self.cycles, str):
            rows = check_cycles(op, self.cycles, num_ranks)
        if num_ranks == 1:
            return CycleSchedule(((0,),))
        if rows is not None:
            return CycleSchedule(rows)
        if nodes not in (None, 1):
            return _schedule_of(two_level_cycles, num_ranks // nodes, nodes)
        if self.cycles == "direct" or (self.cycles is None and num_ranks in (4, 6)):
            return DirectSchedule(num_ranks)
        return _schedule_of(hamiltonian_cycles, num_ranks)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        num_ranks = workload.num_ranks
        nodes = num_ranks // hardware.node_size(num_ranks)
        return (cls(), cls(nodes=nodes)) if nodes > 1 else (cls(),)

    def _sent(self, of: Pass, num_bytes: int | float) -> tuple[Traffic, Receivers]:
        """Returns the traffic of a step: a chunk to every other rank, or one to the next node.

        The cycles determine which chunks are present in a step. With packed documents, the
        computations differed from those of `Zigzag`, which are predicted, by less than 8 % for n =
        8, and by up to 25 % for n = 16. Nodes that are not those of the hardware count as none.
        """
        num_ranks, hardware = of.workload.num_ranks, of.hardware
        size = hardware.node_size(num_ranks)
        if self.nodes == 1 or self.nodes != num_ranks // size:
            return spread(num_bytes, num_ranks, hardware), all_others(num_ranks, hardware)
        chunks = size - (size in (3, 5))  # see `two_level_maps`
        between = num_bytes / chunks
        traffic = Traffic(num_bytes - between, between, num_bytes - between, between)
        return traffic, Receivers(chunks - 1, 1, size)


@functools.cache
def _schedule_of(make: Callable[..., Any], *sizes: int) -> CycleSchedule:
    return CycleSchedule(tuple(map(tuple, make(*sizes))))


def _hashable_rows(rows: Any) -> Any:
    """Converts rows to tuples, of Python's integers; leaves other values for the check."""
    if rows is None or isinstance(rows, str):
        return rows
    plain = lambda x: int(x) if isinstance(x, np.integer) else x
    try:
        return tuple(tuple(map(plain, row)) for row in rows)
    except TypeError:
        return rows
