"""Matmuls of global arrays under plain `jit`, by a Shardy rule or an inner `shard_map`.

Over automatic axes the partitioner keeps known shardings, see `partitioning`. Explicit axes are
read from the types: batch dimensions, and tokens on axes other than the ranks', keep their
sharding.
"""

import functools
import math

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._ranks.place import Place, is_traced, retype, with_manual_axes
from jax_cp_dispatch._ranks.varying import refuse_mapped_explicit_axes, vary_alike, varying_axes
from jax_cp_dispatch.comm_gemm.layers.derivatives import gathered_matmul, scattered_matmul
from jax_cp_dispatch.comm_gemm.layers.partitioning import with_rows
from jax_cp_dispatch.comm_gemm.layers.rank import Matmul
from jax_cp_dispatch.comm_gemm.layers.token_axes import tell_lost_axes
from jax_cp_dispatch.comm_gemm.scaled.operands import scales_of
from jax_cp_dispatch.comm_gemm.types import CommOverlapType


def matmul_of_all_ranks(s: Matmul, place: Place, x, w, bias, state):
    """Computes the matmul of global arrays."""
    gathers = s.overlap.comm_type == CommOverlapType.AG
    split = w.shape[1 if gathers else 0]
    if split % s.comm.num_ranks:
        raise ValueError(
            f"{s.op}: w has shape {w.shape}, whose dimension of {split} does not divide among the "
            f"{s.comm.num_ranks} devices of {s.comm.axis_names}. Pad it."
        )
    rows, room = x.shape[-2], s.comm.num_ranks * max(s.row_counts)
    if gathers:
        x = with_rows(x, room)
    if place.open_axes:
        refuse_mapped_explicit_axes(s.op, place.mesh)
        out = _inside_shard_map(gathers, place, s, x, w, bias, state)
        if gathers or room == rows:
            return out
        batch, _ = _explicit_axes(place, s, x)
        whole = P(*batch, None, None)  # tokens that do not divide are not sharded
        return _move(out, place.mesh, whole)[..., :rows, :]
    scales = None if state is None else scales_of(s.scaling_mode, (), state)
    out = _one_program(gathers)(s, x, w, bias, scales)
    return out if gathers or room == rows else out[..., :rows, :]


@functools.cache
def _one_program(gathers: bool):
    """Jits the matmul, so that the compiler sees all of it even without an outer `jit`."""
    run = gathered_matmul if gathers else scattered_matmul
    return jax.jit(run, static_argnums=0, inline=True)


def even_row_counts(rows: int, num_ranks: int) -> tuple[int, ...]:
    """Returns row counts as even as blocks of one size allow."""
    room = max(1, -(-rows // num_ranks))
    return tuple(min(room, max(0, rows - q * room)) for q in range(num_ranks))


# ---- Explicit axes.


def _move(array, mesh, spec: P):
    if is_traced([array]):
        return retype(array, mesh, spec)
    return jax.device_put(array, NamedSharding(mesh, spec))


def _explicit_axes(place: Place, s: Matmul, x):
    """Returns how types shard batch dimensions and tokens, apart from the ranks."""
    mesh = place.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_free = lambda a: (
        kinds[a] == AxisType.Explicit and a in place.open_axes and a not in s.comm.axis_names
    )
    spec = (*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim - 1]
    axes_of = lambda entry: (entry,) if isinstance(entry, str) else entry or ()
    *batch, tokens = [tuple(filter(is_free, axes_of(entry))) for entry in spec]
    parts = math.prod(mesh.shape[name] for name in tokens) * s.comm.num_ranks
    rows = sum(s.row_counts)
    if tokens and rows % parts:
        tell_lost_axes(s, tokens, f"{rows} tokens do not divide among {parts} devices; pad them")
        tokens = ()
    return [axes or None for axes in batch], tokens


def matmul_on_rank(s: Matmul, x, w, bias, state):
    """Calls the differentiable matmul with one rank's arguments, inside `jax.shard_map`."""
    x, w, *rest = vary_alike([a for a in (x, w, bias) if a is not None], also=s.varying_axes())
    axes, varying = s.comm.axis_names + s.comm.group_axes, varying_axes(x)
    if varying:  # JAX tracks them; ranks with the same x share the state anyway
        axes = tuple(a for a in axes if a in varying)
    scales = None if state is None else scales_of(s.scaling_mode, axes, state)
    return s, x, w, rest[0] if rest else None, scales


def _inside_shard_map(gathers: bool, place: Place, s: Matmul, x, w, bias, state):
    names, mesh = s.comm.axis_names, place.mesh
    batch, tokens = _explicit_axes(place, s, x)
    by_rows, by_columns = P(*batch, tokens + names, None), P(*batch, tokens or None, names)
    specs = [by_rows, P(None, names)] if gathers else [by_columns, P(names, None)]
    arrays = [x, w]
    if bias is not None:
        specs, arrays = [*specs, P(names) if gathers else P()], [*arrays, bias]
    arrays = [_move(a, mesh, spec) for a, spec in zip(arrays, specs, strict=True)]
    groups = math.prod(mesh.shape[name] for name in tokens)
    counts = tuple(count // groups for count in s.row_counts)
    local = s.replace(row_counts=counts, comm=s.comm.inside(mesh), mesh=None)
    run = gathered_matmul if gathers else scattered_matmul

    def on_one_rank(state, x, w, *bias):
        return run(*matmul_on_rank(local, x, w, bias[0] if bias else None, state))

    return with_manual_axes(
        on_one_rank,
        place.open_axes,
        mesh,
        in_specs=(P(), *specs),
        out_specs=by_columns if gathers else by_rows,
        check_vma=True,
    )(state, *arrays)
