"""Checks the arguments of the planning functions; every error names the argument."""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_cp_dispatch._arguments import clip_to_int32, host_value

_MAX_UINT32 = 2**32 - 1
_TOKENS = {"seq_len", "kv_context_size", "q_to_num_kv_token", "shard_len", "shard_context"}


class Inputs:
    """The integer arrays of one call: NumPy where values are known, traced otherwise."""

    def __init__(self, op: str, **arrays: Any):
        self.op = op
        self._arrays = {}
        for name, value in arrays.items():
            known = host_value(value)
            array = value if known is None else known
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"{op}: {name} has dtype {array.dtype}; it needs an integer dtype.")
            self._arrays[name] = array

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    @property
    def known(self) -> bool:
        """Whether every value is known, so that sizes may depend on them."""
        return all(isinstance(x, np.ndarray) for x in self._arrays.values())

    def canonical(self) -> list[Any]:
        """Returns the arrays in the order given: u32 where they count tokens, else i32."""
        return [
            clip_to_int32(x, np.uint32 if name in _TOKENS else np.int32)
            for name, x in self._arrays.items()
        ]

    def first_shape(self, name: str) -> tuple[int, int]:
        """Returns (W, S), which the argument `name` `[W, S]` defines."""
        shape = self[name].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"{self.op}: {name} has shape {shape}; it needs [W, S]: W ranks by S slots, at "
                f"least one of each. Pass the plan of all ranks, not one rank's row."
            )
        return shape

    def require_shape(self, name: str, *shapes: tuple[int | str, ...]) -> None:
        """Rejects any shape not in `shapes`, where a string denotes any positive size."""
        got = self[name].shape
        for shape in shapes:
            if len(got) == len(shape) and all(
                n > 0 if isinstance(want, str) else n == want
                for n, want in zip(got, shape, strict=True)
            ):
                return
        needs = " or ".join("[" + ", ".join(map(str, shape)) + "]" for shape in shapes)
        raise ValueError(f"{self.op}: {name} has shape {got}; it needs {needs}.")

    def require_range(self, name: str, low: int, high: int) -> None:
        """Rejects known values outside `[low, high]`."""
        x = self[name]
        if isinstance(x, np.ndarray):
            self.refuse(name, (x < low) | (x > high), f"needs to lie in [{low}, {high}]")

    def refuse(self, name: str, bad: np.ndarray, needs: str) -> None:
        """Raises at the first element of `name` that is `bad`."""
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            axes = ("rank", "slot", "replica", "component")
            place = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=False))
            raise ValueError(f"{self.op}: {name} at {place} is {self[name][at]}; it {needs}.")

    def require_tokens(self, what: str, per_rank: np.ndarray, *, high: int = _MAX_UINT32) -> None:
        """Rejects token sums that exceed the range of the plan's fields."""
        if per_rank.max() > high:
            rank = int(per_rank.argmax())
            raise ValueError(
                f"{self.op}: {what} of rank {rank} is {int(per_rank[rank])} tokens; at most "
                f"{high} are possible. Give each rank fewer tokens."
            )

    def num_slots(self, needed: np.ndarray | None, max_recv_seqs: Any) -> tuple[int, int]:
        """Returns (slots to compute with, slots to return) for `needed` slots per rank.

        Both are `max_recv_seqs` if it is given. Otherwise the computation uses the next power of
        two, so that plans of varying size share a few compiled programs.
        """
        most = None if needed is None else int(needed.max())
        if max_recv_seqs is None:
            if most is None:
                raise ValueError(
                    f"{self.op}: the number of shards that a rank receives depends on traced "
                    f"values. Pass max_recv_seqs, an upper bound, as a static int."
                )
            exact = max(1, most)  # arrays are never empty, even if no rank receives
            return 1 << (exact - 1).bit_length(), exact
        if isinstance(max_recv_seqs, Tracer):
            raise TypeError(
                f"{self.op}: max_recv_seqs is traced; it needs to be a static int, because it is a "
                "shape."
            )
        bound = operator.index(max_recv_seqs)
        if bound < 1:
            raise ValueError(f"{self.op}: max_recv_seqs is {bound}; it needs to be at least 1.")
        if needed is not None and most is not None and most > bound:
            raise ValueError(
                f"{self.op}: rank {int(needed.argmax())} would receive {most} shards but "
                f"max_recv_seqs is {bound}. Pass max_recv_seqs>={most}, or omit it."
            )
        return bound, bound


def count_per_rank(dst: np.ndarray, world_size: int, weights: np.ndarray) -> np.ndarray:
    """Returns the sum of `weights` sent to each rank; exact below 2**53."""
    sent = dst >= 0
    total = np.bincount(
        dst[sent], weights=np.broadcast_to(weights, dst.shape)[sent], minlength=world_size
    )
    return total.astype(np.int64)
