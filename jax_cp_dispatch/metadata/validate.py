"""Validates a plan on the host; errors name the rank, the slot and the field."""

from typing import Any

import numpy as np

from jax_cp_dispatch._arguments import host_value

_MAX_UINT32 = 2**32 - 1


def check_plan(plan: Any) -> None:
    """Raises unless a transport can execute `plan` (a `Metadata`)."""
    fields = _host_fields(plan)
    world_size = plan.world_size
    is_view = fields["seq_len"].ndim == 1
    if is_view:
        fields = {name: x[None] for name, x in fields.items()}
    _check_shapes(fields, world_size, is_view)
    _check_ranges(fields, world_size)
    if "num_seqs" in fields:
        _check_slots_in_use(fields)
    _check_counts(fields, world_size)
    if is_view:
        return
    _check_pairs(fields, world_size)
    _check_destinations(fields)


def _host_fields(plan: Any) -> dict[str, np.ndarray]:
    fields = {}
    for name, leaf in vars(plan).items():
        if name in ("world_size", "normalized") or leaf is None:
            continue
        value = host_value(leaf)
        if value is None:
            raise TypeError(
                f"Metadata.validate: {name} is traced or lives on another host, so its values are "
                f"not known here. Validate on the host, before the plan enters jit."
            )
        if name == "seq_recv_mask":
            if value.dtype != np.bool_:
                _fail(f"seq_recv_mask has dtype {value.dtype}; it needs bool")
        elif not np.issubdtype(value.dtype, np.integer):
            _fail(f"{name} has dtype {value.dtype}; it needs an integer dtype")
        fields[name] = value
    return fields


def _fail(what: str) -> None:
    raise ValueError(f"Metadata.validate: {what}.")


def _first(bad: np.ndarray) -> tuple[int, ...] | None:
    where = np.argwhere(bad)
    return tuple(int(i) for i in where[0]) if len(where) else None


def _at(index: tuple[int, ...]) -> str:
    names = ("rank", "slot", "replica")
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=False))


def _check_shapes(fields: dict[str, np.ndarray], world_size: int, is_view: bool) -> None:
    if world_size < 1:
        _fail(f"world_size is {world_size}; it needs to be at least 1")
    lead = 1 if is_view else world_size
    if fields["seq_len"].ndim != 2:
        _fail(f"seq_len has shape {fields['seq_len'].shape}; it needs [W, S], or [S] for one rank")
    num_slots = fields["seq_len"].shape[1]
    expected = {
        "seq_len": (lead, num_slots),
        "dst_offset": fields["dst_rank"].shape,
        "src_offset": (lead, num_slots),
        "num_recv_tokens": (lead, world_size + 1),
        "num_seqs": (lead,),
        "num_total_recv_tokens": (lead,),
    }
    dst_rank = fields["dst_rank"].shape
    if dst_rank[:2] != (lead, num_slots) or len(dst_rank) not in (2, 3):
        _fail(
            f"dst_rank has shape {dst_rank}; it needs seq_len's {fields['seq_len'].shape} with "
            f"{lead} leading rows for world_size {world_size}, or that and a replica axis"
        )
    if "recv_seq_lens" in fields:
        shape = fields["recv_seq_lens"].shape
        if len(shape) != 2 or shape[0] != lead:
            _fail(f"recv_seq_lens has shape {shape}; it needs [W, S] with W {world_size}, or [S]")
        mask = fields.get("seq_recv_mask")
        if mask is not None and (mask.ndim != 3 or mask.shape[:2] != shape):
            _fail(
                f"seq_recv_mask has shape {mask.shape}; it needs that of recv_seq_lens, {shape}, "
                f"and a replica axis"
            )
    elif "seq_recv_mask" in fields:
        _fail("seq_recv_mask is given without recv_seq_lens; pass both, or neither")
    for name, shape in expected.items():
        if name in fields and fields[name].shape != shape:
            _fail(
                f"{name} has shape {fields[name].shape}; it needs {shape} for world_size "
                f"{world_size} and dst_rank {dst_rank}"
            )


def _check_ranges(fields: dict[str, np.ndarray], world_size: int) -> None:
    limits = {name: (0, _MAX_UINT32) for name in fields if name != "seq_recv_mask"}
    limits["dst_rank"] = (-1, world_size - 1)
    limits["num_seqs"] = (0, 2**31 - 1)
    for name, (low, high) in limits.items():
        at = _first((fields[name] < low) | (fields[name] > high))
        if at is not None:
            _fail(f"{_at(at)}: {name} is {fields[name][at]}; it needs to lie in [{low}, {high}]")
    for name, field in fields.items():  # 64-bit sums below cannot wrap
        fields[name] = field if field.dtype == np.bool_ else field.astype(np.int64)
    end = fields["dst_offset"] + _per_replica(fields)
    read_to = np.cumsum(fields["seq_len"], 1)
    if "src_offset" in fields:
        read_to = fields["src_offset"] + fields["seq_len"]
    for what, rows, moves in (
        ("dst_offset + seq_len", end, fields["dst_rank"] >= 0),
        ("src_offset + seq_len", read_to, True),
    ):
        at = _first(moves & (rows > _MAX_UINT32))
        if at is not None:
            _fail(f"{_at(at)}: {what} is {rows[at]}; it needs to fit in 32 bits")


def _per_replica(fields: dict[str, np.ndarray]) -> np.ndarray:
    seq_len, dst_rank = fields["seq_len"], fields["dst_rank"]
    if dst_rank.ndim == 3:
        seq_len = seq_len[..., None]
    return np.broadcast_to(seq_len, dst_rank.shape)


