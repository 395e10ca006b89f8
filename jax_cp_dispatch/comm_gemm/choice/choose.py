"""Which method a matmul takes: a cost model, corrected by what has been measured."""

import math
from typing import NamedTuple

import jax

from jax_cp_dispatch.comm_gemm.choice.tuning import TuningTable, method_options
from jax_cp_dispatch.comm_gemm.types import CommOverlapType
from jax_cp_dispatch.cost import (
    HARDWARE,
    CommGemmShape,
    Hardware,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.cost.comm_gemm import CommGemmOp

OPS: dict[CommOverlapType, CommGemmOp] = {
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
      shape: of one group's matmul.
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
