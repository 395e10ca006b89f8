"""Chooses the method of a matmul by a cost model, corrected by measurements."""

import math
from typing import NamedTuple

import jax

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.comm_gemm.choice.tuning import TuningTable, check_table, method_options
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
    """The chosen method, and why.

    Attributes:
      label: key of `cost.comm_gemm_methods`.
      options: keywords for `all_gather_matmul` or `matmul_reduce_scatter`: method and so on.
      seconds: measured or predicted time of every available method.
      reason: explanation as text.
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
    """Chooses the fastest method of a matmul.

    Call on the host. `method="auto"` calls this with the table in use. For a measured shape, the
    measured times decide. For others, each method's prediction is multiplied by its ratio of
    measured to predicted time at the nearest measured shape, by the logarithms of M, K and N.

    Args:
      shape: the matmul of one group.
      hardware: rates of ranks and links; None selects the entry of `cost.HARDWARE` for the default
        backend.
      table: measurements of `tune`.
    Returns:
      The fastest method; on a tie the simplest, so NONE if overlap does not pay off.
    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the table does not contain any known method for this shape.
    """
    op = "choose_comm_gemm"
    check_type(op, "shape", shape, CommGemmShape, "Pass a cost.CommGemmShape.")
    if hardware is not None:
        check_type(op, "hardware", hardware, Hardware, "Pass an entry of cost.HARDWARE.")
    if table is not None:
        check_table(op, table)
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
        f"is {source} to take {1e3 * seconds[label]:.3g} ms; "
    )
    if label == "none":
        text += "no method with overlap is faster."
    else:
        text += f"it is {gain:.2f} times as fast as none."
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
