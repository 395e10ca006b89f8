"""One implementation of the operations: what it serves, and how it lowers each of them."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

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
      why_not: from the platforms of a program and the processes of its ranks, why it cannot serve
        the program, or None. See `choose_implementation`.
      serves: what it serves, as text, if it is available.
      remedy: the next step, for the error if it cannot serve a program.
      rank_attributes: from the context of a lowering rule, the ranks, their processes and a
        description of the operation, the attributes by which a custom call finds its ranks.
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
