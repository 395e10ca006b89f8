"""`Metadata`: the plan of one exchange as data, its views, its dtypes and its validation."""

import dataclasses
import operator
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int64

from jax_cp_dispatch._arguments import host_value, read_wide
from jax_cp_dispatch._text import describe_metadata, rows_between_ranks

# ---- Validates a plan on the host; errors name the rank, the slot and the field.

_MAX_UINT32 = 2**32 - 1


def check_metadata(plan: Any) -> None:
    """Raises unless a transport can execute `plan` (a `Metadata`)."""
    fields, is_view = _host_fields(plan)
    world_size = plan.world_size
    limits = {"dst_rank": (-1, world_size - 1), "num_seqs": (0, 2**31 - 1)}
    for name, x in fields.items():
        if name != "seq_recv_mask":
            low, high = limits.get(name, (0, _MAX_UINT32))
            needs = f"{name} is {{}}; it needs to lie in [{low}, {high}]"
            _refuse((x < low) | (x > high), needs, x)
            fields[name] = x.astype(np.int64)  # sums below cannot wrap

    dst_rank, offset, seq_len = (fields[x] for x in ("dst_rank", "dst_offset", "seq_len"))
    moves = dst_rank >= 0
    length = seq_len.reshape(*seq_len.shape, *(1,) * (dst_rank.ndim - 2))
    length = np.broadcast_to(length, dst_rank.shape)
    end = offset + length
    read_to = np.cumsum(seq_len, 1)
    if "src_offset" in fields:
        read_to = fields["src_offset"] + seq_len
    too_far = "{} is {{}}; it needs to fit in 32 bits"
    _refuse(moves & (end > _MAX_UINT32), too_far.format("dst_offset + seq_len"), end)
    _refuse(read_to > _MAX_UINT32, too_far.format("src_offset + seq_len"), read_to)
    if "num_seqs" in fields:
        num_seqs, num_slots = fields["num_seqs"], seq_len.shape[1]
        derived: dict[str, Any] = {**fields, "num_seqs": None}
        last = cast(np.ndarray, Metadata(**derived, world_size=world_size).num_seqs)
        _refuse(
            (num_seqs < last) | (num_seqs > num_slots),
            f"num_seqs is {{}}; it needs to lie in [{{}}, {num_slots}], from the last slot in use "
            "to the number of slots. If omitted, it is derived",
            *(num_seqs, last),
        )
    received, total = np.split(fields["num_recv_tokens"], [world_size], axis=1)
    sums = received.sum(1)
    differs = "{} is {{}}, but num_recv_tokens sums to {{}}"
    _refuse(total[:, 0] != sums, differs.format("num_recv_tokens' last column"), total[:, 0], sums)
    totals: Any = fields.get("num_total_recv_tokens", sums)
    of_totals = differs.format("num_total_recv_tokens") + ". If omitted, it is derived"
    _refuse(totals != sums, of_totals, totals, sums)
    if is_view:
        return

    sent = np.zeros((world_size, world_size), np.int64)
    np.add.at(sent, (dst_rank[moves], np.nonzero(moves)[0]), length[moves])
    for receiver, sender in np.argwhere(sent != received)[:1]:
        slots = np.unique(np.argwhere(dst_rank[sender] == receiver)[:, 0])
        some = ", ".join(map(str, slots[:8])) + (", …" if len(slots) > 8 else "")
        _fail(
            f"rank {receiver}: num_recv_tokens expects {received[receiver, sender]} tokens of rank "
            f"{sender}, whose seq_len with dst_rank {receiver} sums to {sent[receiver, sender]} "
            f"(slot {some or 'none'})"
        )
    _check_destinations(fields, length)


