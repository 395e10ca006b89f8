"""Products of global arrays under plain `jit`: a Shardy rule, or a `shard_map` of our own.

Over automatic axes the partitioner keeps what it knows: batch dimensions stay as they are sharded,
the dimensions of the ranks are constrained. Explicit axes are read from the types.
"""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._varying import vary_alike
from jax_cp_dispatch.comm_gemm.call import other_axes
from jax_cp_dispatch.comm_gemm.config import CommOverlapType
from jax_cp_dispatch.comm_gemm.derivatives import gathered_matmul, scattered_matmul
from jax_cp_dispatch.comm_gemm.partitioning import batch_spec, with_rows
from jax_cp_dispatch.comm_gemm.product import Matmul
from jax_cp_dispatch.dispatch.placement import Place, is_traced, retype


def matmul_of_all_ranks(
    op: str,
    kind: CommOverlapType,
    place: Place,
    num_ranks: int,
    product: Callable[[tuple[int, ...]], Matmul],
    x,
    w,
    bias,
):
    """The product of global arrays; `product` makes its static parts from row counts."""
    counts = _row_counts(x.shape[-2], num_ranks)
    s = product(counts)
    gathers = kind == CommOverlapType.AG
    split = w.shape[1 if gathers else 0]
    if split % s.num_ranks:
        raise ValueError(
            f"{op}: w has shape {w.shape}, of which {split} does not divide among the "
            f"{s.num_ranks} devices of {s.axis_names}. Pad it."
        )
    if place.open_axes:
        return _inside_shard_map(op, gathers, place, s, x, w, bias)
    if not s.keeps_gathered:
        raise ValueError(
            f"{op}: got gathered='again' with global arrays over automatic axes. Call inside "
            "jax.shard_map, or recompute with jax.checkpoint."
        )
    rows, room = x.shape[-2], s.num_ranks * max(counts)
    if gathers:
        x = with_rows(x, room)
    names = s.axis_names
    x = _constrain(place.mesh, x, *((names, None) if gathers else (None, names)))
    w = _constrain(place.mesh, w, *((None, names) if gathers else (names, None)))
    out = (gathered_matmul if gathers else scattered_matmul)(s, x, w, bias)
    out = _constrain(place.mesh, out, *((None, names) if gathers else (names, None)))
    return out if gathers or room == rows else out[..., :rows, :]


def _row_counts(rows: int, num_ranks: int) -> tuple[int, ...]:
    """As even as blocks of one size allow."""
    room = max(1, -(-rows // num_ranks))
    return tuple(min(room, max(0, rows - q * room)) for q in range(num_ranks))


def _constrain(mesh, array, *last):
    free = (P.UNCONSTRAINED,) * (array.ndim - 2)
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*free, *last)))


# ---- Explicit axes.


def _inside_shard_map(op: str, gathers: bool, place: Place, s: Matmul, x, w, bias):
    if len(set(s.row_counts)) > 1:
        raise ValueError(
            f"{op}: {x.shape[-2]} tokens do not divide among the {s.num_ranks} devices of "
            f"{s.axis_names}, which explicit axes need. Pad them."
        )
    names, mesh = s.axis_names, place.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_free = lambda a: kinds[a] == AxisType.Explicit and a in place.open_axes and a not in names
    batch = batch_spec(jax.typeof(x).sharding, x.ndim - 2, is_free)
    by_rows, by_columns = P(*batch, names, None), P(*batch, None, names)
    specs = [by_rows, P(None, names)] if gathers else [by_columns, P(names, None)]
    arrays = [x, w]
    if bias is not None:
        specs, arrays = [*specs, P(names) if gathers else P()], [*arrays, bias]
    traced = is_traced(arrays)
    move = retype if traced else lambda a, *to: jax.device_put(a, NamedSharding(*to))
    arrays = [move(a, mesh, spec) for a, spec in zip(arrays, specs, strict=True)]
    around = jax.sharding.get_abstract_mesh()
    is_around = all(name in around.axis_names for name in place.open_axes)
    local = s.replace(group_axes=other_axes(mesh, names), mesh=None)
    run = gathered_matmul if gathers else scattered_matmul

    def on_one_rank(*arrays):
        x, w, *rest = vary_alike(arrays, also=local.varying_axes())
        return run(local, x, w, rest[0] if rest else None)

    return jax.shard_map(
        on_one_rank,
        mesh=None if is_around else mesh,
        axis_names=set(place.open_axes),
        in_specs=tuple(specs),
        out_specs=by_columns if gathers else by_rows,
    )(*arrays)
