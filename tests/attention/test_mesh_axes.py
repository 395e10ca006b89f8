"""Which mesh and which of its axes `context_parallel_attention` uses: named, inferred, or manual.

The tests count gathers in compiled programs: devices along an unused axis all compute the same
result, so they are wasted.
"""

import dataclasses
import re
import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from calls import Call, check, check_qkv, dense_qkv, draw_qkv, with_gradients
from inner import warn_again
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from on_mesh import AXIS, collectives_over, permuted_mesh

import jax_cp_dispatch as cp

T = 24
CUBE = {"data": 2, AXIS: 2, "tp": 2}
SHARDED = P("data", AXIS, "tp")
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
OPERANDS = draw_qkv(0, 2, T)
IDS = OPERANDS[4]


@pytest.fixture(autouse=True)
def nothing_warned_yet():
    warn_again()


@pytest.fixture
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def mesh_of_kind(kind: Any):
    return permuted_mesh((2, 2, 2), tuple(CUBE), kind)


def put(arrays, mesh, spec=SHARDED) -> Any:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


def attention(algorithm: Any = "ring", **options) -> Any:
    options = {"axis_name": AXIS, "segment_ids": IDS, **options}
    return partial(cp.context_parallel_attention, algorithm=algorithm, **options)


def spec_of(array):
    """Of an array, or of its type."""
    spec = tuple(array.sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


# ---- Inferred axes.


@pytest.mark.usefixtures("no_warning")
def test_explicit_axes_are_read_from_types():
    """Of a mesh that is not set; of one that is: tests/contract."""
    mesh = mesh_of_kind(EXPLICIT)
    arrays = put(OPERANDS[:4], mesh)
    compiled = jax.jit(with_gradients(attention())).lower(*arrays).compile()
    results = compiled(*arrays)
    assert collectives_over(compiled, mesh, "data") == collectives_over(compiled, mesh, "tp") == []
    assert all(spec_of(x) == ("data", AXIS, "tp", None) for x in results)
    check_qkv(results, OPERANDS)


@pytest.mark.usefixtures("no_warning")
def test_all_axes_are_read_from_placed_arrays():
    out = attention()(*put(OPERANDS[:3], mesh_of_kind(AUTO)))
    assert spec_of(out)[:3] == ("data", AXIS, "tp")
    check_qkv([out], OPERANDS)


@pytest.mark.usefixtures("no_warning")
def test_keys_also_show_axes_and_named_ones_override_them():
    """`()` means no axis, however the arrays are sharded."""
    q, *kv = OPERANDS[:3]
    kv = put(kv, mesh_of_kind(EXPLICIT))
    for batch, heads in (("data", "tp"), ((), "tp"), (["data"], ())):
        named = {} if batch and heads else {"batch_axis": batch, "head_axis": heads}
        (out,) = jax.make_jaxpr(attention(**named))(q, *kv).out_avals
        assert spec_of(out)[:3] == ("data" if batch else None, AXIS, "tp" if heads else None)


# ---- Axes that cannot be inferred.


def test_automatic_axes_in_a_program_cause_one_warning():
    mesh = mesh_of_kind(AUTO)
    arrays = put(OPERANDS[:3], mesh)
    attend = attention(mesh=mesh)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        jax.make_jaxpr(lambda *qkv: attend(*qkv))(*arrays)
        gathering = jax.jit(lambda *qkv: attend(*qkv)).lower(*arrays).compile()
    batch, heads = (str(x.message) for x in warned if issubclass(x.category, UserWarning))
    assert re.search(r"batch_axis is not given.*B = 2.*axes \('data', 'tp'\)", batch)
    assert "Pass as batch_axis the axis over which B is sharded, or batch_axis=()" in batch
    assert re.search("head_axis is not given.*N = 4", heads)
    assert {"all-gather"} <= set(collectives_over(gathering, mesh, "data"))
    check_qkv([gathering(*arrays)], OPERANDS)


def test_a_mesh_with_explicit_axes_is_set():
    """Otherwise JAX cannot transpose the linear layer after attention; the warning names both."""
    mesh, x = mesh_of_kind(EXPLICIT), np.ones((2, T, 4, 8), np.float32)

    def gradient(w, **given):
        def loss(w):
            q = x @ w
            options: dict[str, Any] = {"batch_axis": (), "head_axis": (), **given}
            out = cp.context_parallel_attention(
                q, q, q, axis_name=AXIS, algorithm="ring", **options
            )
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
    """Values: the sink, below."""
    mesh = mesh_of_kind(AUTO)
    arrays = put(OPERANDS[:3], mesh)
    attend = attention(mesh=mesh, batch_axis="data", head_axis="tp")
    named = jax.jit(attend).lower(*arrays).compile()
    assert collectives_over(named, mesh, "data") == collectives_over(named, mesh, "tp") == []
    assert spec_of(named(*arrays))[:3] == ("data", AXIS, "tp")
    jax.eval_shape(attention(mesh=mesh, batch_axis=(), head_axis=()), *arrays)


@pytest.mark.usefixtures("no_warning")
def test_no_warning_without_a_possible_cost():
    """Axes that are used, axes of one device, and sizes that an axis cannot split."""
    for shape, names in (((4,), (AXIS,)), ((1, 2), ("data", AXIS)), ((3, 2), ("data", AXIS))):
        x = jax.ShapeDtypeStruct((2, T, 4, 8), np.float32)
        jax.eval_shape(attention(mesh=permuted_mesh(shape, names)), x, x, x)


def test_a_plan_is_for_the_whole_batch():
    """It is rejected if the batch is sharded; segment ids are planned by each group."""
    documents = cp.Documents(IDS).with_plan(cp.plan_attention(IDS, world_size=2))
    attend = attention("balanced", segment_ids=None, documents=documents)
    with pytest.warns(UserWarning, match=r"the plan is for all rows.*Pass stack_plans"):
        out = attend(*put(OPERANDS[:3], mesh_of_kind(EXPLICIT)))
    check_qkv([out], OPERANDS)
    # Types do not show automatic axes: a warning states the cost, except for `()`.
    warn_again()
    x = jax.ShapeDtypeStruct((2, T, 4, 8), np.float32)
    attend = partial(attend, mesh=mesh_of_kind(AUTO), head_axis="tp")
    with pytest.warns(UserWarning, match=r"the plan is for all rows.*\('data',\).*batch_axis=\(\)"):
        jax.eval_shape(attend, x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warn_again()
        jax.eval_shape(partial(attend, batch_axis=()), x, x, x)
    says = r"single plan, but .*\('data',\) splits the batch into 2 .*stack_plans"
    with pytest.raises(ValueError, match=says):
        attend(*OPERANDS[:3], batch_axis="data")


# ---- Several axes at once.

SINK = Call("ring", 2, batch=2, heads=(4, 2), sink=True, returns=("lse", "max_logits"))
LATENTS = Call(
    "ulysses", 2, cp.masks.SlidingWindow(16), rows=21, batch=2, heads=(4, 4), latents=True
)
PLACED = dataclasses.replace(LATENTS, algorithm="placed", order="placed", num_groups=2)
BOTH = {"batch_axis": "data", "head_axis": "tp"}
TENSOR: dict[str, int] = {AXIS: 2, "tp": 4}


@pytest.mark.parametrize(
    "call, axes, kinds, options",
    [
        # Gradients are summed once over the batch and the ranks: of the sink, and of weights, which
        # are sharded by heads.
        (SINK, CUBE, AUTO, BOTH),
        (PLACED, CUBE, AUTO, {**BOTH, "weight_specs": P(None, "tp")}),
        (LATENTS, CUBE, AUTO, {**BOTH, "weight_specs": P(None, ("tp", AXIS))}),
        (dataclasses.replace(LATENTS, num_ranks=4, check_vma=True), {AXIS: 4}, AUTO,
         {"weight_specs": P(None, AXIS)}),  # a rank has the weights of its heads
        (Call("ring", 2, batch=4), CUBE, AUTO, {"batch_axis": ("data", "tp")}),
        (Call("ring", 2, batch=2), {"data": 2, AXIS: 2}, (AUTO, EXPLICIT), {"batch_axis": "data"}),
        # Explicit axes shard equal parts only: neither these tokens nor the result.
        (Call("ring", 3, rows=4, more=2), {AXIS: 3}, EXPLICIT, {}),
        # 4 devices: those whose query heads read a KV head hold a copy; gradients are summed.
        (Call("balanced", 2, heads=(4, 1)), TENSOR, EXPLICIT, {"head_axis": "tp"}),
        (Call("ring", 2, heads=(12, 6)), TENSOR, AUTO, {"head_axis": "tp"}),
        (Call("balanced", 2, heads=(4, 2), latents=True), TENSOR, EXPLICIT, {"head_axis": "tp"}),
        # Weights that are sharded over the first axes of the heads only.
        (Call("ring", 2, heads=(4, 4), latents=True), {AXIS: 2, "tp": 2, "ep": 2}, AUTO,
         {"head_axis": ("tp", "ep"), "weight_specs": P(None, "tp")}),
    ],
    ids=lambda x: str(x) if isinstance(x, Call) else "",
)  # fmt: skip
def test_axes_beside_those_of_the_ranks(call, axes, kinds, options):
    mesh = permuted_mesh(tuple(axes.values()), tuple(axes), kinds)
    with jax.set_mesh(mesh):
        check(call, np.random.default_rng(), mesh, **options)


def test_heads_shared_over_two_levels_beside_a_tensor_axis():
    """A device of the tensor axis has one KV head for two inner ranks."""
    axes = "outer", "inner"
    mesh = permuted_mesh((2, 2, 2), (*axes, "tp"))
    options: dict[str, Any] = {"axis_name": axes, "batch_axis": (), "head_axis": "tp"}
    attend = attention(cp.Ulysses(outer=cp.Ring()), mesh=mesh, **options)
    arrays = put(OPERANDS[:4], mesh, P(None, axes, "tp"))
    compiled = jax.jit(with_gradients(attend)).lower(*arrays).compile()
    assert collectives_over(compiled, mesh, "tp") == []
    check_qkv(compiled(*arrays), OPERANDS)


# ---- Inside `jax.shard_map`, over another axis or over its own, and beside other kinds of axes.

DATA = P("data")


def over_data(fn, num_results=4, **options):
    out_specs = (DATA,) * num_results
    return jax.shard_map(fn, in_specs=DATA, out_specs=out_specs, axis_names={"data"}, **options)


def small_mesh(kind: Any = AUTO):
    return permuted_mesh((2, 2), ("data", AXIS), kind)


def attend(q, k, v, segment_ids, **options):
    options = {"segment_ids": segment_ids, "batch_axis": (), "head_axis": (), **options}
    return attention(**options)(q, k, v)


def test_differentiated_outside_of_a_shard_map_over_explicit_axes():
    run = lambda *x: over_data(lambda *x: (attend(*x),), 1)(*x)[0]
    mesh = small_mesh(EXPLICIT)
    with jax.set_mesh(mesh):
        arrays = put(OPERANDS, mesh, P("data", AXIS))
        check_qkv(jax.jit(with_gradients(run))(*arrays), OPERANDS)


@pytest.mark.parametrize("algorithm", ["balanced", "ring"])
def test_explicit_axes_stay_in_the_types_of_a_rank(algorithm):
    """They shard the heads. Values: tests/contract."""
    specs = {"in_specs": P(None, AXIS), "out_specs": P(None, AXIS), "axis_names": {AXIS}}
    mesh, spec = small_mesh(EXPLICIT), P(None, AXIS, "data")
    fn = attention(algorithm, segment_ids=None)
    with jax.set_mesh(mesh):
        run = with_gradients(jax.shard_map(fn, **specs))
        results = jax.eval_shape(run, *put(OPERANDS[:4], mesh, spec))
    assert all("data" in x.sharding.spec for x in results)


def test_placed_and_unchecked():
    """A surrounding `shard_map` that does not track the axes over which arrays vary."""
    placement = cp.place_tokens(segment_ids=IDS, world_size=2, num_groups=2)
    fn = lambda q, k, v, x: attend(q, k, v, None, algorithm="placed", documents=x)
    with jax.set_mesh(small_mesh()):
        run = jax.jit(over_data(with_gradients(fn), check_vma=False))
        results = run(*placement.apply(OPERANDS[:4]), placement.documents)
    check_qkv(placement.restore([np.asarray(x) for x in results]), OPERANDS)


def test_checkpointed_layers_of_a_scan():
    """In a `vmap`; JAX would hoist a part of the keys, which all layers share, out of the loop."""
    policy = jax.checkpoint_policies.save_only_these_names("context")

    def layers(q, k, v, segment_ids):
        fn = jax.checkpoint(partial(attend, algorithm="zigzag"), policy=policy)
        return jax.lax.scan(lambda _, q: (None, fn(q, k, v, segment_ids)), None, q[None])[1][0]

    with jax.set_mesh(small_mesh()):
        run = jax.vmap(over_data(with_gradients(layers)))
        twice = jax.jit(run)(*(np.stack([x, x]) for x in OPERANDS))
    for i in range(2):
        check_qkv([x[i] for x in twice], OPERANDS)


def test_operands_that_are_alike_on_all_groups():
    """Their gradients are summed over the groups, in which only the documents differ."""
    q, k, v, g, segment_ids = OPERANDS
    shared = [x[:1] for x in (q, k, v)]
    specs = {"in_specs": (P(), P(), P(), DATA), "out_specs": DATA, "axis_names": {"data"}}
    with jax.set_mesh(small_mesh()):
        run = with_gradients(jax.shard_map(attend, **specs))
        _, *got = jax.jit(run)(*shared, g, segment_ids)
    both = [np.concatenate([x, x]) for x in shared]
    _, *want = dense_qkv((*both, g, segment_ids))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, np.asarray(y).sum(0, keepdims=True), atol=1e-5, rtol=1e-5)


def test_some_axes_of_the_ranks_are_manual():
    fn = attention(segment_ids=None, axis_name=("data", AXIS))
    rows, mesh = P(None, AXIS), small_mesh()
    run = jax.shard_map(fn, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={AXIS})
    says = r"only \('cp',\) of axis_name \('data', 'cp'\) are manual"
    with pytest.raises(ValueError, match=says):
        jax.jit(run)(*OPERANDS[:3])