def _host_fields(plan: Any) -> tuple[dict[str, np.ndarray], bool]:
    """Returns arrays `[W, ...]` of right dtypes and shapes, and whether they are one rank's."""
    fields = {}
    for name, leaf in vars(plan).items():
        if name in ("world_size", "normalized") or leaf is None:
            continue
        fields[name] = value = host_value(leaf)
        if value is None:
            raise TypeError(
                f"Metadata.validate: {name} is traced or lives on another host, so its values are "
                f"not known here. Validate on the host, before the plan enters jit."
            )
        is_mask = name == "seq_recv_mask"
        if not np.issubdtype(value.dtype, np.bool_ if is_mask else np.integer):
            needs = "bool" if is_mask else "an integer dtype"
            _fail(f"{name} has dtype {value.dtype}; it needs {needs}")
    world_size, is_view = plan.world_size, fields["seq_len"].ndim == 1
    if is_view:
        fields = {name: x[None] for name, x in fields.items()}
    lead = 1 if is_view else world_size
    shapes = {name: x.shape for name, x in fields.items()}
    seq_len, dst_rank = shapes["seq_len"], shapes["dst_rank"]
    home, mask = shapes.get("recv_seq_lens"), shapes.get("seq_recv_mask")
    needed = {
        "seq_len": (lead, *seq_len[1:]),
        "dst_offset": dst_rank,
        "src_offset": (lead, *seq_len[1:]),
        "num_recv_tokens": (lead, world_size + 1),
        "num_seqs": (lead,),
        "num_total_recv_tokens": (lead,),
    }
    for is_right, what in (
        (world_size >= 1, f"world_size is {world_size}; it needs to be at least 1"),
        (len(seq_len) == 2, f"seq_len has shape {seq_len}; it needs [W, S], or [S] for one rank"),
        (
            dst_rank[:2] == needed["seq_len"] and len(dst_rank) in (2, 3),
            f"dst_rank has shape {dst_rank}; it needs seq_len's {seq_len} with {lead} leading rows "
            f"for world_size {world_size}, or that and a replica axis",
        ),
        (
            home is None or (len(home) == 2 and home[0] == lead),
            f"recv_seq_lens has shape {home}; it needs [W, S] with W {world_size}, or [S]",
        ),
        (
            mask is None or home is not None,
            "seq_recv_mask is given without recv_seq_lens; pass both, or neither",
        ),
        (
            mask is None or (len(mask) == 3 and mask[:2] == home),
            f"seq_recv_mask has shape {mask}; it needs that of recv_seq_lens, {home}, and a "
            "replica axis",
        ),
        *(
            (
                shapes.get(name, shape) == shape,
                f"{name} has shape {shapes.get(name)}; it needs {shape} for world_size "
                f"{world_size} and dst_rank {dst_rank}",
            )
            for name, shape in needed.items()
        ),
    ):
        if not is_right:
            _fail(what)
    return fields, is_view


def _check_destinations(fields: dict[str, np.ndarray], length: np.ndarray) -> None:
    """Requires that destination ranges cover exactly the expected rows, each of them once."""
    dst_rank, offset = fields["dst_rank"], fields["dst_offset"]
    home: Any = fields.get("recv_seq_lens")
    mask: Any = fields.get("seq_recv_mask")
    size = fields["num_recv_tokens"][:, -1]
    if home is not None:
        mask = np.ones((*home.shape, 1), bool) if mask is None else mask
        size = home.sum(1) * mask.shape[2]
    _refuse(
        (dst_rank >= 0) & (offset + length > size[dst_rank]),
        "dst_offset {} with seq_len {} ends outside of the {} rows that rank {} receives",
        *(offset, length, size[dst_rank], dst_rank),
    )
    shards: Any = np.argwhere((dst_rank >= 0) & (length > 0))  # rows (rank, slot[, replica])
    to, start, tokens = (x[tuple(shards.T)] for x in (dst_rank, offset, length))
    order = np.lexsort((start, to))
    shards, to, start, tokens = (x[order] for x in (shards, to, start, tokens))
    free = np.roll(start + tokens, 1)  # the first unwritten row
    free[np.diff(to, prepend=-1) != 0] = 0
    gap = (start > free) & (home is None)
    _refuse(
        (start < free) | gap,
        "dst_offset {} with seq_len {} {} the rows below {} that rank {} receives",
        *(start, tokens, np.where(gap, "leaves a gap after", "overlaps"), free, to),
        places=shards,
    )
    if home is None or mask is None:
        return
    # Each range of a reverse plan is one replica of one of the receiver's shards.
    row = np.arange(mask.shape[2]) * home.sum(1)[:, None, None]
    row = row + (np.cumsum(home, 1) - home)[..., None]
    expected = {
        (int(r), int(row[r, s, c])): int(home[r, s])
        for r, s, c in np.argwhere(mask & (home > 0)[..., None])
    }
    given = zip(to.tolist(), start.tolist(), tokens.tolist(), strict=True)
    _refuse(
        np.array([expected.pop((rank, first), None) != n for rank, first, n in given], bool),
        "dst_offset {} with seq_len {} is not a shard of rank {} in recv_seq_lens and "
        "seq_recv_mask",
        *(start, tokens, to),
        places=shards,
    )
    if expected and "seq_recv_mask" in fields:
        (rank, first), n = next(iter(expected.items()))
        _fail(
            f"rank {rank}: no rank returns rows [{first}, {first + n}), which seq_recv_mask expects"
        )


