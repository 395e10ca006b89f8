"""Which method a product takes: a cost model, corrected by what has been measured."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch.comm_gemm.buffers.config import CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm.checks import Wish, overlap_of_wish
from jax_cp_dispatch.comm_gemm.choice.tuning import TuningTable, current_tuning, method_options
from jax_cp_dispatch.comm_gemm.engine.call import Overlap
from jax_cp_dispatch.cost import (
    HARDWARE,
    CommGemmShape,
    Hardware,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.cost.comm_gemm import CommGemmOp

_OPS: dict[CommOverlapType, CommGemmOp] = {
    CommOverlapType.AG: "all_gather_matmul",
    CommOverlapType.RS: "matmul_reduce_scatter",
}


class CommGemmChoice(NamedTuple):
    """A method, and what speaks for it.

    Attributes:
      label: of `cost.comm_gemm_methods`.
      options: keywords of `all_gather_matmul` or `matmul_reduce_scatter`: method and so on.
      seconds: of every method that could serve, measured or predicted.
      reason: in words.
    """

    label: str
    options: dict[str, object]
    seconds: dict[str, float]
    reason: str


def choose_comm_gemm(
    shape: CommGemmShape,
    *,
    hardware: Hardware | None = None,
    table: TuningTable | None = None,
) -> CommGemmChoice:
    """Chooses by time; call on the host. `method="auto"` does, with the table in use.

    A measured shape decides by its times. Others take the predictions, each times what the method
    took over what was predicted, at the measured shape that is nearest in the logarithms of M, K
    and N.

    Args:
      shape: of one group's product.
      hardware: rates of ranks and links; None: those of `cost.HARDWARE` for the default backend.
      table: what `tune` has measured.
    Returns:
      The fastest; the simplest among equals, so NONE where overlap does not pay.
    """
    if hardware is None:
        hardware = HARDWARE["cpu" if jax.default_backend() == "cpu" else "h100"]
    methods = comm_gemm_methods(shape.op, shape.num_ranks)
    seconds = {
        label: predict_comm_gemm(shape, method, hardware=hardware)
        for label, method in methods.items()
    }
    source = "predicted"
    measured = {} if table is None else table.seconds
    if shape in measured:
        seconds, source = measured[shape], "measured"
    elif nearest := _nearest(shape, measured):
        predicted = {
            label: predict_comm_gemm(nearest, method, hardware=hardware)
            for label, method in methods.items()
        }
        seconds = {
            label: time * measured[nearest].get(label, predicted[label]) / predicted[label]
            for label, time in seconds.items()
        }
        source = f"predicted from M={nearest.m}, K={nearest.k}, N={nearest.n}, which is measured,"
    known = [name for name in methods if name in seconds]
    if not known:
        raise ValueError(
            f"choose_comm_gemm: the table has times of {sorted(seconds)} for {shape}, but there "
            f"are {sorted(methods)}. Tune again."
        )
    label = min(known, key=lambda name: seconds[name])
    gain = seconds["none"] / seconds[label] if "none" in seconds else math.nan
    text = (
        f"{shape.op} of M={shape.m}, K={shape.k}, N={shape.n} on {shape.num_ranks} ranks: {label} "
        f"is {source} to take {1e3 * seconds[label]:.3g} ms, "
    )
    text += "no other less." if label == "none" else f"{gain:.2f} times faster than none."
    return CommGemmChoice(label, method_options(label, methods[label]), seconds, text)


def _nearest(shape: CommGemmShape, measured) -> CommGemmShape | None:
    alike = [
        other
        for other in measured
        if (other.op, other.num_ranks, other.itemsize)
        == (shape.op, shape.num_ranks, shape.itemsize)
    ]
    sizes = lambda s: (s.m, s.k, s.n)
    distance = lambda other: math.hypot(
        *(math.log(a / b) for a, b in zip(sizes(shape), sizes(other), strict=True))
    )
    return min(alike, key=distance, default=None)


def choose_overlaps(
    wish: Wish,
    kind: CommOverlapType,
    shape: tuple[int, int, int],
    dtype: str,
    out_dtype: str,
    num_ranks: int,
    rows_of_slots: int,
) -> tuple[Overlap, Overlap]:
    """How a product communicates, and the one in its derivative.

    `shape` is M of all ranks, K and N of one rank's weight; `rows_of_slots` M with room for as many
    rows on every rank.
    """
    m, k, n = shape
    sums = sum_dtype(out_dtype).name
    other = CommOverlapType.RS if kind == CommOverlapType.AG else CommOverlapType.AG

    def settle(wish: Wish, kind: CommOverlapType, k: int, n: int) -> Overlap:
        moved = ((m, k), dtype) if kind == CommOverlapType.AG else ((m, n), sums)
        if wish.is_auto:
            wish = _auto(wish, CommGemmShape(_OPS[kind], m, k, n, num_ranks, _bytes(dtype)))
        return overlap_of_wish(wish, kind, *moved, num_ranks, rows_of_slots)

    forward = settle(wish, kind, k, n)
    back = wish
    if not wish.is_auto:
        method = forward.method
        if (other, method) == (CommOverlapType.AG, CommOverlapMethod.PIPELINE):
            method = CommOverlapMethod.RING_EXCHANGE
        stays_ring = forward.method == CommOverlapMethod.RING_EXCHANGE
        back = Wish(
            wish.op,
            method,
            num_splits=wish.num_splits if method == CommOverlapMethod.PIPELINE else None,
            use_ce=forward.use_ce if stays_ring else None,
        )
    return forward, settle(back, other, n, k)


def _auto(wish: Wish, shape: CommGemmShape) -> Wish:
    if 0 in (shape.m, shape.k, shape.n):
        return wish._replace(method=CommOverlapMethod.NONE)
    choice = choose_comm_gemm(shape, table=current_tuning())
    return wish._replace(**choice.options)


def _bytes(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
