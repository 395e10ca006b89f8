"""What holds for every operation: each property once, for all cases.

A program takes seconds to compile, so one program shows several properties; the docstring of a test
lists them.
"""

import dataclasses
import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
    DATA,
    check,
    mesh_of,
    on_global_arrays,
    on_ranks,
    placed,
    same_bits,
    split,
    with_gradients,
)  # fmt: skip
from jax.sharding import AxisType, PartitionSpec as P
from on_mesh import AXIS
from operations import CASES

each_case = pytest.mark.parametrize("case", CASES, ids=str)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.fixture(autouse=True)
def strict():
    """JAX promotes neither dtypes nor ranks, as in its own tests."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def on_arrays(case, mesh, **options):
    run = on_ranks if case.only_on_ranks else on_global_arrays
    return run(case, mesh, **options)


@each_case
def test_values_and_gradients(case):
    """In float64, donated where a result fits, twice with the same bits, by XLA's collectives too.

    NaN in padding reaches nothing.

    Inside `shard_map` over one of two axes, of which the other is explicit.
    """
    arrays = case.arrays("float64", ids="int64")
    *expected, cotangents = case.expected(arrays)
    floats, others = split(hide_padding(arrays))
    mesh, found = mesh_of(4, (EXPLICIT, AUTO), num_groups=2), []
    with jax.enable_x64(True), jax.set_mesh(mesh):
        fixed = placed(mesh, case.specs, others), placed(mesh, case.results, cotangents)
        for options in [{}] if case.is_local else [{}, {"implementation": "xla"}]:
            run = with_gradients(on_ranks(case, mesh, check_vma=False, **options))
            program = jax.jit(run, donate_argnums=0)
            for _ in range(2 if not options else 1):
                # What shares memory with NumPy cannot be donated.
                given = jax.tree.map(jnp.copy, placed(mesh, case.specs, floats))
                results = program(given, *fixed)
                found.append(jax.tree.map(np.asarray, results))
            check(found[-1], tuple(expected), "float64")
    same_bits(*found[:2])
    if "bits" not in case.unlike:
        same_bits(found[0], found[-1])


def hide_padding(arrays):
    """Returns arrays of tokens with NaN in padding; a user's function expands latents of any."""
    ids = arrays.get("segment_ids")
    if ids is None:
        return arrays

    def hide(x):
        if x.shape[:2] != ids.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return np.where((ids > 0).reshape(*ids.shape, *[1] * (x.ndim - 2)), x, np.nan)

    return {name: x if name == "latents" else hide(x) for name, x in arrays.items()}


@each_case
def test_constants_inside_jit(case):
    """On explicit axes of the mesh that is set, while JAX looks for NaN."""
    arrays = case.arrays("float32", ids="uint16")
    results, gradients, cotangents = case.expected(arrays)
    kind = AUTO if case.only_on_ranks else EXPLICIT  # `shard_map` does not reshard
    mesh = mesh_of(4, kind)
    run = with_gradients(on_arrays(case, mesh if case.only_on_ranks else None))
    with jax.set_mesh(mesh), jax.debug_nans(True):
        got = jax.jit(lambda: run(*split(arrays), cotangents))()
    check(got, (results, gradients), "float32")


@each_case
def test_nested(case):
    """In a `shard_map` over groups, in a loop that computes steps again, mapped, in bfloat16."""
    if "nested" in case.unlike:
        pytest.skip(case.unlike["nested"])
    batches = [case.arrays("bfloat16", seed=seed, ids="int8") for seed in range(4)]
    stack = lambda *x: jax.tree.map(lambda *x: np.stack(x), *x)
    *expected, cotangents = map(stack, *(case.expected(arrays) for arrays in batches))
    run = jax.vmap(with_gradients(jax.checkpoint(on_arrays(case, None))))

    def of_group(*operands):
        step = lambda _, x: (None, run(*x))
        steps = jax.tree.map(lambda x: x[None], operands)
        return jax.tree.map(lambda x: x[0], jax.lax.scan(step, None, steps)[1])

    with jax.set_mesh(mesh_of(4, num_groups=2)):
        mapped = jax.shard_map(of_group, in_specs=P(DATA), out_specs=P(DATA), axis_names={DATA})
        got = jax.jit(mapped)(*split(stack(*batches)), cotangents)
    check(got, tuple(expected), "bfloat16")


