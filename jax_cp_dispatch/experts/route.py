"""`route`: from the experts of each token to the plan of its exchanges, by counts alone.

`fit_capacity`: the rows for the experts of a rank, from a sample of routings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32, Integer, UInt

from jax_cp_dispatch._arguments import (
    MOST_ROWS,
    HostOrDevice,
    check_positive,
    check_rows,
    read_int32,
)
from jax_cp_dispatch._arrays import (
    divided,
    running_sum,
    sum_by_key,
    sum_dtype,
    take_in_bounds,
    where_or_zero,
)
from jax_cp_dispatch._door import door
from jax_cp_dispatch._ranks.communicator import AxisName, rank_index
from jax_cp_dispatch._ranks.options import CollectiveOptions, read_options, vary_alike
from jax_cp_dispatch.documents.segment_ids import gather_sequence
from jax_cp_dispatch.experts.routing import Overflow, Routing
from jax_cp_dispatch.experts.tokens import on_ranks, ranks_of
from jax_cp_dispatch.planning.fit import quantile

# ---- Counts by key, and each element's place among those of its key: sums over blocks, no sort.

_BLOCK = 32  # elements that are compared with each other; the others are counted


def places_by_key(
    key: Int32[Array, " n"], num_keys: int
) -> tuple[Int32[Array, " n"], Int32[Array, " num_keys"]]:
    """Returns how many earlier elements have the key of each, and how many elements each key has.

    Keys outside of [0, num_keys) do not count; the places of their elements are undefined.
    """
    size = len(key)
    num_blocks = max(1, -(-size // _BLOCK))
    key = jnp.where((key >= 0) & (key < num_keys), key, num_keys)
    key = jnp.pad(key, (0, num_blocks * _BLOCK - size), constant_values=num_keys)
    key = key.reshape(num_blocks, _BLOCK)
    at = key * num_blocks + np.arange(num_blocks, dtype=np.int32)[:, None]
    in_block = jnp.zeros((num_keys + 1) * num_blocks, jnp.int32)
    in_block = in_block.at[at.astype(jnp.uint32)].add(1, mode="promise_in_bounds")
    until = running_sum(in_block.reshape(num_keys + 1, num_blocks))
    before = until.reshape(-1) - in_block
    is_same = (key[:, None] == key[:, :, None]) & np.tri(_BLOCK, k=-1, dtype=bool)[None]
    places = take_in_bounds(before, at) + is_same.sum(2, dtype=jnp.int32)
    return places.reshape(-1)[:size], until[:num_keys, -1]


# ---- Which of the places of an expert a token uses, where a map gives experts to ranks.


def choose_replicas(
    expert_index: Int32[Array, "T k"],
    physical_to_logical: Int32[Array, "W L"],
    num_experts: int,
    rank: Array,
) -> Int32[Array, "T k"]:
    """Returns the place of each choice, rank * L + i; token t of rank r takes replica r + t.

    If the map holds what is no expert, all choices are of that one.
    """
    num_places = physical_to_logical.size
    expert = physical_to_logical.reshape(-1)
    low, high = expert.min(), expert.max()
    is_wrong = (low < -1) | (high >= num_experts)
    wrong = jnp.where(high >= num_experts, high, low)
    expert_index = jnp.where(is_wrong & (expert_index >= 0), wrong, expert_index)
    expert = jnp.where(expert < 0, num_experts, expert)  # a place without an expert
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    ones = jnp.ones(num_places, jnp.int32)
    (num_replicas,) = sum_by_key([ones], expert, num_experts)
    first = running_sum(num_replicas) - num_replicas
    is_expert = (expert_index >= 0) & (expert_index < num_experts)
    known = jnp.where(is_expert, expert_index, 0)
    token = rank + jnp.arange(len(expert_index), dtype=jnp.int32)[:, None]
    replicas = num_replicas[known]
    place = order[first[known] + token % jnp.maximum(replicas, 1)]
    return jnp.where(is_expert & (replicas > 0), place, no_place(expert_index, num_places))


def no_place(expert_index: Int32[Array, "T k"], num_places: int) -> Int32[Array, "T k"]:
    """Returns what stands for the place of experts without one: beyond all places; -1 stays."""
    beyond = num_places + jnp.minimum(expert_index, MOST_ROWS - num_places)
    return jnp.where(expert_index < 0, expert_index, beyond)


# ---- `overflow="drop"`: which choices are kept where a rank has fewer rows than it needs.

_DIGIT_BITS = 4


def quotas(counts: Int32[Array, "W W L"], capacity: int) -> Int32[Array, "W W L"]:
    """Returns how many rows each rank (first axis) may send to each expert of each rank.

    The largest counts of a full rank are cut to one level, so that its rows are exactly `capacity`;
    where that leaves a rest, the first of these keep one more.
    """
    zero = jnp.zeros(counts.shape[1], jnp.int32)
    low, high = vary_alike([zero, zero + capacity], like=counts)
    kept_at = lambda level: jnp.minimum(counts, level[None, :, None])
    total_at = lambda level: kept_at(level).sum((0, 2), dtype=jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        fits = total_at(middle) <= capacity
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    level, _ = lax.fori_loop(0, capacity.bit_length() + 1, halve, (low, high))
    is_cut = counts > level[None, :, None]
    by_rank = jnp.moveaxis(is_cut, 1, 0).astype(jnp.int32)
    number = running_sum(by_rank.reshape(len(zero), -1)).reshape(by_rank.shape)
    rest = capacity - total_at(level)
    has_more = is_cut & jnp.moveaxis(number <= rest[:, None, None], 0, 1)
    return kept_at(level) + has_more.astype(jnp.int32)


def keep_heaviest(
    place: Int32[Array, " n"], weights: Float[Array, " n"], quota: Int32[Array, " P"]
) -> Bool[Array, " n"]:
    """Whether each choice is among the `quota` heaviest of its place; of equal ones the first.

    Choices without a place in [0, P) are kept: they move nothing, or are errors. NaN is lightest.

    Nothing is sorted, which compilers for TPUs need minutes for: counts give the lightest weight
    that each place keeps, digit by digit from the highest.
    """
    num_places = len(quota)
    has_place = (place >= 0) & (place < num_places)
    at = jnp.where(has_place, place, 0)
    key = _ordered(weights)
    num_digits = key.dtype.itemsize * 8 // _DIGIT_BITS
    base = 1 << _DIGIT_BITS
    is_higher = np.tri(base, k=-1, dtype=np.int32).T[None]

    def add_digit(i, found):
        """Returns the next digits, and how many of the weights that begin with them are kept."""
        lightest, left = found
        rest = key >> ((num_digits - 1 - i) * _DIGIT_BITS).astype(key.dtype)
        before, digit = rest >> _DIGIT_BITS, (rest & (base - 1)).astype(jnp.int32)
        counts_here = has_place & (before == take_in_bounds(lightest, at))
        bins = jnp.where(counts_here, at * base + digit, num_places * base)
        (counts,) = sum_by_key([jnp.ones_like(bins)], bins, num_places * base)
        heavier = (counts.reshape(-1, 1, base) * is_higher).sum(2, dtype=jnp.int32)
        fits = heavier <= left[:, None]
        digit = (~fits).sum(1).astype(key.dtype)
        return (lightest << _DIGIT_BITS) | digit, left - jnp.where(fits, heavier, 0).max(1)

    found = vary_alike([jnp.zeros(num_places, key.dtype), quota], like=place)
    lightest, left = lax.fori_loop(0, num_digits, add_digit, tuple(found))
    lightest, left = take_in_bounds(lightest, at), take_in_bounds(left, at)
    is_equal = has_place & (key == lightest)
    number, _ = places_by_key(jnp.where(is_equal, place, -1), num_places)
    return ~has_place | (key > lightest) | (is_equal & (number < left))


def _ordered(x: Float[Array, " n"]) -> UInt[Array, " n"]:
    """Returns integers in the order of these numbers: -0 equals 0, NaN is the smallest."""
    x = x.astype(sum_dtype(x.dtype))
    number = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), f"uint{x.dtype.itemsize * 8}")
    sign = np.array(1 << (x.dtype.itemsize * 8 - 1), number.dtype)
    return jnp.where(jnp.isnan(x), 0, jnp.where(number >= sign, ~number, number | sign))


_OP = "route"


@door(
    _OP,
    expert_index="Collapse the dimensions of the tokens into one.",
    weights="Pass a weight for each choice.",
)
def route(
    expert_index: Integer[HostOrDevice, "T k"],
    *,
    num_experts: int,
    axis_name: AxisName,
    capacity: int | None = None,
    overflow: Overflow = "error",
    weights: Float[HostOrDevice, "T k"] | None = None,
    physical_to_logical: Integer[HostOrDevice, "W L"] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    implementation: str | None = None,
    deadline: float | None = None,
) -> Routing:
    """Plans the exchanges of a layer of experts, from the experts that each token chose.

    Each rank holds L experts, and has a buffer of `capacity` rows for them: one for each choice of
    a token, grouped by expert, in the order of the ranks, tokens and choices from which they come.
    The ranks exchange how many choices each has of each expert, with `overflow="drop"` twice, and
    nothing else. For a number of experts, time and memory are proportional to T k.

    Call inside `jax.shard_map` over `axis_name`, on every rank of the axis, on this rank's tokens;
    or on those of all ranks, `[W * T, k]`. No derivative: these are integers.

    Args:
      expert_index: the experts of each token; -1 is none. The same one twice is two choices. Where
        experts choose tokens, `[E, C]`: all experts, -1 for those that do not choose the token.
      num_experts: their number. Without a map, expert e is on rank e // L.
      axis_name: the mesh axis whose devices are the ranks, or several, the major one first.
      capacity: rows of the buffer of each rank, see `fit_capacity`; None: W * T * k, enough for
        any routing.
      overflow: what happens if a rank needs more rows. "error": an error on all ranks, of the first
        exchange that follows, which names the rank and its need. "drop": the largest counts of a
        rank and an expert are cut to one level, so that its rows are just filled; of these choices
        those with the largest weights stay, `num_dropped` counts the others, and they contribute
        zero.
      weights: of the choices, for `overflow="drop"`.
      physical_to_logical: the expert in each place of each rank, -1 for none, the same array on all
        ranks; an expert may have several places. Token t of rank r uses replica r + t of an expert,
        modulo their number. None: experts are spread evenly, each in one place.
      mesh: the mesh of `axis_name`, if global arrays do not determine it.
      implementation, deadline: of all exchanges of the layer, see `dispatch`.
    Returns:
      The plan, for `dispatch_tokens` and `combine_tokens`, with the `group_sizes` of the experts.
    Raises:
      TypeError, ValueError: an argument is invalid, also known indices and a known map that hold
        what is neither -1 nor an expert.
      jax.errors.JaxRuntimeError: see `dispatch`. Traced ones, and an expert without a place, are
        errors of the first exchange of the layer, with `implementation="xla"` NaN.
    References:
      GShard (Lepikhin et al. 2021); DeepEP, whose dispatch also sends a token once to a rank; EPLB,
      for the map from physical to logical experts.
    """
    options = read_options(_OP, axis_name, mesh, implementation, deadline)
    check_positive(_OP, num_experts=num_experts)
    if overflow not in ("error", "drop"):
        raise ValueError(f"{_OP}: overflow is {overflow!r}; it needs to be 'error' or 'drop'.")
    if (overflow == "drop") != (weights is not None):
        raise ValueError(
            f"{_OP}: got overflow={overflow!r} {'without' if weights is None else 'and'} weights, "
            "by which it drops. Pass both or none."
        )
    if not expert_index.shape[1]:
        raise ValueError(
            f"{_OP}: expert_index has shape {list(expert_index.shape)}; each token needs at least "
            "one choice. Pass -1 for tokens without an expert."
        )
    remedy = (
        "It is an expert of each token, or -1 for none; where experts choose tokens, pass all "
        "experts of each token, with -1 for those that do not choose it."
    )
    expert_index = read_int32(_OP, "expert_index", expert_index, -1, num_experts - 1, remedy=remedy)
    axes, num_ranks = ranks_of(options, expert_index)
    num_choices = expert_index.size * (num_ranks if axes is None else 1)
    check_rows(_OP, "the number of all choices, W * T * k,", num_choices)
    if capacity is None:
        capacity = max(num_choices, 1)
    check_positive(_OP, capacity=capacity)
    check_rows(_OP, "W * capacity", num_ranks * int(capacity) + 1)
    if axes is not None:  # for the calls that follow, whose arrays may be on no mesh
        options = dataclasses.replace(options, mesh=axes.mesh)
    num_places = num_experts // num_ranks
    if physical_to_logical is not None:
        shape = physical_to_logical.shape
        if shape[0] != num_ranks or not shape[1]:
            raise ValueError(
                f"{_OP}: physical_to_logical has shape {list(shape)}; it needs [{num_ranks}, L], "
                "the expert in each place of each rank."
            )
        num_places = shape[1]
        physical_to_logical = read_int32(
            _OP, "physical_to_logical", physical_to_logical, -1, num_experts - 1
        )
    elif num_experts % num_ranks:
        raise ValueError(
            f"{_OP}: num_experts is {num_experts}, not a multiple of the {num_ranks} ranks. "
            "Pass physical_to_logical, with -1 in places that stay empty."
        )
    plan = _Plan(options, num_ranks, num_experts, num_places, int(capacity), overflow)
    tokens = P(options.axis_names)
    return on_ranks(
        _on_rank,
        plan,
        (expert_index, weights, physical_to_logical),
        axes,
        in_specs=(tokens, tokens, P()),
        out_specs=tokens,
        num_differentiable=0,
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    options: CollectiveOptions
    num_ranks: int
    num_experts: int
    num_places: int
    capacity: int
    overflow: Overflow


@jax.named_scope("cpd.plan")
def _on_rank(plan: _Plan, expert_index: Any, weights: Any, physical_to_logical: Any) -> Routing:
    rank = rank_index(plan.options.axis_names)
    given = [x for x in (expert_index, weights, physical_to_logical) if x is not None]
    given = jax.lax.stop_gradient(given)
    expert_index, *others = vary_alike(given, also=plan.options.axis_names)
    if physical_to_logical is not None:
        place = choose_replicas(expert_index, others[-1], plan.num_experts, rank)
    else:
        is_wrong = expert_index >= plan.num_experts
        place = jnp.where(is_wrong, no_place(expert_index, plan.num_experts), expert_index)
    dst_rank, within, choices, tokens, is_right = _count(plan, place)
    rows = choices.sum((0, 2), dtype=jnp.int32)  # that each rank needs
    num_rows, num_dropped = take_in_bounds(rows, rank), jnp.zeros(1, jnp.int32)
    if plan.overflow == "drop":
        quota = take_in_bounds(quotas(choices, plan.capacity), rank).reshape(-1)
        keep = keep_heaviest(place.reshape(-1), others[0].reshape(-1), quota).reshape(place.shape)
        num_dropped = num_dropped + (~keep).sum(dtype=jnp.int32)
        place = jnp.where(keep, place, -1)
        dst_rank, within, choices, tokens, is_right = _count(plan, place)
        rows = choices.sum((0, 2), dtype=jnp.int32)

    # Rows of a rank: by place, then by the rank they come from.
    before = np.arange(plan.num_ranks, dtype=np.int32) < rank
    earlier = lambda x: where_or_zero(before, x).sum(0, dtype=x.dtype)
    of_place = choices.sum(0, dtype=jnp.int32)
    first = jnp.cumsum(of_place, 1, dtype=jnp.int32) - of_place + earlier(choices)
    at = np.arange(plan.num_ranks, dtype=np.int32)[:, None] * plan.capacity + first
    has_place = (place >= 0) & (place < at.size)
    row = take_in_bounds(at.reshape(-1), jnp.where(has_place, place, 0)) + within[0]
    to = jnp.clip(dst_rank, 0, plan.num_ranks - 1)
    first_row = earlier(tokens)
    offset = take_in_bounds(first_row, to) + within[1]
    received = take_in_bounds(tokens, rank, axis=1)
    return Routing(
        dst_rank=dst_rank,
        dst_offset=jnp.where(dst_rank >= 0, offset, 0),
        row=jnp.where(has_place, row, -1),
        num_recv_tokens=jnp.append(received, received.sum(dtype=jnp.int32))[None],
        num_send_tokens=take_in_bounds(tokens, rank)[None],
        first_row=first_row[None],
        group_sizes=take_in_bounds(of_place, rank),
        rows_of_ranks=rows[None],
        num_recv_rows=take_in_bounds(choices.sum(2, dtype=jnp.int32), rank, axis=1)[None],
        num_rows=num_rows[None],
        num_dropped=num_dropped,
        is_valid=((rows <= plan.capacity).all() & is_right)[None],
        capacity=plan.capacity,
        overflow=plan.overflow,
        options=plan.options,
    )


def _count(plan: _Plan, place: Int32[Array, "T k"]) -> tuple[Any, Any, Any, Any, Any]:
    """Counts choices by place and tokens by rank, and exchanges the counts.

    Returns:
      dst_rank: `[T, k]`, see `Routing`; if the place does not exist, W + the expert, or the
        negative index.
      within: `[2, T, k]`; the number of earlier choices of the same place, and of earlier tokens
        for that rank, on this rank.
      choices: `[W, W, L]`; of each place, by the rank they come from and the rank of the place.
      tokens: `[W, W]`; for each rank, by the rank they come from.
      is_right: whether every choice of all ranks has a place, or is -1.
    """
    num_ranks, num_all = plan.num_ranks, plan.num_ranks * plan.num_places
    to = jnp.where(place < num_all, divided(place, plan.num_places)[0], place - num_all + num_ranks)
    to = jnp.where(place < 0, place, to)
    is_same = to[:, None, :] == to[:, :, None]
    is_repeated = (is_same & np.tri(to.shape[1], k=-1, dtype=bool)[None]).any(2)
    dst_rank = jnp.where(is_repeated & (to >= 0), -1, to)
    is_wrong = (place < -1) | (place >= num_all)
    rank_key = jnp.where((dst_rank >= 0) & ~is_wrong, dst_rank + num_all, -1)
    keys = jnp.stack([jnp.where(is_wrong, num_all + num_ranks, place), rank_key])
    within, own = places_by_key(keys.reshape(-1), num_all + num_ranks + 1)
    counts = gather_sequence(plan.options, own[None], num_ranks).reshape(num_ranks, -1)
    choices, tokens, wrong = jnp.split(counts, [num_all, num_all + num_ranks], axis=1)
    choices = choices.reshape(num_ranks, num_ranks, plan.num_places)
    return dst_rank, within.reshape(keys.shape), choices, tokens, (wrong == 0).all()


def fit_capacity(
    samples: Iterable[Integer[np.ndarray, "tokens k"]],
    *,
    num_experts: int,
    world_size: int,
    overflow: float = 1e-4,
) -> int:
    """Finds a `capacity` for `route`, from the experts that the tokens of some batches chose.

    The larger of the sample's maximum and the quantile of an exponential tail that is fitted to its
    largest tenth (at least ten batches), rounded up to a multiple of 128; see `fit_plan_config`.
    Call on the host.

    Args:
      samples: the `expert_index` of all ranks, for each batch and layer, with experts spread
        evenly. With a map, the largest `Routing.num_rows` of some batches is what they need.
      num_experts, world_size: as for `route`; the number of ranks.
      overflow: wanted share of batches that need more, between 0 and 1.
    Returns:
      The capacity; at most what any routing of as many tokens needs.
    Raises:
      ValueError: an argument is invalid, or there is no sample.
    """
    op = "fit_capacity"
    check_positive(op, num_experts=num_experts, world_size=world_size)
    if num_experts % world_size:
        raise ValueError(
            f"{op}: num_experts is {num_experts}, not a multiple of the {world_size} ranks. With "
            "a map, take the largest Routing.num_rows of some batches."
        )
    if not 0 < overflow < 1:
        raise ValueError(f"{op}: overflow is {overflow}; it needs to be between 0 and 1.")
    needs, most = [], 1
    for sample in samples:
        index = np.asarray(sample)
        if index.size and not -1 <= index.min() <= index.max() < num_experts:
            raise ValueError(
                f"{op}: a sample has experts {index.min()} to {index.max()}; they need to be in "
                f"[-1, {num_experts}). Pass the num_experts of the model."
            )
        rank = index[index >= 0] // (num_experts // world_size)
        needs.append(np.bincount(rank, minlength=world_size).max())
        most = max(most, index.size)
    if not needs:
        raise ValueError(f"{op}: there is no sample. Pass the expert_index of some batches.")
    rows = quantile(np.array(needs, np.int64), overflow)
    return min(math.ceil(max(rows, 1) / 128) * 128, most)
