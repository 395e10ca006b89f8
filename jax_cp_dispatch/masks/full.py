"""`Full`: a query sees its whole document."""

import dataclasses
from typing import Any

import jax

from jax_cp_dispatch.masks.static_mask import StaticMask


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Full(StaticMask):
    """A query sees all keys of its document; `mask="full"`."""

    @property
    def is_causal(self) -> bool:
        return False

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, 0

    def k_start(self, q: Any, start: Any) -> Any:
        return start

    def k_end(self, q: Any, start: Any, end: Any) -> Any:
        return end

    def pairs_before(self, queries: Any, keys: Any) -> Any:
        return queries * keys
