"""A matmul on one rank, made of gemms; and on global arrays over automatic axes, by a Shardy rule.

With that rule, batch dimensions, and tokens on axes other than the ranks', keep their sharding. The
dimensions that are sharded over the ranks are constrained.
"""

import dataclasses
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
from jaxtyping import Array

from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._jax_private import get_concrete_mesh, parse_flatten_op_sharding
from jax_cp_dispatch._ranks.communicator import Communicator, axes_of, other_axes
from jax_cp_dispatch._ranks.lowering import partitioned, program_mesh
from jax_cp_dispatch._ranks.options import vary_alike, with_manual_axes
from jax_cp_dispatch._text import say_once
from jax_cp_dispatch.buffers import CommOverlapConfig, CommOverlapMethod, CommOverlapType
from jax_cp_dispatch.comm_gemm.primitive import GemmCall, GemmOperands, bind_gemm, collapse
from jax_cp_dispatch.scaling import (
    BLOCK,
    DelayedScaling,
    Quantized,
    ScalingMode,
    dequantize,
    pad_scales,
    quantize,
    scales_shape,
    unpad_scales,
    unswizzle_scales,
)

FORWARD_DTYPE = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The static parts of a differentiable matmul."""

    op: str  # the public function, for messages
    comm: Communicator  # the ranks
    row_counts: tuple[int, ...]  # see `GemmCall`
    # How the matmul communicates, and the one in its derivative
    overlap: CommOverlapConfig
    backward: CommOverlapConfig
    out_dtype: str  # of the result
    # The gathered lhs is kept for the derivative instead of gathered again
    keeps_gathered: bool = True
    rhs_transposed: bool = False  # w is [N, K]
    # How x and w become 8 bits; then they have types as follows
    scaling_mode: ScalingMode = ScalingMode.NO_SCALING
    # 8-bit type of x, and of the result's gradient
    x_dtype: str = FORWARD_DTYPE
    dy_dtype: str = FORWARD_DTYPE
    # Of global arrays, which hold the rows of all ranks; None: arrays are one rank's
    mesh: Any = None

    def call(self, x, out_shape, out_dtype, **changes) -> GemmCall:
        call = GemmCall(
            op=self.op,
            lhs_boundary=x.ndim - 1,
            rhs_boundary=1,
            out_shape=out_shape,
            out_dtype=jnp.dtype(out_dtype).name,
            comm=self.comm,
            overlap=self.overlap,
            rhs_transposed=self.rhs_transposed,
            scaling_mode=self.scaling_mode,
            row_counts=self.row_counts,
            num_batches=math.prod(x.shape[:-2]),
        )
        return dataclasses.replace(call, **changes)

    def adjoint(self, out_dtype) -> "Matmul":
        """Returns the matmul that computes dx: w is transposed, and the communication swapped."""
        return dataclasses.replace(
            self,
            overlap=self.backward,
            backward=self.overlap,
            out_dtype=jnp.dtype(out_dtype).name,
            rhs_transposed=not self.rhs_transposed,
            x_dtype=self.dy_dtype,
            dy_dtype=self.x_dtype,
        )

    def quantize(self, x, w, scales, *, axis_name: Any = None) -> tuple[Quantized, Quantized]:
        """Quantizes x, its dimensions before the last collapsed, and w [K, N] or [N, K].

        The ranks of `axis_name` share a current scale of x; `scales` of x and w, f32 [2], are
        delayed ones.
        """
        mode, layout = self.scaling_mode, "row" if self.rhs_transposed else "column"
        of_x = of_w = None
        if scales is not None:
            of_x = DelayedScaling(amax_history=None, scale=scales[:1])
            of_w = DelayedScaling(amax_history=None, scale=scales[1:2])
        rows = x.reshape(collapse(x.shape, -1))
        return (
            quantize(rows, mode, dtype=self.x_dtype, state=of_x, axis_name=axis_name),
            quantize(w, mode, dtype=FORWARD_DTYPE, layout=layout, state=of_w),
        )

    @property
    def is_scaled(self) -> bool:
        return self.scaling_mode != ScalingMode.NO_SCALING

    @property
    def gathers(self) -> bool:
        """Whether x is gathered; otherwise sums are scattered."""
        return self.overlap.gathers

    @property
    def num_parts(self) -> int:
        """The ranks whose columns the weights hold."""
        return 1 if self.mesh is None else self.comm.num_ranks

    def join(self, arrays: Sequence[Array]) -> Array:
        """[.., p N_i] of each array to [.., p sum of N_i]: every part has its own columns."""
        if len(arrays) == 1:
            return arrays[0]
        p = self.num_parts
        parts = [a.reshape(*a.shape[:-1], p, a.shape[-1] // p) for a in arrays]
        joined = jnp.concatenate(parts, axis=-1)
        return joined.reshape(*joined.shape[:-2], p * joined.shape[-1])

    def split(self, array: Array, sizes: Sequence[int]) -> tuple[Array, ...]:
        """The inverse of `join`; `sizes` are the columns of each array, of all parts."""
        if len(sizes) == 1:
            return (array,)
        p = self.num_parts
        parts = array.reshape(*array.shape[:-1], p, sum(sizes) // p)
        split = jax.lax.split(parts, [n // p for n in sizes], axis=parts.ndim - 1)
        each = zip(split, sizes, strict=True)
        return tuple(a.reshape(*array.shape[:-1], n) for a, n in each)

    def num_columns(self, w) -> int:
        return w.shape[0 if self.rhs_transposed else 1]


def product_of_rank(s: Matmul, x, w, bias, scales, *, keeps: bool):
    """Returns the product, and the gathered x, as it is multiplied, if it `keeps` that, or None.

    The product has the rows of all ranks, or the largest count of rows; those after a rank's own
    are zero.
    """
    rows = sum(s.row_counts) if s.gathers else max(s.row_counts)
    shape = (*x.shape[:-2], rows, s.num_columns(w))
    if 0 in (*x.shape, *w.shape):  # jaxlib 0.11 crashes on empty arrays
        of_all = (*x.shape[:-2], rows, x.shape[-1])
        out, gathered = vary_alike(
            [jnp.zeros(shape, s.out_dtype), jnp.zeros(of_all, x.dtype)], like=x
        )
        if bias is not None:
            out = jnp.broadcast_to(bias.astype(out.dtype), out.shape)
        return out if s.gathers else real_rows(s, out), gathered if keeps else None
    call = s.call(x, shape, s.out_dtype, gathers_to_aux=keeps, fuse_bias=bias is not None)
    if not s.is_scaled:
        results = bind_gemm(call, GemmOperands(lhs=x, rhs=w, bias=bias))
        return results.output, results.aux_out
    lhs, rhs = s.quantize(x, w, scales, axis_name=s.comm.axis_names if s.gathers else None)
    is_blocks = s.scaling_mode == ScalingMode.MXFP8_1D_SCALING
    pad = lambda q: pad_scales(q.scale_inv, layout=q.layout) if is_blocks else q.scale_inv
    operands = GemmOperands(lhs.data.reshape(x.shape), pad(lhs), rhs.data, pad(rhs), bias)
    results = bind_gemm(call, operands)
    aux = results.aux_out
    if aux is not None:  # 8 bits of all ranks
        rows, scale_inv = aux.reshape(collapse(aux.shape, -1)), lhs.scale_inv
        if is_blocks:
            padded = unswizzle_scales(results.lhs_swizzled)
            scale_inv = unpad_scales(padded, shape=scales_shape(rows.shape, "row"))
        gathered = dataclasses.replace(lhs, data=rows, scale_inv=scale_inv)
        aux = dequantize(gathered, x.dtype).reshape(aux.shape)
    return results.output, aux


def gradients_of_rank(s: Matmul, x, w, dy):
    """Returns dx and dw if the gathered x was not kept; each GEMM hides a transfer.

    x is gathered during dy w', whose result is reduce-scattered during x' dy.
    """
    if 0 in (*x.shape, *w.shape, *dy.shape):  # jaxlib 0.11 crashes on empty arrays
        return jnp.zeros_like(x), jnp.zeros_like(w)
    bulk = lambda kind: CommOverlapConfig(kind, CommOverlapMethod.BULK)
    wide = sum_dtype(x.dtype)
    call = s.call(
        dy,
        (*dy.shape[:-1], x.shape[-1]),
        wide,
        overlap=bulk(CommOverlapType.AG),
        rhs_transposed=not s.rhs_transposed,
    )
    first = bind_gemm(call, GemmOperands(lhs=dy, rhs=w, aux_in=x))
    gathered, partial = first.aux_out, first.output
    lhs, rhs = (dy, gathered) if s.rhs_transposed else (gathered, dy)
    call = s.call(
        lhs,
        w.shape,
        w.dtype,
        overlap=bulk(CommOverlapType.RS),
        rhs_boundary=rhs.ndim - 1,
        lhs_transposed=True,
        rhs_transposed=False,
    )
    second = bind_gemm(call, GemmOperands(lhs=lhs, rhs=rhs, aux_in=partial))
    return second.aux_out.astype(x.dtype), second.output


def real_rows(s: Matmul, dy):
    """Removes the unused rows of ranks with fewer rows."""
    if s.mesh is not None or min(s.row_counts) == max(s.row_counts):
        return dy
    count = jnp.array(s.row_counts)[jax.lax.axis_index(s.comm.axis_names)]
    return jnp.where(jnp.arange(dy.shape[-2])[:, None] < count, dy, 0)


def check_contracted_blocks(op: str, mode: ScalingMode, contracted: int) -> None:
    """Requires that a rank contracts whole blocks."""
    if mode == ScalingMode.MXFP8_1D_SCALING and contracted % BLOCK:
        raise ValueError(
            f"{op}: {contracted} elements are contracted on a rank, in the forward pass or in the "
            f"derivative (columns of w); {mode} needs a multiple of {BLOCK}, the elements that "
            "share a scale. Pad with zeros."
        )


# ---- Global arrays: the rule, and the part of one device.


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
    """Returns the matmul with its rule, under a unique name; `ndims` are those of the operands.

    XLA's compiler for TPUs has no such rules. There the ranks' axes become manual, and the others
    stay automatic.
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
        local = dataclasses.replace(s, mesh=None, row_counts=counts, comm=s.comm.inside(mesh))
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
        return [pad_rows(dx.astype(x.dtype), room), dw.astype(w.dtype)]
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
    return [pad_rows(out, s.comm.num_ranks * max(s.row_counts))]


def pad_rows(x, num_rows: int):
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
    return [*map(axes_of, spec), *[()] * (num_dims - len(spec))]


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