def _check_slots_in_use(fields: dict[str, np.ndarray]) -> None:
    num_slots = fields["seq_len"].shape[1]
    dst_rank = fields["dst_rank"]
    sent = (dst_rank >= 0).any(axis=tuple(range(2, dst_rank.ndim)))
    used = sent | (fields["seq_len"] > 0)
    last: np.ndarray = np.max(np.where(used, np.arange(1, num_slots + 1), 0), axis=1, initial=0)
    at = _first((fields["num_seqs"] < last) | (fields["num_seqs"] > num_slots))
    if at is not None:
        _fail(
            f"{_at(at)}: num_seqs is {fields['num_seqs'][at]}; it needs to lie in "
            f"[{last[at]}, {num_slots}], from the last slot in use to the number of slots. If "
            f"omitted, it is derived"
        )


def _check_counts(fields: dict[str, np.ndarray], world_size: int) -> None:
    per_rank = fields["num_recv_tokens"]
    sums: np.ndarray = per_rank[:, :world_size].sum(1)
    totals = fields.get("num_total_recv_tokens", sums)
    for name, got, remedy in (
        ("num_recv_tokens' last column", per_rank[:, -1], ""),
        ("num_total_recv_tokens", totals, ". If omitted, it is derived"),
    ):
        at = _first(got != sums)
        if at is not None:
            _fail(f"{_at(at)}: {name} is {got[at]}, but num_recv_tokens sums to {sums[at]}{remedy}")


def _check_pairs(fields: dict[str, np.ndarray], world_size: int) -> None:
    dst_rank = fields["dst_rank"]
    source = np.broadcast_to(
        np.arange(world_size).reshape(-1, *(1,) * (dst_rank.ndim - 1)), dst_rank.shape
    )
    moves = dst_rank >= 0
    sent = np.zeros((world_size, world_size), np.int64)
    np.add.at(sent, (dst_rank[moves], source[moves]), _per_replica(fields)[moves])
    received = fields["num_recv_tokens"][:, :world_size]
    at = _first(sent != received)
    if at is not None:
        receiver, sender = at
        slots = np.unique(np.argwhere(dst_rank[sender] == receiver)[:, 0])
        some = ", ".join(map(str, slots[:8])) + (", …" if len(slots) > 8 else "")
        _fail(
            f"rank {receiver}: num_recv_tokens expects {received[at]} tokens of rank {sender}, "
            f"whose seq_len with dst_rank {receiver} sums to {sent[at]} (slot {some or 'none'})"
        )


def _check_destinations(fields: dict[str, np.ndarray]) -> None:
    """Requires that destination ranges cover exactly the expected rows, each of them once."""
    dst_rank, length = fields["dst_rank"], _per_replica(fields)
    size = _buffer_rows(fields)
    at = _first((dst_rank >= 0) & (fields["dst_offset"] + length > size[dst_rank]))
    if at is not None:
        _fail(
            f"{_at(at)}: dst_offset {fields['dst_offset'][at]} with seq_len {length[at]} ends "
            f"outside of the {size[dst_rank[at]]} rows that rank {dst_rank[at]} receives"
        )
    shards = np.argwhere((dst_rank >= 0) & (length > 0))  # rows (rank, slot[, replica])
    at = tuple(shards.T)
    to, start = dst_rank[at], fields["dst_offset"][at]
    order = np.lexsort((start, to))
    shards, to, start, length = shards[order], to[order], start[order], length[at][order]

    first = np.r_[True, to[1:] != to[:-1]] if len(to) else np.zeros(0, bool)
    free = np.where(first, 0, np.roll(start + length, 1))  # the first unwritten row
    gap = (start > free) & ("recv_seq_lens" not in fields)
    at = _first((start < free) | gap)
    if at is not None:
        what = "leaves a gap after" if gap[at] else "overlaps"
        _fail(
            f"{_at(tuple(shards[at].tolist()))}: dst_offset {start[at]} with seq_len {length[at]} "
            f"{what} the rows below {free[at]} that rank {to[at]} receives"
        )
    if "recv_seq_lens" in fields:
        _check_homes(fields, shards, to, start, length)


def _buffer_rows(fields: dict[str, np.ndarray]) -> np.ndarray:
    if "recv_seq_lens" not in fields:
        return fields["num_recv_tokens"][:, -1]
    mask = fields.get("seq_recv_mask")
    return fields["recv_seq_lens"].sum(1) * (1 if mask is None else mask.shape[2])


def _check_homes(
    fields: dict[str, np.ndarray],
    shards: np.ndarray,
    to: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
) -> None:
    """Requires that each range of a reverse plan is one replica of one of the receiver's shards."""
    home = fields["recv_seq_lens"]
    mask = fields.get("seq_recv_mask", np.ones((*home.shape, 1), bool))
    total = home.sum(1)[:, None, None]
    row = np.arange(mask.shape[2]) * total + (np.cumsum(home, 1) - home)[..., None]
    expected = {
        (int(r), int(row[r, s, c])): int(home[r, s])
        for r, s, c in np.argwhere(mask & (home > 0)[..., None])
    }
    for shard, *key, tokens in zip(shards, to, start, length, strict=True):
        want = expected.pop((int(key[0]), int(key[1])), None)
        if want != tokens:
            _fail(
                f"{_at(tuple(shard.tolist()))}: dst_offset {key[1]} with seq_len {tokens} "
                f"is not a shard of rank {key[0]} in recv_seq_lens and seq_recv_mask"
            )
    if expected and "seq_recv_mask" in fields:
        (rank, offset), tokens = next(iter(expected.items()))
        _fail(
            f"rank {rank}: no rank returns rows [{offset}, {offset + tokens}), which "
            f"seq_recv_mask expects"
        )
