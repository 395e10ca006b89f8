"""Models how fast a rank computes attention: whole tiles, and an efficiency by their size."""

import dataclasses
from typing import NamedTuple

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch.cost.work import attention_flops


class Tile(NamedTuple):
    """The part of the query-key pairs that attention computes as a whole.

    Attributes:
      queries, keys: its tokens.
      rows: rows of its matrices: its queries, times the query heads of a KV head.
    """

    queries: int
    keys: int
    rows: int


@dataclasses.dataclass(frozen=True)
class AttentionRate:
    """The speed of attention on one rank; for "shared_memory", on all ranks together.

    Attention computes whole tiles, so short documents take longer per pair than long ones. A matrix
    product reaches the share rows / (rows + half_rate_rows) of its rate (the n_1/2 of Hockney, "The
    Science of Computer Benchmarking", 1996). The defaults count only the pairs that the mask
    admits.

    Attributes:
      flops: FLOP/s of the matrix products of the forward pass.
      backward_flops: of the backward pass; None: as `flops`.
      exponentials: exponentials per second; one per pair, head and pass.
      half_rate_rows: rows of a tile at which its products reach half of their rate.
      tile_rows: rows of a tile, over the query heads of a KV head.
      planned_tile_rows: the same in algorithms that follow a plan; None: as `tile_rows`.
      least_tile_queries: least queries of a tile.
      tile_keys: keys of a tile.
    Raises:
      TypeError, ValueError: a rate or size is not positive, or `half_rate_rows` is negative.
    """

    flops: int | float
    backward_flops: int | float | None = None
    exponentials: int | float = float("inf")
    half_rate_rows: int | float = 0.0
    tile_rows: int = 1
    planned_tile_rows: int | None = None
    least_tile_queries: int = 1
    tile_keys: int = 1

    def __post_init__(self) -> None:
        sizes = ("tile_rows", "planned_tile_rows", "least_tile_queries", "tile_keys")
        given = {name: getattr(self, name) for name in sizes}
        check_positive("AttentionRate", **{k: v for k, v in given.items() if v is not None})
        rates = ("flops", "backward_flops", "exponentials")
        for name in rates:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"AttentionRate: {name} is {value}; it needs a positive rate.")
        if self.half_rate_rows < 0:
            raise ValueError(
                f"AttentionRate: half_rate_rows is {self.half_rate_rows}; it needs at least 0."
            )

    def tile(self, *, heads_per_group: int, is_planned: bool) -> Tile:
        """Returns the tile for `heads_per_group` query heads of a KV head."""
        rows = self.planned_tile_rows if is_planned else None
        rows = self.tile_rows if rows is None else rows
        queries = max(self.least_tile_queries, rows // heads_per_group)
        return Tile(queries, self.tile_keys, queries * heads_per_group)

    def pair_seconds(self, tile: Tile, *, num_heads: int, head_size: int, backward: bool) -> float:
        """Returns the seconds of one computed pair with all heads."""
        flops = self.flops
        if backward and self.backward_flops is not None:
            flops = self.backward_flops
        sizes = {"num_heads": num_heads, "head_size": head_size}
        products = attention_flops(1, **sizes, backward=backward) / flops
        share = tile.rows / (tile.rows + self.half_rate_rows)
        return products / share + num_heads / self.exponentials
