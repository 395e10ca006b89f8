"""What callers give a GEMM, read and checked: arrays, their types and scales, and the overlap.

A matmul and its derivative communicate by options, by a registered buffer, or by predicted time; a
gemm by a buffer.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.buffers import (
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    check_buffer,
    find_buffer,
    read_config,
)
from jax_cp_dispatch.comm_gemm.primitive import GemmCall, GemmOperands
from jax_cp_dispatch.cost import (
    HARDWARE,
    CommGemmShape,
    Hardware,
    comm_gemm_methods,
    predict_comm_gemm,
)
from jax_cp_dispatch.scaling import BYTE_FLOATS, FLOATS, ScalingMode, dtype_name

# ---- Arrays, and the errors that all GEMMs share.


def read_arrays(op: str, annotated: Any, **given: Any) -> dict[str, Any]:
    """Returns arrays by name, also of nested lists, checked as a function annotates them.

    A tuple is several arrays. Absent ones are None and left out.
    """
    read = {}
    for name, value in given.items():
        several = value if isinstance(value, tuple) else (value,)
        arrays = []
        for i, x in enumerate(several):
            try:
                arrays.append(None if x is None else jnp.asarray(x))
            except (TypeError, ValueError) as error:
                at = f"{name}[{i}]" if isinstance(value, tuple) else name
                raise TypeError(
                    f"{op}: {at} is {type(x).__name__}; it needs to be an array, or nested lists "
                    f"of numbers that make one. {error}"
                ) from None
        if value is not None:
            read[name] = tuple(arrays) if isinstance(value, tuple) else arrays[0]
    check_annotated(op, annotated, read)
    return read


def check_operand_types(op: str, mode: ScalingMode | None, **operands: Array) -> None:
    """Requires that types match the mode of a gemm, and those of the first two each other."""
    (left, lhs), (right, rhs), *_ = operands.items()
    if all(x.dtype.name == "float8_e5m2" for x in (lhs, rhs)):
        raise ValueError(
            f"{op}: got float8_e5m2 for {left} and {right}; at least one needs to be "
            "float8_e4m3fn. Quantize it to that."
        )
    is_scaled = mode is not None and mode != ScalingMode.NO_SCALING
    allowed = BYTE_FLOATS if is_scaled else FLOATS
    remedy = "Quantize it first" if is_scaled else "Pass its scaling_mode and inverse scale"
    for name, array in operands.items():
        if array.dtype.name not in allowed:
            is_other = mode is not None and array.dtype.name in BYTE_FLOATS + FLOATS
            raise TypeError(
                f"{op}: {name} is {array.dtype}{'' if mode is None else f' with {mode}'}; it needs "
                f"to be one of {allowed}.{f' {remedy}.' if is_other else ''}"
            )
    if (lhs.dtype.name == "float64") != (rhs.dtype.name == "float64"):
        raise TypeError(
            f"{op}: {left} is {lhs.dtype} and {right} {rhs.dtype}; float64 can only be used with "
            "float64. Convert one."
        )


def result_dtype(op: str, x: Array, w: Array, preferred: Any) -> str:
    is_scaled = x.dtype.name in BYTE_FLOATS
    natural = jnp.dtype(jnp.bfloat16) if is_scaled else jnp.promote_types(x.dtype, w.dtype)
    name = dtype_name(natural if preferred is None else preferred)
    if name in BYTE_FLOATS:
        raise TypeError(
            f"{op}: preferred_element_type is {name}; a product of 8 bits would need a scale of "
            f"its own. It needs to be one of {FLOATS[:3]}: quantize the result."
        )
    if name not in FLOATS or (name == "float64") != (natural.name == "float64"):
        raise TypeError(
            f"{op}: preferred_element_type is {name} for operands of {natural.name}; it needs to "
            f"be one of {FLOATS}, and float64 can only be used with float64."
        )
    return name


def required_scales(op: str, mode: ScalingMode, **scales: Any) -> dict[str, Any]:
    """Returns the scales of lhs and rhs: both for a scaling mode, none for NO_SCALING."""
    given = {name: scale for name, scale in scales.items() if scale is not None}
    if mode == ScalingMode.NO_SCALING and given:
        raise ValueError(
            f"{op}: got {next(iter(given))}_scale_inv with {mode}; scales need another "
            "scaling_mode. Omit it."
        )
    missing = [name for name in scales if name not in given]
    if mode != ScalingMode.NO_SCALING and missing:
        raise ValueError(
            f"{op}: missing inverse scaling factor of {' and '.join(missing)} for {mode}. "
            f"Pass {missing[0]}_scale_inv."
        )
    return given


@contextlib.contextmanager
def reverse_mode_only(op: str) -> Iterator[None]:
    """Names the operation in the error, which JAX's own message does not."""
    try:
        yield
    except TypeError as error:
        if "forward-mode autodiff" not in str(error):
            raise
        raise TypeError(
            f"{op}: got forward mode (jax.jvp, jax.jacfwd, jax.hessian), but it has a derivative "
            "in reverse mode only, of any order. Use jax.vjp, jax.grad or jax.jacrev: a Hessian "
            "is jax.jacrev(jax.grad(...))."
        ) from None


