"""From this rank's rows of a sequence to attention over the ranks, and back, in every layout."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from jax_cp_dispatch._ranks.axis import check_axis_name
from jax_cp_dispatch._ranks.deadline import check_deadline
from jax_cp_dispatch._ranks.implementations import check_implementation
from jax_cp_dispatch._ranks.varying import vary_alike
from jax_cp_dispatch._window import Reach, Window, reach
from jax_cp_dispatch.attention.checks import check_arrays, check_layout
from jax_cp_dispatch.attention.local.derivative_order import in_reverse_only
from jax_cp_dispatch.attention.local.options import (
    blocks_of_ranks,
    check,
    check_operands,
    check_softmax,
)
from jax_cp_dispatch.attention.rotating.attend import Rotation, rotating_attention
from jax_cp_dispatch.attention.rotating.chunks import Chunking
from jax_cp_dispatch.attention.rotating.communication import move_chunks, reverse
from jax_cp_dispatch.attention.rotating.documents import attended_tokens
from jax_cp_dispatch.attention.rotating.layout import (
    contiguous_placement,
    halves_in_zigzag,
    zigzag_permutation,
    zigzag_placement,
)
from jax_cp_dispatch.attention.rotating.schedules import Schedule, Transport
from jax_cp_dispatch.planner.segment_ids import read_documents

HostOrDevice = Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Sequence:
    """How a sequence stands on the ranks, and what its tokens attend: static options, checked.

    Attributes:
      transport: of the exchanges; names the op, too.
      schedule: of the chunks of keys and values; hashable.
      zigzag: computed in zigzag layout: contiguous parts are brought there, the output back.
      causal, window, layout, scale, logit_soft_cap: see `ring_attention`.
    """

    transport: Transport
    schedule: Schedule
    zigzag: bool
    causal: bool = True
    window: Window | None = None
    layout: str = "contiguous"
    scale: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self):
        op = self.transport.op
        check_layout(op, self.layout)
        check_axis_name(op, self.transport.axis_name)
        check_implementation(op, self.transport.implementation)
        check_deadline(op, self.transport.deadline)
        check_softmax(op, self.scale, self.logit_soft_cap)
        reach(op, self.causal, self.window)

    @property
    def reach(self) -> Reach:
        return reach(self.transport.op, self.causal, self.window)

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def rearranges(self) -> bool:
        return self.zigzag and self.layout == "contiguous" and self.num_ranks > 1

    @property
    def axis_names(self) -> tuple[str, ...]:
        name = self.transport.axis_name
        return (name,) if isinstance(name, str) else tuple(name)

    def rotation(self, q, k, v) -> Rotation:
        """Of one rank's arrays, or their shapes and dtypes."""
        if self.layout == "zigzag":
            place = zigzag_placement
        else:
            place = halves_in_zigzag if self.rearranges else contiguous_placement
        (B, T, N, H), K = q.shape, k.shape[2]
        placement = place(self.num_ranks, T)
        held = Chunking(placement, self.schedule.num_chunks).most_tokens
        rows = placement.num_rows
        options = check(
            *(self.transport.op, q, k, v),
            scale=self.scale,
            logit_soft_cap=self.logit_soft_cap,
            **blocks_of_ranks(rows, held, N, K, rows=256),
        )
        options = dataclasses.replace(options, piece_rows=placement.block_rows)
        shape = B, rows, N, H
        return Rotation(self.schedule, placement, self.transport, options, shape, K)


def attend_sequence(
    sequence: Sequence,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segment_ids: Integer[Array, "B T"] | None,
    positions: Integer[Array, "B T"] | None,
) -> Float[Array, "B T N Hv"]:
    """Attention of this rank's rows; what is common to all schedules."""
    op = sequence.transport.op
    check_rows(op, q, k, v, segment_ids, positions)
    segment_ids, positions = read_documents(op, segment_ids, positions)
    B, T, N, _ = q.shape
    if B * T == 0:
        return jnp.zeros((B, T, N, v.shape[3]), q.dtype)
    rotation = sequence.rotation(q, k, v)
    q, k, v = in_reverse_only(sequence.transport.op, [q, k, v])
    q, k, v = vary_alike([q, k, v], also=sequence.axis_names)
    q, k, v = to_placement(sequence, rotation, (q, k, v))
    ranges = token_ranges(sequence, rotation, segment_ids, positions, (B, T))
    out = rotating_attention(rotation, *vary_alike([q, k, v, *ranges]))
    return from_placement(sequence, out, T)


