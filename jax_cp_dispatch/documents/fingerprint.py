"""Checksums that tie a plan to its batch, its rank and the plans of the other ranks.

They are sums over the runs of a rank's rows: rows with one segment id, or with consecutive
positions. So each rank computes the checksum of its own rows locally, and a planner that knows the
runs does not need the rows. NumPy arrays give NumPy, without starting JAX.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, UInt32

from jax_cp_dispatch._dispatch.arguments import outgoing
from jax_cp_dispatch._dispatch.movement import move
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch.documents.segment_ids import Ids, number_ids
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.mask import MaskKind
from jax_cp_dispatch.metadata import Metadata

Words = Int32[Array, "B T"] | Int32[np.ndarray, "B T"]

# What a row of a run adds to the value of the row before it.
ID_STEP, POSITION_STEP = 0, 1
# Special values of the rank field: the plan is a fallback; tokens are not in the assumed order; the
# mask does not belong to these tokens.
NO_RANK, OUT_OF_ORDER, WRONG_MASK = -1, -2, -3
# WRONG_TOKENS - 2 n: checked array n is in another order. One less: it has other values.
WRONG_TOKENS = -4
_FINGERPRINT_SIZE = 9  # that of `csrc/dispatch/dispatch.h`


def checksums(
    x: Words, num_ranks: int, *, step: int, counts: Bool[Any, "B T"] | None = None
) -> Int32[Array | np.ndarray, " W"]:
    """Returns the checksum of each rank's columns of `x`.

    Different batches have equal checksums with probability 2**-32. With `counts`, other values do
    not matter.
    """
    xp = np if isinstance(x, np.ndarray) else jnp
    rows = _by_rank(x.view(np.uint32), num_ranks)
    follows = rows[:, 1:] == rows[:, :-1] + np.uint32(step)
    counted = xp.ones(rows.shape, bool) if counts is None else _by_rank(counts, num_ranks)
    follows &= counted[:, :-1]
    begins = counted & xp.concatenate([counted[:, :1], ~follows], axis=1)
    hashed = _hash(xp.arange(rows.shape[1], dtype=np.uint32)[None], rows)
    return xp.where(begins, hashed, np.uint32(0)).sum(1, dtype=np.uint32).view(np.int32)


def place_checksums(
    positions: Ids, num_ranks: int, *, counts: Bool[Any, "B T"]
) -> Int32[Array | np.ndarray, " W"]:
    """`checksums` of positions of any dtype: of those beyond 32 bits, a mix of all bits."""
    words = positions.astype(np.uint32)
    if positions.dtype.itemsize == 8:
        high = (positions >> positions.dtype.type(32)).astype(np.uint32)
        words = words ^ mix(high + (words >> np.uint32(31)))  # 0 if 32 bits hold it
    return checksums(words.view(np.int32), num_ranks, step=POSITION_STEP, counts=counts)


def run_checksums(
    rank: Int[np.ndarray, " R"],
    row: Int[np.ndarray, " R"],
    length: Int[np.ndarray, " R"],
    value: Int[np.ndarray, " R"],
    *,
    step: int,
    num_ranks: int,
) -> Int32[np.ndarray, " W"]:
    """Returns `checksums` of runs, by rank, then by first row; rows outside of them do not count.

    Consecutive runs may be one: for example two documents with the same id.
    """
    row, length, value = (x.astype(np.uint32) for x in (row, length, value))
    follows = np.zeros(len(rank), bool)
    follows[1:] = (rank[1:] == rank[:-1]) & (row[1:] == row[:-1] + length[:-1])
    follows[1:] &= value[1:] == value[:-1] + np.uint32(step) * length[:-1]
    total = np.zeros(num_ranks, np.uint32)
    np.add.at(total, rank[~follows], _hash(row, value)[~follows])
    return total.view(np.int32)


def plan_digest(config: Any, mask: Mask | MaskKind, *arrays: Int[Any, " N"]) -> UInt32[Any, " 1"]:
    """Returns a checksum of what a plan depends on besides its batch.

    Fields of its config that do not take part in comparisons do not count. `arrays` are what the
    planner has chosen: where each piece or block is computed.
    """
    choices: list[tuple[str, Any]] = []  # their text is the same for equal configs
    for name in (x.name for x in dataclasses.fields(config) if x.compare):
        value = getattr(config, name)
        is_text = value is None or dataclasses.is_dataclass(value)
        choices.append((name, value if is_text else np.asarray(value, float).tolist()))
    digest = np.array([zlib.crc32(repr((mask, choices)).encode())], np.uint32)
    for x in arrays:
        index = np.arange(len(x), dtype=np.uint32)
        digest = mix(digest + _hash(index, x.astype(np.uint32)).sum(keepdims=True, dtype=np.uint32))
    return digest


def mask_checksums(mask: Mask, num_ranks: int) -> Int32[Array | np.ndarray, " W"]:
    """Returns the checksum of each rank's columns of the arrays of a mask."""
    total: Any = np.uint32(0)
    for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(mask)):
        name = np.uint32(zlib.crc32(str(path[-1]).encode()))
        each = checksums(x.astype(np.int32), num_ranks, step=ID_STEP).view(np.uint32)
        total = mix(total + mix(each + name) + np.uint32(number))
    return total.view(np.int32)


