"""`Causal`: a query sees the keys up to its own."""

import dataclasses
from typing import Any

import jax

from jax_cp_dispatch.masks.static_mask import StaticMask, triangle


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Causal(StaticMask):
    """A query sees the keys of its document up to its own; `mask="causal"`, and the default."""

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, 0

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, 0

    def k_start(self, q: Any, start: Any) -> Any:
        return start

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        return q + 1

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        return triangle(queries, keys)
