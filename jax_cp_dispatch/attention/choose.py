"""Chooses the algorithm with the shortest predicted time; `Auto` does so in a call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jax_cp_dispatch._arguments import check_positive, check_type, is_on_host
from jax_cp_dispatch._text import duration
from jax_cp_dispatch.attention.algorithms import (
    ALGORITHMS,
    Algorithm,
    Balanced,
    Placed,
    Zigzag,
)
from jax_cp_dispatch.attention.algorithms.planned import check_plan_config, moves_of_plan
from jax_cp_dispatch.attention.operands import Call, Operands, key_shapes
from jax_cp_dispatch.cost import HARDWARE, Hardware, Moves, Prediction, Workload
from jax_cp_dispatch.cost.pairs import wasted_pairs
from jax_cp_dispatch.documents.documents import Documents, trusted, with_segment_ids
from jax_cp_dispatch.documents.layouts import check_layout, zigzag_permutation
from jax_cp_dispatch.documents.table import document_lengths
from jax_cp_dispatch.global_call import MeshAxes, kv_copies
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.masks.selected import refuse_picks
from jax_cp_dispatch.planning import PlanConfig
from jax_cp_dispatch.planning.request import DoesNotFitError

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
    `Algorithm.predict`: counted pairs and bytes divided by the rates of `hardware`, with
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
    refuse_picks(op, mask)
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
    given = {"layout": layout, "can_place": can_place}
    moves = {
        x: moves_of_plan(x.plan_for(workload, hardware), hardware)
        for x in candidates(workload, hardware, **given)
    }
    options = {"layout": layout, "with_backward": with_backward}
    return choose_for(workload, moves, hardware=hardware, **options)[0]


def candidates(
    workload: Workload, hardware: Hardware, *, layout: str = "contiguous", can_place: bool = False
) -> list[Algorithm]:
    """Returns the algorithms that can serve a workload, simplest first."""
    order = {"layout": layout, "can_place": can_place}
    return [x for kind in ALGORITHMS for x in kind.candidates(workload, hardware, **order)]


def choose_for(
    workload: Workload,
    moves: Mapping[Algorithm, Moves | None],
    *,
    hardware: Hardware,
    layout: str = "contiguous",
    with_backward: bool,
) -> tuple[Choice, dict[str, float]]:
    """Returns the choice for a workload, and the predicted seconds with the rearrangement.

    `moves` are the candidates, with the rows that their plans move.
    """
    options = {"hardware": hardware, "with_backward": with_backward}
    predictions = {x: x.predict(workload, **options, moves=rows) for x, rows in moves.items()}
    seconds = {
        x: prediction.total + x.rearrangement_seconds(workload, layout=layout, **options)
        for x, prediction in predictions.items()
    }
    close = [x for x in seconds if seconds[x] <= _CLOSE * min(seconds.values())]
    # The slowest rank may have less work than the mean, which is no better balance.
    best = min(close, key=lambda x: max(1.0, round(predictions[x].imbalance, 2)))
    named = {x.label: prediction for x, prediction in predictions.items()}
    times = {x.label: total for x, total in seconds.items()}
    reason = _reason(best.label, times, named, with_backward, hardware)
    parts = reason, _about_tiles(workload), best.advice
    return Choice(best, named, " ".join(filter(None, parts))), times


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


def _reason(best, seconds, predictions, with_backward, hardware: Hardware) -> str:
    passes = "forward and backward" if with_backward else "forward"
    shares_cores = hardware.has_shared_memory
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
        f"{share:.0%} of the pairs in computed tiles of {_TILE} x {_TILE} lie outside the mask, "
        "because documents, windows or chunks are short: balance saves less time than "
        "pair counts suggest."
    )


def _duration(seconds: float) -> str:
    """Returns two digits in milliseconds, or a short time in a smaller unit."""
    if seconds < 1e-4:
        return duration(seconds)
    digits = max(0, 1 - math.floor(math.log10(1e3 * seconds)))
    return f"{1e3 * seconds:.{digits}f} ms"


# ---- `Auto`: the algorithm of a call by its documents, and the plan by which it was predicted.


@dataclasses.dataclass(frozen=True)
class Auto:
    """The algorithm of the plan; without one, the choice of `choose_algorithm` from concrete ids.

    "placed" is only used with its plan: tokens are in the order of the batch otherwise, and cannot
    be placed inside a call.

    Attributes:
      hardware: rates and topology for the prediction; None: see `choose_algorithm`.
      config: of the plan, as in `Balanced`. A batch that is not sharded is planned once; one that
        does not fit gets another algorithm. The groups of a sharded batch plan in the program, and
        are predicted with the heads of the call and the nodes of the hardware.
    """

    name: ClassVar[str] = "auto"
    follows_plan: ClassVar[bool] = True
    hardware: Hardware | None = None
    config: PlanConfig = PlanConfig()

    def check(self, op: str) -> None:
        check_plan_config(op, self.config)
        if not isinstance(self.hardware, Hardware | None):
            raise TypeError(
                f"{op}: hardware is {self.hardware!r}; it needs to be a "
                "jax_cp_dispatch.cost.Hardware. Omit it for the entry of the default backend."
            )

    def head_axes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns none: it chooses no algorithm that shares heads for latents."""
        return ()

    def choose(
        self,
        call: Call,
        operands: Operands,
        documents: Documents,
        axes: MeshAxes,
    ) -> tuple[Algorithm, Documents]:
        """Returns the algorithm, and the documents with its plan: that of the call, or a new one.

        Operands are padded to a multiple of the ranks.
        """
        balanced, is_zigzag = Balanced(self.config), call.order.layout == "zigzag"
        if documents.plan is not None:
            return Placed() if documents.plan.is_placed else balanced, documents
        if call.pick_block or call.local:
            those = (x for x in (balanced, *(kind() for kind in ALGORITHMS)) if x.gathers_keys)
            return next(x for x in those if x.why_not(call, documents.mask) is None), documents
        if 0 in operands.q.shape[:2]:  # there are no tokens
            return Zigzag() if is_zigzag else balanced, documents
        if any(isinstance(x, Tracer) for x in (documents.segment_ids, documents.positions)):
            raise ValueError(
                f"{call.op}: algorithm='auto' reads segment_ids on the host, but they are "
                "traced. Call choose_algorithm outside jit, once for similar batches, and pass "
                "the algorithm of its result."
            )
        if not all(map(is_on_host, jax.tree.leaves(documents.mask))):  # planned in the program
            return Zigzag() if is_zigzag else balanced, documents
        hardware = self.hardware or default_hardware()
        num_tokens = operands.q.shape[1] * (1 if axes.sequence else call.num_ranks)
        num_groups = axes.num_devices(axes.batch)
        workload = _workload(call, operands, documents, num_tokens, num_groups)
        estimate = plan = None
        if not is_zigzag and num_groups > 1:  # each group makes its own plan in the program
            estimate = Balanced().plan_for(workload, hardware)
        elif not is_zigzag:
            shape = operands.q.shape[0], num_tokens
            known = with_segment_ids(documents, shape)
            with contextlib.suppress(DoesNotFitError):
                estimate = plan = balanced.plan_before(known, call.num_ranks)
        layout: Any = {"layout": call.order.layout}
        compared = candidates(workload, hardware, **layout)
        moves: dict[Algorithm, Any] = {x: None for x in compared if not x.follows_plan}
        if estimate is not None:
            moves[balanced] = moves_of_plan(estimate, hardware)
        choice, _ = choose_for(workload, moves, hardware=hardware, with_backward=True, **layout)
        if plan is not None and choice.algorithm.follows_plan:
            documents = trusted(mask=plan.mask, plans=(plan,))  # nothing to compare
        return choice.algorithm, documents


