"""One implementation of the operations: what it serves, and how it lowers each of them."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jax_cp_dispatch._ranks.communicator import Communicator, Groups


class Operation(enum.Enum):
    """What an implementation lowers."""

    EXCHANGE = "dispatch and combine"
    EXCHANGE_START = "the first call of an exchange in two calls"
    EXCHANGE_DONE = "the second call of it"
    EXCHANGE_ON_ONE_DEVICE = "the same where one device holds the rows of all ranks"
    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Implementation:
    """One row of the table.

    Attributes:
      name: the value of `implementation=`.
      platform: the platform whose devices it serves; None: all.
      is_collectives: whether XLA's collectives move the data; code that has such collectives of its
        own uses them instead of a dispatch.
      spans_processes: whether ranks of one group may be in several processes.
      why_not: from the platforms of a program and the devices of its ranks, why it cannot serve the
        program, or None. See `choose_implementation`.
      serves: what it serves, as text, if it is available.
      remedy: the next step, for the error if it cannot serve a program.
      rank_attributes: from the context of a lowering rule, the ranks, their devices and a
        description of the operation, the attributes by which a custom call finds its ranks. They
        replace those of the operation.
      lowerings: the rule of each operation; see `register_lowering`.
    """

    name: str
    platform: str | None
    spans_processes: bool
    is_collectives: bool = False
    why_not: Callable[[Sequence[str], Groups | None], str | None]
    serves: Callable[[], str]
    remedy: str
    rank_attributes: Callable[[Any, Communicator, Groups | None, str], dict[str, Any]]
    lowerings: dict[Operation, Callable[..., Any]] = dataclasses.field(default_factory=dict)


def all_groups(groups: Groups | None) -> Groups:
    """Returns the devices of the ranks by group; all devices in one if they are unknown."""
    return (tuple(jax.devices()),) if groups is None else groups


def process_numbers(group: Iterable[Any]) -> list[int]:
    """Returns the processes of some devices."""
    return sorted({device.process_index for device in group})


def why_not_one_process(groups: Groups | None) -> str | None:
    """Returns which ranks of one group are in several processes; None if there are none."""
    for group in all_groups(groups) if jax.process_count() > 1 else ():
        processes = process_numbers(group)
        if len(processes) > 1:
            named = ", ".join(map(str, processes[:4])) + (", ..." if len(processes) > 4 else "")
            return (
                f"ranks of one group are in {len(processes)} processes ({named}), but it serves "
                "those of one"
            )
    return None
