"""Returns the schedule of chunks of an algorithm for a number of ranks."""

from __future__ import annotations

import functools

from jax_cp_dispatch.attention.algorithms import Hamilton, Rotating, check_algorithm
from jax_cp_dispatch.attention.rotating.schedules import CycleSchedule, DirectSchedule
from jax_cp_dispatch.cycles import hamiltonian_cycles, two_level_cycles
from jax_cp_dispatch.cycles.integer_rows import CycleRows, check_cycles
from jax_cp_dispatch.cycles.maps import cycles_of_maps


def schedule_of(op: str, algorithm: Rotating, num_ranks: int) -> CycleSchedule | DirectSchedule:
    """Makes the schedule for `op`; raises the errors documented in `hamilton_attention`."""
    if isinstance(algorithm, Hamilton):
        return _hamilton(op, algorithm, num_ranks)
    return CycleSchedule((tuple(range(num_ranks)),))  # one chunk, from each rank to the next


def _hamilton(op: str, algorithm: Hamilton, num_ranks: int) -> CycleSchedule | DirectSchedule:
    check_algorithm(op, algorithm)
    nodes = algorithm.nodes
    if nodes is not None and (nodes < 1 or num_ranks % nodes):
        raise ValueError(
            f"{op}: nodes is {nodes} but there are {num_ranks} ranks; it needs to divide them."
        )
    rows = _given_rows(op, algorithm, num_ranks)
    if num_ranks == 1:
        return CycleSchedule(((0,),))
    if rows is not None:
        return CycleSchedule(rows)
    if nodes not in (None, 1):
        return _two_level(num_ranks // nodes, nodes)
    if algorithm.cycles == "direct" or (algorithm.cycles is None and num_ranks in (4, 6)):
        return DirectSchedule(num_ranks)
    return _flat(num_ranks)


def _given_rows(op: str, algorithm: Hamilton, num_ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns checked cycles, from `cycles` or `maps`."""
    cycles: CycleRows | str | None = algorithm.cycles
    if algorithm.maps is not None:
        cycles = cycles_of_maps(*algorithm.maps, num_ranks, op=op)
    if cycles is None or isinstance(cycles, str):
        return None
    return check_cycles(cycles, num_ranks, op=op)


@functools.cache
def _flat(num_ranks: int) -> CycleSchedule:
    return CycleSchedule(tuple(map(tuple, hamiltonian_cycles(num_ranks))))


@functools.cache
def _two_level(ranks_per_node: int, nodes: int) -> CycleSchedule:
    return CycleSchedule(tuple(map(tuple, two_level_cycles(ranks_per_node, nodes))))
