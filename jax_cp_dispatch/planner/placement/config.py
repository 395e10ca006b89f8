"""The static choices of a placement."""

import dataclasses

from jax_cp_dispatch._arguments import check_positive


@dataclasses.dataclass(frozen=True)
class PlacementConfig:
    """Static choices of `place_tokens`. None selects the need of a batch, rounded up.

    Attributes:
      balance_tolerance: fraction by which the work of a rank may exceed the mean. A larger
        tolerance moves fewer keys.
      kv_capacity: rows of the buffer in which a rank receives keys and values, its own included.
      max_transfers: ranges of keys that one rank may send.
      max_pieces: pieces of documents that one rank may hold.
    """

    balance_tolerance: float = 0.01
    kv_capacity: int | None = None
    max_transfers: int | None = None
    max_pieces: int | None = None

    def __post_init__(self):
        if not 0 <= self.balance_tolerance <= 1:
            raise ValueError(
                f"PlacementConfig: balance_tolerance is {self.balance_tolerance} but must lie in "
                "[0, 1]; 0.01 allows 1 % above the mean."
            )
        for name in ("kv_capacity", "max_transfers", "max_pieces"):
            value = getattr(self, name)
            if value is not None:
                check_positive("PlacementConfig", **{name: value})
