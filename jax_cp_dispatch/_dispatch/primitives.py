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
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import PartitionSpec as P

from jax_cp_dispatch._dispatch.arguments import (
    Exchange,
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
    _, arrays, _ = exchange.split(operands)
    num_held = exchange.comm.num_ranks if exchange.is_global else 1
    rows_of = lambda group: group.capacity if exchange.sums is None else group.num_tokens
    rows = [rows_of(group) for group in exchange.groups for _ in range(group.num_arrays)]
    dtypes = exchange.sums or [x.dtype for x in arrays]
    return [
        x.update(shape=(num_held * num, *x.shape[1:]), dtype=np.dtype(dtype), weak_type=False)
        for x, num, dtype in zip(arrays, rows, dtypes, strict=True)
    ]


class PairValues(NamedTuple):
    """The results of `start_p`, the operands of `done_p` without fields, or values of each."""

    results: list[Any]  # one for each array that moves
    arrays: list[Any]  # as results
    held: Any  # f32 [num_held]
    beside: list[Any]  # of any number

    @classmethod
    def split(cls, values: Sequence[Any], exchange: Exchange) -> "PairValues":
        n, values = exchange.num_arrays, list(values)
        return cls(values[:n], values[n : 2 * n], values[2 * n], values[2 * n + 1 :])

    def flat(self) -> list[Any]:
        return [*self.results, *self.arrays, self.held, *self.beside]


def _split_done(operands: Sequence[Any], exchange: Exchange) -> tuple[list[Any], PairValues]:
    fields, results, others = exchange.split(operands)
    return fields, PairValues.split([*results, *others], exchange)


def _start_shapes(*operands, exchange: Exchange, num_held: int):
    fields, arrays, beside = exchange.split(operands)
    arrays = [x.update(weak_type=False) for x in arrays]
    sharding = arrays[0].sharding.update(spec=P(None))
    held = arrays[0].update(shape=(num_held,), dtype=np.dtype(np.float32), sharding=sharding)
    return [*_shapes(*fields, *arrays, exchange=exchange), *arrays, held, *beside]


def _done_shapes(*operands, exchange: Exchange):
    _, values = _split_done(operands, exchange)
    return [*values.results, *values.beside]


# ---- Batching. A batch axis of an array moves behind its rows: still one call, with wider rows.
# Metadata or fingerprints that differ per example need one exchange per example, in a loop.


def _batch(primitive, operands, dims, *, exchange: Exchange, **params):
    fields, arrays, beside = exchange.split(operands)
    dims_fields, dims_arrays, dims_beside = exchange.split(dims)
    is_whole = primitive is not start_p
    if is_whole:  # storage is not reused
        beside = dims_beside = []
    if any(dim is not None for dim in dims_fields):
        if is_whole:
            num_fields = sum(len(group.fields) for group in exchange.groups)
            axes = set().union(*map(varying_axes, fields[:num_fields]))  # of spmd_axis_name, too
            arrays = vary_alike(arrays, also=axes)
        operands, dims = [*fields, *arrays, *beside], [*dims_fields, *dims_arrays, *dims_beside]
        return one_after_another(primitive, operands, dims, exchange=exchange, **params)
    pairs = zip(arrays, dims_arrays, strict=True)
    arrays = [x if dim is None else jnp.moveaxis(x, dim, 1) for x, dim in pairs]
    dims = [None if dim is None else 1 for dim in dims_arrays]
    outs = primitive.bind(*fields, *arrays, *beside, exchange=exchange, **params)
    return outs, dims if is_whole else [*dims, *dims, None, *dims_beside]


def _batch_done(primitive, operands, dims, *, exchange: Exchange):
    _, of_each = _split_done(dims, exchange)
    if of_each.held is not None:
        return one_after_another(primitive, operands, dims, exchange=exchange)
    outs = primitive.bind(*operands, exchange=exchange)
    return outs, [*of_each.results, *of_each.beside]


# ---- Derivatives. Only arrays with a tangent take part in a linear call; integer arrays move too,
# but have none.


def _is_nonzero(values: Iterable[Any]) -> list[bool]:
    return [type(x) is not ad.Zero for x in values]


def _spread(values: Iterable[Any], keep: Iterable[bool], otherwise: Iterable[Any]) -> list[Any]:
    """Returns the next value where it was kept, and the other value elsewhere."""
    rest = iter(values)
    return [next(rest) if kept else other for kept, other in zip(keep, otherwise, strict=True)]


def _zero_like(x: Any) -> Any:
    return ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None


def name_of_transpose(op: str) -> str:
    prefix = "the transpose of "
    return op.removeprefix(prefix) if op.startswith(prefix) else prefix + op


def _transposed(exchange: Exchange, moved: Sequence[Any]) -> Exchange:
    """Returns the adjoint, by which arrays of the dtypes of `moved` return."""
    return exchange._replace(
        op=name_of_transpose(exchange.op),
        by_collectives=exchange.by_collectives and exchange.by_collectives.transposed(),
        sums=tuple(x.dtype.name for x in moved) if exchange.sums is None else None,
    )


def _adjoint(
    fields: list[Any], cotangents: list[Any], dtypes: list[Any], exchange: Exchange
) -> list[Any]:
    """Moves cotangents back; `dtypes` are those of the results."""
    if exchange.sums is None:
        moved = [ct.astype(summable(ct.dtype)) for ct in cotangents]
    else:  # a copy commutes with rounding, so the narrower type is moved
        moved = [ct.astype(dtype) for ct, dtype in zip(cotangents, dtypes, strict=True)]
    adjoint = _transposed(exchange, moved)
    outs = adjoint.primitive.bind(*fields, *moved, exchange=adjoint)
    return [x.astype(dtype) for x, dtype in zip(outs, dtypes, strict=True)]


def _jvp(primitive, primals, tangents, *, exchange: Exchange, **params):
    if any("weights" in group.fields for group in exchange.groups):
        raise NotImplementedError(f"{exchange.op}: forward mode is not defined. Use jax.grad.")
    outs = primitive.bind(*primals, exchange=exchange, **params)
    fields, _, _ = exchange.split(primals)
    _, arrays, beside = exchange.split(tangents)
    if primitive is not start_p:  # that is storage
        beside = []
    keep, work = _is_nonzero(arrays), _is_nonzero(beside)
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs[: len(outs) - len(beside)]]
    otherwise = [*zeros, *beside]
    if not any(keep):
        return outs, otherwise
    fields, arrays, kept = exchange.select(fields, arrays, keep)
    beside = itertools.compress(beside, work)
    moved = primitive.bind(*fields, *arrays, *beside, exchange=kept, **params)
    are_new = [*keep, *keep, True, *work] if primitive is start_p else keep
    return outs, _spread(moved, are_new, otherwise)