def make_fingerprint(
    own: Sequence[Int32[Array | np.ndarray, " W"]], digest: UInt32[Any, " 1"]
) -> Int32[Any, "W F"]:
    """Returns the fingerprint of a plan with this `plan_digest`.

    In each rank's row: the checksum of the plan and its whole batch, the rank, then the rank's own
    checksums: of segment ids, of positions, and of the mask if it has arrays.
    """
    xp = np if isinstance(own[0], np.ndarray) else jnp
    own_columns: Any = xp.stack(own, axis=1)
    place = np.arange(1, 1 + own_columns.size, dtype=np.uint32).reshape(own_columns.shape)
    each = mix(own_columns.view(np.uint32) + place * np.uint32(0x165667B1))
    whole = mix(each.sum(keepdims=True, dtype=np.uint32) + digest[None]).view(np.int32)
    rank = np.arange(len(own_columns), dtype=np.int32)[:, None]
    return xp.concatenate([xp.broadcast_to(whole, rank.shape), rank, own_columns], axis=1)


def fallback_fingerprint(num_held: int, mask: Mask) -> Int32[np.ndarray, "R F"]:
    """Returns a fingerprint that every rank refuses."""
    own = [0] * (3 if mask.has_arrays else 2)
    return np.tile(np.array([0, NO_RANK, *own], np.int32), (num_held, 1))


def order_error_code(
    is_in_order: Any, mask: Mask | None = None, starts: Any = None, ends: Any = None
) -> Int32[Array, ""]:
    """Returns 0, or what every rank refuses: tokens out of order, or the mask of other tokens.

    `starts` and `ends` are the edges of each token's document; starts of padding are -1.
    """
    has_its_mask: Any = True
    if mask is not None and mask.has_arrays:
        column = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
        rules = [(x | (starts < 0)).all() for x, _ in mask.rules(column, starts, ends)]
        has_its_mask = jnp.stack(rules).all() if rules else True
    of_mask = jnp.where(has_its_mask, 0, WRONG_MASK)
    return jnp.where(is_in_order, of_mask, OUT_OF_ORDER).astype(jnp.int32)


def refused_at_fault(
    fingerprint: Int32[Array, "W F"], fault: Int32[Array, ""]
) -> Int32[Array, "W F"]:
    """Returns a fingerprint that every rank refuses if there is an `order_error_code`."""
    rank = jnp.where(fault == 0, fingerprint[:, 1], fault)
    return fingerprint.at[:, 1].set(rank)


def order_fingerprint(fault: Int32[Array, ""], rank: Any) -> Int32[Array, " 9"]:
    """Returns what is sent with an exchange without a plan, with an `order_error_code`."""
    expected = jnp.where(fault == 0, rank, fault)
    nothing = jnp.zeros(_FINGERPRINT_SIZE - 3, jnp.int32)
    return jnp.concatenate([jnp.stack([0 * expected, expected, rank]), nothing])


def confirmed(exchange: CollectiveOptions, fingerprint: Int32[Array, " 9"]) -> Bool[Array, ""]:
    """Compares the fingerprints of all ranks where nothing moves, by an exchange of its own."""
    rank, num_ranks = jax.lax.axis_index(exchange.axis_name), jax.lax.axis_size(exchange.axis_name)
    own = (jnp.arange(num_ranks, dtype=jnp.int32) == rank).astype(jnp.uint32)
    metadata = Metadata(
        dst_rank=rank[None],
        dst_offset=jnp.zeros(1, jnp.uint32),
        seq_len=jnp.ones(1, jnp.uint32),
        num_recv_tokens=jnp.append(own, jnp.uint32(1)),
        world_size=num_ranks,
    )
    token = vary_alike([jnp.ones((1, 1), jnp.int32)], also=exchange.axis_names)[0]
    part = outgoing(token, metadata, capacity=1, fingerprint=fingerprint)
    (received,) = move(exchange, [part])
    return received[0, 0] == 1


