"""How a matmul and its derivative communicate: by options, or by predicted time."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.comm_gemm.buffers import check_buffer, find_buffer, read_config
from jax_cp_dispatch.comm_gemm.call import Overlap
from jax_cp_dispatch.comm_gemm.types import CommOverlapMethod, CommOverlapType
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """The caller's options for communication; see `matmul_reduce_scatter`."""

    method: Any = "auto"
    num_splits: int | None = None
    atomic: bool = False
    rs_overlap_first_gemm: bool = False
    aggregate: bool = False
    use_ce: bool | None = None
    buffer: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.buffer is None and self.method == "auto"

    @property
    def details(self) -> list[str]:
        """Names of the given options that depend on the method."""
        given = {
            "num_splits": self.num_splits is not None,
            "atomic": self.atomic,
            "rs_overlap_first_gemm": self.rs_overlap_first_gemm,
            "aggregate": self.aggregate,
            "use_ce": self.use_ce is not None,
        }
        return [name for name, is_given in given.items() if is_given]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSizes:
    """The matmul of one group of ranks.

    Attributes:
      comm_type: whether x is gathered, or sums are scattered.
      m, k, n: rows of all ranks, K and N of one rank's weight.
      slot_rows: m if every rank has as many rows as the largest.
      num_ranks: of the group.
      dtype: name of the type in which x moves.
      sum_dtype: of partial sums.
    """

    comm_type: CommOverlapType
    m: int
    k: int
    n: int
    slot_rows: int
    num_ranks: int
    dtype: str
    sum_dtype: str

    def adjoint(self) -> "MatmulSizes":
        """The matmul that computes the derivative in x."""
        gathers = self.comm_type == CommOverlapType.AG
        other = CommOverlapType.RS if gathers else CommOverlapType.AG
        return dataclasses.replace(self, comm_type=other, k=self.n, n=self.k)

    @property
    def moved(self) -> tuple[tuple[int, int], str]:
        """Shape and type of all moved data."""
        if self.comm_type == CommOverlapType.AG:
            return (self.m, self.k), self.dtype
        return (self.m, self.n), self.sum_dtype


def choose_overlaps(
    op: str, options: OverlapOptions, sizes: MatmulSizes
) -> tuple[Overlap, Overlap]:
    """Returns how a matmul communicates, and how the matmul in its derivative does."""
    forward = _settled(op, options, sizes)
    if options.is_auto:
        return forward, _settled(op, options, sizes.adjoint())
    backward, method = sizes.adjoint(), forward.method
    if (backward.comm_type, method) == (CommOverlapType.AG, CommOverlapMethod.PIPELINE):
        method = CommOverlapMethod.RING_EXCHANGE
    stays_ring = forward.method == CommOverlapMethod.RING_EXCHANGE
    back = OverlapOptions(
        method=method,
        num_splits=options.num_splits if method == CommOverlapMethod.PIPELINE else None,
        use_ce=forward.use_ce if stays_ring else None,
    )
    return forward, _settled(op, back, backward)


def _settled(op: str, options: OverlapOptions, sizes: MatmulSizes) -> Overlap:
    if options.buffer is not None:
        return _from_buffer(op, options.buffer, options.method, sizes)
    return _from_options(op, _chosen(options, sizes) if options.is_auto else options, sizes)


def _chosen(options: OverlapOptions, sizes: MatmulSizes) -> OverlapOptions:
    """Returns the options with the method that is predicted to be fastest."""
    m, k, n = sizes.m, sizes.k, sizes.n
    if 0 in (m, k, n):
        return dataclasses.replace(options, method=CommOverlapMethod.NONE)
    itemsize = jnp.dtype(sizes.dtype).itemsize
    shape = CommGemmShape(OPS[sizes.comm_type], m, k, n, sizes.num_ranks, itemsize)
    choice: Any = choose_comm_gemm(shape)
    return dataclasses.replace(options, **choice.options)


