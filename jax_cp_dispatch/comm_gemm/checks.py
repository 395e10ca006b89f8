"""What Python can see of bad input to a product, refused before anything is traced."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jax_cp_dispatch.comm_gemm.buffers.config import (
    BYTE_FLOATS,
    FLOATS,
    CommOverlapConfig,
    CommOverlapMethod,
    CommOverlapType,
    ScalingMode,
    check_pair,
    make_config,
)
from jax_cp_dispatch.comm_gemm.buffers.registry import find_config
from jax_cp_dispatch.comm_gemm.engine.call import Overlap
from jax_cp_dispatch.comm_gemm.scaled.mxfp8 import BLOCK
from jax_cp_dispatch.comm_gemm.scaled.operands import MatmulScaling


class Wish(NamedTuple):
    """What a caller says about the communication."""

    op: str
    method: Any
    num_splits: int | None = None
    atomic: bool = False
    overlap_first_gemm: bool = False
    aggregate: bool = False
    use_ce: bool | None = None
    buffer: int | None = None

    @property
    def is_auto(self) -> bool:
        return self.buffer is None and self.method == "auto"

    @property
    def details(self) -> list[str]:
        """Names of the parameters that say more than the method."""
        given = {
            "num_splits": self.num_splits is not None,
            "atomic": self.atomic,
            "rs_overlap_first_gemm": self.overlap_first_gemm,
            "aggregate": self.aggregate,
            "use_ce": self.use_ce is not None,
        }
        return [name for name, is_given in given.items() if is_given]


def check_details(wish: Wish) -> None:
    """What says more than the method needs a method that the caller names."""
    if not wish.details or not (wish.is_auto or wish.buffer is not None):
        return
    name = wish.details[0]
    if wish.buffer is not None:
        raise ValueError(
            f"{wish.op}: got {name} with buffer {wish.buffer}, whose own parameters hold. Leave it "
            "away, or create another buffer."
        )
    raise ValueError(
        f"{wish.op}: got {name} with method='auto', which chooses that, too. Leave it away, or "
        "name a method."
    )


def read_array(op: str, name: str, value: Any) -> Array:
    """An array from what the caller says: an array, or nested lists of numbers."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op}: {name} is {type(value).__name__}; it needs to be an array, or nested lists of "
            f"numbers that make one. {error}"
        ) from None


def check_arrays(op: str, x: Array, w: Array, bias: Array | None) -> None:
    """Shapes and types of the operands of one product."""
    for name, array in (("x", x), ("w", w), ("bias", bias)):
        if array is not None and array.dtype.name not in FLOATS:
            raise TypeError(f"{op}: {name} is {array.dtype}; it needs to be one of {FLOATS}.")
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(
            f"{op}: x has shape {x.shape} and w {w.shape}; it needs [*batch, tokens, K] and "
            "[K, N]. Reshape other dimensions into these."
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: x has {x.shape[-1]} columns but w has {w.shape[0]} rows; they are contracted. "
            "Transpose w, or split both over the same axis."
        )
    if bias is not None and bias.shape != (w.shape[1],):
        raise ValueError(
            f"{op}: bias has shape {bias.shape}; it needs ({w.shape[1]},), an element for each "
            "column of w."
        )
    if (x.dtype.name == "float64") != (w.dtype.name == "float64"):
        raise TypeError(
            f"{op}: x is {x.dtype} and w {w.dtype}; float64 goes with float64 alone. Convert one."
        )


def result_dtype(op: str, x: Array, w: Array, preferred: Any) -> str:
    """The name of the type of the result."""
    is_scaled = x.dtype.name in BYTE_FLOATS
    natural = jnp.dtype(jnp.bfloat16) if is_scaled else jnp.promote_types(x.dtype, w.dtype)
    try:
        name = jnp.dtype(natural if preferred is None else preferred).name
    except TypeError:
        name = repr(preferred)
    if name in BYTE_FLOATS:
        raise TypeError(
            f"{op}: preferred_element_type is {name}; a product of 8 bits would need a scale of "
            f"its own. It needs to be one of {FLOATS[:3]}: quantize the result."
        )
    if name not in FLOATS or (name == "float64") != (natural.name == "float64"):
        raise TypeError(
            f"{op}: preferred_element_type is {name} for operands of {natural.name}; it needs to "
            f"be one of {FLOATS}, and float64 goes with float64 alone."
        )
    return name


