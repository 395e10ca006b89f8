"""The Shardy rule for matmuls of global arrays over automatic axes, and one device's part.

Batch dimensions, and tokens on axes other than the ranks', keep their sharding. The dimensions that
are sharded over the ranks are constrained.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._jax_private import get_concrete_mesh
from jax_cp_dispatch._ranks.communicator import other_axes
from jax_cp_dispatch._ranks.lowering import partitioned, program_mesh
from jax_cp_dispatch._ranks.options import with_manual_axes
from jax_cp_dispatch.comm_gemm.rank import (
    Matmul,
    dim_axes,
    gather_rows,
    gather_rows_again,
    keeps_token_axes,
    scatter_rows,
    split_like,
    split_tokens,
    tell_lost_axes,
)
from jax_cp_dispatch.comm_gemm.types import CommOverlapType


def partition_gather(s: Matmul, x, w, bias, scales, *, gathers_to_aux: bool):
    """Result [*batch, sum of the row counts, p N], and the gathered x or None.

    As in the two functions below, w may have a leading dimension of examples, which is then also
    the first dimension of all other arrays.
    """
    free, names = _free(x), s.comm.axis_names
    keeps = keeps_token_axes(s, x)
    if keeps:
        x = split_like(x, split_tokens(s, x), x.ndim - 1)
    elif not other_axes(s.mesh, names):
        x = _constrain(s, x, *free, names, None)
    w = _constrain(s, w, *_weight_spec(s, w, True))
    out, *aux = _run(s, gathers_to_aux, x, w, bias, scales)
    out = _constrain(s, out, *free, P.UNCONSTRAINED if keeps else None, names)
    if keeps and aux:
        aux = [split_like(aux[0], out, x.ndim - 1)]
    return out, aux[0] if aux else None


def partition_scatter(s: Matmul, x, w, bias, scales):
    """Result [*batch, p times the largest row count, N]."""
    free, names = _free(x), s.comm.axis_names
    x = _constrain(s, x, *free, P.UNCONSTRAINED, names)
    w = _constrain(s, w, *_weight_spec(s, w, False))
    (out,) = _run(s, False, x, w, bias, scales)
    if keeps_token_axes(s, x):
        return split_like(out, split_tokens(s, x), x.ndim - 1)
    return _constrain(s, out, *free, names, None)


def partition_gather_again(s: Matmul, x, w, dy):
    """dx [*batch, p times the largest row count, K], and dw like w."""
    of_w = _weight_spec(s, w, True)
    w = _constrain(s, w, *of_w)
    dx, dw = _partitioned_again(s, x.ndim, w.ndim == 3, get_concrete_mesh())(x, w, dy)
    if keeps_token_axes(s, x):
        dx = split_like(dx, x, x.ndim - 1)
    else:
        dx = _constrain(s, dx, *_free(x), s.comm.axis_names, None)
    return dx, _constrain(s, dw, *of_w)


def constrain_weight(s: Matmul, dw):
    """Shards a weight's gradient like the weight of the matmul."""
    return _constrain(s, dw, *_weight_split(s, s.overlap.comm_type == CommOverlapType.AG))


def _free(x) -> tuple[Any, ...]:
    return (P.UNCONSTRAINED,) * (x.ndim - 2)


def _weight_spec(s: Matmul, w, gathers: bool) -> P:
    return P(*(P.UNCONSTRAINED,) * (w.ndim - 2), *_weight_split(s, gathers))


def _weight_split(s: Matmul, gathers: bool) -> P:
    spec = (None, s.comm.axis_names) if gathers else (s.comm.axis_names, None)
    return P(*spec[::-1]) if s.rhs_transposed else P(*spec)


def _constrain(s: Matmul, array, *spec):
    return jax.lax.with_sharding_constraint(array, NamedSharding(s.mesh, P(*spec)))


class _Form(NamedTuple):
    """What the rule of a matmul depends on, in addition to its static parts."""

    gathers: bool
    to_aux: bool
    ndim: int
    has_bias: bool
    has_scales: bool
    has_examples: bool

    def read(self, rest):
        """Returns bias and scales, or None, from the operands after x and w."""
        rest = iter(rest)
        return [next(rest) if there else None for there in (self.has_bias, self.has_scales)]


def _run(s: Matmul, to_aux: bool, x, w, bias, scales):
    gathers = s.overlap.comm_type == CommOverlapType.AG
    form = _Form(gathers, to_aux, x.ndim, bias is not None, scales is not None, w.ndim == 3)
    run = _partitioned(s, form, get_concrete_mesh())
    return run(*(a for a in (x, w, bias, scales) if a is not None))