def _refuse(
    bad: np.ndarray, what: str, *values: np.ndarray, places: np.ndarray | None = None
) -> None:
    """Raises at the first place [rank, slot, replica] that is bad, with the values there."""
    for at in np.argwhere(bad)[:1]:
        place = at if places is None else places[at[0]]
        names = ("rank", "slot", "replica")
        where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=False))
        _fail(f"{where}: {what.format(*(x[tuple(at)] for x in values))}")


def _fail(what: str) -> None:
    raise ValueError(f"Metadata.validate: {what}.")


# An array; or anything that a transformation maps over the leaves (specs, shapes, axes).
Leaf: TypeAlias = Any

_DTYPES = {"dst_rank": np.int32, "num_seqs": np.int32, "seq_recv_mask": np.bool_}  # others: uint32
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
        kinds, dst_rank, seq_len = np.ndarray | jax.Array, self.dst_rank, self.seq_len
        if self.num_total_recv_tokens is None and isinstance(self.num_recv_tokens, kinds):
            object.__setattr__(self, "num_total_recv_tokens", self.num_recv_tokens[..., -1])
        if self.num_seqs is not None or not all(isinstance(x, kinds) for x in (dst_rank, seq_len)):
            return
        if seq_len.ndim and dst_rank.shape[: seq_len.ndim] == seq_len.shape:
            xp = np if isinstance(dst_rank, np.ndarray) and isinstance(seq_len, np.ndarray) else jnp
            sent = (dst_rank >= 0).any(axis=tuple(range(seq_len.ndim, dst_rank.ndim)))
            slot = xp.arange(1, seq_len.shape[-1] + 1, dtype=xp.int32)
            last = xp.max(xp.where(sent | (seq_len > 0), slot, 0), axis=-1, initial=0)
            object.__setattr__(self, "num_seqs", last)

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
            rank = 0
        elif len(shape) != 2 or shape[0] != self.world_size:
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
        view = jax.tree.map(lambda x: x[rank], self)
        in_use = None if self.num_seqs is None else host_value(self.num_seqs)
        if in_use is None:
            return view
        fields = {name: getattr(view, name) for name in _PER_SLOT}
        end = int(in_use[rank])
        used = {name: x[:end] for name, x in fields.items() if x is not None}
        return dataclasses.replace(view, **used)

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
        fields = {}
        for name, value in vars(self).items():
            if name in ("world_size", "normalized") or value is None:
                continue
            dtype: Any = counts if name in _COUNTS else _DTYPES.get(name, np.uint32)
            known = host_value(value)
            if known is not None and dtype != np.bool_:
                limits = np.iinfo(dtype)
                bad = np.argwhere((known < limits.min) | (known > limits.max))
                if bad.size:
                    at = tuple(bad[0].tolist())
                    raise ValueError(
                        f"Metadata.normalize_dtype: {name}{list(at)} is {known[at]}, outside of "
                        f"[{limits.min}, {limits.max}], the range of {np.dtype(dtype).name}. Plan "
                        "fewer tokens per rank" + (", or enable x64." if name in _COUNTS else ".")
                    )
            fields[name] = value.astype(dtype) if known is None else jnp.asarray(value, dtype)
        return dataclasses.replace(self, **fields, normalized=True)

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
        check_metadata(self)

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


def single_rows(dst_rank: np.ndarray, dst_offset: np.ndarray) -> Metadata:
    """Returns a plan on the host whose shards are one token each, `[W, S]` or `[W, S, C]`.

    A rank of -1 receives nothing. `dst_offset` may have fewer dimensions, as in broadcasting.
    """
    num_ranks, sends = len(dst_rank), dst_rank >= 0
    received = np.zeros((num_ranks, num_ranks + 1), np.uint32)
    np.add.at(received, (dst_rank[sends], np.nonzero(sends)[0]), 1)
    received[:, -1] = received.sum(1)
    return Metadata(
        dst_rank=dst_rank.astype(np.int32),
        dst_offset=np.where(sends, dst_offset, 0).astype(np.uint32),
        seq_len=np.ones(dst_rank.shape[:2], np.uint32),
        num_recv_tokens=received,
        world_size=num_ranks,
    )
