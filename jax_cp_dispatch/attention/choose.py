"""Chooses the algorithm with the shortest predicted time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_cp_dispatch._arguments import check_positive, check_type
from jax_cp_dispatch._text import duration
from jax_cp_dispatch.attention.algorithms import ALGORITHMS, Algorithm, Hamilton, Placed
from jax_cp_dispatch.attention.planned_traffic import balanced_plan, placement, traffic_of_plans
from jax_cp_dispatch.cost import HARDWARE, Hardware, Prediction, Workload, predict
from jax_cp_dispatch.cost.pairs import wasted_pairs
from jax_cp_dispatch.documents.layouts import check_layout
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import read_mask_on_host

_CLOSE = 1.03
_TILE = 128  # queries, and keys, of usual kernels
_MUCH = 0.2  # of the computed pairs


class Choice(NamedTuple):
    """The chosen algorithm, and why.

    Attributes:
      algorithm: for `context_parallel_attention`; `Hamilton()` over several nodes with `nodes`.
        `name` is its short name. `Placed()` only if tokens can be placed; each batch then needs
        `place_tokens`.
      predictions: of all available algorithms, by name; "hamilton_nodes" is "hamilton" over several
        nodes.
      reason: explanation as text.
    """

    algorithm: Algorithm
    predictions: dict[str, Prediction]
    reason: str


def choose_algorithm(
    lengths: Iterable[Iterable[int]] | None,
    *,
    num_ranks: int,
    tokens_per_rank: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    mask: Mask | str | None = None,
    layout: str = "contiguous",
    can_place: bool = False,
    with_backward: bool = True,
    latent_size: int | None = None,
    expand_flops: float = 0.0,
    hardware: Hardware | None = None,
) -> Choice:
    """Chooses an algorithm by predicted time.

    Call on the host, once for similar batches. The predictions are those of
    `jax_cp_dispatch.cost.predict`: counted pairs and bytes divided by the rates of `hardware`, with
    perfect overlap. Use them to rank algorithms, not as absolute times. "balanced" and "placed" are
    predicted from plans of these documents, made for these heads and nodes; the busiest rank of
    each kind of link decides the time. `python -m jax_cp_dispatch plan` makes the same choice.

    Args:
      lengths: tokens of the documents of each batch row, in order; None: one batch row with one
        document. The rest of a row is padding. See `document_lengths`.
      num_ranks: devices of the sequence axis.
      tokens_per_rank: tokens of a batch row on one device.
      num_heads, num_kv_heads, head_size: N, K, H of one device.
      itemsize: bytes of an element of q.
      mask: as in `context_parallel_attention`; arrays as in `cost.Workload`.
      layout: of the tokens. "balanced" needs "contiguous". "zigzag" and "hamilton" rearrange
        contiguous tokens, which is included.
      can_place: whether the data loader can reorder the tokens of every batch, as `place_tokens`
        says. If so, "placed" is predicted from the placement of `lengths`; it needs
        `layout="contiguous"`, the order before placement.
      with_backward: predict forward and backward pass, instead of the forward pass.
      latent_size, expand_flops: for `expand=`: elements of a latent row, and the floating-point
        operations that expand one; rings repeat these at every step.
      hardware: rates and topology; None: an entry of `cost.HARDWARE` for the default backend.
    Returns:
      The choice. Times within 3 % of the shortest count as equal; among these, the best balanced
      algorithm is chosen, then the simplest. `predictions` exclude the rearrangement; `reason`
      includes it, and says if documents are so short that balance saves less time than pair counts
      suggest.
    Raises:
      TypeError: `hardware` is not a `Hardware`.
      ValueError: sizes do not match, or there is no entry for the default backend.
    """
    op = "choose_algorithm"
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    check_positive(op, num_ranks=num_ranks, **sizes, itemsize=itemsize)
    check_layout(op, layout)
    rows = _length_rows(op, lengths)
    mask = read_mask_on_host(op, mask, (len(rows or [0]), num_ranks * tokens_per_rank))
    hardware = default_hardware() if hardware is None else hardware
    check_type(
        "choose_algorithm", "hardware", hardware, Hardware, "Pass an entry of cost.HARDWARE."
    )
    workload = Workload(
        num_ranks=num_ranks,
        tokens_per_rank=tokens_per_rank,
        **sizes,
        itemsize=itemsize,
        mask=mask,
        lengths=rows,
        latent_size=latent_size,
        expand_flops=expand_flops,
    )
    in_order = layout == "contiguous"
    plan = balanced_plan(workload, hardware) if in_order else None
    placed = placement(workload, hardware).plan if can_place and in_order else None
    moves = traffic_of_plans(hardware, plan, placed)
    options = {"layout": layout, "with_backward": with_backward}
    return choose_for(workload, hardware=hardware, **options, **moves)[0]


def choose_for(
    workload: Workload,
    *,
    hardware: Hardware,
    layout: str = "contiguous",
    with_backward: bool,
    **moves: Any,
) -> tuple[Choice, dict[str, float]]:
    """Returns the choice for a workload, and the predicted seconds with the rearrangement.

    `moves` is the result of `traffic_of_plans`; "balanced" is available if they are known.
    """
    is_planned = workload.visible.is_causal and layout == "contiguous"
    predictions = predict(workload, hardware=hardware, with_backward=with_backward, **moves)
    del predictions["all_gather"]
    if "moved_tokens" not in moves:
        del predictions["balanced"]
    if layout == "zigzag":
        del predictions["ring"]  # in this layout it is "zigzag"
    seconds = {name: prediction.total for name, prediction in predictions.items()}
    if is_planned:
        rearrangement = _rearrangement_seconds(workload, hardware, with_backward)
        for name in ("zigzag", "hamilton", "hamilton_nodes"):
            if name in seconds:
                seconds[name] += rearrangement
    close = [name for name in seconds if seconds[name] <= _CLOSE * min(seconds.values())]
    best = min(close, key=lambda name: round(predictions[name].imbalance, 2))
    if best == "hamilton_nodes":
        algorithm = Hamilton(nodes=workload.num_ranks // hardware.node_size(workload.num_ranks))
    else:
        algorithm = next(kind() for kind in ALGORITHMS if kind.name == best)
    reason = _reason(best, seconds, predictions, with_backward, hardware) + _about_tiles(workload)
    if isinstance(algorithm, Placed):
        reason += " Place the tokens of every batch with place_tokens, and pass its documents."
    return Choice(algorithm, predictions, reason), seconds


def _length_rows(op: str, lengths: Any) -> tuple[tuple[int, ...], ...] | None:
    if lengths is None:
        return None
    try:
        rows = tuple(tuple(map(int, row)) for row in lengths)
    except TypeError:
        raise TypeError(
            f"{op}: lengths is {lengths!r}; it needs the lengths of each batch row's documents, "
            "for example [[4, 2], [6]], or None. See document_lengths."
        ) from None
    if not rows:
        raise ValueError(f"{op}: lengths has no batch row. Pass at least one, or None.")
    return rows


def default_hardware() -> Hardware:
    """Returns the entry of `cost.HARDWARE` closest to the default backend."""
    device = jax.devices()[0]
    name = device.device_kind.lower()
    for entry, hardware in HARDWARE.items():
        if entry in (device.platform, *name.split()):
            return hardware
    raise ValueError(
        f"choose_algorithm: no entry for {device.device_kind!r} in cost.HARDWARE. Pass hardware=, "
        "a jax_cp_dispatch.cost.Hardware with its rates; to context_parallel_attention "
        "algorithm=Auto(hardware=...), or another algorithm."
    )


def _rearrangement_seconds(workload: Workload, hardware: Hardware, with_backward: bool) -> float:
    """Predicts the seconds to rearrange q, k, v to zigzag and out back, half to each of two ranks.

    The backward pass rearranges dout, and dq, dk and dv back.
    """
    if workload.num_ranks == 1:
        return 0.0
    rows = workload.rows_per_rank
    q, kv = workload.q_bytes(rows), workload.kv_bytes(rows)
    inside = hardware.node_size(workload.num_ranks) == workload.num_ranks
    where = {"inside": 2} if inside else {"outside": 2}
    there, back = (
        hardware.exchange_seconds(num_bytes / 2, num_ranks=workload.num_ranks, **where)
        for num_bytes in (q + kv, q)
    )
    return (1 + with_backward) * (there + back)


def _reason(best, seconds, predictions, with_backward, hardware: Hardware) -> str:
    passes = "forward and backward" if with_backward else "forward"
    shares_cores = hardware.topology == "shared_memory"
    parts = []
    for name in sorted(seconds, key=seconds.__getitem__):
        prediction = predictions[name]
        part = f"{name} {_duration(seconds[name])}"
        if prediction.imbalance > 1.05 and not shares_cores:
            part += f" (slowest ranks {prediction.imbalance:.1f} times the mean work)"
        elif prediction.exposed_communication > 0.1 * prediction.total:
            share = prediction.exposed_communication / prediction.total
            part += f" ({share:.0%} waiting for communication)"
        parts.append(part)
    reason = f"{best}: predicted times, {passes}: " + ", ".join(parts) + "."
    if seconds[best] > min(seconds.values()):
        reason += (
            f" {best} is within {_CLOSE - 1:.0%} of the fastest, and better balanced or simpler."
        )
    if shares_cores:
        cores = "1 core" if hardware.cores == 1 else f"{hardware.cores} cores"
        reason += (
            f" All ranks share {cores}: a step takes as long as the work of all of them, so better "
            "balance hardly shortens it."
        )
    return reason


def _about_tiles(workload: Workload) -> str:
    """Returns a sentence if documents are so short that tiles compute much outside the mask."""
    mask = workload.visible
    if not isinstance(mask, StaticMask):
        return ""
    lengths = np.array([x for row in workload.rows for x in row], np.int64)
    pairs = mask.pairs_before(lengths, lengths).sum()
    wasted = wasted_pairs(0, lengths, lengths, mask, (_TILE, _TILE)).sum()
    share = wasted / max(1, pairs + wasted)
    if share <= _MUCH:
        return ""
    return (
        f" {share:.0%} of the pairs in computed tiles of {_TILE} x {_TILE} lie outside the mask, "
        "because documents, windows or chunks are short: balance saves less time than "
        "pair counts suggest."
    )


def _duration(seconds: float) -> str:
    """Returns two digits in milliseconds, or a short time in a smaller unit."""
    if seconds < 1e-4:
        return duration(seconds)
    digits = max(0, 1 - math.floor(math.log10(1e3 * seconds)))
    return f"{1e3 * seconds:.{digits}f} ms"