@functools.lru_cache(maxsize=256)
def _partitioned(s: Matmul, form: _Form, mesh_around):
    names, gathers = s.comm.axis_names, form.gathers

    def everywhere(x, w, *rest):
        dense = lambda x, w, *rest: _dense(s, form, x, w, *form.read(rest))
        return _each(form.has_examples, dense)(x, w, *rest)

    def partition(mesh, arguments, results):
        mesh = _find_mesh(s, mesh, mesh_around)
        batch, tokens, counts = _layout(s, mesh, arguments[0], results[0])
        by_rows, by_columns = P(*batch, tokens + names, None), P(*batch, tokens or None, names)
        of_example = batch[:1] if form.has_examples else []
        specs = [by_rows if gathers else by_columns, P(*of_example, *_weight_split(s, gathers))]
        if form.has_bias:
            specs.append(P(*of_example, names if gathers else None))
        if form.has_scales:
            specs.append(P(*of_example, None))
        outs = [by_rows]
        if gathers:
            outs = [by_columns, *([P(*batch, tokens or None, None)] if form.to_aux else [])]
        local = s.replace(mesh=None, row_counts=counts, comm=s.comm.inside(mesh))

        def on_each_device(x, w, *rest):
            bias, scales = form.read(rest)
            if not gathers:
                return [scatter_rows(local, x, w, bias, scales)]
            out, aux = gather_rows(local, x, w, bias, scales, gathers_to_aux=form.to_aux)
            return [out, aux] if form.to_aux else [out]

        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        each = _each(form.has_examples, on_each_device)
        return mesh, each, on_mesh(outs), tuple(on_mesh(specs))

    return _with_rule(everywhere, partition, _sharding_rule(s, form), (form, mesh_around, s))


@functools.lru_cache(maxsize=256)
def _partitioned_again(s: Matmul, ndim: int, has_examples: bool, mesh_around):
    names = s.comm.axis_names

    def everywhere(x, w, dy):
        return _each(has_examples, functools.partial(_dense_again, s))(x, w, dy)

    def partition(mesh, arguments, results):
        mesh = _find_mesh(s, mesh, mesh_around)
        batch, tokens, counts = _layout(s, mesh, arguments[0], arguments[2])
        of_example, others = (batch[:1], batch[1:]) if has_examples else ([], batch)
        by_rows, of_w = P(*batch, tokens + names, None), P(*of_example, *_weight_split(s, True))
        local = s.replace(mesh=None, row_counts=counts, comm=s.comm.inside(mesh))
        groups = (*(axis for axes in others if axes for axis in axes), *tokens)

        def on_each_device(x, w, dy):
            dx, dw = gather_rows_again(local, x, w, dy)
            return [dx, jax.lax.psum(dw, groups) if groups else dw]

        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        operands = on_mesh([by_rows, of_w, P(*batch, tokens or None, names)])
        each = _each(has_examples, on_each_device)
        return mesh, each, on_mesh([by_rows, of_w]), tuple(operands)

    batch = [f"b{i}" for i in range(ndim - 2)]
    of_example = batch[:1] if has_examples else []
    w = " ".join([*of_example, *("nk" if s.rhs_transposed else "kn")])
    tokens = lambda *last: " ".join([*batch, *last])
    rule = f"{tokens('t', 'k')}, {w}, {tokens('m', 'n')} -> {tokens('t', 'k')}, {w}"
    return _with_rule(
        everywhere, partition, (rule, ("k",)), ("again", has_examples, mesh_around, s)
    )


def _each(has_examples: bool, run):
    """Runs the examples in sequence."""
    return jax.vmap(run) if has_examples else run


def _dense_again(s: Matmul, x, w, dy):
    wide = sum_dtype(x.dtype)
    columns, rows = (0 if s.rhs_transposed else 1,), tuple(range(x.ndim - 1))
    dims = (((x.ndim - 1,), columns), ((), ()))
    dx = jax.lax.dot_general(dy, w, dims, preferred_element_type=wide).astype(x.dtype)
    tokens = x[..., : sum(s.row_counts), :]
    pair = (dy, tokens) if s.rhs_transposed else (tokens, dy)
    dw = jax.lax.dot_general(*pair, ((rows, rows), ((), ())), preferred_element_type=wide)
    return [with_rows(dx, x.shape[-2]), dw.astype(w.dtype)]


def _find_mesh(s: Matmul, mesh, mesh_around):
    """Returns the mesh of the program; it must have the number of ranks of the trace."""
    otherwise = s.mesh if isinstance(s.mesh, Mesh) else mesh_around
    mesh = program_mesh(s.op, s.comm.axis_names, mesh, otherwise)
    num_devices = math.prod(mesh.shape[name] for name in s.comm.axis_names)
    if num_devices != s.comm.num_ranks:
        raise ValueError(
            f"{s.op}: it was traced for {s.comm.num_ranks} devices of {s.comm.axis_names} but runs "
            f"on a mesh with {num_devices}, {dict(mesh.shape)}. Pass the mesh that holds the "
            "arrays: mesh=."
        )
    return mesh