def to_placement(sequence: Sequence, rotation: Rotation, arrays):
    """This rank's rows as the rotation wants them: blocks filled up, in zigzag if need be."""
    missing = rotation.placement.num_rows - arrays[0].shape[1]  # 1 where halves are uneven, else 0
    arrays = tuple(jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in arrays)
    return _to_zigzag(sequence.transport, arrays) if sequence.rearranges else arrays


def from_placement(sequence: Sequence, out, num_tokens: int):
    """The way back."""
    if sequence.rearranges:
        (out,) = _from_zigzag(sequence.transport, (out,))
    return out[:, :num_tokens]


def token_ranges(sequence: Sequence, rotation: Rotation, segment_ids, positions, shape):
    """The tokens that each of this rank's rows attends, in the rows of the rotation."""
    B, T = shape
    num_tokens = T * sequence.num_ranks
    axis_name = sequence.transport.axis_name
    if segment_ids is None and positions is not None:
        segment_ids = jnp.ones(shape, jnp.int32)

    def whole(x):
        if x is None:
            return None
        x = lax.all_gather(x, axis_name, axis=1, tiled=True)
        if sequence.layout == "zigzag":
            x = x[:, zigzag_permutation(num_tokens, sequence.num_ranks, inverse=True)]
        return x

    start, end = attended_tokens(
        whole(segment_ids),
        whole(positions),
        shape=(B, num_tokens),
        reach=sequence.reach,
    )
    token = rotation.placement.positions(lax.axis_index(axis_name))
    ranges = [jnp.where(token >= 0, x[:, token], 0) for x in (start, end)]
    return vary_alike(ranges, also=sequence.axis_names)


def _zigzag_routes(num_ranks: int):
    """Halves 2 r and 2 r + 1 of the sequence go from rank r to where zigzag wants them."""
    return tuple(
        tuple(min(2 * r + half, 2 * num_ranks - 1 - (2 * r + half)) for r in range(num_ranks))
        for half in range(2)
    )


def _to_zigzag(transport: Transport, arrays):
    chunks = tuple(map(_halves, arrays))
    routes = _zigzag_routes(lax.axis_size(transport.axis_name))
    moved = move_chunks(chunks=chunks, routes=routes, **transport._asdict())
    return tuple(_rows(_swap_on_odd_ranks(transport, x)) for x in moved)


def _from_zigzag(transport: Transport, arrays):
    chunks = tuple(_swap_on_odd_ranks(transport, _halves(x)) for x in arrays)
    routes = reverse(_zigzag_routes(lax.axis_size(transport.axis_name)))
    return tuple(map(_rows, move_chunks(chunks=chunks, routes=routes, **transport._asdict())))


def _halves(x: Float[Array, "B rows N H"]) -> Float[Array, "2 B half N H"]:
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _rows(x: Float[Array, "2 B half N H"]) -> Float[Array, "B rows N H"]:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _swap_on_odd_ranks(transport: Transport, x: Array) -> Array:
    """Even halves travel in slot 0. An odd rank's front block is odd, so it came in slot 1."""
    return jnp.where(lax.axis_index(transport.axis_name) % 2 == 1, x[::-1], x)


def read_sequences(op: str, segment_ids, positions, *, layout: str, num_ranks: int):
    """`read_documents` of whole sequences, in a layout whose ranks divide the tokens."""
    known = next((x for x in (segment_ids, positions) if x is not None), None)
    order = None
    if layout == "zigzag" and known is not None:
        order = zigzag_permutation(known.shape[1], num_ranks, inverse=True)
    return read_documents(op, segment_ids, positions, order=order)


def check_rows(op, q, k, v, segment_ids=None, positions=None) -> None:
    """One rank's arrays, or those of all, belong together."""
    check_arrays(op, q=q, k=k, v=v, segment_ids=segment_ids, positions=positions)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        raise ValueError(
            f"{op}: q, k, v have shapes {q.shape}, {k.shape}, {v.shape}; they need "
            "[B, T, heads, features] with equal B and T."
        )
    check_operands(op, q, k, v)
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
        if x is None:
            continue
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{op}: {name} has dtype {x.dtype}; it needs to be integers.")
        if x.shape != q.shape[:2]:
            raise ValueError(
                f"{op}: {name} has shape {x.shape} but q has B, T = {q.shape[:2]}; they need to "
                "be equal."
            )
