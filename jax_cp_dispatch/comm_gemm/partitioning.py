"""The Shardy rule of products of global arrays over automatic axes, and one device's part.

The partitioner keeps what it knows: batch dimensions stay as they are sharded, the dimensions of
the ranks are left out of propagation and fixed.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.mesh import get_concrete_mesh  # private, but get_mesh refuses to tell while tracing
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dtypes import sum_dtype
from jax_cp_dispatch.comm_gemm.call import other_axes
from jax_cp_dispatch.comm_gemm.product import (
    Matmul,
    gather_rows_again,
    gather_rows_of_rank,
    scatter_rows_of_rank,
)


def partition_gather(s: Matmul, x, w, bias, scales, *, gathers_to_aux: bool):
    """Result [*batch, sum of the row counts, p N], and the gathered x or None."""
    return (*_run(s, True, gathers_to_aux, x, w, bias, scales), None)[:2]


def partition_scatter(s: Matmul, x, w, bias, scales):
    """Result [*batch, p times the largest row count, N]."""
    return _run(s, False, False, x, w, bias, scales)[0]


def partition_gather_again(s: Matmul, x, w, dy):
    """dx [*batch, p times the largest row count, K], and dw like w."""
    return tuple(_partitioned_again(s, x.ndim, _sizes(s, x, w), get_concrete_mesh())(x, w, dy))


class _Form(NamedTuple):
    """What the rule of a product depends on beside its static parts."""

    gathers: bool
    to_aux: bool
    ndim: int
    has_bias: bool
    has_scales: bool

    def read(self, rest):
        """bias and scales, or None, from the operands behind x and w."""
        rest = iter(rest)
        return [next(rest) if there else None for there in (self.has_bias, self.has_scales)]


def _run(s: Matmul, gathers: bool, to_aux: bool, x, w, bias, scales):
    form = _Form(gathers, to_aux, x.ndim, bias is not None, scales is not None)
    run = _partitioned(s, form, _sizes(s, x, w), get_concrete_mesh())
    return run(*(a for a in (x, w, bias, scales) if a is not None))


def _sizes(s: Matmul, x, w) -> tuple[tuple[str, int], ...]:
    """Of the factors that only one rank has."""
    n, k = s.num_columns(w), x.shape[-1]
    return tuple({"t": max(s.row_counts), "n": n // s.num_ranks, "k": k // s.num_ranks}.items())


@functools.lru_cache(maxsize=256)
def _partitioned(s: Matmul, form: _Form, sizes, mesh_around):
    names, gathers = s.axis_names, form.gathers

    @custom_partitioning
    def everywhere(x, w, *rest):
        return _dense(s, form, x, w, *form.read(rest))

    def partition(mesh, arguments, results):
        mesh, batch = _mesh_and_batch(s, mesh, mesh_around, arguments[0])
        by_rows, by_columns = P(*batch, names, None), P(*batch, None, names)
        of_w = P(None, names) if gathers else P(names, None)
        specs = [by_rows if gathers else by_columns, P(*of_w[::-1]) if s.rhs_transposed else of_w]
        if form.has_bias:
            specs.append(P(names) if gathers else P())
        if form.has_scales:
            specs.append(P())
        outs = [by_rows]
        if gathers:
            outs = [by_columns, *([P(*batch, None, None)] if form.to_aux else [])]
        local = s.replace(mesh=None, group_axes=other_axes(mesh, names))

        def on_each_device(x, w, *rest):
            bias, scales = form.read(rest)
            if not gathers:
                return [scatter_rows_of_rank(local, x, w, bias, scales)]
            out, aux = gather_rows_of_rank(local, x, w, bias, scales, gathers_to_aux=form.to_aux)
            return [out, aux] if form.to_aux else [out]

        place = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, on_each_device, place(outs), tuple(place(specs))

    return _named(everywhere, partition, _sharding_rule(s, form, dict(sizes)), (form, s))


@functools.lru_cache(maxsize=256)
def _partitioned_again(s: Matmul, ndim: int, sizes, mesh_around):
    names = s.axis_names

    @custom_partitioning
    def everywhere(x, w, dy):
        wide = sum_dtype(x.dtype)
        columns, rows = (w.ndim - 2,) if s.rhs_transposed else (w.ndim - 1,), tuple(range(ndim - 1))
        dims = (((ndim - 1,), columns), ((), ()))
        dx = jax.lax.dot_general(dy, w, dims, preferred_element_type=wide).astype(x.dtype)
        tokens = x[..., : sum(s.row_counts), :]
        pair = (dy, tokens) if s.rhs_transposed else (tokens, dy)
        dw = jax.lax.dot_general(*pair, ((rows, rows), ((), ())), preferred_element_type=wide)
        return [with_rows(dx, x.shape[-2]), dw.astype(w.dtype)]

    def partition(mesh, arguments, results):
        mesh, batch = _mesh_and_batch(s, mesh, mesh_around, arguments[0])
        by_rows, of_w = P(*batch, names, None), P(None, names)
        of_w = P(*of_w[::-1]) if s.rhs_transposed else of_w
        local = s.replace(mesh=None, group_axes=other_axes(mesh, names))
        groups = tuple(axis for axes in batch if axes for axis in axes)

        def on_each_device(x, w, dy):
            dx, dw = gather_rows_again(local, x, w, dy)
            return [dx, jax.lax.psum(dw, groups) if groups else dw]

        place = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        operands = place([by_rows, of_w, P(*batch, None, names)])
        return mesh, on_each_device, place([by_rows, of_w]), tuple(operands)

    form = _Form(gathers=True, to_aux=False, ndim=ndim, has_bias=False, has_scales=False)
    text, *factors = _sharding_rule(s, form, dict(sizes))
    (x, w), dy = (side.split(", ") for side in text.split(" -> "))
    rule = f"{x}, {w}, {dy[0]} -> {x}, {w}", *factors
    return _named(everywhere, partition, rule, ("again", s))


def _mesh_and_batch(s: Matmul, mesh, mesh_around, x):
    """The mesh of the program, and how batch dimensions are split over it."""
    if mesh.empty:  # custom_partitioning does not ask jax.set_mesh
        mesh = s.mesh if isinstance(s.mesh, Mesh) else mesh_around
    _check_mesh(s, mesh)
    is_free = lambda axis: axis not in s.axis_names
    return mesh, batch_spec(x.sharding, len(x.shape) - 2, is_free)


def _named(everywhere, partition, rule, name):
    """With its rule, and a name that tells it from every other call."""
    text, whole, sizes = rule
    factors: dict[str, Any] = {"need_replication_factors": whole, **sizes}
    everywhere.def_partition(partition=partition, sharding_rule=text, **factors)

    def named(*arrays):
        # The program names only the address of `partition`, which a persistent compilation cache
        # may ignore, and which another process may use for another call.
        with set_xla_metadata(jax_cp_dispatch=repr(name)):
            return everywhere(*arrays)

    return named


def _dense(s: Matmul, form: _Form, x, w, bias, scales):
    """The whole of it, as it is on one device: what the partitioner replaces."""
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
    return [with_rows(out, s.num_ranks * max(s.row_counts))]


def with_rows(x, num_rows: int):
    """Padded to that many rows."""
    missing = num_rows - x.shape[-2]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x


def batch_spec(sharding: Any, num_dims: int, is_free) -> list[tuple[str, ...] | None]:
    """How batch dimensions are split over those axes that are free."""
    spec = tuple(getattr(sharding, "spec", ()))[:num_dims]
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    batch = [tuple(filter(is_free, axes_of(entry))) or None for entry in spec]
    return batch + [None] * (num_dims - len(batch))


def _check_mesh(s: Matmul, mesh) -> None:
    missing = [name for name in s.axis_names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{s.op}: axis_name {missing[0]!r} is not an axis of the mesh on which this program "
            f"runs, {dict(mesh.shape)}. Name the axis whose devices are the ranks."
        )
    num_devices = math.prod(mesh.shape[name] for name in s.axis_names)
    if num_devices != s.num_ranks:
        raise ValueError(
            f"{s.op}: it was traced for {s.num_ranks} devices of {s.axis_names} but runs on a mesh "
            f"with {num_devices}, {dict(mesh.shape)}. Pass the mesh that holds the arrays: mesh=."
        )


def _sharding_rule(s: Matmul, form: _Form, sizes):
    """The rule as text, the factors that every device has whole, and sizes of those in pairs.

    "b0 (r t) k, k (r n) -> b0 m (r n)": r is the factor of the ranks, t, n and k what one has.
    """
    whole: list[str] = []
    in_pairs: dict[str, int] = {}  # sizes that no dimension of its own tells

    def plain(name: str) -> str:
        if name not in whole:
            whole.append(name)
        return name

    def split(name: str) -> str:
        if sizes[name] == 1:  # a factor of size 1 must stand alone
            return "r"
        plain(name)
        if s.num_ranks == 1:
            return name
        in_pairs.update({"r": s.num_ranks, name: sizes[name]})
        return f"(r {name})"

    batch = [f"b{i}" for i in range(form.ndim - 2)]
    if form.gathers:
        x, of_w, out = [split("t"), plain("k")], ["k", split("n")], [plain("m"), split("n")]
        bias = [split("n")]
    else:
        x, of_w = [plain("m"), split("k")], [split("k"), plain("n")]
        out, bias = [split("t"), "n"], ["n"]
    operands = [
        [*batch, *x],
        of_w[::-1] if s.rhs_transposed else of_w,
        *([bias] if form.has_bias else []),
        *([[plain("q")]] if form.has_scales else []),
    ]
    results = [[*batch, *out], *([[*batch, "m", "k"]] if form.to_aux else [])]
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (operands, results))
    for alone in re.sub(r"\(.*?\)", "", text).split():
        in_pairs.pop(alone.strip(","), None)
    whole.sort(key=re.findall(r"\w+", text).index)  # by first appearance
    return text, tuple(whole), in_pairs
