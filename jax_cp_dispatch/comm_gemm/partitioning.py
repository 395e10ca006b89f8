"""The Shardy rule of products of global arrays over automatic axes, and one device's part.

The partitioner keeps what it knows: batch dimensions stay as they are sharded, the dimensions of
the ranks are left out of propagation and fixed.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.mesh import get_concrete_mesh  # private, but get_mesh refuses to tell while tracing
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch.comm_gemm.call import other_axes
from jax_cp_dispatch.comm_gemm.product import Matmul, gather_rows_of_rank, scatter_rows_of_rank


def partition_gather(s: Matmul, x, w, bias, *, gathers_to_aux: bool):
    """Result [*batch, sum of the row counts, p N], and the gathered x or None."""
    run = _partitioned(
        s, True, x.ndim, bias is not None, gathers_to_aux, _sizes(s, x, w), get_concrete_mesh()
    )
    results = run(*(a for a in (x, w, bias) if a is not None))
    return (*results, None)[:2]


def partition_scatter(s: Matmul, x, w, bias):
    """Result [*batch, p times the largest row count, N]."""
    run = _partitioned(
        s, False, x.ndim, bias is not None, False, _sizes(s, x, w), get_concrete_mesh()
    )
    return run(*(a for a in (x, w, bias) if a is not None))[0]


def _sizes(s: Matmul, x, w) -> tuple[tuple[str, int], ...]:
    """Of the factors that only one rank has."""
    n, k = s.num_columns(w), x.shape[-1]
    return tuple({"t": max(s.row_counts), "n": n // s.num_ranks, "k": k // s.num_ranks}.items())


@functools.lru_cache(maxsize=256)
def _partitioned(
    s: Matmul, gathers: bool, ndim: int, has_bias: bool, to_aux: bool, sizes, mesh_around
):
    names = s.axis_names

    @custom_partitioning
    def everywhere(x, w, *bias):
        return _dense(s, gathers, to_aux, x, w, *bias)

    def partition(mesh, arguments, results):
        if mesh.empty:  # custom_partitioning does not ask jax.set_mesh
            mesh = s.mesh if isinstance(s.mesh, Mesh) else mesh_around
        _check_mesh(s, mesh)
        batch = batch_spec(arguments[0].sharding, ndim - 2, lambda axis: axis not in names)
        by_rows, by_columns = P(*batch, names, None), P(*batch, None, names)
        of_w = P(None, names) if gathers else P(names, None)
        specs = [by_rows if gathers else by_columns, P(*of_w[::-1]) if s.rhs_transposed else of_w]
        if has_bias:
            specs.append(P(names) if gathers else P())
        outs = [by_columns, *([P(*batch, None, None)] if to_aux else [])] if gathers else [by_rows]
        local = s.replace(mesh=None, group_axes=other_axes(mesh, names))

        def on_each_device(x, w, *bias):
            b = bias[0] if bias else None
            if not gathers:
                return [scatter_rows_of_rank(local, x, w, b)]
            out, aux = gather_rows_of_rank(local, x, w, b, gathers_to_aux=to_aux)
            return [out, aux] if to_aux else [out]

        place = lambda specs: [NamedSharding(mesh, spec) for spec in specs]
        return mesh, on_each_device, place(outs), tuple(place(specs))

    rule, whole, sizes_in_rule = _sharding_rule(s, gathers, ndim, has_bias, to_aux, dict(sizes))
    factors: dict[str, Any] = {"need_replication_factors": whole, **sizes_in_rule}
    everywhere.def_partition(partition=partition, sharding_rule=rule, **factors)

    def named(*arrays):
        # The program names only the address of `partition`, which a persistent compilation cache
        # may ignore, and which another process may use for another call.
        with set_xla_metadata(jax_cp_dispatch=repr((gathers, to_aux, s))):
            return everywhere(*arrays)

    return named


def _dense(s: Matmul, gathers: bool, to_aux: bool, x, w, *bias):
    """The whole of it, as it is on one device: what the partitioner replaces."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dims = ((x.ndim - 1,), (1 if s.rhs_transposed else 0,))
    rows = sum(s.row_counts)
    x = x[..., :rows, :]
    out = jax.lax.dot_general(x, w, (dims, ((), ())), preferred_element_type=wide)
    if bias:
        out = out + bias[0].astype(wide)
    out = out.astype(s.out_dtype)
    if gathers:
        return [out, x] if to_aux else [out]
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


def _sharding_rule(s: Matmul, gathers: bool, ndim: int, has_bias: bool, to_aux: bool, sizes):
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

    batch = [f"b{i}" for i in range(ndim - 2)]
    if gathers:
        x, of_w, out = [split("t"), plain("k")], ["k", split("n")], [plain("m"), split("n")]
        bias = [split("n")]
    else:
        x, of_w = [plain("m"), split("k")], [split("k"), plain("n")]
        out, bias = [split("t"), "n"], ["n"]
    operands = [
        [*batch, *x],
        of_w[::-1] if s.rhs_transposed else of_w,
        *([bias] if has_bias else []),
    ]
    results = [[*batch, *out], *([[*batch, "m", "k"]] if to_aux else [])]
    text = " -> ".join(", ".join(" ".join(dims) for dims in side) for side in (operands, results))
    for alone in re.sub(r"\(.*?\)", "", text).split():
        in_pairs.pop(alone.strip(","), None)
    whole.sort(key=re.findall(r"\w+", text).index)  # by first appearance
    return text, tuple(whole), in_pairs