def _from_options(op: str, options: OverlapOptions, sizes: MatmulSizes) -> Overlap:
    kind, method = sizes.comm_type, _read_method(op, options.method)
    shape, dtype = sizes.moved
    _refuse_bulk(op, method)
    _check_options(op, options, kind, method)
    if method == CommOverlapMethod.NONE:
        return Overlap(comm_type=kind, method=method, partial_dtype=dtype)
    config = read_config(
        op,
        comm_type=kind,
        method=method,
        buffer_shape=[max(1, size) for size in shape],  # also for an array without elements
        buffer_dtype=dtype,
        tp_size=sizes.num_ranks,
        num_splits=4 if options.num_splits is None else options.num_splits,
        atomic_gemm=options.atomic,
        rs_overlap_first_gemm=options.rs_overlap_first_gemm,
        aggregate_ag=options.aggregate,
        use_ce=options.use_ce,
    )
    return Overlap.of(config, buffer=0)


def _from_buffer(op: str, buffer: int, method: Any, sizes: MatmulSizes) -> Overlap:
    """Returns the overlap of a buffer, which must match the call."""
    found, kind = find_buffer(op, buffer), sizes.comm_type
    config = found.config
    if method != "auto" and _read_method(op, method) != config.method:
        raise ValueError(
            f"{op}: method is {method!r} but buffer {buffer} is for {config.method}. Omit method."
        )
    if config.comm_type != kind:
        raise ValueError(
            f"{op}: buffer {buffer} is for {config.comm_type}; it needs {kind}. Create one."
        )
    _refuse_bulk(op, config.method)
    shape, dtype = sizes.moved
    if (kind, config.method) == (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE):
        shape = sizes.slot_rows, shape[1]  # the ring has slots of equal size
    check_buffer(op, found, shape, dtype, sizes.num_ranks)
    return Overlap.of(config, buffer=buffer)


# ---- Checks.


def check_details(op: str, options: OverlapOptions) -> None:
    """Rejects method-specific options without an explicit method."""
    if not options.details or not (options.is_auto or options.buffer is not None):
        return
    name = options.details[0]
    if options.buffer is not None:
        raise ValueError(
            f"{op}: got {name} with buffer {options.buffer}, whose own parameters apply. Omit "
            "it, or create another buffer."
        )
    raise ValueError(
        f"{op}: got {name} with method='auto', which also chooses this. Omit it, or specify a "
        "method."
    )


def _read_method(op: str, method: Any) -> CommOverlapMethod:
    """Returns the method as a member of the enumeration."""
    if method == "ring":
        method = CommOverlapMethod.RING_EXCHANGE
    if not isinstance(method, CommOverlapMethod) and (
        not isinstance(method, str) or method.upper() not in CommOverlapMethod.__members__
    ):
        raise ValueError(
            f"{op}: method is {method!r}; it needs to be 'auto', 'none', 'ring', 'pipeline' (of a "
            "reduce-scatter), or a member of CommOverlapMethod."
        )
    return CommOverlapMethod.read(op, "method", method)


def _refuse_bulk(op: str, method: CommOverlapMethod) -> None:
    if method == CommOverlapMethod.BULK:
        raise ValueError(
            f"{op}: method is {method}, which moves an array during an independent GEMM. Use "
            "CommOverlapMethod.RING_EXCHANGE, or gemm(..., aux_in=...) for bulk."
        )


def _check_options(
    op: str, options: OverlapOptions, kind: CommOverlapType, method: CommOverlapMethod
) -> None:
    """Requires that the options belong to the method."""
    if method == CommOverlapMethod.NONE:
        if options.details:
            raise ValueError(
                f"{op}: got {options.details[0]} with {method}, which has no chunks. Omit "
                "it, or specify another method."
            )
        return
    of_method = {
        "num_splits": (options.num_splits, CommOverlapMethod.PIPELINE),
        "use_ce": (options.use_ce, CommOverlapMethod.RING_EXCHANGE),
    }
    for name, (value, needs) in of_method.items():
        if value is not None and method != needs:
            raise ValueError(
                f"{op}: got {name} with {method}; it is an option of {needs}. Omit it."
            )
    is_ring = method == CommOverlapMethod.RING_EXCHANGE
    if is_ring and kind == CommOverlapType.RS and options.atomic and options.use_ce is False:
        raise ValueError(
            f"{op}: got atomic with use_ce=False; then each rank multiplies its tokens of all "
            "ranks at once, without chunks. Omit one of them."
        )
