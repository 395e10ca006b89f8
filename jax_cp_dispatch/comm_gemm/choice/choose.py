"""Chooses the method of a matmul by a cost model."""

from typing import Any, NamedTuple

import jax

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.comm_gemm.types import CommOverlapType
from jax_cp_dispatch.cost import (
    HARDWARE,
    CommGemmMethod,
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
      seconds: predicted time of every available method.
      reason: explanation as text.
    """

    label: str
    options: dict[str, object]
    seconds: dict[str, float]
    reason: str


def choose_comm_gemm(shape: CommGemmShape, *, hardware: Hardware | None = None) -> CommGemmChoice:
    """Chooses the method of a matmul that is predicted to be fastest.

    Call on the host. `method="auto"` calls this.

    Args:
      shape: the matmul of one group.
      hardware: rates of ranks and links; None selects the entry of `cost.HARDWARE` for the default
        backend.
    Returns:
      The fastest method; on a tie the simplest, so NONE if overlap does not pay off.
    Raises:
      TypeError: an argument has the wrong type.
    """
    op = "choose_comm_gemm"
    check_type(op, "shape", shape, CommGemmShape, "Pass a cost.CommGemmShape.")
    if hardware is None:
        hardware = HARDWARE["cpu" if jax.default_backend() == "cpu" else "h100"]
    check_type(op, "hardware", hardware, Hardware, "Pass an entry of cost.HARDWARE.")
    methods = comm_gemm_methods(shape.op, shape.num_ranks)
    seconds = {
        label: predict_comm_gemm(shape, method, hardware=hardware)
        for label, method in methods.items()
    }
    label = min(methods, key=lambda name: seconds[name])
    text = (
        f"{shape.op} of M={shape.m}, K={shape.k}, N={shape.n} on {shape.num_ranks} ranks: {label} "
        f"is predicted to take {1e3 * seconds[label]:.3g} ms; "
    )
    if label == "none":
        text += "no method with overlap is faster."
    else:
        text += f"it is {seconds['none'] / seconds[label]:.2f} times as fast as none."
    return CommGemmChoice(label, _options(label, methods[label]), seconds, text)


def _options(label: str, method: CommGemmMethod) -> dict[str, Any]:
    """Returns the keywords of a matmul for a method of `cost.comm_gemm_methods`."""
    options: dict[str, Any] = {"method": method.name}
    if method.name == "PIPELINE":
        options["num_splits"] = method.num_chunks
    if method.name == "RING_EXCHANGE":
        options["use_ce"] = method.copies
        if label == "ring pairs":
            options["aggregate"] = True
    return options
