"""A collective call where it is made: options, ranks, context, axes over which arrays vary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from jax.typing import ArrayLike
from jaxtyping import Array

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._jax_private import get_axis_env, trace_state_clean
from jax_cp_dispatch._ranks.communicator import (
    AxisName,
    Communicator,
    axes_of,
    check_axis_name,
    check_deadline,
    check_mesh,
    mesh_groups,
    other_axes,
)
from jax_cp_dispatch._ranks.implementations import (
    IMPLEMENTATIONS,
    check_implementation,
    choose_implementation,
)
from jax_cp_dispatch._ranks.job import refuse_here

# ---- The context of a call: on one rank inside `shard_map`, or on the arrays of all ranks.


class CallContext(NamedTuple):
    """The mesh of a call, and what must happen before each device runs its part.

    The partitioner handles a global call without open axes.
    """

    mesh: Any  # None if only the compiler will know it
    is_global: bool  # whether the arrays hold the rows of all ranks; otherwise those of this rank
    open_axes: tuple[str, ...] = ()  # that our `shard_map` must make manual


def is_on_rank(op: str, names: tuple[str, ...]) -> bool:
    """Whether the arrays of a call are those of one rank: all axes of the ranks are manual here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not any(name in manual for name in names):
        return False
    if not all(name in manual for name in names):
        raise ValueError(
            f"{op}: only {tuple(manual)} of axis_name {names} are manual here. Make all of them "
            f"manual, or none: jax.shard_map(..., axis_names={set(names)})."
        )
    return True


def find_mesh(names: Sequence[str], mesh: Any, around: Any, arrays: Sequence[Any]) -> Any:
    """Returns the user's mesh, or that of an array; if possible, one that has `names`."""
    if mesh is not None:
        return mesh
    if any(name in around.axis_names for name in names):
        return around if is_in_program(arrays) else jax.sharding.get_mesh()
    for array in arrays:
        is_placed = isinstance(array, jax.Array) and not is_traced([array])
        typed = getattr((array if is_placed else jax.typeof(array)).sharding, "mesh", None)
        if typed is not None and any(name in typed.axis_names for name in names):
            return typed
    return None if around.empty else around


def refuse_other_mesh(op: str, mesh: Any, arrays: Iterable[Any]) -> None:
    """Refuses arrays that are placed on the same devices by another mesh than the call's.

    JAX gives a program with our primitives one mesh, and otherwise raises without the name of the
    operation. Call outside `shard_map`.
    """
    axes_of = lambda mesh: ", ".join(
        f"{name}={size} ({kind.name})"
        for (name, size), kind in zip(mesh.shape_tuple, mesh.axis_types, strict=True)
    )
    placed = [x for x in arrays if isinstance(x, jax.Array)]
    if is_in_program(placed):  # others are constants of the program
        placed = [x for x in placed if isinstance(x, Tracer)]
    for x in placed:
        own = jax.typeof(x).sharding.mesh
        is_other = (own.shape_tuple, own.axis_types) != (mesh.shape_tuple, mesh.axis_types)
        if is_other and own.size == mesh.size > 1:
            raise ValueError(
                f"{op}: an array of shape {list(x.shape)} is placed on a mesh with the axes "
                f"{axes_of(own)}, but the call has one with {axes_of(mesh)}. Pass the mesh "
                "of the arrays, or place them on this one before the program: "
                "jax.device_put(x, NamedSharding(mesh, spec))."
            )


def is_traced(arrays: Iterable[Any]) -> bool:
    """Whether some of the arrays are known only when the program runs."""
    return any(isinstance(x, Tracer) for x in arrays)


def is_in_program(arrays: Iterable[Any]) -> bool:
    """Whether a call is part of a program that is traced, of whose arrays all may be constants."""
    return is_traced(arrays) or not trace_state_clean()


