"""The primitives of exchanges: shapes, batching and derivatives.

`dispatch_p` and `combine_p` are linear in the arrays, and each is the other's transpose:

    dispatch:  buffer[dst_rank][dst_offset + i] = tokens[src_offset + i]
    combine:   tokens[src_offset + i] = sum over replicas of buffer[dst_rank][dst_offset + i]

`start_p` and `done_p` are one exchange in two calls, with other work of the program between them:

    start:  fields, arrays, beside -> results, arrays, held, beside
    done:   fields, results, arrays, held, beside -> results, beside

`results` are unfinished until `done`. `arrays` and `held` (copies of the fields) are what the
exchange reads meanwhile: `done` takes them, so that they stay. `beside` are inputs of the work,
then its outputs; both calls return them unchanged. The work depends on the first call through its
inputs, and the second call on the work through its outputs. Where an implementation has no such
calls, `start` is the whole exchange.

As linear functions, `start` passes its arrays on, and `done` moves them. The transpose of `done`
therefore starts the adjoint exchange: its unfinished results are the cotangents of `arrays`, and
the rows that it reads are those of `results`. The transpose of `start` ends it.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._dispatch.arguments import (
    Exchange,
    ExchangeOperands,
    combine_p,
    dispatch_p,
    done_p,
    start_p,
    summable,
)
from jax_cp_dispatch._dispatch.lowering import lower, lower_done, lower_start
from jax_cp_dispatch._jax_private import prim_requires_devices_during_lowering
from jax_cp_dispatch._ranks.lowering import one_after_another, run_alone
from jax_cp_dispatch._ranks.options import vary_alike, varying_axes

# ---- Shapes. `update` keeps the mesh axes over which an array varies.


def _shapes(*operands, exchange: Exchange):
    arrays = ExchangeOperands.split(operands, exchange).arrays
    dtypes = exchange.sums or [x.dtype for x in arrays]
    return [
        x.update(shape=(num_rows, *x.shape[1:]), dtype=np.dtype(dtype), weak_type=False)
        for x, num_rows, dtype in zip(arrays, exchange.result_rows, dtypes, strict=True)
    ]


class PairValues(NamedTuple):
    """The results of `start_p`, the operands of `done_p` without fields, or values of each.

    Attributes:
      results, arrays: one for each array that moves.
      held: f32 [num_held].
      beside: of any number.
    """

    results: list[Any]
    arrays: list[Any]
    held: Any
    beside: list[Any]

    @classmethod
    def split(cls, values: Sequence[Any], exchange: Exchange) -> "PairValues":
        n, values = exchange.num_arrays, list(values)
        return cls(values[:n], values[n : 2 * n], values[2 * n], values[2 * n + 1 :])

    def flat(self) -> list[Any]:
        return [*self.results, *self.arrays, self.held, *self.beside]


def num_held(fields: Iterable[Any]) -> int:
    """Returns the floats that hold copies of the rank and the fields; see kernels/prepare.h."""
    return 4 + sum(-(-x.size * x.dtype.itemsize // 16) * 4 for x in fields)


def _split_start(
    operands: Sequence[Any], exchange: Exchange
) -> tuple[list[Any], list[Any], list[Any]]:
    """Separates fields, arrays, and operands of the work."""
    n, operands = exchange.num_before_arrays, list(operands)
    end = n + exchange.num_arrays
    return operands[:n], operands[n:end], operands[end:]


def _split_done(operands: Sequence[Any], exchange: Exchange) -> tuple[list[Any], PairValues]:
    num_fields = exchange.num_before_arrays
    return list(operands[:num_fields]), PairValues.split(operands[num_fields:], exchange)


def _start_shapes(*operands, exchange: Exchange, num_held: int):
    fields, arrays, beside = _split_start(operands, exchange)
    arrays = [x.update(weak_type=False) for x in arrays]
    sharding = arrays[0].sharding.update(spec=P(None))
    held = arrays[0].update(shape=(num_held,), dtype=np.dtype(np.float32), sharding=sharding)
    return PairValues(_shapes(*fields, *arrays, exchange=exchange), arrays, held, beside).flat()


def _done_shapes(*operands, exchange: Exchange):
    _, values = _split_done(operands, exchange)
    return [*values.results, *values.beside]


# ---- Batching. A batch axis of an array moves behind its rows: still one call, with wider rows.
# Metadata or fingerprints that differ per example need one exchange per example, in a loop.


def _behind_rows(arrays: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    pairs = zip(arrays, dims, strict=True)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in pairs]
    return moved, [None if dim is None else 1 for dim in dims]


def _batch(primitive, operands, dims, *, exchange: Exchange):
    n = exchange.num_before_arrays
    end = n + exchange.num_arrays  # storage is not reused
    fields, arrays, dims = list(operands[:n]), list(operands[n:end]), list(dims[:end])
    if all(dim is None for dim in dims[:n]):
        arrays, dims = _behind_rows(arrays, dims[n:])
        return primitive.bind(*fields, *arrays, exchange=exchange), dims
    num_fields = sum(len(group.fields) for group in exchange.groups)
    axes = set().union(*map(varying_axes, fields[:num_fields]))  # those of spmd_axis_name, too
    operands = [*fields, *vary_alike(arrays, also=axes)]
    return one_after_another(primitive, operands, dims, exchange=exchange)


def _batch_start(operands, dims, *, exchange: Exchange, num_held: int):
    params = {"exchange": exchange, "num_held": num_held}
    fields, arrays, beside = _split_start(operands, exchange)
    dims_fields, dims_arrays, dims_beside = _split_start(dims, exchange)
    if any(dim is not None for dim in dims_fields):
        return one_after_another(start_p, operands, dims, **params)
    arrays, dims_arrays = _behind_rows(arrays, dims_arrays)
    outs = start_p.bind(*fields, *arrays, *beside, **params)
    return outs, PairValues(dims_arrays, dims_arrays, None, dims_beside).flat()


def _batch_done(operands, dims, *, exchange: Exchange):
    _, of_each = _split_done(dims, exchange)
    if of_each.held is not None:
        return one_after_another(done_p, operands, dims, exchange=exchange)
    outs = done_p.bind(*operands, exchange=exchange)
    return outs, [*of_each.results, *of_each.beside]


# ---- Derivatives. Only arrays with a tangent take part in a linear call; integer arrays move too,
# but have none.


def _is_nonzero(values: Iterable[Any]) -> list[bool]:
    return [type(x) is not ad.Zero for x in values]


def _spread(values: Iterable[Any], keep: Iterable[bool], otherwise: Iterable[Any]) -> list[Any]:
    """Returns the next value where it was kept, and the other value elsewhere."""
    rest = iter(values)
    return [next(rest) if kept else other for kept, other in zip(keep, otherwise, strict=True)]


def _zero_tangents(outs: Iterable[Any]) -> list[Any]:
    return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


def _zero_like(x: Any) -> Any:
    return ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None


def _select(
    fields: Sequence[Any], exchange: Exchange, arrays: Sequence[Any], keep: Sequence[bool]
) -> tuple[ExchangeOperands, Exchange]:
    return ExchangeOperands.split([*fields, *arrays], exchange).select(exchange, keep)


def name_of_transpose(op: str) -> str:
    """Returns the name of the transpose of an operation, for messages."""
    prefix = "the transpose of "
    return op.removeprefix(prefix) if op.startswith(prefix) else prefix + op


def _transposed(exchange: Exchange, sums: tuple[str, ...] | None) -> Exchange:
    by_collectives = exchange.by_collectives and exchange.by_collectives.transposed()
    op = name_of_transpose(exchange.op)
    return exchange._replace(op=op, by_collectives=by_collectives, sums=sums)


def _adjoint(linear: ExchangeOperands, dtypes: list[Any], exchange: Exchange) -> list[Any]:
    """Moves cotangents back; `dtypes` are those of the results."""
    if exchange.sums is None:
        wide = [ct.astype(summable(ct.dtype)) for ct in linear.arrays]
        exchange = _transposed(exchange, tuple(ct.dtype.name for ct in wide))
        sums = combine_p.bind(*linear._replace(arrays=wide).flat(), exchange=exchange)
        return [total.astype(dtype) for total, dtype in zip(sums, dtypes, strict=True)]
    # A copy commutes with rounding, so the narrower type is moved.
    narrow = [ct.astype(dtype) for ct, dtype in zip(linear.arrays, dtypes, strict=True)]
    operands = linear._replace(arrays=narrow).flat()
    return dispatch_p.bind(*operands, exchange=_transposed(exchange, None))


def _jvp(primitive, primals, tangents, *, exchange: Exchange):
    if any(group.has_weights for group in exchange.groups):
        raise NotImplementedError(f"{exchange.op}: forward mode is not defined. Use jax.grad.")
    outs = primitive.bind(*primals, exchange=exchange)
    n = exchange.num_before_arrays
    arrays = tangents[n : n + exchange.num_arrays]
    keep, zeros = _is_nonzero(arrays), _zero_tangents(outs)
    if not any(keep):
        return outs, zeros
    linear, kept = _select(primals[:n], exchange, arrays, keep)
    return outs, _spread(primitive.bind(*linear.flat(), exchange=kept), keep, zeros)


def _transpose(cotangents, *operands, exchange: Exchange):
    split = ExchangeOperands.split(operands, exchange)
    pairs = zip(split.arrays, _is_nonzero(cotangents), strict=True)
    keep = [ad.is_undefined_primal(x) and is_nonzero for x, is_nonzero in pairs]
    results = [_zero_like(x) for x in split.arrays]
    if any(keep):
        linear, kept = split._replace(arrays=list(cotangents)).select(exchange, keep)
        dtypes = [x.aval.dtype for x in itertools.compress(split.arrays, keep)]
        results = _spread(_adjoint(linear, dtypes, kept), keep, results)
    return [None] * exchange.num_before_arrays + results + [None] * len(split.storage)


def _adjoint_pair(exchange: Exchange, arrays: Sequence[Any]) -> Exchange:
    """Returns the adjoint in two calls, between which nothing may be cast."""
    sums = tuple(x.dtype.name for x in arrays) if exchange.sums is None else None
    return _transposed(exchange, sums)


def _jvp_start(primals, tangents, *, exchange: Exchange, num_held: int):
    outs = start_p.bind(*primals, exchange=exchange, num_held=num_held)
    fields, *_ = _split_start(primals, exchange)
    _, arrays, beside = _split_start(tangents, exchange)
    keep, work = _is_nonzero(arrays), _is_nonzero(beside)
    otherwise = [*_zero_tangents(outs)[: 2 * len(arrays) + 1], *beside]
    if not any(keep):
        return outs, otherwise
    linear, kept = _select(fields, exchange, arrays, keep)
    operands = *linear.flat(), *itertools.compress(beside, work)
    moved = start_p.bind(*operands, exchange=kept, num_held=num_held)
    return outs, _spread(moved, [*keep, *keep, True, *work], otherwise)


def _jvp_done(primals, tangents, *, exchange: Exchange):
    outs = done_p.bind(*primals, exchange=exchange)
    fields, _ = _split_done(primals, exchange)
    _, given = _split_done(tangents, exchange)
    keep, work = _is_nonzero(given.results), _is_nonzero(given.beside)
    otherwise = [*given.results, *given.beside]
    if not any(keep):
        return outs, otherwise
    linear, kept = _select(fields, exchange, given.arrays, keep)
    moved = _done(linear, kept, itertools.compress(given.results, keep), given, work)
    return outs, _spread(moved, [*keep, *work], otherwise)


def _done(
    linear: ExchangeOperands,
    exchange: Exchange,
    results: Iterable[Any],
    values: PairValues,
    work: Sequence[bool],
) -> list[Any]:
    """Binds `done_p` for the selected arrays, with the nonzero values of the work."""
    values = PairValues(
        [ad.instantiate_zeros(x) for x in results],
        [ad.instantiate_zeros(x) for x in linear.arrays],
        ad.instantiate_zeros(values.held),
        list(itertools.compress(values.beside, work)),
    )
    return done_p.bind(*linear._replace(arrays=[]).flat(), *values.flat(), exchange=exchange)


def _transpose_done(cotangents, *operands, exchange: Exchange):
    fields, values = _split_done(operands, exchange)
    cts, beside = cotangents[: exchange.num_arrays], cotangents[exchange.num_arrays :]
    keep, work = _is_nonzero(cts), _is_nonzero(beside)
    out = PairValues.split([*map(_zero_like, values.flat())], exchange)._replace(
        beside=list(beside)
    )
    if any(keep):
        linear, kept = _select(fields, exchange, cts, keep)
        avals = [x.aval for x in itertools.compress(values.arrays, keep)]
        pairs = zip(linear.arrays, avals, strict=True)
        if any(x.dtype != y.dtype or summable(x.dtype) != x.dtype for x, y in pairs):
            moved = _adjoint(linear, [x.dtype for x in avals], kept)
            out = out._replace(arrays=_spread(moved, keep, out.arrays))
        else:
            adjoint = _adjoint_pair(kept, linear.arrays)
            started = start_p.bind(
                *linear.flat(),
                *itertools.compress(beside, work),
                exchange=adjoint,
                num_held=values.held.aval.size,
            )
            moved = PairValues.split(started, adjoint)
            out = PairValues(
                _spread(moved.arrays, keep, out.results),
                _spread(moved.results, keep, out.arrays),
                moved.held,
                _spread(moved.beside, work, beside),
            )
    return [None] * len(fields) + _linear_only(out.flat(), values.flat())


def _transpose_start(cotangents, *operands, exchange: Exchange, num_held: int):
    fields, arrays, beside = _split_start(operands, exchange)
    cts = PairValues.split(cotangents, exchange)
    keep, work = _is_nonzero(cts.results), _is_nonzero(cts.beside)
    outs = [*cts.arrays, *cts.beside]
    if any(keep):  # the adjoint exchange has been started
        linear, kept = _select(fields, exchange, cts.results, keep)
        adjoint = _adjoint_pair(kept, linear.arrays)
        moved = _done(linear, adjoint, itertools.compress(cts.arrays, keep), cts, work)
        outs = _spread(moved, [*keep, *work], outs)
    return [None] * len(fields) + _linear_only(outs, [*arrays, *beside])


def _linear_only(cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    pairs = zip(cotangents, operands, strict=True)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in pairs]


# ---- The primitives.


def _register(primitive: Primitive, shapes, lowering, batch, jvp, transpose) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(functools.partial(run_alone, primitive))
    # The second of two calls looks at the origin of its operands, not at their types alone.
    mlir.register_lowering(primitive, lowering, cacheable=primitive is not done_p)
    # Private, but the only way to make `jit` provide what a partitioned lowering needs.
    prim_requires_devices_during_lowering.add(primitive)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


for _whole in dispatch_p, combine_p:
    _batch_whole, _jvp_whole = (functools.partial(rule, _whole) for rule in (_batch, _jvp))
    _register(_whole, _shapes, lower, _batch_whole, _jvp_whole, _transpose)
_register(start_p, _start_shapes, lower_start, _batch_start, _jvp_start, _transpose_start)
_register(done_p, _done_shapes, lower_done, _batch_done, _jvp_done, _transpose_done)
