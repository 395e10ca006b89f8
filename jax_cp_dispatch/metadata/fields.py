"""`Metadata`: the plan of one exchange as data, its views and its dtypes."""

import dataclasses
import operator
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int64

from jax_cp_dispatch._arguments import host_value, read_wide
from jax_cp_dispatch._text import describe_metadata, rows_between_ranks
from jax_cp_dispatch.metadata.validate import check_plan

# An array; or anything that a transformation maps over the leaves (specs, shapes, axes).
Leaf: TypeAlias = Any

_INT32 = ("dst_rank", "num_seqs")
_UINT32 = ("dst_offset", "seq_len", "recv_seq_lens", "src_offset")
_PER_SLOT = ("dst_rank", "dst_offset", "seq_len", "src_offset")
_COUNTS = ("num_recv_tokens", "num_total_recv_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Metadata:
    """A plan: which shard of each rank goes to which row of which rank. Counts are tokens.

    A pytree: the arrays are leaves; `world_size` and `normalized` are static. The shapes below are
    for all W ranks. The view of one rank (`get_slice`) has the same fields without the leading W;
    `seq_len.ndim` distinguishes the two. Padding is `dst_rank = -1`, `dst_offset = 0`,
    `seq_len = 0`, in any slot. A slot with `dst_rank = -1` and `seq_len > 0` occupies rows of the
    sender and moves nothing.

    Attributes:
      dst_rank: i32 `[W, S]` or `[W, S, C]`; the rank each shard (replica) is sent to, -1 = none.
      dst_offset: u32, shape of `dst_rank`; the row of its first token at the destination.
      seq_len: u32 `[W, S]`; tokens in the shard.
      num_recv_tokens: u32 `[W, W + 1]`; row i: the tokens that rank i receives from each rank, then
        their sum.
      num_seqs: i32 `[W]`; slots in use: the last slot with a destination or a length, plus one.
        Derived if omitted.
      num_total_recv_tokens: u32 `[W]`; the last column of `num_recv_tokens`. Derived if omitted.
      seq_recv_mask: bool `[W, S, C]` or None; in a reverse plan: which replicas return.
      recv_seq_lens: u32 `[W, S]` or None; in a reverse plan: lengths of the shards to which they
        return, in a buffer of layout `(C, sum of the rank's lengths)`.
      src_offset: u32 `[W, S]` or None; the shard's first row at the sender. None: shards are
        contiguous and in order.
      world_size: W, the size of the mesh axis.
      normalized: whether `normalize_dtype` made the arrays.
    """

    dst_rank: Leaf
    dst_offset: Leaf
    seq_len: Leaf
    num_recv_tokens: Leaf
    num_seqs: Leaf = None
    num_total_recv_tokens: Leaf = None
    seq_recv_mask: Leaf = None
    recv_seq_lens: Leaf = None
    src_offset: Leaf = None
    world_size: int = dataclasses.field(metadata={"static": True})
    normalized: bool = dataclasses.field(default=False, metadata={"static": True})

    def __post_init__(self):
        if self.num_total_recv_tokens is None and _are_arrays(self.num_recv_tokens):
            object.__setattr__(self, "num_total_recv_tokens", self.num_recv_tokens[..., -1])
        if self.num_seqs is None and _are_arrays(self.dst_rank, self.seq_len):
            object.__setattr__(self, "num_seqs", _slots_in_use(self.dst_rank, self.seq_len))

    def get_slice(self, rank: Any) -> "Metadata":
        """Returns the view of one rank: its rows of the fields, without slots past `num_seqs`.

        Call anywhere with a concrete `rank`, or inside `jax.shard_map` with `lax.axis_index`. If
        `rank` or the plan is traced, the padding is kept, so that all views have the same shapes. A
        plan that `in_specs=P(axis_name)` has sharded (leading size 1 although W > 1) is the view of
        the running rank; `rank` is then ignored.

        Raises:
          ValueError: this is already a view, or a concrete `rank` is not in `[0, W)`.
        """
        shape = jnp.shape(self.seq_len)
        if len(shape) == 2 and shape[0] == 1 and self.world_size > 1:
            return self._row(0)
        if len(shape) != 2 or shape[0] != self.world_size:
            raise ValueError(
                f"Metadata.get_slice: needs the plan of all {self.world_size} ranks, seq_len "
                f"[{self.world_size}, S], got seq_len {shape}. For a plan that may be one rank's "
                f"view already, call local_view(rank)."
            )
        if isinstance(rank, Tracer):
            return jax.tree_util.tree_map_with_path(partial(_row_of, rank), self)
        rank = operator.index(rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"Metadata.get_slice: rank {rank} is not in [0, {self.world_size}), the ranks of "
                f"this plan."
            )
        return self._row(rank)

    def _row(self, rank: int) -> "Metadata":
        view = jax.tree.map(lambda x: x[rank], self)
        in_use = None if self.num_seqs is None else host_value(self.num_seqs)
        if in_use is None:
            return view
        end = int(in_use[rank])
        fields = {name: getattr(view, name) for name in _PER_SLOT}
        return dataclasses.replace(
            view, **{name: x[:end] for name, x in fields.items() if x is not None}
        )

    def local_view(self, rank: Any) -> "Metadata":
        """Returns `get_slice(rank)`, or this plan if it is already one rank's view."""
        return self if jnp.ndim(self.seq_len) == 1 else self.get_slice(rank)

    def normalize_dtype(self) -> "Metadata":
        """Returns the plan with the dtypes of the kernels: i32 ranks and slots, u32 tokens.

        The counts `num_recv_tokens` and `num_total_recv_tokens` become u64 if x64 is enabled, else
        u32. Call anywhere; the range of concrete values is checked.

        Raises:
          ValueError: a value is out of range; the error names field, rank and slot.
        """
        counts = np.uint64 if jax.config.jax_enable_x64 else np.uint32  # pyright: ignore
        dtypes = dict.fromkeys(_INT32, np.int32) | dict.fromkeys(_UINT32, np.uint32)
        dtypes |= dict.fromkeys(_COUNTS, counts) | {"seq_recv_mask": np.bool_}
        return dataclasses.replace(
            self,
            **{name: _cast(name, getattr(self, name), dtype) for name, dtype in dtypes.items()},
            normalized=True,
        )

    def device_put(self, sharding: Any = None) -> "Metadata":
        """Returns the plan on the default device, or placed by `jax.device_put` with `sharding`.

        `NamedSharding(mesh, P(axis_name))` gives each rank its own view. Call outside `jit`.
        """
        return jax.device_put(self, sharding)

    def validate(self) -> None:
        """Checks that the plan is complete and that a transport can execute it.

        Call on the host, outside `jit`. `dispatch` and `combine` execute every valid plan, given
        enough rows and capacity. They and `validate` reject: wrong shapes and dtypes; ranks outside
        `[-1, W)`; negative lengths; overlapping destination ranges; and, for any pair of ranks,
        different numbers of tokens sent and received.

        Only `validate` rejects errors that do not affect movement: gaps between destination ranges
        (in a reverse plan with `recv_seq_lens`, gaps must be exactly the shards and replicas that
        were never sent); ranges past the last received row; values beyond 32 bits; and summaries
        that disagree with the slots: the last column of `num_recv_tokens`, `num_total_recv_tokens`,
        `num_seqs`. For the view of one rank, only checks that need no other rank are made.

        Raises:
          ValueError: names rank, slot and field.
          TypeError: the values are traced.
        """
        check_plan(self)

    def rows_between_ranks(self) -> Int64[np.ndarray, "W W"]:
        """Returns the rows that each rank (first axis) sends to each (second axis), and keeps.

        Call on the host, with the plan of all ranks. `cost.rows_by_link` takes the result.

        Raises:
          TypeError: the values are traced.
          ValueError: this is one rank's view, or a stack of plans.
        """
        return rows_between_ranks("Metadata.rows_between_ranks", self)

    def describe(self) -> str:
        """Returns a text for people: which rank sends how many rows to which, and slots in use.

        Call on the host. Of up to 12 ranks, the text has a matrix; of more, the largest transfers.

        Raises:
          TypeError: the values are traced.
        """
        return describe_metadata(self)


def _row_of(rank: Tracer, path: Any, x: Leaf) -> Array:
    if isinstance(x, np.ndarray) and x.dtype != np.bool_:
        x = read_wide("Metadata.get_slice", path[-1].name, x)
    return jax.lax.dynamic_index_in_dim(jnp.asarray(x), rank, keepdims=False)


def _are_arrays(*leaves: Leaf) -> bool:
    return all(isinstance(x, np.ndarray | jax.Array) for x in leaves)


def _slots_in_use(dst_rank: Any, seq_len: Any) -> Any:
    """Returns the last slot with a destination or a length, plus one; None if shapes mismatch."""
    if seq_len.ndim == 0 or dst_rank.shape[: seq_len.ndim] != seq_len.shape:
        return None
    xp = np if isinstance(dst_rank, np.ndarray) and isinstance(seq_len, np.ndarray) else jnp
    sent = (dst_rank >= 0).any(axis=tuple(range(seq_len.ndim, dst_rank.ndim)))
    slot = xp.arange(1, seq_len.shape[-1] + 1, dtype=xp.int32)
    return xp.max(xp.where(sent | (seq_len > 0), slot, 0), axis=-1, initial=0)


def _cast(name: str, value: Leaf, dtype: Any) -> Leaf:
    if value is None:
        return None
    known = host_value(value)
    if known is None:
        return value.astype(dtype)
    if dtype is not np.bool_:
        limits = np.iinfo(dtype)
        bad = np.argwhere((known < limits.min) | (known > limits.max))
        if bad.size:
            at = tuple(int(i) for i in bad[0])
            raise ValueError(
                f"Metadata.normalize_dtype: {name}{list(at)} is {known[at]}, outside of "
                f"[{limits.min}, {limits.max}], the range of {np.dtype(dtype).name}. Plan fewer "
                f"tokens per rank" + (", or enable x64." if name in _COUNTS else ".")
            )
    return jnp.asarray(value, dtype)
