"""`PlanConfig`: the static choices of a plan, or of a placement; and checks of them."""

from __future__ import annotations

import dataclasses
import math

from jax_cp_dispatch._arguments import check_positive, check_rows
from jax_cp_dispatch.cost import HARDWARE, Hardware, attention_flops

# In the order of `Plan.largest_needs`: of a plan that moves queries, and of a placement.
CAPACITIES = ("q_capacity", "kv_capacity", "max_q_transfers", "max_kv_transfers", "max_pieces")
PLACED_CAPACITIES = (
    *("kv_capacity", "max_kv_transfers", "max_pieces"),
    *("max_cut_pieces", "max_linked_pieces"),
)
ALL_CAPACITIES = tuple(dict.fromkeys(CAPACITIES + PLACED_CAPACITIES))
_MOST_ROW_TIME = 2**30  # so that the planner's sums keep 64 bits


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Static choices of `plan_attention` and `place_tokens`; None selects a default.

    One config can serve both. A placement moves no queries, so it ignores `q_capacity`,
    `max_q_transfers` and, without `hardware`, the numbers of heads and `backward`; a plan that
    moves queries ignores `max_cut_pieces` and `max_linked_pieces`.

    Attributes:
      block: inside `jit`, rows per block, the unit of planning and movement. Outside, documents are
        cut at multiples of it, counted from their start, where the planner finds such cuts. None:
        128 inside `jit`; outside, cuts anywhere, for `plan_attention` into pieces of at least 128
        queries if possible.
      q_capacity: rows of the buffer in which a rank receives queries.
      kv_capacity: rows of the buffer in which a rank receives keys and values, its own included.
      max_q_transfers, max_kv_transfers: ranges of queries, and of keys, that one rank may send.
      max_pieces: pieces of documents that one rank may compute.
      max_cut_pieces: pieces of cut documents that one rank may hold.
      max_linked_pieces: pieces that other ranks may hold of the documents that are cut on one rank.
        The rank has to know them, for layers beside attention; see `Plan.cut_pieces`.
      num_heads, num_kv_heads: heads of queries, and of keys. A plan made outside `jit` moves as few
        bytes as possible; see `query_cost` and `key_cost`. Only the ratio matters. The defaults
        suit models with 4 query heads per key head; pass those of yours.
      balance_tolerance: fraction by which the work of a rank may exceed its share, which is the
        mean if all ranks are equally fast. A larger tolerance moves fewer bytes.
      rank_speeds: relative speed of each rank. The share of a rank in the work is proportional to
        it; all ranks of a placement hold the same number of tokens. None: all are equally fast.
      ranks_per_node: consecutive ranks of one node. Fewer bytes between nodes are preferred to
        fewer bytes in total. None: no nodes.
      backward: count the bytes of a training step, the backward pass included. False: those of the
        forward pass.
      hardware: an entry of `cost.HARDWARE`, or its name. Plans made outside `jit` then minimize the
        time of the slowest rank: its work, at the rate of attention, and what it sends or receives,
        at the rate of each link, whichever takes longer; as in predictions, attention hides half
        of each exchange, while it lasts, if keys have several heads. Nodes are those of
        `ranks_per_node`, or of the hardware. Within `balance_tolerance` of the mean work, fewer
        moved bytes are preferred. With `block`, only balanced placements are compared. Where ranks
        share memory, as on "cpu", it has no effect.
        None: links cost no time, so work is balanced, and then few bytes move.
      expected_overflow: set by `fit_plan_config`; the estimated share of batches that do not
        fit the capacities that it found.
    """

    block: int | None = None
    q_capacity: int | None = None
    kv_capacity: int | None = None
    max_q_transfers: int | None = None
    max_kv_transfers: int | None = None
    max_pieces: int | None = None
    max_cut_pieces: int | None = None
    max_linked_pieces: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    balance_tolerance: float = 0.01
    rank_speeds: tuple[float, ...] | None = None
    ranks_per_node: int | None = None
    backward: bool = False
    hardware: Hardware | str | None = None
    expected_overflow: float | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        op = "PlanConfig"
        if not 0 <= self.balance_tolerance <= 1:
            raise ValueError(
                f"{op}: balance_tolerance is {self.balance_tolerance}; it needs to be in [0, 1]. "
                "Pass 0.01 to allow a rank 1 % more than its share."
            )
        optional = (*ALL_CAPACITIES, "ranks_per_node", "block")
        values = {name: x for name in optional if (x := getattr(self, name)) is not None}
        check_positive(op, **values, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)
        for name in set(values).intersection(ALL_CAPACITIES):
            check_rows(op, name, values[name])
        if isinstance(self.hardware, str):
            object.__setattr__(self, "hardware", HARDWARE.get(self.hardware, self.hardware))
        if not isinstance(self.hardware, Hardware | None):
            raise ValueError(
                f"{op}: hardware is {self.hardware!r}; it needs to be a cost.Hardware, or one of "
                f"{', '.join(map(repr, HARDWARE))}. Omit it to balance work alone."
            )
        if self.rank_speeds is None:
            return
        try:
            speeds = tuple(map(float, self.rank_speeds))
        except (TypeError, ValueError, OverflowError):
            speeds = ()
        # The planner reads millionths of the fastest, and shares are parts of the sum.
        if not speeds or min(speeds) <= 0 or not math.isfinite(1e6 * sum(speeds)):
            raise ValueError(
                f"{op}: rank_speeds is {self.rank_speeds!r}; it needs one positive number per "
                "rank, or None for equal speeds."
            )
        object.__setattr__(self, "rank_speeds", speeds)

    @property
    def rows_per_block(self) -> int:
        """Rows of a block inside `jit`; the queries of a piece that is not shorter than wanted."""
        return self.block or 128

    @property
    def query_cost(self) -> int:
        """Rows of one head that move with a query that is computed away from home.

        Forward, the query and its output; backward, the gradients of both.
        """
        return (4 if self.backward else 2) * self.num_heads

    @property
    def key_cost(self) -> int:
        """Rows of one head that move with a key to another rank.

        Forward, the key and its value. Backward, their gradients in float32, which count twice, as
        rows of 16-bit elements.
        """
        return (6 if self.backward else 2) * self.num_kv_heads

    def node_size(self, num_ranks: int) -> int | None:
        """Returns the ranks of a node, by `ranks_per_node` or the hardware; None: no nodes."""
        size = self.ranks_per_node
        if size is None and isinstance(self.hardware, Hardware):
            size = self.hardware.node_size(num_ranks)
        return size

    def row_times(self, num_rows: int, num_ranks: int) -> tuple[int, int]:
        """Returns the time of rows of one head that move, as query-key pairs that take as long.

        Inside a node, and between nodes; 0 if links cost no time. Rows have elements of 16 bits;
        the size of a head cancels.
        """
        hardware, size = self.hardware, self.node_size(num_ranks)
        if size is None or not isinstance(hardware, Hardware) or hardware.has_shared_memory:
            return 0, 0
        flops = sum(self._pass_flops())
        pairs = 2 * num_rows * hardware.attention_rate(is_planned=True) / flops  # in a second
        links = max(size - 1, 1) if hardware.topology == "full_mesh" else 1
        inside = round(min(pairs / (links * hardware.link_bandwidth), _MOST_ROW_TIME))
        if size == num_ranks:
            return inside, 0
        rail = hardware.rail_bandwidth * min(1, hardware.rails / size)
        between = round(min(pairs / rail, _MOST_ROW_TIME))
        return (inside if size > 1 else between), between

    def exchanges(self, *, moves_queries: bool) -> list[tuple[float, float, float]]:
        """Returns the exchanges of a step, before and after each pass of attention.

        Of each: its pass as a share of all attention, and the shares of `key_cost` and `query_cost`
        that move then.
        """
        flops, keys, queries = self._pass_flops(), 2 * self.num_kv_heads, self.num_heads
        moves = [(keys, queries), (0, queries)]
        if self.backward:
            moves += [(0, queries), (self.key_cost - keys, queries)]
        return [
            (flops[i // 2] / sum(flops), of_keys / self.key_cost, of_queries / self.query_cost)
            for i, (of_keys, of_queries) in enumerate(moves)
            if of_keys or moves_queries
        ]

    def _pass_flops(self) -> list[float]:
        """FLOPs of a pair in each pass."""
        passes = (False, True) if self.backward else (False,)
        sizes = {"num_heads": self.num_heads, "head_size": 1}
        return [attention_flops(1, **sizes, backward=x) for x in passes]

    def fits(self, needs: PlanConfig) -> bool:
        """Whether these capacities are at least those of `needs`; None is always enough.

        Args:
          needs: of one batch; see `needs_inside_jit`, `Plan.needs` and `Placement.needs`.
        """
        pairs = [(getattr(self, name), getattr(needs, name)) for name in ALL_CAPACITIES]
        return all(capacity is None or capacity >= (need or 0) for capacity, need in pairs)


def check_ranks(op: str, config: PlanConfig, world_size: int) -> None:
    """Requires constraints that match the ranks."""
    speeds, size = config.rank_speeds, config.ranks_per_node
    if speeds is not None and len(speeds) != world_size:
        raise ValueError(
            f"{op}: rank_speeds has {len(speeds)} numbers but there are {world_size} ranks. Pass "
            "one number per rank."
        )
    if size is not None and world_size % size:
        raise ValueError(
            f"{op}: {world_size} ranks cannot be divided into nodes of ranks_per_node={size}. Pass "
            "a divisor of world_size."
        )
    hardware = config.hardware
    if not isinstance(hardware, Hardware) or hardware.has_shared_memory:
        return
    if size is None and world_size % min(hardware.ranks_per_node or 1, world_size):
        raise ValueError(
            f"{op}: {world_size} ranks cannot be divided into nodes of {hardware.ranks_per_node}, "
            "those of the hardware. Pass ranks_per_node, a divisor of world_size."
        )
    if config.node_size(world_size) != world_size and not hardware.rail_bandwidth:
        raise ValueError(
            f"{op}: {world_size} ranks are in several nodes, but the rail_bandwidth of the "
            "hardware is 0. Pass hardware with links between nodes (dataclasses.replace)."
        )


def check_fallback(
    op: str, fallback: str | None, config: PlanConfig, capacities: tuple[str, ...]
) -> None:
    """Requires a known fallback, and capacities that say which shapes its plan has."""
    if fallback is None:
        return
    if fallback != "ring":
        raise ValueError(f"{op}: fallback is {fallback!r}; it needs to be 'ring' or None.")
    missing = [name for name in capacities if getattr(config, name) is None]
    if missing:
        raise ValueError(
            f"{op}: fallback='ring' needs plans of equal shapes, but the config has no "
            f"{', '.join(missing)}. Pass a config with all capacities, for example from "
            "fit_plan_config."
        )