def _transpose(cotangents, *operands, exchange: Exchange):
    fields, arrays, storage = exchange.split(operands)
    pairs = zip(arrays, _is_nonzero(cotangents), strict=True)
    keep = [ad.is_undefined_primal(x) and is_nonzero for x, is_nonzero in pairs]
    results = [_zero_like(x) for x in arrays]
    if any(keep):
        dtypes = [x.aval.dtype for x in itertools.compress(arrays, keep)]
        kept_fields, cts, kept = exchange.select(fields, cotangents, keep)
        results = _spread(_adjoint(kept_fields, cts, dtypes, kept), keep, results)
    return [None] * len(fields) + results + [None] * len(storage)


def _jvp_done(primitive, primals, tangents, *, exchange: Exchange):
    outs = primitive.bind(*primals, exchange=exchange)
    fields, _, _ = exchange.split(primals)
    _, given = _split_done(tangents, exchange)
    keep, work = _is_nonzero(given.results), _is_nonzero(given.beside)
    otherwise = [*given.results, *given.beside]
    if not any(keep):
        return outs, otherwise
    fields, arrays, kept = exchange.select(fields, given.arrays, keep)
    results = list(itertools.compress(given.results, keep))
    linear = given._replace(results=results, arrays=arrays)
    return outs, _spread(_done(fields, linear, kept, work), [*keep, *work], otherwise)


