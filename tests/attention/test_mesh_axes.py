"""Which mesh and which of its axes `context_parallel_attention` uses: named, or inferred.

The tests count gathers in compiled programs: devices along an unused axis all compute the same
result, so they are wasted.
"""

import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, collectives_over, mesh_of, permuted_mesh
from sequences import TOLERANCE, Case, dense, draw, relative_errors

from jax_cp_dispatch import Documents, context_parallel_attention, plan_attention
from jax_cp_dispatch.attention import chunk_exchange, ring_exchange
from jax_cp_dispatch.global_call import mesh_axes

T = 24
CASE = Case("ring", 1, T, documents="segments", batch=2, heads=(4, 2))
AXES = ("data", AXIS, "tp")
SHARDED = P("data", AXIS, "tp")
SOME_ALGORITHMS = ["balanced", "hamilton"]  # one that follows a plan, and one that rotates


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(mesh_axes, "_warned", set())


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def mesh_of_kind(kind: Any):
    return permuted_mesh((2, 2, 2), AXES, kind)


def placed(arrays, mesh, spec=SHARDED) -> Any:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def program(segment_ids, **options):
    """`(q, k, v, g) -> (out, dq, dk, dv)`"""
    attend = partial(context_parallel_attention, axis_name=AXIS, segment_ids=segment_ids, **options)

    @jax.jit
    def run(q, k, v, g):
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(g)

    return run


def check(results, operands, case=CASE):
    segment_ids = operands[4]
    got = [np.where((segment_ids > 0)[..., None, None], np.asarray(x), 0) for x in results]
    errors = relative_errors(got, dense(case, operands))
    assert max(errors.values()) <= TOLERANCE["float32"], errors


