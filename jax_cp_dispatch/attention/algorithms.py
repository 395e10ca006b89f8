"""The algorithms of `context_parallel_attention`, each with its own options.

All are frozen and compare by value, so equal ones share a compiled program.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeAlias

import numpy as np

from jax_cp_dispatch._arguments import check_integer
from jax_cp_dispatch._ranks.axis import AxisName
from jax_cp_dispatch.cost import Hardware
from jax_cp_dispatch.cycles.integer_rows import CycleRows, integer_rows
from jax_cp_dispatch.planner import PlanConfig


@dataclasses.dataclass(frozen=True)
class Balanced:
    """Every rank computes an equal share of the query-key pairs; see `balanced_attention`.

    Queries and keys move to the ranks that a plan selects. Use it for packed documents, whose work
    is unequal in any fixed layout. Supports contiguous tokens only.

    Attributes:
      config: block size and capacities of plans made in the call. A plan that you pass has its own.
    """

    name: ClassVar[str] = "balanced"
    config: PlanConfig = PlanConfig()


@dataclasses.dataclass(frozen=True)
class Ring:
    """Keys and values rotate through the ranks as a whole; see `ring_attention`.

    Use it for attention that is not causal, and if tokens cannot be rearranged: nothing else moves.
    With causal attention, the last rank works at every step but the first rank at only one.
    """

    name: ClassVar[str] = "ring"


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """A ring in zigzag layout; see `zigzag_ring_attention`.

    Use it for causal attention of long documents: all ranks have equal work at every step.
    """

    name: ClassVar[str] = "zigzag"


@dataclasses.dataclass(frozen=True)
class Hamilton:
    """Keys and values rotate through the ranks in chunks, over all links; see `hamilton_attention`.

    Use it if a ring waits for its links: it uses all links of a full mesh. With `nodes`, every rank
    sends to another node, instead of one rank for all.

    Attributes:
      nodes, cycles, maps: see `hamilton_attention`; pass at most one of them. Rows become tuples.
    """

    name: ClassVar[str] = "hamilton"
    nodes: int | None = None
    cycles: CycleRows | str | None = None
    maps: tuple[CycleRows, CycleRows] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cycles", _hashable_rows(self.cycles))
        if isinstance(self.maps, tuple | list) and len(self.maps) == 2:
            object.__setattr__(self, "maps", tuple(map(_hashable_rows, self.maps)))


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Each rank computes a share of the heads, over whole documents; see `ulysses_attention`.

    Use it if the ranks divide the query heads: all ranks have equal work under any mask, and few
    bytes move. Tokens and documents stay as they are.

    Attributes:
      inner: not supported: the mesh axis of an all-to-all inside a ring (USP).
    """

    name: ClassVar[str] = "ulysses"
    inner: AxisName | None = None


@dataclasses.dataclass(frozen=True)
class Placed:
    """Tokens are on the ranks that `place_tokens` selected; see `placed_attention`.

    Only keys and values move, to the ranks that attend to them. Use it if the data pipeline can
    place tokens and many layers share a placement. Needs the plan of the placement.
    """

    name: ClassVar[str] = "placed"


@dataclasses.dataclass(frozen=True)
class Auto:
    """The algorithm of the plan; without one, the choice of `choose_algorithm` from concrete ids.

    "placed" is only used with its plan: tokens are in the order of the batch otherwise, and cannot
    be placed inside a call.

    Attributes:
      hardware: rates and topology for the prediction; None: see `choose_algorithm`.
      config: of the plan, as in `Balanced`. A batch that is not sharded is planned once; one that
        does not fit gets another algorithm. The groups of a sharded batch plan in the program, and
        are predicted with the heads of the call and the nodes of the hardware.
    """

    name: ClassVar[str] = "auto"
    hardware: Hardware | None = None
    config: PlanConfig = PlanConfig()


Algorithm: TypeAlias = Balanced | Ring | Zigzag | Hamilton | Ulysses | Placed | Auto
Rotating: TypeAlias = Ring | Zigzag | Hamilton
BY_NAME: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (Balanced, Ring, Zigzag, Hamilton, Ulysses, Placed, Auto)
}


def read_algorithm(op: str, algorithm: Any) -> Algorithm:
    """Returns an algorithm; a short name selects the one with all defaults."""
    if isinstance(algorithm, str) and algorithm in BY_NAME:
        return BY_NAME[algorithm]()
    if not isinstance(algorithm, tuple(BY_NAME.values())):
        raise ValueError(
            f"{op}: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, BY_NAME))}, or an object with options: "
            f"{', '.join(f'{kind.__name__}()' for kind in BY_NAME.values())}."
        )
    check_algorithm(op, algorithm)
    return algorithm


def check_algorithm(op: str, algorithm: Algorithm) -> None:
    """Checks the types of its options, but not whether they match the ranks."""
    if isinstance(algorithm, Balanced | Auto) and not isinstance(algorithm.config, PlanConfig):
        raise TypeError(
            f"{op}: config is {algorithm.config!r}; it needs to be a PlanConfig. Omit it for the "
            "default."
        )
    if isinstance(algorithm, Auto) and not isinstance(algorithm.hardware, Hardware | None):
        raise TypeError(
            f"{op}: hardware is {algorithm.hardware!r}; it needs to be a "
            "jax_cp_dispatch.cost.Hardware. Omit it for the entry of the default backend."
        )
    if isinstance(algorithm, Hamilton):
        _check_hamilton(op, algorithm)
    if isinstance(algorithm, Ulysses) and algorithm.inner is not None:
        raise NotImplementedError(
            f"{op}: got Ulysses(inner={algorithm.inner!r}): an all-to-all inside a ring (USP) is "
            "not supported. Omit inner: the heads are shared over all ranks of axis_name. Or pass "
            "Hamilton(nodes=...), which also has two levels."
        )


def _check_hamilton(op: str, algorithm: Hamilton) -> None:
    nodes, cycles, maps = algorithm.nodes, algorithm.cycles, algorithm.maps
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