def _done(
    fields: list[Any], values: PairValues, exchange: Exchange, work: Sequence[bool]
) -> list[Any]:
    """Binds `done_p` for the selected arrays, with the nonzero values of the work."""
    linear = map(ad.instantiate_zeros, [*values.results, *values.arrays, values.held])
    beside = itertools.compress(values.beside, work)
    return done_p.bind(*fields, *linear, *beside, exchange=exchange)


def _transpose_done(cotangents, *operands, exchange: Exchange):
    fields, values = _split_done(operands, exchange)
    cts, beside = cotangents[: exchange.num_arrays], cotangents[exchange.num_arrays :]
    keep, work = _is_nonzero(cts), _is_nonzero(beside)
    out = PairValues.split([*map(_zero_like, values.flat())], exchange)._replace(
        beside=list(beside)
    )
    if any(keep):
        kept_fields, cts, kept = exchange.select(fields, cts, keep)
        avals = [x.aval for x in itertools.compress(values.arrays, keep)]
        pairs = zip(cts, avals, strict=True)
        if any(x.dtype != y.dtype or summable(x.dtype) != x.dtype for x, y in pairs):
            moved = _adjoint(kept_fields, cts, [x.dtype for x in avals], kept)
            out = out._replace(arrays=_spread(moved, keep, out.arrays))
        else:  # the adjoint in two calls, between which nothing may be cast
            adjoint = _transposed(kept, cts)
            started = start_p.bind(
                *kept_fields,
                *cts,
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
    fields, arrays, beside = exchange.split(operands)
    cts = PairValues.split(cotangents, exchange)
    keep, work = _is_nonzero(cts.results), _is_nonzero(cts.beside)
    outs = [*cts.arrays, *cts.beside]
    if any(keep):  # the adjoint exchange has been started
        kept_fields, results, kept = exchange.select(fields, cts.results, keep)
        linear = cts._replace(results=list(itertools.compress(cts.arrays, keep)), arrays=results)
        moved = _done(kept_fields, linear, _transposed(kept, results), work)
        outs = _spread(moved, [*keep, *work], outs)
    return [None] * len(fields) + _linear_only(outs, [*arrays, *beside])


def _linear_only(cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    pairs = zip(cotangents, operands, strict=True)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in pairs]


# ---- Policies of `jax.checkpoint`. The results of a start are unfinished, so none are saved: a
# policy saves the results of `done`, or both calls run again.


def _recompute_start(saveable, is_unknown, is_there, eqn):
    """Whatever the policy `saveable` says; `is_there`: in the backward pass."""
    pairs, num_outs = zip(eqn.invars, is_there, strict=True), len(eqn.outvars)
    residuals = [x for x, there in pairs if not there]
    if any(is_unknown):
        return None, eqn, [True] * num_outs, [True] * num_outs, residuals
    return eqn, eqn, [False] * num_outs, [True] * num_outs, residuals


# ---- The primitives.


def _register(primitive: Primitive, shapes, lowering, transpose, batch=_batch, jvp=_jvp) -> None:
    primitive.multiple_results = True
    primitive.def_abstract_eval(shapes)
    primitive.def_impl(functools.partial(run_alone, primitive))
    # Each call has a number, and the second of two looks at the origin of its operands.
    mlir.register_lowering(primitive, lowering, cacheable=False)
    # Private, but the only way to make `jit` provide what a partitioned lowering needs.
    prim_requires_devices_during_lowering.add(primitive)
    batching.primitive_batchers[primitive] = functools.partial(batch, primitive)
    ad.primitive_jvps[primitive] = functools.partial(jvp, primitive)
    ad.primitive_transposes[primitive] = transpose


_register(dispatch_p, _shapes, lower, _transpose)
_register(combine_p, _shapes, lower, _transpose)
_register(start_p, _start_shapes, lower_start, _transpose_start)
partial_eval.partial_eval_jaxpr_custom_rules[start_p] = _recompute_start
_register(done_p, _done_shapes, lower_done, _transpose_done, _batch_done, _jvp_done)