def rank_fingerprint(
    fingerprint: Int32[Any, "..."],
    rank: Any,
    segment_ids: Ids | None,
    positions: Ids | None,
    mask: Any = None,
) -> Int32[Array, " 9"]:
    """Returns what is sent with an exchange: the plan's checksum, then pairs (expected, seen).

    The fingerprint is of all ranks, or a rank's slice; ids, positions and mask are of this rank's
    columns. None, or a mask without arrays, counts as expected. Positions of padding do not count,
    so they need the ids.
    """
    fingerprint = jnp.asarray(fingerprint)
    if fingerprint.ndim > 1:
        fingerprint = fingerprint[0] if fingerprint.shape[0] == 1 else fingerprint[rank]
    digest, *expected = fingerprint
    values, seen = [digest], (rank, *_seen(segment_ids, positions, mask, 1))
    for x, y in zip(expected, seen[: len(expected)], strict=True):
        values += [x, x if y is None else y.reshape(())]
    return jnp.stack(values + (_FINGERPRINT_SIZE - len(values)) * [jnp.int32(0)])


def check_batch(
    op: str,
    fingerprint: Int32[Any, "... F"],
    segment_ids: Ids,
    positions: Ids | None,
    mask: Mask | None,
    *,
    num_tokens: int,
) -> None:
    """Raises unless the fingerprint of a plan is that of these arrays; for `validate` of a plan."""
    if fingerprint.ndim != 2:
        raise ValueError(
            f"{op}: this is not the plan of all ranks of one batch; its fingerprint has shape "
            f"{fingerprint.shape}. Validate each plan before stack_plans."
        )
    num_ranks, fingerprint = len(fingerprint), np.asarray(fingerprint)
    if (fingerprint[:, 1] == NO_RANK).any():
        raise ValueError(
            f"{op}: this plan is a fallback: its batch does not fit the config, so nothing was "
            "planned. Check `fits` first, and use a ring for this batch."
        )
    named = {"segment_ids": segment_ids, "positions": positions}
    for name, x in named.items():
        if x is None:
            continue
        if x.ndim != 2 or x.size != num_ranks * num_tokens or x.shape[1] % num_ranks:
            raise ValueError(
                f"{op}: {name} has shape {x.shape} but the plan is for {num_ranks} ranks of "
                f"{num_tokens} rows. Pass the plan of this batch."
            )
    positions = None if positions is None else np.asarray(positions)
    all_seen = _seen(number_ids(np.asarray(segment_ids)), positions, mask, num_ranks)
    names = *named, "arrays of the mask"
    for name, expected, seen in zip(names, fingerprint[:, 2:].T, all_seen, strict=False):
        differs = expected != (expected if seen is None else np.asarray(seen))
        if differs.any():
            raise ValueError(
                f"{op}: the plan was made for another batch: the {name} of rank "
                f"{int(differs.argmax())} are not those of the plan. Pass the plan "
                "of this batch, and placed tokens in placed order."
            )


def _seen(segment_ids: Any, positions: Any, mask: Any, num_ranks: int) -> tuple[Any, ...]:
    """Returns the checksums of ids, positions and mask; None of arrays that are not given."""
    of_mask = mask_checksums(mask, num_ranks) if jax.tree.leaves(mask) else None
    if segment_ids is None:
        return None, None, of_mask
    of_ids = checksums(segment_ids, num_ranks, step=ID_STEP)
    if positions is None:
        return of_ids, None, of_mask
    return of_ids, place_checksums(positions, num_ranks, counts=segment_ids > 0), of_mask


def mix(x: Any) -> Any:
    """A bijection of uint32 whose every output bit depends on every input bit (MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _by_rank(x: Any, num_ranks: int) -> Any:
    """Returns the rows of each rank, [W, rows], from `[B, columns]`."""
    return x.reshape(x.shape[0], num_ranks, -1).swapaxes(0, 1).reshape(num_ranks, -1)


def _hash(row: UInt32[Any, "..."], value: UInt32[Any, "..."]) -> UInt32[Any, "..."]:
    """Hashes the beginning of a run."""
    return mix(value * np.uint32(0x9E3779B1) + (row + np.uint32(1)) * np.uint32(0x27D4EB2F))