def _layout(s: Matmul, mesh, x, out):
    """Returns how batch dimensions and tokens are sharded, and the rows of each rank."""
    is_free = lambda axis: axis not in s.comm.axis_names
    *of_batch, found, _ = dim_axes(x.sharding, mesh, len(x.shape))
    *_, wanted, _ = dim_axes(out.sharding, mesh, len(out.shape))
    batch = [tuple(filter(is_free, axes)) or None for axes in of_batch]
    tokens = tuple(filter(is_free, found))
    if not tokens:
        taken = {axis for axes in batch for axis in axes or ()}
        tokens = tuple(axis for axis in wanted if is_free(axis) and axis not in taken)
    parts = math.prod(mesh.shape[axis] for axis in tokens) * s.comm.num_ranks
    rows = sum(s.row_counts)
    if not tokens:
        return batch, (), s.row_counts
    if rows % parts:
        tell_lost_axes(s, tokens, f"{rows} tokens are not a multiple of {parts} devices; pad them")
        return batch, (), s.row_counts
    if not set(tokens) <= set(wanted):
        order = f"x has them split over {found}, the result has them over {wanted}"
        tell_lost_axes(s, tokens, order)
    return batch, tokens, (rows // parts,) * s.comm.num_ranks


def _with_rule(everywhere, partition, rule, name):
    """Attaches the rule, and a unique name, whose last part is the matmul.

    XLA's compiler for TPUs has no such rules. There the ranks' axes become manual, and the others
    stay automatic.
    """
    text, whole = rule
    s: Matmul = name[-1]

    def over_ranks(*arrays):
        mesh = s.mesh.abstract_mesh
        whole = NamedSharding(mesh, P())
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arrays]
        _, each, outs, ins = partition(mesh, shapes, shapes)
        specs = {"in_specs": tuple(x.spec for x in ins), "out_specs": [x.spec for x in outs]}
        return with_manual_axes(each, s.comm.axis_names, mesh, **specs)(*arrays)

    return partitioned(
        everywhere,
        partition,
        name=name,
        on_tpus=over_ranks,
        sharding_rule=text,
        need_replication_factors=whole,
        decode_shardings=False,
    )


def _dense(s: Matmul, form: _Form, x, w, bias, scales):
    """Computes the matmul as on one device; the partitioner replaces it."""
    wide = sum_dtype(x.dtype)
    dims = ((x.ndim - 1,), (1 if s.rhs_transposed else 0,))
    rows = sum(s.row_counts)
    x = x[..., :rows, :]
    aux = x
    if s.is_scaled:
        x, w = s.quantize(x, w, scales).values(wide)
        aux = x.astype(aux.dtype)
    out = jax.lax.dot_general(x, w, (dims, ((), ())), preferred_element_type=wide)
    if bias is not None:
        out = out + jnp.expand_dims(bias.astype(wide), range(out.ndim - 1))
    out = out.astype(s.out_dtype)
    if form.gathers:
        return [out, aux] if form.to_aux else [out]
    return [with_rows(out, s.comm.num_ranks * max(s.row_counts))]


def with_rows(x, num_rows: int):
    """Pads x to `num_rows` rows."""
    missing = num_rows - x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x


def _sharding_rule(s: Matmul, form: _Form):
    """Returns the rule as text, and the factors that are not sharded.

    "b0 m k, k n -> b0 m n": tokens of x and of a gathered product are sharded alike, except for the
    ranks' axis, which shards the product's columns. `split_like` shards the tokens of a sum.
    """
    batch = [f"b{i}" for i in range(form.ndim - 2)]
    keeps = form.gathers and min(s.row_counts) == max(s.row_counts)
    example = batch[:1] if form.has_examples else []
    of_w = ["n", "k"] if s.rhs_transposed else ["k", "n"]
    operands = [
        [*batch, "m", "k"],
        [*example, *of_w],
        *([[*example, "n"]] if form.has_bias else []),
        *([[*example, "q"]] if form.has_scales else []),
    ]
    results = [[*batch, "m" if keeps else "t", "n"], *([[*batch, "a", "k"]] if form.to_aux else [])]
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (operands, results))
    whole = [*("k" if form.gathers else "n"), *(["q"] if form.has_scales else [])]
    return text, tuple(sorted(whole, key=re.findall(r"\w+", text).index))
