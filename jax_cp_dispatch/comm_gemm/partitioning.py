"""The Shardy rule for matmuls of global arrays over automatic axes, and one device's part.

Batch dimensions, and tokens on axes other than the ranks', keep their sharding. The dimensions that
are sharded over the ranks are constrained.
"""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._jax_private import get_concrete_mesh, parse_flatten_op_sharding
from jax_cp_dispatch._ranks.communicator import other_axes
from jax_cp_dispatch._ranks.lowering import partitioned, program_mesh
from jax_cp_dispatch._ranks.options import with_manual_axes
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.comm_gemm.rank import Matmul, gradients_of_rank, product_of_rank
from jax_cp_dispatch.scaling import dequantize


def partition_product(s: Matmul, x, w, bias, scales, *, keeps: bool):
    """Returns the product, and the gathered x or None, as `product_of_rank` of all ranks.

    It has rows of all ranks, [*batch, sum of the row counts, p N], or room for them,
    [*batch, p times the largest row count, N]. Here and in `partition_gradients`, w may have a
    leading dimension of examples, which is then also the first dimension of all other arrays.
    """
    names, free = s.comm.axis_names, (P.UNCONSTRAINED,) * (x.ndim - 2)
    keeps_axes = keeps_token_axes(s, x)
    if not s.gathers:
        x = constrain(s, x, *free, P.UNCONSTRAINED, names)
    elif keeps_axes:
        x = split_like(x, split_tokens(s, x), x.ndim - 1)
    elif not other_axes(s.mesh, names):
        x = constrain(s, x, *free, names, None)
    w = constrain(s, w, *weight_spec(s, free[: w.ndim - 2]))
    out, *aux = _run(s, keeps, _Arrays(x, w, bias, scales))
    if s.gathers:
        out = constrain(s, out, *free, P.UNCONSTRAINED if keeps_axes else None, names)
        if keeps_axes and aux:
            aux = [split_like(aux[0], out, x.ndim - 1)]
    elif keeps_axes:
        out = split_like(out, split_tokens(s, x), x.ndim - 1)
    else:
        out = constrain(s, out, *free, names, None)
    return out, aux[0] if aux else None


def partition_gradients(s: Matmul, x, w, dy):
    """dx [*batch, p times the largest row count, K], and dw like w."""
    free = (P.UNCONSTRAINED,) * (x.ndim - 2)
    of_w = weight_spec(s, free[: w.ndim - 2])
    w = constrain(s, w, *of_w)
    dx, dw = _run(s, False, _Arrays(x, w, dy=dy))
    if keeps_token_axes(s, x):
        dx = split_like(dx, x, x.ndim - 1)
    else:
        dx = constrain(s, dx, *free, s.comm.axis_names, None)
    return dx, constrain(s, dw, *of_w)


def weight_spec(s: Matmul, examples: Sequence[Any] = ()) -> P:
    """Returns how a weight is sharded; it may have a dimension of examples."""
    spec = (None, s.comm.axis_names) if s.gathers else (s.comm.axis_names, None)
    return P(*examples, *(spec[::-1] if s.rhs_transposed else spec))


def constrain(s: Matmul, array, *spec):
    return jax.lax.with_sharding_constraint(array, NamedSharding(s.mesh, P(*spec)))


class _Arrays(NamedTuple):
    """The operands of a matmul, or something of each; with dy, its results are dx and dw."""

    x: Any
    w: Any
    bias: Any = None
    scales: Any = None
    dy: Any = None


def _run(s: Matmul, keeps: bool, arrays: _Arrays):
    ndims = jax.tree.map(jnp.ndim, arrays)
    return _partitioned(s, keeps, ndims, get_concrete_mesh())(*jax.tree.leaves(arrays))


