"""`Placement`: where each token of a batch is; reorders arrays and restores them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, Shaped

from jax_cp_dispatch.planner.describe import column_of
from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.plan import PlacedPlan, describe_placed
from jax_cp_dispatch.planner.traffic import num_moved


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The assignment of the tokens of a batch `[batch, columns]` to ranks. Picklable; NumPy only.

    Places index the rows of all ranks: rank r holds places `[r * T, (r + 1) * T)`, with `T = batch
    * columns / world_size`. In an array `[batch, columns, ...]` that is sharded over its columns,
    these are the rank's columns of each batch row, one batch row after another.

    Attributes:
      batch, columns: shape of the batch.
      world_size: number of ranks.
      plan: for `context_parallel_attention(algorithm="placed")`.
      config: the choices with which it was made.
      reason: why the batch does not fit, if this is the fallback of `place_tokens`; else None.
      source, place, tokens: i64 `[P]`; the ranges of tokens that stay together: first token in the
        batch (counted row by row), first place, length. Sorted by place; padding included.
    """

    batch: int
    columns: int
    world_size: int
    plan: PlacedPlan
    config: PlacementConfig
    source: Int[np.ndarray, " P"]
    place: Int[np.ndarray, " P"]
    tokens: Int[np.ndarray, " P"]
    reason: str | None = None

    @functools.cached_property
    def permutation(self) -> Int[np.ndarray, " BT"]:
        """The token at each place, counted over the batch row by row."""
        return self._map(self.place, self.source)

    @functools.cached_property
    def inverse(self) -> Int[np.ndarray, " BT"]:
        """The place of each token."""
        return self._map(self.source, self.place)

    @property
    def needs(self) -> PlacementConfig:
        """The smallest capacities for this plan; other choices as in `config`.

        Raises:
          ValueError: the batch did not fit, so nothing was placed. The message says what it needs.
        """
        if self.reason is not None:
            raise ValueError(f"Placement.needs: no tokens were placed. {self.reason}")
        metadata = self.plan.kv_metadata
        return dataclasses.replace(
            self.config,
            kv_capacity=max(int(np.max(metadata.num_total_recv_tokens)), 1),
            max_transfers=max(int(np.max(metadata.num_seqs)), 1),
            max_pieces=max(int((self.plan.run_row < self.plan.num_tokens).sum(axis=1).max()), 1),
        )

    @property
    def imbalance(self) -> float:
        """Largest work of a rank divided by its share; see `PlacementConfig.rank_speeds`."""
        pairs = np.asarray(self.plan.pairs, np.float64)
        speeds = np.array(self.config.rank_speeds or [1.0] * self.world_size)
        share = pairs.sum() * speeds / speeds.sum()
        return float((pairs / share).max()) if pairs.sum() > 0 else 1.0

    @property
    def num_kv_tokens_moved_between_nodes(self) -> int:
        """Keys that move between ranks of different nodes, each copy counted; 0 without nodes."""
        if self.config.ranks_per_node is None:
            return 0
        return num_moved(self.plan.kv_metadata, self.config.ranks_per_node)

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts token arrays `[batch, columns, ...]` into placed order.

        Call on the host with NumPy arrays, as a data loader does, or anywhere with JAX arrays.
        Apply it to tokens, labels, positions and segment ids alike. Shift labels by one token
        first: neighbours in placed order need not be neighbours in a document.

        Raises:
          ValueError: an array does not start with `[batch, columns]`.
        """
        return jax.tree.map(lambda x: self._move("apply", x), arrays)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays in placed order back into the order of the batch; the inverse of `apply`."""
        return jax.tree.map(lambda x: self._move("restore", x), arrays)

    def describe(self) -> str:
        """Returns the text of `PlacedPlan.describe`, with the batch columns of its pieces."""
        if self.reason is not None:
            return f"Placement.describe: no tokens were placed. {self.reason}"
        sizes = {"columns": self.columns, "num_tokens": self.plan.num_tokens}
        where = column_of(self.source, self.place, **sizes)
        speeds, node = self.config.rank_speeds, self.config.ranks_per_node
        return describe_placed(self.plan, "Placement.describe", where, speeds, node)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _map(self, first: np.ndarray, value: np.ndarray) -> np.ndarray:
        total = self.batch * self.columns
        dtype = np.int32 if total < 2**31 else np.int64
        order = np.argsort(first)
        shift = (value - first)[order].astype(dtype)
        return np.arange(total, dtype=dtype) + np.repeat(shift, self.tokens[order])

    def _move(self, name: str, x: Any) -> Any:
        if tuple(x.shape[:2]) != (self.batch, self.columns):
            raise ValueError(
                f"Placement.{name}: an array has shape {list(x.shape)} but the placement is for "
                f"[{self.batch}, {self.columns}, ...]. Pad the columns as segment 0, or place the "
                "tokens of this batch."
            )
        xp = np if isinstance(x, np.ndarray) else jnp
        rest = x.shape[2:]
        rows = self.columns // self.world_size
        if name == "apply":
            x = xp.take(x.reshape(-1, *rest), self.permutation, axis=0)
            x = x.reshape(self.world_size, self.batch, rows, *rest).swapaxes(0, 1)
        else:
            x = x.reshape(self.batch, self.world_size, rows, *rest).swapaxes(0, 1)
            x = xp.take(x.reshape(-1, *rest), self.inverse, axis=0)
        return x.reshape(self.batch, self.columns, *rest)