def retype(x: Any, mesh: Any, spec: P) -> Any:
    """Shards an array over the explicit axes of `spec`; types do not show the others."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed = lambda entry: tuple(a for a in axes_of(entry) if kinds[a] == AxisType.Explicit) or None
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*map(typed, spec))))


def place(x: Any, mesh: Any, spec: P) -> Any:
    """Places an array that is known here; `retype` of others, and in a program without devices."""
    if is_traced([x]) or isinstance(mesh, AbstractMesh):
        return retype(x, mesh, spec)
    return jax.device_put(x, NamedSharding(mesh, spec))


def with_manual_axes(
    fn: Callable[..., Any],
    axes: Sequence[str],
    mesh: Any,
    *,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Returns `fn` with `axes` manual too, in the surrounding mesh or else in `mesh`."""
    around = jax.sharding.get_abstract_mesh()
    is_around = all(name in around.axis_names for name in axes)
    return jax.shard_map(
        fn,
        mesh=None if is_around else mesh,
        axis_names=set(axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


@dataclasses.dataclass(frozen=True)
class CollectiveOptions:
    """The checked options of one call; static. Make it with `read_options`."""

    op: str  # the function that was called, for error messages
    axis_names: tuple[str, ...]  # whose devices are the ranks, major axis first; () without ranks
    mesh: Any = None  # of global arrays, if given
    implementation: str | None = None  # the caller's choice; None selects one
    deadline: float | None = None  # seconds that a rank waits for another; None is the default
    num_comm_sm: int | None = None  # multiprocessors of a GPU per exchange; None is the default

    @property
    def axis_name(self) -> AxisName:
        """The same for JAX, which is much faster with one name than with a tuple."""
        return self.axis_names if len(self.axis_names) != 1 else self.axis_names[0]


class ExchangeKeywords(TypedDict, total=False):
    """Keywords of every exchange; see `dispatch`."""

    axis_name: Required[AxisName]
    mesh: Any
    implementation: str | None
    deadline: float | None
    num_comm_sm: int | None


def read_options(
    op: str,
    axis_name: Any,
    mesh: Any = None,
    implementation: Any = None,
    deadline: Any = None,
    num_comm_sm: Any = None,
    *,
    needs_ranks: bool = True,
) -> CollectiveOptions:
    """Checks the options of a call of `op` over a mesh axis, and that this process can make calls.

    Without `needs_ranks`, `axis_name` may be None: the call does not communicate.
    """
    names = ()
    if needs_ranks or axis_name is not None:
        names = check_axis_name(op, axis_name)
    check_mesh(op, mesh)
    check_implementation(op, implementation)
    if deadline is not None:
        check_deadline(op, deadline)
    if num_comm_sm is not None:
        check_positive(op, num_comm_sm=num_comm_sm)
    return CollectiveOptions(op, names, mesh, implementation, deadline, num_comm_sm)


def find_ranks(
    options: CollectiveOptions, arrays: Sequence[Any]
) -> tuple[Communicator, CallContext]:
    """Finds the ranks of a call; its context from its surroundings, `mesh`, or the arrays.

    If the mesh is not known yet, the number of ranks is 0.
    """
    op, names = options.op, options.axis_names
    refuse_here(op)  # the process that traces a derivative may be another one
    mesh: Any = jax.sharding.get_abstract_mesh()
    manual, is_global = mesh.manual_axes, not is_on_rank(op, names)
    if is_global and not manual:
        mesh = find_mesh(names, options.mesh, mesh, arrays)
    here = names if mesh is None else mesh.axis_names
    if missing := [name for name in names if name not in here]:
        raise ValueError(
            f"{op}: axis_name {missing[0]!r} is not an axis of the mesh here, which has "
            f"{tuple(here)}. Name the axis whose devices are the ranks."
        )
    open_axes, groups = (), ()
    if mesh is None:
        _check_mesh_comes_later(op, names, arrays)
    elif not is_global:
        rest = other_axes(mesh, names)
        open_axes = tuple(name for name in rest if name not in manual)
        groups = tuple(name for name in rest if name in manual)
    elif manual or any(kind != AxisType.Auto for kind in mesh.axis_types):
        open_axes = tuple(name for name in mesh.axis_names if name not in manual)
    elif IMPLEMENTATIONS[options.implementation or "xla"].platform == "cpu":
        # The caller's transport between CPU devices may not reach all ranks; the lowering of open
        # axes finds this, too.
        others = [name for name in mesh.axis_names if name not in names]
        devices = mesh_groups(mesh, names, others)
        if devices is not None:
            choose_implementation(op, options.implementation, ["cpu"], devices)
    comm = Communicator(
        axis_names=names,
        num_ranks=0 if mesh is None else math.prod(mesh.shape[name] for name in names),
        group_axes=groups,
        open_axes=open_axes,
        implementation=options.implementation,
        deadline=options.deadline,
    )
    return comm, CallContext(mesh, is_global, open_axes)


def _check_mesh_comes_later(op: str, names: tuple[str, ...], arrays: Sequence[Any]) -> None:
    """Requires a call in a program, whose mesh only the compiler will know."""
    for name in names:
        try:
            jax.lax.axis_size(name)
        except NameError:
            continue
        raise ValueError(
            f"{op}: axis_name {name!r} is an axis of jax.vmap here, but the ranks must be devices. "
            "Use another name in jax.vmap, and pass the name of a mesh axis."
        )
    if not is_in_program(arrays):
        raise ValueError(
            f"{op}: no mesh with axis {names[0]!r} was found. Call {op} inside jax.shard_map "
            f"over {names[0]!r}, or on arrays of all ranks with mesh=, under jax.set_mesh, or "
            "sharded over such a mesh."
        )


# ---- Finds and extends the mesh axes over which arrays vary in `jax.shard_map` (`check_vma`).


def vary_alike(tree: Any, *, also: Iterable[str] = (), like: ArrayLike | None = None) -> Any:
    """Makes all arrays of a pytree vary over the union of their mesh axes, of `also` and `like`.

    JAX's operations do this themselves; ours need it for the operands of one primitive, for the
    initial and the next carry of a loop, and for an argument and its cotangent in a custom
    derivative. The transpose sums over the added axes. Outside `shard_map` it does nothing.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes = frozenset(also).union(*map(varying_axes, [*leaves, *([] if like is None else [like])]))
    missing = [tuple(axes - varying_axes(x)) for x in leaves]
    add = lambda x, names: jax.lax.pcast(x, names, to="varying") if names else jnp.asarray(x)
    return structure.unflatten([add(x, names) for x, names in zip(leaves, missing, strict=True)])


def varying_axes(array: ArrayLike) -> frozenset[str]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def whole_on_explicit_axes(tree: Any, num_dims: int | None = None) -> Any:
    """Returns arrays that no explicit mesh axis shards; their cotangents keep the sharding.

    For a function of one device's arrays, whose custom derivative has results of unsharded types.
    With `num_dims`, the dimensions after the first ones keep their sharding.
    """

    def whole(x: ArrayLike) -> Array:
        x = jnp.asarray(x)
        sharding = jax.typeof(x).sharding
        split = sharding.spec[:num_dims]
        if all(entry is None for entry in split):
            return x
        spec = P(*(None for _ in split), *sharding.spec[len(split) :])
        return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(whole, tree)


def mapped_axes() -> frozenset[str]:
    """Returns the mesh axes that `jax.vmap(..., spmd_axis_name=...)` hides here."""
    return frozenset(get_axis_env().spmd_axis_names)


def refuse_mapped_explicit_axes(op: str, mesh: Any) -> None:
    """Refuses a `jax.vmap` over arrays that are sharded over an explicit axis of `mesh`.

    A `shard_map` cannot make that axis manual, and its function would see arrays split over it.
    """
    mapped = sorted(frozenset(get_axis_env().explicit_mesh_axis_names) & set(mesh.axis_names))
    if mapped:
        raise ValueError(
            f"{op}: jax.vmap maps over arrays that are sharded over the explicit mesh axis "
            f"{mapped[0]!r}. Make that axis automatic (AxisType.Auto), and map with "
            f"spmd_axis_name={mapped[0]!r}."
        )


def can_check_varying() -> bool:
    """Whether this package's `shard_map` may track the axes over which arrays vary (`check_vma`).

    False inside a `shard_map` that does not: arrays would begin to vary over its axes, and their
    cotangents would not. False with `mapped_axes`: JAX makes arrays vary over them but does not
    show it. Then neither JAX's operations nor ours cast the other operands, and batched bodies of
    loops and branches keep their previous types.
    """
    around = jax.sharding.get_abstract_mesh().manual_axes
    is_checked = not around or bool(varying_axes(jax.lax.axis_index(around[0])))
    return is_checked and not mapped_axes()
