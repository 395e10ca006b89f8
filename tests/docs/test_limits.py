"""The limits that the README and docs state: what does not work, and what works instead.

Limits of one topic (threads, dtypes of sums, deadlines, caches) are tested in its own file.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from movement_oracle import dispatched, random_plan
from on_mesh import AXIS, mesh_of, permuted_mesh

import jax_cp_dispatch as cpd

ROOT = Path(__file__).parents[2]
W, T, F = 4, 8, 6
PLAN = random_plan(np.random.default_rng(0), W, 5, T, 2)
METADATA = cpd.Metadata(**PLAN)
CAPACITY = int(PLAN["num_total_recv_tokens"].max())
X = np.random.default_rng(1).normal(size=(W * T, F)).astype(np.float32)
SENT = dispatched(PLAN, X.reshape(W, T, F), CAPACITY).reshape(-1, F)

send = partial(cpd.dispatch, axis_name=AXIS, capacity=CAPACITY)


def compiled(fn, *operands) -> Any:
    return jax.jit(fn).lower(*operands).compile()


ROWS: Any = P(AXIS)


def inside(fn, mesh, in_specs=ROWS, out_specs=ROWS, **options):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


# ---- Transports.


@pytest.mark.parametrize("implementation, gathers", [("in_process", False), ("xla", True)])
def test_only_xlas_collectives_gather_the_rows_of_all_ranks(implementation, gathers):
    """They also cannot reject an invalid plan: see `test_implementations.py`."""
    move = inside(partial(send, implementation=implementation), mesh_of(W))
    text = compiled(move, X, METADATA).as_text()
    assert ("all-gather" in text) is gathers
    np.testing.assert_array_equal(jax.jit(move)(X, METADATA), SENT)


# ---- Meshes.


@pytest.mark.parametrize(
    "where, kind, gathers",
    [("partly manual", "Auto", True), ("jit", "Auto", False),
     ("jit", "Explicit", False)],
)  # fmt: skip
def test_automatic_axes_of_a_partly_manual_shard_map_are_gathered(where, kind, gathers):
    mesh = permuted_mesh((W, 2), (AXIS, "tp"), AxisType[kind])
    x = jax.device_put(X, NamedSharding(mesh, P(AXIS, "tp")))
    move = send if where == "jit" else inside(send, mesh, axis_names={AXIS})
    with jax.set_mesh(mesh):
        program = compiled(move, x, METADATA)
        np.testing.assert_array_equal(program(x, METADATA), SENT)
    assert ("all-gather" in program.as_text()) is gathers
    assert (program.output_shardings.spec == P(AXIS, "tp")) is not gathers


def test_explicit_axes_need_set_mesh_for_unplaced_arguments_under_jit():
    mesh = permuted_mesh((W, 2), (AXIS, "tp"), AxisType.Explicit)
    with pytest.raises(ValueError, match=r"jax.set_mesh"):
        jax.jit(partial(send, mesh=mesh))(X, METADATA)
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(send)(X, METADATA), SENT)
    np.testing.assert_array_equal(send(X, METADATA, mesh=mesh), SENT)  # without jit
    placed = jax.device_put(X, NamedSharding(mesh, P(AXIS)))
    np.testing.assert_array_equal(jax.jit(send)(placed, METADATA), SENT)


# ---- Export, and meshes without devices.


def exported(fn, *operands):
    names = ("dispatch", "combine", "gemm")
    checks = [export.DisabledSafetyCheck.custom_call(f"jax_cp_dispatch.{x}") for x in names]
    return export.export(jax.jit(fn), platforms=("cpu",), disabled_checks=checks)(*operands)


def on_devices(mesh, *operands_and_specs):
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in operands_and_specs]


def without_devices(mesh, *operands_and_specs):
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in operands_and_specs
    ]


def test_export_takes_calls_inside_shard_map_with_our_custom_calls_named():
    mesh = mesh_of(W)
    (x,) = on_devices(mesh, (X, P(AXIS)))
    metadata = jax.device_put(METADATA, NamedSharding(mesh, P(AXIS)))
    for around in (mesh, mesh.abstract_mesh):  # placed arguments determine the devices
        again = exported(inside(send, around), x, metadata)
        np.testing.assert_array_equal(jax.jit(again.call)(x, metadata), SENT)
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility"):
        export.export(jax.jit(inside(send, mesh)))(x, metadata)
    with pytest.raises(NotImplementedError):  # around the arrays of all ranks
        exported(send, x, metadata)


@pytest.mark.parametrize("algorithm", ["balanced", "zigzag"])
def test_attention_can_be_exported(algorithm):
    mesh = mesh_of(W)
    (q,) = on_devices(mesh, (np.random.default_rng(2).normal(size=(1, 32, 2, 8)), P(None, AXIS)))
    for around in (mesh, mesh.abstract_mesh):
        attend = partial(
            cpd.context_parallel_attention, axis_name=AXIS, mesh=around, algorithm=algorithm
        )
        again = exported(lambda q, attend=attend: attend(q, q, q), q)
        np.testing.assert_array_equal(jax.jit(again.call)(q), jax.jit(attend)(q, q, q))


def test_without_any_device_only_gemms_inside_shard_map_can_be_lowered():
    mesh = AbstractMesh((W,), (AXIS,))
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(16, 8)).astype("f"), rng.normal(size=(8, 16)).astype("f")
    specs = P(AXIS), P(None, AXIS)
    multiply = inside(
        partial(cpd.all_gather_matmul, axis_name=AXIS, method="ring"), mesh, specs, P(None, AXIS)
    )
    operands = list(zip((x, w), specs, strict=True))
    again = exported(multiply, *without_devices(mesh, *operands))
    product = jax.jit(again.call)(*on_devices(mesh_of(W), *operands))
    np.testing.assert_allclose(product, x @ w, rtol=1e-5, atol=1e-5)
    (x_of_ranks,) = without_devices(mesh, (X, P(AXIS)))
    with pytest.raises(ValueError, match="primitives that require devices"):
        exported(inside(lambda x: send(x, METADATA), mesh), x_of_ranks)


# ---- After an error.

ONE_GROUP_FAILS = """
    import dataclasses, functools, jax, numpy as np
    from jax.sharding import PartitionSpec as P
    import jax_cp_dispatch as cpd
    from jax_cp_dispatch.cpu_devices import start_cpu_devices

    start_cpu_devices(4)
    mesh = jax.make_mesh((2, 2), ("data", "cp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan, _ = cpd.compute_metadata(np.ones((2, 1), "i"), np.array([[1], [0]], "i"))
    wrong = dataclasses.replace(plan, dst_offset=plan.dst_offset + 99)
    move = functools.partial(cpd.dispatch, axis_name="cp", capacity=1)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(("data", "cp")), out_specs=P("cp"), check_vma=False
    )
    def step(x):
        y = jax.lax.cond(jax.lax.axis_index("data") == 0, lambda: move(x, wrong), lambda: x)
        return jax.lax.psum(y, "data")  # where the other group waits, with no exchange to come

    print(jax.block_until_ready(step(np.ones((4, 2), "f"))))
"""


def test_a_group_that_waits_in_a_collective_for_a_failed_group_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ONE_GROUP_FAILS)],
        env=os.environ | {"XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=2"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert "Termination timeout" in done.stderr


# ---- Rows.


def test_combine_sums_no_booleans_and_elements_have_whole_bytes(unchecked_types):
    with pytest.raises(TypeError, match="combine: cannot sum bool"):
        jax.eval_shape(
            partial(cpd.combine, axis_name=AXIS, num_tokens=T, mesh=mesh_of(W)),
            jnp.zeros((W * CAPACITY, F), bool), METADATA,
        )  # fmt: skip
    with pytest.raises(TypeError, match="less than a byte per element"):
        jax.eval_shape(partial(send, mesh=mesh_of(W)), jnp.zeros((W * T, F), "int4"), METADATA)


def test_plans_of_empty_results_are_not_checked():
    wrong = cpd.Metadata(**{**PLAN, "dst_offset": PLAN["dst_offset"] + 99})
    move = jax.jit(partial(send, mesh=mesh_of(W)))
    assert jax.block_until_ready(move(X[:, :0], wrong)).shape == (W * CAPACITY, 0)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="dispatch over axis 'cp'"):
        jax.block_until_ready(move(X, wrong))


# ---- Attention and its plans.


@pytest.mark.parametrize("algorithm", ["ring", "zigzag", "hamilton"])
def test_rotating_attention_moves_all_keys_whatever_the_mask(algorithm):
    q = jnp.zeros((1, 32, 2, 8))
    attend = partial(
        cpd.context_parallel_attention, axis_name=AXIS, mesh=mesh_of(W), algorithm=algorithm
    )

    def exchanges(**mask):
        text = jax.jit(lambda q: attend(q, q, q, **mask)).lower(q).as_text()
        moved = re.findall(r"@jax_cp_dispatch\.dispatch\(.*-> (.*)", text)
        return sorted(kind for kind in moved if "f32" in kind)  # the others gather segment ids

    assert exchanges()
    documents = np.repeat(np.arange(1, 9), 4)[None]
    assert (
        exchanges(segment_ids=documents)
        == exchanges(mask=cpd.masks.SlidingWindow(2))
        == exchanges()
    )


def test_a_plan_made_inside_jit_reserves_space_for_all_keys_on_every_rank():
    documents = np.repeat(np.arange(1, 17), 64)[None]
    config = cpd.PlanConfig(block=32)
    make = partial(cpd.plan_attention, world_size=W, config=config)
    outside, traced = make(documents), jax.jit(make)(documents)
    rows = documents.size // W
    assert traced.kv_capacity == documents.size and traced.q_capacity == 2 * rows + 32
    assert outside.kv_capacity < traced.kv_capacity and outside.q_capacity < traced.q_capacity


def test_one_long_document_makes_balanced_attention_gather_most_keys():
    tokens, ranks = 8192, 8
    moved = {}
    for name, lengths in {"one": [tokens], "many": [256] * (tokens // 256)}.items():
        ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
        plan = cpd.plan_attention(ids, world_size=ranks)
        moved[name] = plan.num_kv_tokens_moved / ((ranks - 1) * tokens)
    assert moved["one"] > 0.7 and moved["many"] < 0.05


# ---- Overlapped GEMMs.

XG, WG = jnp.ones((16, 8)), jnp.ones((8, 16))


def test_gemms_have_no_forward_mode():
    gather = partial(cpd.all_gather_matmul, axis_name=AXIS, mesh=mesh_of(W), method="ring")
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(gather, (XG, WG), (XG, WG))


def test_gemms_of_global_arrays_take_no_row_counts():
    gather = partial(cpd.all_gather_matmul, axis_name=AXIS, mesh=mesh_of(W), method="ring")
    with pytest.raises(ValueError, match="row_counts"):
        jax.jit(partial(gather, row_counts=(4,) * W))(XG, WG)


def test_columns_and_rows_of_weights_divide_among_the_ranks():
    options = {"axis_name": AXIS, "mesh": mesh_of(W), "method": "ring"}
    with pytest.raises(ValueError, match="all_gather_matmul"):
        cpd.all_gather_matmul(XG, WG[:, :15], **options)
    with pytest.raises(ValueError, match="matmul_reduce_scatter"):
        cpd.matmul_reduce_scatter(XG[:, :7], WG[:7], **options)


def test_scaled_operands_are_not_gathered_again_and_grouped_products_take_no_mxfp8(
    unchecked_types,
):
    mode = cpd.scaling.ScalingMode.MXFP8_1D_SCALING
    x, w = (jnp.ones((64, 64), jnp.bfloat16) for _ in range(2))
    with pytest.raises(ValueError, match="gathered"):
        cpd.all_gather_matmul(
            x, w, axis_name=AXIS, mesh=mesh_of(W), method="ring", scaling_mode=mode,
            gathered="again",
        )  # fmt: skip
    q = cpd.scaling.quantize(x, mode)
    with pytest.raises(ValueError, match="MXFP8"):
        cpd.grouped_gemm(
            q.data, q.data[None], jnp.array([64], jnp.int32), scaling_mode=mode,
            lhs_scale_inv=q.scale_inv, rhs_scale_inv=q.scale_inv[None],
        )  # fmt: skip


# ---- Numbers on the pages.


def test_versions_match_the_package():
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (jax_version,) = re.findall(r'"jax>=([\d.]+)"', project)
    assert f"Python {python} to" in readme and f"jax {jax_version} or newer" in readme


def test_gpu_limits_match_the_sources():
    header = "".join(path.read_text() for path in (ROOT / "csrc" / "kernels").glob("*.h"))
    size = lambda name: re.findall(rf"\b{name} = (\d+)", header)[0]
    page = (ROOT / "docs" / "gpu.md").read_text()
    ranks, plans, arrays = map(size, ("kMaxRanks", "kMaxOperandGroups", "kMaxArrays"))
    assert f"One call supports up to {ranks} ranks, {plans} plans and {arrays} arrays." in page
