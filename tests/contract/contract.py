"""An operation as a `Case`, the contexts in which a program calls it, and comparisons of results.

`operations.py` has the cases, and `test_contract.py` the properties, each written once for all
cases. The cases also run between processes (`tests/processes/suite.py`) and on GPUs (`tests/gpu`).
"""

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from on_mesh import AXIS

DATA = "data"  # an axis beside the ranks
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large a case is: ranks, tokens of each, batch rows."""

    ranks: int = 4
    tokens: int = 6
    batch: int = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation with the arrays of all ranks.

    Attributes:
      name: of the case.
      functions: the public functions that it calls; run-time errors name the first. Arrays have the
        names of their parameters.
      call: from arrays by name to results by name; its keywords are those of the operation.
      oracle: the same in NumPy, and a function from cotangents to gradients, both by name.
      draw: makes the arrays, float64 and int32, for a generator and sizes.
      specs: the dimensions over the ranks (`AXIS`), and over an axis beside them (`DATA`); or a
        function from the array to its specs.
      results: the same of results.
      ids: arrays of integers that may have any width; "segment_ids" names documents, by any
        integers.
      has_batch: arrays are [B, T, ...], and the call names the axes of B and of heads.
      is_local: the operation knows no ranks.
      only_on_ranks: it has no form for global arrays.
      unlike: properties that this case does not have, with the reason.
    """

    name: str
    functions: tuple[Callable[..., Any], ...]
    call: Callable[..., Any]
    oracle: Callable[..., Any]
    draw: Callable[[np.random.Generator, Sizes], Any]
    specs: Any
    results: Any
    ids: tuple[str, ...] = ()
    has_batch: bool = False
    is_local: bool = False
    only_on_ranks: bool = False
    unlike: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        assert self.unlike.keys() <= {"annotations", "bits", "nested", "nothing"}, self.unlike

    def __str__(self):
        return self.name

    def arrays(self, dtype, *, seed=0, ids="int32", **sizes) -> Arrays:
        """Returns arrays of a dtype; ids of any width are large where it allows that."""
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        drawn = self.draw(rng, Sizes(**sizes))
        cast = lambda x: x.astype(jnp.dtype(dtype)) if x.dtype == np.float64 else x
        arrays = {name: jax.tree.map(cast, x) for name, x in drawn.items()}
        for name in self.ids:
            least = 0 if ids.startswith("u") else -1
            arrays[name] = np.maximum(arrays[name], least).astype(ids)
            if name == "segment_ids" and arrays[name].itemsize == 8:  # all are 0 in 32 bits
                arrays[name] <<= 33
        return arrays

    def expected(self, arrays, cotangents=None) -> tuple[Arrays, Arrays, Arrays]:
        """Returns results, gradients and the cotangents, drawn and in the dtype of the arrays."""
        floats, _ = split(arrays)
        dtype = jax.tree.leaves(floats)[0].dtype
        wide = {name: jax.tree.map(_widened, x) for name, x in arrays.items()}
        results, pull = self.oracle(wide)
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        if cotangents is None:
            draw = lambda x: rng.normal(size=x.shape).astype(dtype)
            cotangents = {name: draw(x) for name, x in results.items()}
        return results, pull({name: _widened(x) for name, x in cotangents.items()}), cotangents


def _widened(x):
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def split(arrays) -> tuple[Arrays, Arrays]:
    """Returns the arrays that have gradients, and the others."""
    is_float = lambda x: all(jnp.issubdtype(a.dtype, jnp.floating) for a in jax.tree.leaves(x))
    floats = {name: x for name, x in arrays.items() if is_float(x)}
    return floats, {name: x for name, x in arrays.items() if name not in floats}


def mesh_of(num_ranks: int, kinds: Any = AxisType.Auto, *, num_groups: int = 0) -> Mesh:
    """Returns a mesh over shuffled devices: the ranks, and if there are groups, `DATA` before."""
    shape, names = (
        ((num_groups, num_ranks), (DATA, AXIS)) if num_groups else ((num_ranks,), (AXIS,))
    )
    order = np.random.default_rng(num_ranks).permutation(np.prod(shape))
    kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
    return Mesh(np.array(jax.devices())[order].reshape(shape), names, axis_types=kinds)


def restricted(spec: P, axes, lead=()) -> P:
    """Returns a spec of these axes only, of an array with further dimensions before."""
    return P(*lead, *(name if name in axes else None for name in spec))


def specs_of(specs, arrays, axes, lead=()) -> Arrays:
    """Returns the specs over some axes of arrays that have further dimensions before."""
    found = {}
    for name, x in arrays.items():
        spec = specs[name](x) if callable(specs[name]) else specs[name]
        of = lambda spec: restricted(spec, axes, lead)
        found[name] = jax.tree.map(of, spec, is_leaf=lambda x: isinstance(x, P))
    return found


def placed(mesh: Mesh, specs, arrays, lead=()) -> Arrays:
    """Places arrays on a mesh as their specs say."""
    specs = specs_of(specs, arrays, mesh.axis_names, lead)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    place = lambda sharding, x: jax.tree.map(lambda a: jax.device_put(a, sharding), x)
    return jax.tree.map(place, shardings, arrays, is_leaf=lambda x: isinstance(x, NamedSharding))


def on_global_arrays(case: Case, mesh: Mesh | None, **options) -> Callable[[Arrays], Arrays]:
    """The call on global arrays; without a mesh, of the one that is set or the arrays'."""
    if case.is_local:
        return case.call
    if mesh is not None:
        options["mesh"] = mesh
    if case.has_batch:
        is_sharded = mesh is not None and DATA in mesh.axis_names
        options = {"batch_axis": DATA if is_sharded else (), "head_axis": (), **options}
    return partial(case.call, axis_name=AXIS, **options)


def on_ranks(case: Case, mesh: Any, *, check_vma=True, **options) -> Callable[[Arrays], Arrays]:
    """The call of each rank, inside a `shard_map` over the ranks alone."""
    call = case.call if case.is_local else partial(case.call, axis_name=AXIS, **options)
    results = {name: restricted(spec, (AXIS,)) for name, spec in case.results.items()}

    def run(arrays):
        specs = specs_of(case.specs, arrays, (AXIS,))
        return jax.shard_map(
            call, mesh=mesh, in_specs=(specs,), out_specs=results,
            axis_names={AXIS}, check_vma=check_vma,
        )(arrays)  # fmt: skip

    return run


def with_gradients(run) -> Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]:
    """`(floats, others, cotangents) -> (results, gradients)`"""

    def both(floats, others, cotangents):
        floats = jax.tree.map(jnp.asarray, floats)
        results, pull = jax.vjp(lambda floats: run({**floats, **others}), floats)
        return results, pull(jax.tree.map(_sharded_alike, cotangents, results))[0]

    return both


def _sharded_alike(cotangent, result):
    sharding = jax.typeof(result).sharding
    has_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(cotangent, sharding) if has_explicit else cotangent


def check(got, expected, dtype) -> None:
    """Requires equal shapes, the dtype, and values within its tolerance of the largest one."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, want), x in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert x.dtype == dtype, f"{name} is {x.dtype}"
        x = np.asarray(x, np.float64)
        assert x.shape == want.shape, f"{name} is {x.shape}, not {want.shape}"
        atol = TOLERANCE[str(jnp.dtype(dtype))] * max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(x, want, rtol=0, atol=atol, err_msg=name)


def same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        bits = lambda x: np.ascontiguousarray(x).view(np.uint8)
        np.testing.assert_array_equal(bits(x), bits(y), err_msg=jax.tree_util.keystr(path))