@each_case
def test_one_rank(case):
    """Without jit; and gradients inside `shard_map`, which checks over what arrays vary."""
    arrays, mesh = case.arrays("float32", ranks=1, ids="uint64"), mesh_of(1)
    *expected, cotangents = case.expected(arrays)
    with jax.enable_x64(True):
        check(on_arrays(case, mesh)(arrays), expected[0], "float32")
        run = jax.jit(with_gradients(on_ranks(case, mesh)))
        check(run(*split(arrays), cotangents), tuple(expected), "float32")


@each_case
def test_nothing(case):
    """No tokens; traced, no batch rows."""
    run = jax.jit(with_gradients(on_arrays(case, mesh_of(4))))
    if "nothing" in case.unlike:
        pytest.skip(case.unlike["nothing"])
    arrays = case.arrays("float32", tokens=0)
    *expected, cotangents = case.expected(arrays)
    check(run(*split(arrays), cotangents), tuple(expected), "float32")
    if case.has_batch:
        arrays = case.arrays("float32", batch=0)
        *expected, cotangents = case.expected(arrays)
        shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
        assert shapes(run.eval_shape(*split(arrays), cotangents)) == shapes(tuple(expected))


@each_case
def test_a_missing_rank_is_named(case):
    """A rank that takes another branch."""
    if case.is_local:
        pytest.skip("it knows no ranks")
    arrays, mesh = case.arrays("float32"), mesh_of(4)

    def call(arrays, **where):
        present = partial(case.call, deadline=2.0, **where)
        absent = lambda x: jax.tree.map(jnp.zeros_like, jax.eval_shape(present, x))
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 2, absent, present, arrays)

    run = on_ranks(dataclasses.replace(case, call=call), mesh, check_vma=False)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"{case.functions[0].__name__}.*missing ranks \[2\]"
    ):
        jax.block_until_ready(jax.jit(run)(placed(mesh, case.specs, arrays)))


@each_case
def test_dtypes(case):
    """Traced: results and gradients of float16; ids of the widths that no test above has."""
    run = on_arrays(case, mesh_of(4))
    with jax.enable_x64(True):
        arrays = case.arrays("float16")
        traced = jax.eval_shape(with_gradients(run), *split(arrays), case.expected(arrays)[2])
        assert {x.dtype for x in jax.tree.leaves(traced)} == {jnp.dtype("float16")}
        for ids in ("int16", "uint32") if case.ids else ():
            traced = jax.eval_shape(run, case.arrays("float32", ids=ids))
            assert {x.dtype for x in jax.tree.leaves(traced)} == {jnp.dtype("float32")}


@each_case
@pytest.mark.usefixtures("unchecked_types")
def test_what_annotations_exclude_is_refused(case):
    """Traced: another kind of dtype, a dimension more or less; the error names the function."""
    run = on_arrays(case, mesh_of(4))
    arrays = case.arrays("float32")
    names = "|".join(function.__name__ for function in case.functions)
    wrongs = list(wrong_arguments(case, arrays))
    assert bool(wrongs) != ("annotations" in case.unlike)
    for name, wrong in wrongs:
        with pytest.raises((TypeError, ValueError)) as error:
            jax.eval_shape(run, {**arrays, name: wrong})
        assert re.match(f"({names}): ", str(error.value)), (name, wrong.shape, str(error.value))


def wrong_arguments(case, arrays):
    """Yields names and arrays that the annotations of parameters exclude; pytrees take any."""
    for function in case.functions:
        for name, parameter in inspect.signature(function).parameters.items():
            annotation = str(parameter.annotation)
            array = re.search(r"\b(Float|Int|Integer|Int32)\[.*?['\"]([^'\"]*)['\"]\]", annotation)
            if name not in arrays or array is None or "PyTree" in annotation:
                continue
            kind, dims = array.groups()
            x = arrays[name]
            yield name, x.astype(np.int32 if kind == "Float" else np.float32)
            if "*" not in dims and "..." not in dims:
                yield name, x[..., None]
                if x.ndim > 1:  # `shard_map` refuses scalars itself
                    yield name, x[0]