@functools.lru_cache(maxsize=256)
def _partitioned(s: Matmul, keeps: bool, ndims: _Arrays, mesh_around):
    """Returns the matmul with its rule, under a unique name.

    XLA's compiler for TPUs has no such rules. There the ranks' axes become manual, and the others
    stay automatic.

    Args:
      s: the static parts.
      keeps: the gathered x is a result, too.
      ndims: dimensions of the operands.
      mesh_around: the concrete mesh of the context, or None.
    """
    names, is_gradient, num_examples = s.comm.axis_names, ndims.dy is not None, ndims.w - 2
    tree = jax.tree.structure(ndims)
    given = lambda parts: [part for part, n in zip(parts, ndims, strict=True) if n is not None]

    def each(run):
        """Returns `run(_Arrays)` as a function of those given, over the examples in sequence."""
        of_given = lambda *arrays: run(jax.tree.unflatten(tree, arrays))
        return jax.vmap(of_given) if num_examples else of_given

    def partition(mesh, arguments, results):
        mesh = _find_mesh(s, mesh, mesh_around)
        like = arguments[-1] if is_gradient else results[0]
        batch, tokens, counts = _layout(s, mesh, arguments[0], like)
        by_rows, by_columns = P(*batch, tokens + names, None), P(*batch, tokens or None, names)
        of_x, of_out = (by_rows, by_columns) if s.gathers else (by_columns, by_rows)
        example, others = batch[:num_examples], batch[num_examples:]
        of_bias, of_scales = P(*example, names if s.gathers else None), P(*example, None)
        of_w = weight_spec(s, example)
        ins = _Arrays(of_x, of_w, of_bias, of_scales, of_out)
        outs = [of_out, *([P(*batch, tokens or None, None)] if keeps else [])]
        if is_gradient:
            outs = [of_x, of_w]
        local = s.replace(mesh=None, row_counts=counts, comm=s.comm.inside(mesh))
        groups = (*itertools.chain(*filter(None, others)), *tokens)

        def on_each_device(arrays: _Arrays):
            x, w, bias, scales, dy = arrays
            if dy is None:
                return jax.tree.leaves(product_of_rank(local, x, w, bias, scales, keeps=keeps))
            dx, dw = gradients_of_rank(local, x, w, dy)
            return [dx, jax.lax.psum(dw, groups) if groups else dw]

        on_mesh = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, each(on_each_device), on_mesh(outs), tuple(on_mesh(given(ins)))

    def over_ranks(*arrays):
        mesh = s.mesh.abstract_mesh
        whole = NamedSharding(mesh, P())
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arrays]
        _, run, outs, ins = partition(mesh, shapes, shapes)
        specs = {"in_specs": tuple(x.spec for x in ins), "out_specs": [x.spec for x in outs]}
        return with_manual_axes(run, names, mesh, **specs)(*arrays)

    # The rule as text, and the factors that are not sharded.
    # "b0 m k, k n -> b0 m n": tokens of x and of a gathered product are sharded alike, except for
    # the ranks' axis, which shards the product's columns. `split_like` shards the tokens of a sum.
    batch = [f"b{i}" for i in range(ndims.x - 2)]
    example = batch[:num_examples]
    of_w = [*example, *(["n", "k"] if s.rhs_transposed else ["k", "n"])]
    of_x = [*batch, "t" if is_gradient else "m", "k"]
    ins = _Arrays(of_x, of_w, [*example, "n"], [*example, "q"], [*batch, "m", "n"])
    is_even = s.gathers and min(s.row_counts) == max(s.row_counts)
    outs = [[*batch, "m" if is_even else "t", "n"], *([[*batch, "a", "k"]] if keeps else [])]
    sides = given(ins), [of_x, of_w] if is_gradient else outs
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in sides)
    whole = ["k" if s.gathers else "n", *([] if ndims.scales is None else ["q"])]
    return partitioned(
        each(functools.partial(_dense, s, keeps)),
        partition,
        name=(keeps, ndims, mesh_around, s),
        on_tpus=over_ranks,
        sharding_rule=text,
        need_replication_factors=tuple(sorted(whole, key=re.findall(r"\w+", text).index)),
        decode_shardings=False,
    )


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
    tokens = dividing_axes(s, mesh, tokens)
    if not tokens:
        return batch, (), s.row_counts
    if not set(tokens) <= set(wanted):
        order = f"x has them split over {found}, the result has them over {wanted}"
        _tell_lost_axes(s, tokens, order)
    groups = math.prod(mesh.shape[axis] for axis in tokens)
    return batch, tokens, tuple(count // groups for count in s.row_counts)


def _dense(s: Matmul, keeps: bool, arrays: _Arrays):
    """Computes the results as on one device; the partitioner replaces it."""
    x, w, bias, scales, dy = arrays
    wide, rows = sum_dtype(x.dtype), sum(s.row_counts)
    dot = functools.partial(jax.lax.dot_general, preferred_element_type=wide)
    contracted = 1 if s.rhs_transposed else 0
    last, room, x = (x.ndim - 1,), x.shape[-2], x[..., :rows, :]
    if dy is not None:
        dx = dot(dy, w, ((last, (1 - contracted,)), ((), ())))
        pair = (dy, x) if s.rhs_transposed else (x, dy)
        dw = dot(*pair, ((tuple(range(x.ndim - 1)),) * 2, ((), ())))
        return [with_rows(dx.astype(x.dtype), room), dw.astype(w.dtype)]
    aux = x
    if s.is_scaled:
        lhs, rhs = s.quantize(x, w, scales)
        x, w = dequantize(lhs, wide).reshape(x.shape), dequantize(rhs, wide)
        aux = x.astype(aux.dtype)
    out = dot(x, w, ((last, (contracted,)), ((), ())))
    if bias is not None:
        out = out + jnp.expand_dims(bias.astype(wide), range(out.ndim - 1))
    out = out.astype(s.out_dtype)
    if s.gathers:
        return [out, aux] if keeps else [out]
    return [with_rows(out, s.comm.num_ranks * max(s.row_counts))]


def with_rows(x, num_rows: int):
    """Pads x to `num_rows` rows."""
    missing = num_rows - x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x


# ---- Tokens of global arrays that are sharded over more mesh axes than the ranks'.
#
# A Shardy rule states which dimensions are sharded alike. It cannot state "as x, and also over the
# ranks", because only the compiler knows over how many devices x is sharded. Small unused arrays
# convey it: one for each possible number of devices of the other mesh axes, each sharded over the
# ranks only after that number. All of them start alike, and the longest match applies.


def keeps_token_axes(s: Matmul, x) -> bool:
    """Whether tokens of x may be sharded over other mesh axes too, and stay so."""
    is_even = min(s.row_counts) == max(s.row_counts) > 0
    return is_even and x.shape[-1] > 0 and bool(other_axes(s.mesh, s.comm.axis_names))


def dim_axes(sharding: Any, mesh: Any, num_dims: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes over which each dimension is sharded, major axis first.

    A sharding that mesh axes cannot describe (half of one, for example) counts as none.
    """
    try:
        (spec,) = parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(num_dims), mesh)
    except (ValueError, NotImplementedError, StopIteration):
        spec = ()
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return axes + [()] * (num_dims - len(axes))


def split_tokens(s: Matmul, x):
    """Returns an array [*batch, M] sharded as x, and then over the ranks."""
    *batch, rows, _ = x.shape
    p = s.comm.num_ranks
    sizes = [s.mesh.shape[name] for name in other_axes(s.mesh, s.comm.axis_names)]
    subsets = (c for k in range(len(sizes) + 1) for c in itertools.combinations(sizes, k))
    thin = (x[..., 0] != 0).astype(jnp.int8)
    ranks = constrain(s, jnp.zeros(p, jnp.int8), s.comm.axis_names)
    dims = " ".join(f"d{i}" for i in range(x.ndim))
    ranks = _keep_first(ranks, x, f"r, {dims} -> r")[:, None]  # the compiler learns it after x
    total = jnp.zeros_like(thin)
    for devices in sorted({math.prod(subset) for subset in subsets}):
        if rows % (devices * p) == 0:
            # If x is sharded over more devices, the third dimension already has an axis, which
            # Shardy keeps. If over fewer, the second dimension is not full.
            parts = thin.reshape(*batch, devices, p, rows // (devices * p))
            ranks_of = jnp.broadcast_to(ranks, parts.shape)
            total = total + (parts + ranks_of).reshape(thin.shape)
    return total


def split_like(array, like, num_dims: int):
    """Shards the first dimensions of an array like those of another one."""
    shared = [f"d{i}" for i in range(num_dims)]
    dims = " ".join([*shared, *(f"k{i}" for i in range(num_dims, array.ndim))])
    others = " ".join([*shared, *(f"n{i}" for i in range(num_dims, like.ndim))])

    @custom_vmap
    def run(array, like):
        return _keep_first(array, like, f"{dims}, {others} -> {dims}")

    @run.def_vmap
    def _(size, is_mapped, *arrays):
        array, like = (
            a if flag else jnp.broadcast_to(a, (size, *a.shape))
            for a, flag in zip(arrays, is_mapped, strict=True)
        )
        return split_like(array, like, num_dims + 1), True

    return run(array, like)


def _keep_first(array, other, rule: str):
    first = lambda array, other: [array]

    def partition(mesh, arguments, results):
        to = results[0].sharding
        return mesh, first, [to], (to, arguments[1].sharding)

    # On TPUs XLA shards as it sees fit.
    rules = {"sharding_rule": rule, "decode_shardings": False}
    return partitioned(first, partition, name=rule, on_tpus=first, **rules)(array, other)[0]


def dividing_axes(s: Matmul, mesh, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that shard tokens besides the ranks', or none if they do not divide them."""
    rows = sum(s.row_counts)
    parts = math.prod(mesh.shape[axis] for axis in tokens) * s.comm.num_ranks
    if not tokens or rows % parts == 0:
        return tokens
    _tell_lost_axes(s, tokens, f"{rows} tokens are not a multiple of {parts} devices; pad them")
    return ()


def _tell_lost_axes(s: Matmul, axes: tuple[str, ...], why: str) -> None:
    """Warns once about the axes of tokens that XLA gathers."""
    ranks = s.comm.axis_names
    say_once(
        f"{s.op}: tokens are split over {axes} besides axis_name {ranks}, and XLA gathers them "
        f"over {axes}: {why}. Call inside jax.shard_map, reshape tokens to a dimension of {axes} "
        f"and one of {ranks}, or split them over {(*axes, *ranks)}, and constrain the result with "
        "jax.lax.with_sharding_constraint."
    )