_BY_NAME: dict[str, type[Algorithm] | type[Auto]] = {x.name: x for x in (*ALGORITHMS, Auto)}


def read_algorithm(op: str, algorithm: Any) -> Algorithm | Auto:
    if isinstance(algorithm, str) and algorithm in _BY_NAME:
        return _BY_NAME[algorithm]()
    if not isinstance(algorithm, tuple(_BY_NAME.values())):
        raise ValueError(
            f"{op}: algorithm is {algorithm!r}; it needs to be one of "
            f"{', '.join(map(repr, _BY_NAME))}, or an object with options: "
            f"{', '.join(f'{kind.__name__}()' for kind in _BY_NAME.values())}."
        )
    algorithm.check(op)
    return algorithm


def _workload(
    call: Call, operands: Operands, documents: Documents, num_tokens: int, num_groups: int
) -> Workload:
    """Returns the work of one group; the rows of the first represent all."""
    (B, _, N, H), T = operands.q.shape, num_tokens
    K = key_shapes(call.expansion, operands)[0].shape[2]
    head_devices = N // call.num_heads
    rows = max(B // num_groups, 1)
    lengths = ((T,),) * rows
    order = slice(None)
    if call.order.layout == "zigzag":
        order = zigzag_permutation(T, call.num_ranks, inverse=True)
    documents = jax.tree.map(lambda x: np.asarray(x)[:rows, order], documents)
    mask, segment_ids, positions = documents.mask, documents.segment_ids, documents.positions
    if segment_ids is not None or positions is not None:
        ids = np.ones((rows, T), np.int32) if segment_ids is None else segment_ids
        if mask.has_arrays:  # padding is a document for each token: columns stay as they are
            column = np.arange(1, 1 + T)
            ids = np.where(ids == 0, ids.max(initial=0) + column, ids)
            positions = None if positions is None else np.where(segment_ids == 0, 0, positions)
        lengths = document_lengths(ids, positions)
    workload = Workload(
        num_ranks=call.num_ranks,
        tokens_per_rank=T // call.num_ranks,
        num_heads=call.num_heads,
        num_kv_heads=K * kv_copies(N, K, head_devices) // head_devices,
        head_size=H,
        itemsize=operands.q.dtype.itemsize,
        mask=mask,
        lengths=lengths,
    )
    if call.expansion is None:
        return workload
    latent_size = sum(x.shape[3] for x in operands.k)  # as one projection of all features
    flops = 4.0 * latent_size * workload.num_kv_heads * workload.head_size
    return dataclasses.replace(workload, latent_size=latent_size, expand_flops=flops)
