"""`start_p` and `done_p`: one exchange in two calls, with other work of the program between them.

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

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._dispatch.exchange_operands import (
    Exchange,
    ExchangeOperands,
    read_operands,
    select_arrays,
    summable,
)
from jax_cp_dispatch._dispatch.pair_lowering import lower_done, lower_start
from jax_cp_dispatch._dispatch.primitives import adjoint_move, register, result_shapes, transposed
from jax_cp_dispatch._ranks.lowering import one_after_another

start_p = Primitive("exchange_start")
done_p = Primitive("exchange_done")


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
    def read(cls, values: Sequence[Any], exchange: Exchange) -> "PairValues":
        n, values = exchange.num_arrays, list(values)
        return cls(values[:n], values[n : 2 * n], values[2 * n], values[2 * n + 1 :])

    def flat(self) -> list[Any]:
        return [*self.results, *self.arrays, self.held, *self.beside]


def num_held(fields: Iterable[Any]) -> int:
    """Returns the floats that hold copies of the rank and the fields; see kernels/prepare.h."""
    return 4 + sum(-(-x.size * x.dtype.itemsize // 16) * 4 for x in fields)


def _split_start(operands: Sequence[Any], num_beside: int) -> tuple[list[Any], list[Any]]:
    """Separates the operands of the exchange from those of the work."""
    num_moving = len(operands) - num_beside
    return list(operands[:num_moving]), list(operands[num_moving:])


def _split_done(operands: Sequence[Any], exchange: Exchange) -> tuple[list[Any], PairValues]:
    num_fields = exchange.num_before_arrays
    return list(operands[:num_fields]), PairValues.read(operands[num_fields:], exchange)


# ---- Shapes.


def _start_shapes(*operands, exchange: Exchange, num_beside: int, num_held: int):
    moving, beside = _split_start(operands, num_beside)
    arrays = [x.update(weak_type=False) for x in read_operands(moving, exchange).arrays]
    held = arrays[0].update(
        shape=(num_held,),
        dtype=np.dtype(np.float32),
        sharding=arrays[0].sharding.update(spec=P(None)),
    )
    return PairValues(result_shapes(moving, exchange), arrays, held, beside).flat()


def _done_shapes(*operands, exchange: Exchange):
    _, values = _split_done(operands, exchange)
    return [*values.results, *values.beside]


# ---- Batching. A batch axis of an array moves behind its rows, as in one call. Fields that differ
# per example need one exchange per example; these are whole, in a loop of their own.


def _batch_start(operands, dims, *, exchange: Exchange, num_beside: int, num_held: int):
    params = {"exchange": exchange, "num_beside": num_beside, "num_held": num_held}
    n = exchange.num_before_arrays
    if any(dim is not None for dim in dims[:n]):
        return one_after_another(start_p, operands, dims, **params)
    moving, beside = _split_start(operands, num_beside)
    dims_moving, dims_beside = _split_start(dims, num_beside)
    arrays = [
        x if dim is None else jnp.moveaxis(x, dim, 1)
        for x, dim in zip(moving[n:], dims_moving[n:], strict=True)
    ]
    outs = start_p.bind(*moving[:n], *arrays, *beside, **params)
    dims_arrays = [None if dim is None else 1 for dim in dims_moving[n:]]
    return outs, PairValues(dims_arrays, dims_arrays, None, dims_beside).flat()


def _batch_done(operands, dims, *, exchange: Exchange):
    _, of_each = _split_done(dims, exchange)
    if of_each.held is not None:
        return one_after_another(done_p, operands, dims, exchange=exchange)
    outs = done_p.bind(*operands, exchange=exchange)
    return outs, [*of_each.results, *of_each.beside]


# ---- Derivatives.


def _is_nonzero(values: Iterable[Any]) -> list[bool]:
    return [type(x) is not ad.Zero for x in values]


def _spread(values: Iterable[Any], keep: Iterable[bool], otherwise: Iterable[Any]) -> list[Any]:
    """Returns the next value where it was kept, and the other value elsewhere."""
    rest = iter(values)
    return [next(rest) if kept else other for kept, other in zip(keep, otherwise, strict=True)]


def _select(
    fields: Sequence[Any], exchange: Exchange, arrays: Sequence[Any], keep: Sequence[bool]
) -> tuple[ExchangeOperands, Exchange]:
    operands = read_operands([*fields, *arrays], exchange)
    return select_arrays(operands, exchange, keep)


def _jvp_start(primals, tangents, *, exchange: Exchange, num_beside: int, num_held: int):
    outs = start_p.bind(*primals, exchange=exchange, num_beside=num_beside, num_held=num_held)
    zeros = PairValues.read([ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs], exchange)
    moving, beside = _split_start(tangents, num_beside)
    fields, arrays = primals[: exchange.num_before_arrays], moving[exchange.num_before_arrays :]
    keep, work = _is_nonzero(arrays), _is_nonzero(beside)
    if not any(keep):
        return outs, zeros._replace(beside=beside).flat()
    linear, kept = _select(fields, exchange, arrays, keep)
    besides = list(itertools.compress(beside, work))
    moved = start_p.bind(
        *linear.flat(), *besides, exchange=kept, num_beside=len(besides), num_held=num_held
    )
    moved = PairValues.read(moved, kept)
    out_tangents = PairValues(
        _spread(moved.results, keep, zeros.results),
        _spread(moved.arrays, keep, zeros.arrays),
        moved.held,
        _spread(moved.beside, work, beside),
    )
    return outs, out_tangents.flat()


def _jvp_done(primals, tangents, *, exchange: Exchange):
    outs = done_p.bind(*primals, exchange=exchange)
    _, given = _split_done(tangents, exchange)
    keep, work = _is_nonzero(given.results), _is_nonzero(given.beside)
    if not any(keep):
        return outs, [*given.results, *given.beside]
    fields = primals[: exchange.num_before_arrays]
    linear, kept = _select(fields, exchange, given.arrays, keep)
    values = PairValues(
        list(itertools.compress(given.results, keep)),
        [ad.instantiate_zeros(x) for x in linear.arrays],
        ad.instantiate_zeros(given.held),
        list(itertools.compress(given.beside, work)),
    )
    moved = done_p.bind(*linear._replace(arrays=[]).flat(), *values.flat(), exchange=kept)
    return outs, [
        *_spread(moved[: kept.num_arrays], keep, given.results),
        *_spread(moved[kept.num_arrays :], work, given.beside),
    ]


def _adjoint(exchange: Exchange, results: Sequence[Any], arrays: Sequence[Any]) -> Exchange | None:
    """Returns the adjoint, if it can be two calls: nothing may be cast between them."""
    for x, y in zip(results, arrays, strict=True):
        if x.dtype != y.dtype or summable(x.dtype) != x.dtype:
            return None
    names = tuple(x.dtype.name for x in results) if exchange.sums is None else None
    return transposed(exchange)._replace(sums=names)


def _transpose_done(cotangents, *operands, exchange: Exchange):
    fields, values = _split_done(operands, exchange)
    n = exchange.num_arrays
    cts, beside = list(cotangents[:n]), list(cotangents[n:])
    keep, work = _is_nonzero(cts), _is_nonzero(beside)
    zeros = PairValues.read([*map(_zero_like, values.flat())], exchange)._replace(beside=beside)
    out = zeros
    if any(keep):
        linear, kept = _select(fields, exchange, cts, keep)
        avals = [x.aval for x in itertools.compress(values.arrays, keep)]
        adjoint = _adjoint(kept, linear.arrays, avals)
        if adjoint is None:
            moved = adjoint_move(kept)(linear, [x.dtype for x in avals], transposed(kept))
            out = out._replace(arrays=_spread(moved, keep, zeros.arrays))
        else:
            besides = list(itertools.compress(beside, work))
            outs = start_p.bind(
                *linear.flat(),
                *besides,
                exchange=adjoint,
                num_beside=len(besides),
                num_held=values.held.aval.size,
            )
            moved = PairValues.read(outs, adjoint)
            out = PairValues(
                _spread(moved.arrays, keep, zeros.results),
                _spread(moved.results, keep, zeros.arrays),
                moved.held,
                _spread(moved.beside, work, beside),
            )
    return [None] * len(fields) + _linear_only(out.flat(), values.flat())


def _transpose_start(cotangents, *operands, exchange: Exchange, num_beside: int, num_held: int):
    moving, beside = _split_start(operands, num_beside)
    fields, arrays = (
        moving[: exchange.num_before_arrays],
        moving[exchange.num_before_arrays :],
    )
    cts = PairValues.read(cotangents, exchange)
    keep, work = _is_nonzero(cts.results), _is_nonzero(cts.beside)
    outs = [*cts.arrays, *cts.beside]
    if any(keep):  # the adjoint exchange has been started
        linear, kept = _select(fields, exchange, cts.results, keep)
        adjoint = _adjoint(kept, linear.arrays, linear.arrays)
        values = PairValues(
            [ad.instantiate_zeros(x) for x in itertools.compress(cts.arrays, keep)],
            linear.arrays,
            ad.instantiate_zeros(cts.held),
            list(itertools.compress(cts.beside, work)),
        )
        moved = done_p.bind(*linear._replace(arrays=[]).flat(), *values.flat(), exchange=adjoint)
        outs = [
            *_spread(moved[: sum(keep)], keep, cts.arrays),
            *_spread(moved[sum(keep) :], work, cts.beside),
        ]
    return [None] * len(fields) + _linear_only(outs, [*arrays, *beside])


def _zero_like(x: Any) -> Any:
    return ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None


def _linear_only(cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    return [
        ct if ad.is_undefined_primal(x) else None
        for ct, x in zip(cotangents, operands, strict=True)
    ]


# ---- The primitives.

register(start_p, _start_shapes, lower_start)
register(done_p, _done_shapes, lower_done, cacheable=False)  # it looks at their origin
batching.primitive_batchers[start_p] = _batch_start
batching.primitive_batchers[done_p] = _batch_done
ad.primitive_jvps[start_p] = _jvp_start
ad.primitive_jvps[done_p] = _jvp_done
ad.primitive_transposes[start_p] = _transpose_start
ad.primitive_transposes[done_p] = _transpose_done
