"""`Hamilton`: keys and values rotate in chunks, each on its own cycle of ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch.attention.algorithms.ring import RingFamily
from jax_cp_dispatch.attention.rotating.schedules import CycleSchedule, DirectSchedule
from jax_cp_dispatch.cost import Hardware, Traffic, Workload
from jax_cp_dispatch.cost.traffic import Receivers, all_others, spread
from jax_cp_dispatch.cycles import hamiltonian_cycles, two_level_cycles
from jax_cp_dispatch.cycles.integer_rows import CycleRows, check_cycles, integer_rows
from jax_cp_dispatch.cycles.maps import cycles_of_maps


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
        rows = self._given_rows(op, num_ranks)
        if num_ranks == 1:
            return CycleSchedule(((0,),))
        if rows is not None:
            return CycleSchedule(rows)
        if nodes not in (None, 1):
            return _two_level(num_ranks // nodes, nodes)
        if self.cycles == "direct" or (self.cycles is None and num_ranks in (4, 6)):
            return DirectSchedule(num_ranks)
        return _flat(num_ranks)

    def _given_rows(self, op: str, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns checked cycles, from `cycles` or `maps`."""
        cycles: CycleRows | str | None = self.cycles
        if self.maps is not None:
            cycles = cycles_of_maps(*self.maps, num_ranks, op=op)
        if cycles is None or isinstance(cycles, str):
            return None
        return check_cycles(cycles, num_ranks, op=op)

    @classmethod
    def candidates(cls, workload: Workload, hardware: Hardware, *, layout: str, can_place: bool):
        num_ranks = workload.num_ranks
        nodes = num_ranks // hardware.node_size(num_ranks)
        return (cls(), cls(nodes=nodes)) if nodes > 1 else (cls(),)

    def _sent(
        self, num_bytes: int | float, workload: Workload, hardware: Hardware
    ) -> tuple[Traffic, Receivers]:
        """Returns the traffic of a step: a chunk to every other rank, or one to the next node.

        The cycles determine which chunks are present in a step. With packed documents, the
        computations differed from those of `Zigzag`, which are predicted, by less than 8 % for n =
        8, and by up to 25 % for n = 16. Nodes that are not those of the hardware count as none.
        """
        num_ranks, size = workload.num_ranks, hardware.node_size(workload.num_ranks)
        if self.nodes == 1 or self.nodes != num_ranks // size:
            return spread(num_bytes, num_ranks, hardware), all_others(num_ranks, hardware)
        chunks = size - (size in (3, 5))  # see `two_level_maps`
        between = num_bytes / chunks
        traffic = Traffic(num_bytes - between, between, num_bytes - between, between)
        return traffic, Receivers(chunks - 1, 1, size)


@functools.cache
def _flat(num_ranks: int) -> CycleSchedule:
    return CycleSchedule(tuple(map(tuple, hamiltonian_cycles(num_ranks))))


@functools.cache
def _two_level(ranks_per_node: int, nodes: int) -> CycleSchedule:
    return CycleSchedule(tuple(map(tuple, two_level_cycles(ranks_per_node, nodes))))


def _hashable_rows(rows: Any) -> Any:
    """Converts rows to tuples; leaves other values for the check."""
    if rows is None or isinstance(rows, str):
        return rows
    try:
        return tuple(tuple(map(_plain, row)) for row in rows)
    except TypeError:
        return rows


def _plain(number: Any) -> Any:
    """Converts NumPy integers to Python's, so that messages look the same."""
    return int(number) if isinstance(number, np.integer) else number