# ---- How a matmul and its derivative communicate.


class CommGemmChoice(NamedTuple):
    """The chosen method, and why.

    Attributes:
      label: key of `cost.comm_gemm_methods`.
      options: keywords for `all_gather_matmul` or `matmul_reduce_scatter`: method and so on.
      seconds: predicted time of every available method.
      reason: explanation as text.
    """

    label: str
    options: dict[str, Any]
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
    chosen = methods[label]
    options: dict[str, Any] = {"method": chosen.name}
    if chosen.name == "PIPELINE":
        options["num_splits"] = chosen.num_chunks
    if chosen.name == "RING_EXCHANGE":
        options["use_ce"] = chosen.copies
        if chosen.num_chunks < shape.num_ranks:  # pairs
            options["aggregate"] = True
    return CommGemmChoice(label, options, seconds, text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulOptions:
    """The caller's options, besides arrays; see `all_gather_matmul` and `matmul_reduce_scatter`."""

    ranks: CollectiveOptions
    row_counts: Sequence[int] | None = None
    gathered: str = "keep"
    scaling_mode: Any = ScalingMode.NO_SCALING
    preferred_element_type: Any = None
    method: Any = "auto"
    num_splits: int | None = None
    atomic: bool = False
    rs_overlap_first_gemm: bool = False
    aggregate: bool = False
    use_ce: bool | None = None
    buffer: int | None = None

    @property
    def op(self) -> str:
        return self.ranks.op

    @property
    def gathers(self) -> bool:
        return self.op == "all_gather_matmul"


def choose_overlaps(
    options: MatmulOptions, shape: CommGemmShape, slot_rows: int, dtype: str, partial: str
) -> tuple[CommOverlapConfig, CommOverlapConfig]:
    """Returns how a matmul communicates, and how the matmul in its derivative in x does.

    `shape` has the rows of all ranks of one group, K and N of one rank's weight; `slot_rows` are
    those of all ranks if every one has as many as the largest. x moves as `dtype`, partial sums as
    `partial`.
    """
    op, gathers = options.op, options.gathers
    other = "matmul_reduce_scatter" if gathers else "all_gather_matmul"
    adjoint = dataclasses.replace(shape, op=other, k=shape.n, n=shape.k)
    moved = (dtype, partial) if gathers else (partial, dtype)
    is_auto, why = options.method == "auto", None
    method = None if is_auto else _read_method(op, options.method)
    if options.buffer is not None:
        why = f"buffer {options.buffer}, whose own parameters apply. Omit it, or create another one"
    elif is_auto:
        why = "method='auto', which also chooses this. Omit it, or specify a method"
    elif method == CommOverlapMethod.NONE:
        why = f"{method}, which has no chunks. Omit it, or specify another method"
    of_method = {
        "num_splits": options.num_splits is not None,
        "atomic": options.atomic,
        "rs_overlap_first_gemm": options.rs_overlap_first_gemm,
        "aggregate": options.aggregate,
        "use_ce": options.use_ce is not None,
    }
    for name, is_given in of_method.items():
        if is_given and why is not None:
            raise ValueError(f"{op}: got {name} with {why}.")
    if options.buffer is None and is_auto:
        predicted = []
        for each, dtype in zip((shape, adjoint), moved, strict=True):
            chosen: dict[str, Any] = {"method": "none"}
            if 0 not in (each.m, each.k, each.n):
                chosen = choose_comm_gemm(each).options
            of_each = dataclasses.replace(options, **chosen)
            predicted.append(_read_overlap(of_each, each, slot_rows, dtype))
        return predicted[0], predicted[1]
    forward = _read_overlap(options, shape, slot_rows, moved[0])
    method = forward.method
    if not gathers and method == CommOverlapMethod.PIPELINE:
        method = CommOverlapMethod.RING_EXCHANGE
    back = MatmulOptions(
        ranks=options.ranks, method=method, use_ce=forward.use_ce if forward.is_ring else None
    )
    return forward, _read_overlap(back, adjoint, slot_rows, moved[1])


def _read_overlap(
    options: MatmulOptions, shape: CommGemmShape, slot_rows: int, dtype: str
) -> CommOverlapConfig:
    """Returns how a matmul communicates, whose data have this type; see `choose_overlaps`."""
    op, buffer = options.op, options.buffer
    kind, moved = CommOverlapType.RS, (shape.m, shape.n)
    if shape.op == "all_gather_matmul":
        kind, moved = CommOverlapType.AG, (shape.m, shape.k)
    if buffer is not None:
        config = find_buffer(op, buffer)
        if options.method != "auto" and _read_method(op, options.method) != config.method:
            raise ValueError(
                f"{op}: method is {options.method!r} but buffer {buffer} is for {config.method}. "
                "Omit method."
            )
        if config.comm_type != kind:
            raise ValueError(
                f"{op}: buffer {buffer} is for {config.comm_type}; it needs {kind}. Create one."
            )
        _read_method(op, config.method)
        if kind == CommOverlapType.RS and config.is_ring:
            moved = slot_rows, moved[1]  # the ring has slots of equal size
        check_buffer(op, config, moved, dtype, shape.num_ranks)
        return config
    method = _read_method(op, options.method)
    if method == CommOverlapMethod.NONE:
        return CommOverlapConfig(kind, method, buffer_dtype=dtype)
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
    config = read_config(
        op,
        comm_type=kind,
        method=method,
        buffer_shape=[max(1, size) for size in moved],  # also for an array without elements
        buffer_dtype=dtype,
        tp_size=shape.num_ranks,
        num_splits=4 if options.num_splits is None else options.num_splits,
        atomic_gemm=options.atomic,
        rs_overlap_first_gemm=options.rs_overlap_first_gemm,
        aggregate_ag=options.aggregate,
        use_ce=options.use_ce,
    )
    return dataclasses.replace(config, buffer_shape=None)  # it is not registered


def _read_method(op: str, method: Any) -> CommOverlapMethod:
    """Returns the method as a member of the enumeration; a matmul has no BULK."""
    if method == "ring":
        method = CommOverlapMethod.RING_EXCHANGE
    if isinstance(method, str):
        method = CommOverlapMethod.__members__.get(method.upper(), method)
    if not isinstance(method, CommOverlapMethod):
        raise ValueError(
            f"{op}: method is {method!r}; it needs to be 'auto', 'none', 'ring', 'pipeline' (of a "
            "reduce-scatter), or a member of CommOverlapMethod."
        )
    if method == CommOverlapMethod.BULK:
        raise ValueError(
            f"{op}: method is {method}, which moves an array during an independent GEMM. Use "
            "CommOverlapMethod.RING_EXCHANGE, or gemm(..., aux_in=...) for bulk."
        )
    return method


# ---- The communication of a gemm with a buffer.


def with_overlap(call: GemmCall, operands: GemmOperands, paired: int | None) -> GemmCall:
    """Returns the call with the rows that its buffer moves, checked against lhs or aux_in."""
    op, config, lhs, aux_in = call.op, call.overlap, operands.lhs, operands.aux_in
    kind, method, is_bulk = config.comm_type, config.method, config.is_bulk
    if is_bulk != (aux_in is not None):
        raise ValueError(
            f"{op}: got {'no' if is_bulk else 'an'} aux_in with buffer {config.id} of {method}; "
            "an array that moves during an independent GEMM needs CommOverlapMethod.BULK, and "
            f"vice versa. {'Pass one.' if is_bulk else 'Omit it, or create that buffer.'}"
        )
    if call.fuse_gelu and (is_bulk or not config.gathers):
        raise ValueError(
            f"{op}: got fuse_gelu with {kind}, {method}; GELU needs a complete sum, and cannot "
            "run during a bulk transfer. Apply jax.nn.gelu afterwards."
        )
    if call.gathers_to_aux and not config.gathers:
        raise ValueError(f"{op}: got return_aux with {kind}; only an all-gather has one.")
    if call.lhs_transposed and not is_bulk:
        raise ValueError(
            f"{op}: lhs contracts its first dimensions; its chunks are rows, so with {kind} the "
            "last ones need to be contracted. Transpose it."
        )
    p = call.comm.num_ranks
    moved, name = (aux_in, "aux_in") if is_bulk else (lhs, "lhs")
    rows = moved.shape[0]
    if not config.gathers and rows % p:
        raise ValueError(
            f"{op}: {rows} rows of {name} are not a multiple of the {p} ranks. Pad them, or use "
            "matmul_reduce_scatter with row_counts."
        )
    total = rows * p if config.gathers else rows
    columns = call.out_shape[1] if config.is_sum else moved.shape[1]
    dtype = sum_dtype(call.out_dtype) if config.is_sum else moved.dtype
    check_buffer(op, config, (total, columns), dtype.name, p)
    in_ring_order = config.atomic_gemm and config.is_ring
    if in_ring_order and config.gathers:
        _check_pair(op, config, paired, p)
    out_rows = call.out_shape[0]
    if not is_bulk:
        out_rows = total if config.gathers else rows // p
    return dataclasses.replace(
        call,
        out_shape=(out_rows, call.out_shape[1]),
        row_counts=(total // p,) * p,
        in_ring_order=in_ring_order,
        gathers_to_aux=call.gathers_to_aux and not is_bulk and not in_ring_order,
    )


def _check_pair(op: str, config: CommOverlapConfig, paired: int | None, num_ranks: int) -> None:
    ring = (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE, True, num_ranks)
    other = None if paired is None else find_buffer(op, paired)
    found = other and (other.comm_type, other.method, other.atomic_gemm, other.tp_size)
    if found != ring:
        raise ValueError(
            f"{op}: the atomic ring of buffer {config.id} leaves chunks in the order r-1, r-2, "
            f"..., r, and is paired with {other.text if other else 'nothing'}; only an atomic "
            f"RING_EXCHANGE of CommOverlapType.RS with tp_size={num_ranks} consumes chunks in that "
            "order. Pass its id: paired_comm_overlap=..."
        )