def spec_of(array):
    """Of an array, or of its type."""
    spec = tuple(array.sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


# ---- Inferred axes.


@pytest.mark.parametrize(
    "algorithm, is_set", list(zip(SOME_ALGORITHMS, (True, False), strict=True))
)
@pytest.mark.usefixtures("no_warning")
def test_explicit_axes_are_read_from_types(algorithm, is_set):
    mesh = mesh_of_kind(AxisType.Explicit)
    operands = draw(CASE)
    arrays = placed(operands[:4], mesh)
    run = program(operands[4], algorithm=algorithm)
    if is_set:
        with jax.set_mesh(mesh):
            compiled = run.lower(*arrays).compile()
            results = compiled(*arrays)
    else:
        compiled = run.lower(*arrays).compile()
        results = compiled(*arrays)
    assert collectives_over(compiled, mesh, "data") == collectives_over(compiled, mesh, "tp") == []
    assert all(spec_of(x) == ("data", AXIS, "tp", None) for x in results)
    check(results, operands)


@pytest.mark.parametrize("algorithm, kind", list(zip(SOME_ALGORITHMS, AxisType, strict=False)))
@pytest.mark.usefixtures("no_warning")
def test_all_axes_are_read_from_placed_arrays(algorithm, kind):
    mesh = mesh_of_kind(kind)
    operands = draw(CASE)
    q, k, v = placed(operands[:3], mesh)
    options = {"axis_name": AXIS, "algorithm": algorithm, "segment_ids": operands[4]}
    out = context_parallel_attention(q, k, v, **options)
    assert spec_of(out)[:3] == ("data", AXIS, "tp")
    want = dense(CASE, operands)[0]
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def test_axes_are_also_read_from_keys():
    mesh = mesh_of_kind(AxisType.Explicit)
    operands = draw(CASE)
    q, k, v = operands[:3]
    options: Any = {"axis_name": AXIS, "algorithm": "ring", "segment_ids": operands[4]}
    attend = partial(context_parallel_attention, **options)
    (out,) = jax.make_jaxpr(attend)(q, *placed((k, v), mesh)).out_avals
    assert spec_of(out)[:3] == ("data", AXIS, "tp")


@pytest.mark.usefixtures("no_warning")
def test_named_axes_override_inference():
    """`()` means no axis, however the arrays are sharded."""
    mesh = mesh_of_kind(AxisType.Explicit)
    operands = draw(CASE)
    q, k, v = placed(operands[:3], mesh)
    options: Any = {"axis_name": AXIS, "algorithm": "ring", "segment_ids": operands[4]}
    for batch, heads in (((), "tp"), (["data"], ())):
        named: Any = {"batch_axis": batch, "head_axis": heads, **options}
        (out,) = jax.make_jaxpr(partial(context_parallel_attention, **named))(q, k, v).out_avals
        assert spec_of(out)[:3] == ("data" if batch else None, AXIS, "tp" if heads else None)


# ---- Axes that cannot be inferred.


def test_automatic_axes_in_a_program_cause_one_warning():
    mesh = mesh_of_kind(AxisType.Auto)
    operands = draw(CASE)
    arrays = placed(operands[:3], mesh)
    options: Any = {"axis_name": AXIS, "algorithm": "ring", "segment_ids": operands[4]}
    attend = partial(context_parallel_attention, mesh=mesh, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        jax.make_jaxpr(lambda *qkv: attend(*qkv))(*arrays)
        gathering = jax.jit(lambda *qkv: attend(*qkv)).lower(*arrays).compile()
    messages = [str(x.message) for x in warned if issubclass(x.category, UserWarning)]
    assert len(messages) == 2
    batch, heads = messages
    assert (
        "batch_axis is not given" in batch and "B = 2" in batch and "axes ('data', 'tp')" in batch
    )
    assert "Pass as batch_axis the axis over which B is sharded, or batch_axis=()" in batch
    assert "head_axis is not given" in heads and "N = 4" in heads
    assert {"all-gather"} <= set(collectives_over(gathering, mesh, "data"))
    want = dense(CASE, operands)[0]
    np.testing.assert_allclose(gathering(*arrays), want, rtol=1e-5, atol=1e-5)


def test_a_mesh_with_explicit_axes_is_set():
    """Otherwise JAX cannot transpose the linear layer after attention; the warning names both."""
    mesh, x = mesh_of_kind(AxisType.Explicit), np.ones((2, T, 4, 8), np.float32)

    options: dict[str, Any] = {"algorithm": "ring", "batch_axis": (), "head_axis": ()}

    def gradient(w, **given):
        def loss(w):
            q = x @ w
            out = context_parallel_attention(q, q, q, axis_name=AXIS, **options, **given)
            return (out @ w).sum()

        return jax.eval_shape(jax.grad(loss), w)

    w = np.eye(8, dtype=np.float32)
    with jax.set_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert gradient(w).shape == w.shape
    expected = pytest.warns(
        UserWarning, match=r"explicit axes but is not set.*jax.set_mesh\(mesh\)"
    )
    with pytest.raises(Exception, match="Contracting dimensions are sharded"), expected as warned:
        gradient(w, mesh=mesh)
    assert warned[0].filename == __file__


@pytest.mark.usefixtures("no_warning")
def test_named_axes_gather_nothing_and_cause_no_warning():
    mesh = mesh_of_kind(AxisType.Auto)
    operands = draw(CASE)
    arrays = placed(operands[:4], mesh)
    options: Any = {"mesh": mesh, "algorithm": "ring"}
    run = program(operands[4], batch_axis="data", head_axis="tp", **options)
    named = run.lower(*arrays).compile()
    assert collectives_over(named, mesh, "data") == collectives_over(named, mesh, "tp") == []
    assert all(spec_of(x)[:3] == ("data", AXIS, "tp") for x in named(*arrays))
    jax.eval_shape(program(operands[4], batch_axis=(), head_axis=(), **options), *arrays)


@pytest.mark.usefixtures("no_warning")
def test_no_warning_without_a_possible_cost():
    """Axes that are used, axes of one device, and sizes that an axis cannot split."""
    for shape, names in (((4,), (AXIS,)), ((1, 2), ("data", AXIS)), ((3, 2), ("data", AXIS))):
        mesh = permuted_mesh(shape, names)
        x = jax.ShapeDtypeStruct((2, T, 4, 8), np.float32)
        options: Any = {"axis_name": AXIS, "algorithm": "ring", "mesh": mesh}
        jax.eval_shape(partial(context_parallel_attention, **options), x, x, x)


def planned(segment_ids):
    return Documents(segment_ids).with_plan(plan_attention(segment_ids, world_size=2))


@pytest.mark.usefixtures("unchecked_types")
def test_a_plan_is_for_the_whole_batch():
    """It is rejected if the batch is sharded; segment ids are planned by each group."""
    mesh = mesh_of_kind(AxisType.Explicit)
    operands = draw(CASE)
    documents = planned(operands[4])
    q, k, v = placed(operands[:3], mesh)
    options: Any = {"axis_name": AXIS, "algorithm": "balanced"}
    with pytest.warns(UserWarning, match=r"the plan is for all rows.*Pass stack_plans"):
        out = context_parallel_attention(q, k, v, documents=documents, **options)
    np.testing.assert_allclose(out, dense(CASE, operands)[0], rtol=1e-5, atol=1e-5)


def test_a_plan_in_a_program_whose_batch_may_be_sharded():
    """Types do not show automatic axes: a warning states the cost, except for `()`."""
    mesh = mesh_of_kind(AxisType.Auto)
    documents = planned(draw(CASE)[4])
    x = jax.ShapeDtypeStruct((2, T, 4, 8), np.float32)
    options: Any = {"axis_name": AXIS, "algorithm": "balanced", "mesh": mesh, "head_axis": "tp"}
    attend = partial(context_parallel_attention, documents=documents, **options)
    with pytest.warns(UserWarning, match=r"the plan is for all rows.*\('data',\).*batch_axis=\(\)"):
        jax.eval_shape(attend, x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mesh_axes._warned.clear()
        jax.eval_shape(partial(attend, batch_axis=()), x, x, x)


def test_a_plan_of_the_whole_batch_is_rejected_for_groups():
    operands = draw(CASE)
    documents = planned(operands[4])
    options: Any = {"axis_name": AXIS, "algorithm": "balanced", "mesh": mesh_of_kind(AxisType.Auto)}
    with pytest.raises(
        ValueError, match=r"single plan, but .*\('data',\) splits the batch into 2 .*stack_plans"
    ):
        context_parallel_attention(*operands[:3], documents=documents, batch_axis="data", **options)


# ---- Fewer KV heads than devices.


@pytest.mark.parametrize(
    "heads, algorithm, kind",
    [((4, 1), "balanced", AxisType.Explicit), ((12, 6), "zigzag", AxisType.Auto)],
)
def test_kv_heads_are_repeated(heads, algorithm, kind):
    """4 devices: those whose query heads read a KV head hold a copy; gradients are summed."""
    case = Case("ring", 1, T, documents="segments", heads=heads)
    mesh = permuted_mesh((2, 4), (AXIS, "tp"), kind)
    operands = draw(case)
    q, k, v, g = operands[:4]
    q, g = placed((q, g), mesh, P(None, AXIS, "tp"))
    k, v = placed((k, v), mesh, P(None, AXIS))
    run = program(operands[4], algorithm=algorithm, mesh=mesh, head_axis="tp")
    results = run(q, k, v, g)
    assert spec_of(results[0])[:3] == (None, AXIS, "tp")
    check(results, operands, case)


# ---- Invalid calls.


Q = np.ones((1, 8, 3, 8), np.float32)


@pytest.mark.parametrize(
    "axis, message",
    [
        ({"batch_axis": "data"}, r"B is 1 but batch_axis \('data',\) has 2 .*Pass batch_axis=\(\)"),
        ({"head_axis": "data"}, r"N is 3 but head_axis \('data',\) has 2 .*Pass head_axis=\(\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_sizes_that_devices_do_not_divide(axis, message):
    mesh = permuted_mesh((2, 2), ("data", AXIS))
    with pytest.raises(ValueError, match=f"context_parallel_attention: {message}"):
        context_parallel_attention(Q, Q, Q, mesh=mesh, axis_name=AXIS, algorithm="ring", **axis)


@pytest.mark.usefixtures("unchecked_types")
def test_no_mesh():
    with pytest.raises(ValueError, match=r"no mesh with axis 'cp' was found. Pass mesh=, call it"):
        context_parallel_attention(Q, Q, Q, axis_name=AXIS, algorithm="ring")


@pytest.mark.usefixtures("unchecked_types")
def test_some_axes_of_the_ranks_are_manual():
    mesh = permuted_mesh((2, 2), ("data", AXIS))
    attend = partial(context_parallel_attention, axis_name=("data", AXIS), algorithm="ring")
    rows = P(None, AXIS)
    run = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={AXIS})
    with pytest.raises(
        ValueError, match=r"only \('cp',\) of axis_name \('data', 'cp'\) are manual"
    ):
        jax.jit(run)(Q, Q, Q)


@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "no mesh"])
@pytest.mark.parametrize(
    "op, call, instead",
    [
        ("ring_exchange", lambda x, *_, **axis: ring_exchange(x, **axis), "use dispatch"),
        (
            "chunk_exchange",
            lambda x, *_, **axis: chunk_exchange(x, [[-1, 0], [0, -1]], [[-1, 0], [0, -1]], **axis),
            "use dispatch",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_outside_shard_map(op, call, instead, is_set):
    message = f"^{op}: axis_name 'cp' is not manual here.*inside jax.shard_map over 'cp'.*{instead}"
    run = jax.jit(partial(call, axis_name=AXIS))
    with pytest.raises(ValueError, match=message):
        if is_set:
            with jax.set_mesh(mesh_of(2)):
                run(Q, Q, Q)
        else:
            run(Q, Q, Q)
