"""Programs that are stored: exported, read from the cache on disk, serialized.

Forward passes only: derivatives are the same operations.
"""

import os
import subprocess
import sys

import jax
import pytest
from contract import check, mesh_of, on_global_arrays, on_ranks, placed
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import AbstractMesh, NamedSharding
from on_mesh import AXIS
from operations import CASES

each_case = pytest.mark.parametrize("case", CASES, ids=str)
# Cheap to start; methods of GEMMs differ in nothing but an attribute.
STARTED = ("ring", "dispatch", "combine", "dispatch_qkv", "dispatch_start")
STARTED += ("all_gather_matmul none", "all_gather_matmul ring")
STARTED += ("matmul_reduce_scatter none", "matmul_reduce_scatter ring")
# Exported like the others, but not run: they take long to compile, and have no other calls.
LONG = ("balanced", "zigzag", "halo", "hamilton", "gated_delta_rule", "linear_attention")
LONG += ("causal_conv", "recurrence", "linear_recurrence")
OF_THIS_PACKAGE = [
    export.DisabledSafetyCheck.custom_call(f"jax_cp_dispatch.{name}")
    for name in ("dispatch", "combine", "gemm", "grouped_gemm")
]


def exported(run, operands):
    return export.export(jax.jit(run), disabled_checks=OF_THIS_PACKAGE)(operands)


@each_case
def test_exported(case):
    """The devices are those of the arrays."""
    mesh = mesh_of(4)
    arrays = case.arrays("float32")
    operands = placed(mesh, case.specs, arrays)
    program = exported(on_ranks(case, mesh.abstract_mesh), operands)
    expected = case.expected(arrays)[0]
    found = jax.tree.unflatten(program.out_tree, [x.shape for x in program.out_avals])
    assert found == {name: x.shape for name, x in expected.items()}
    if case.name not in LONG:
        check(jax.jit(program.call)(operands), expected, "float32")


def test_what_cannot_be_exported():
    """As docs/limits.md says."""
    (case,) = (case for case in CASES if case.name == "dispatch")
    mesh = mesh_of(4)
    operands = placed(mesh, case.specs, case.arrays("float32"))
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility"):
        export.export(jax.jit(on_ranks(case, mesh)))(operands)
    with pytest.raises(NotImplementedError):
        exported(on_global_arrays(case, mesh), operands)


def test_without_any_device_only_gemms_inside_shard_map_can_be_lowered():
    multiply, move = (
        next(case for case in CASES if case.name == name)
        for name in ("all_gather_matmul ring", "dispatch")
    )
    mesh = mesh_of(4)

    def export_without_devices(case, operands):
        like = lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh.abstract_mesh, x.sharding.spec)
        )
        return exported(on_ranks(case, AbstractMesh((4,), (AXIS,))), jax.tree.map(like, operands))

    arrays = multiply.arrays("float32")
    operands = placed(mesh, multiply.specs, arrays)
    program = export_without_devices(multiply, operands)
    check(jax.jit(program.call)(operands), multiply.expected(arrays)[0], "float32")
    with pytest.raises(ValueError, match="primitives that require devices"):
        export_without_devices(move, placed(mesh, move.specs, move.arrays("float32")))


def start(*, serializes=False):
    """Computes results of global arrays; returns how many programs the cache had, and had not."""
    seen = []
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.split("/")[-1]))
    mesh, counts = mesh_of(4), []
    for case in (case for case in CASES if case.name in STARTED):
        arrays = case.arrays("float32")
        operands = placed(mesh, case.specs, arrays)
        program = jax.jit(on_global_arrays(case, mesh)).lower(operands)
        seen.clear()
        program = program.compile()
        counts.append([seen.count("cache_hits"), seen.count("cache_misses")])
        if serializes:
            program = serialize_executable.deserialize_and_load(
                *serialize_executable.serialize(program), execution_devices=mesh.devices.tolist()
            )
        check(program(operands), case.expected(arrays)[0], "float32")
    return [sum(count) for count in zip(*counts, strict=True)]


def start_again(folder, *arguments, **environment):
    """Starts another process; returns its counts."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "JAX_NUM_CPU_DEVICES": "4",
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **environment,
        },
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_the_second_start_compiles_nothing(tmp_path):
    """Unless the process differs in what the parts of the devices read from it.

    Without their addresses in the keys of the cache, too; equal shapes do not suffice.
    """
    num_programs = len(STARTED)
    assert start_again(tmp_path, "serialize") == [0, num_programs]
    assert start_again(tmp_path) == [num_programs, 0]
    other = {
        "JAX_CP_DISPATCH_DEADLINE": "7",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }
    assert start_again(tmp_path, **other) == [0, num_programs]


if __name__ == "__main__":
    print(*start(serializes=sys.argv[1:] == ["serialize"]))