def read_scaling(
    op: str, scaling_mode: Any, state: Any, x: Array, w: Array, gathered: str
) -> ScalingMode:
    """The mode, which goes with the state, the operands and what is kept."""
    mode = ScalingMode.read(op, "scaling_mode", scaling_mode)
    is_delayed = mode == ScalingMode.DELAYED_TENSOR_SCALING
    if state is not None and not isinstance(state, MatmulScaling):
        raise TypeError(
            f"{op}: scaling_state is {type(state).__name__}; it needs to be MatmulScaling, as "
            "MatmulScaling.init() begins it."
        )
    if is_delayed != (state is not None):
        raise ValueError(
            f"{op}: got {'no' if is_delayed else 'a'} scaling_state with {mode}; the scales of "
            "earlier steps belong to DELAYED_TENSOR_SCALING. "
            + ("Begin with MatmulScaling.init()." if is_delayed else "Leave it away.")
        )
    if mode == ScalingMode.NO_SCALING:
        return mode
    if "float64" in (x.dtype.name, w.dtype.name):
        raise TypeError(
            f"{op}: got float64 with {mode}, of which 8 bits would be left, summed in float32. "
            "Convert it first."
        )
    if gathered == "again":
        raise ValueError(
            f"{op}: got gathered='again' with {mode}; scaled tokens are kept. Leave it away, or "
            "recompute with jax.checkpoint."
        )
    return mode


def check_contracted_blocks(op: str, mode: ScalingMode, contracted: int) -> None:
    """What a rank contracts is whole blocks."""
    if mode == ScalingMode.MXFP8_1D_SCALING and contracted % BLOCK:
        raise ValueError(
            f"{op}: {contracted} elements are contracted on a rank, forward or in the derivative, "
            f"where these are the columns of w; {mode} needs a multiple of {BLOCK}, the elements "
            "that share a scale. Pad with zeros."
        )


def read_row_counts(
    op: str, kind: CommOverlapType, x: Array, num_ranks: int, row_counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Rows of each rank's chunk, per batch."""
    rows = x.shape[-2]
    if row_counts is None:
        if kind == CommOverlapType.AG:
            return (rows,) * num_ranks
        if rows % num_ranks:
            raise ValueError(
                f"{op}: {rows} tokens do not divide among {num_ranks} ranks. Say how many go to "
                "each: row_counts=(...), or pad."
            )
        return (rows // num_ranks,) * num_ranks
    try:
        counts = tuple(operator.index(count) for count in row_counts)
    except TypeError:
        counts = ()
    needs_sum = kind == CommOverlapType.RS
    found, needed = (sum(counts), rows) if needs_sum else (max(counts, default=-1), rows)
    if len(counts) != num_ranks or min(counts, default=-1) < 0 or found != needed:
        what = f"whose sum is {rows}" if needs_sum else f"the largest of them {rows}"
        raise ValueError(
            f"{op}: row_counts is {row_counts!r}; it needs {num_ranks} counts, one per rank, of at "
            f"least 0, {what}: the tokens of x, which has shape {x.shape}."
        )
    return counts


def read_method(op: str, method: Any) -> CommOverlapMethod:
    """A member from what the caller says."""
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


def _refuse_what_has_no_meaning(wish: Wish, method: CommOverlapMethod) -> None:
    if wish.num_splits is not None and method != CommOverlapMethod.PIPELINE:
        name, needs = "num_splits", CommOverlapMethod.PIPELINE
    elif wish.use_ce is not None and method != CommOverlapMethod.RING_EXCHANGE:
        name, needs = "use_ce", CommOverlapMethod.RING_EXCHANGE
    else:
        return
    raise ValueError(f"{wish.op}: got {name} with {method}; it is of {needs}. Leave it away.")


def overlap_of_wish(
    wish: Wish, kind: CommOverlapType, shape, dtype: str, num_ranks: int, rows_of_slots: int
) -> Overlap:
    """How a call communicates, as the caller says.

    `shape` is what moves, all of it; the ring of a reduce-scatter has slots of equal size for it.
    """
    op = wish.op
    if wish.buffer is not None:
        return _overlap_of_buffer(
            op, wish.buffer, wish.method, kind, shape, dtype, num_ranks, rows_of_slots
        )
    method = read_method(op, wish.method)
    refuse_bulk(op, method)
    partial = dtype
    if method == CommOverlapMethod.NONE:
        if wish.details:
            raise ValueError(
                f"{op}: got {wish.details[0]} with {method}, which has no chunks. Leave it "
                "away, or name another method."
            )
        return Overlap(kind, method, partial_dtype=partial)
    _refuse_what_has_no_meaning(wish, method)
    is_ring = method == CommOverlapMethod.RING_EXCHANGE
    if is_ring and kind == CommOverlapType.RS and wish.atomic and wish.use_ce is False:
        raise ValueError(
            f"{op}: got atomic with use_ce=False; there each rank multiplies its tokens of all "
            "ranks at once, and no chunk signals. Leave one of them away."
        )
    config = make_config(
        op,
        kind,
        method,
        [max(1, size) for size in shape],  # of an array without elements, too
        dtype,
        num_ranks,
        num_splits=4 if wish.num_splits is None else wish.num_splits,
        atomic_gemm=wish.atomic,
        rs_overlap_first_gemm=wish.overlap_first_gemm,
        aggregate_ag=wish.aggregate,
        use_ce=wish.use_ce,
    )
    return overlap_of_config(config, buffer=0)


def refuse_bulk(op: str, method: CommOverlapMethod) -> None:
    if method == CommOverlapMethod.BULK:
        raise ValueError(
            f"{op}: method is {method}, which moves an array during an independent GEMM. Take "
            "CommOverlapMethod.RING_EXCHANGE, or gemm(..., aux_in=...) for bulk."
        )


def overlap_of_config(config: CommOverlapConfig, *, buffer: int) -> Overlap:
    """The part of a buffer's parameters that a program names."""
    return Overlap(
        config.comm_type,
        config.method,
        config.num_splits,
        config.atomic_gemm,
        config.rs_overlap_first_gemm,
        config.aggregate_ag,
        config.use_ce,
        buffer,
        config.buffer_dtype,
        config.gemm_priority,
        config.comm_priority,
        config.num_comm_sm,
        config.set_sm_margin,
    )


def _overlap_of_buffer(
    op: str,
    buffer: int,
    method: Any,
    kind: CommOverlapType,
    shape,
    dtype: str,
    num_ranks: int,
    rows_of_slots: int,
) -> Overlap:
    """How a call communicates, as its buffer says; the buffer has to fit."""
    config = find_config(op, buffer)
    if method != "auto" and read_method(op, method) != config.method:
        raise ValueError(
            f"{op}: method is {method!r} but buffer {buffer} is for {config.method}. "
            "Leave method away."
        )
    if config.comm_type != kind:
        raise ValueError(
            f"{op}: buffer {buffer} is for {config.comm_type}; it needs {kind}. Create one."
        )
    refuse_bulk(op, config.method)
    if (kind, config.method) == (CommOverlapType.RS, CommOverlapMethod.RING_EXCHANGE):
        shape = rows_of_slots, shape[1]
    check_buffer(op, buffer, config, shape, dtype, num_ranks)
    return overlap_of_config(config, buffer=buffer)


def check_buffer(
    op: str, buffer: int, config: CommOverlapConfig, shape, dtype: str, num_ranks: int
) -> None:
    """The ranks, the type and the room of a buffer are those of the call."""
    check_pair(op, config.comm_type, config.method)
    if config.tp_size != num_ranks:
        raise ValueError(
            f"{op}: buffer {buffer} is for tp_size={config.tp_size} but the mesh axis has "
            f"{num_ranks} devices. Create one with tp_size={num_ranks}."
        )
    # Partial sums may be stored in float32, or rounded to a narrower type.
    is_sum = config.comm_type == CommOverlapType.RS and config.method != CommOverlapMethod.BULK
    allowed = FLOATS[:3] if is_sum and dtype != "float64" else (dtype,)
    if config.buffer_dtype not in allowed:
        raise ValueError(
            f"{op}: buffer {buffer} is {config.buffer_dtype} but the call moves {dtype}. Create "
            f"one with buffer_dtype={dtype!r}."
        )
    rows, columns = shape
    needed = dataclasses.replace(config, buffer_shape=(rows, columns)).rank_bytes
    room = config.buffer_shape[0] * config.buffer_shape[1]
    if room < rows * columns or config.rank_bytes < needed:
        raise ValueError(
            f"{op}: buffer {buffer} has shape {config.buffer_shape} but the call needs "
            f"{(rows, columns)}. Create one with buffer_shape={(rows, columns)}."
        )
