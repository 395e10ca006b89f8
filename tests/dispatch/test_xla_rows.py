"""Rows between ranks by XLA: `ragged_all_to_all`, and all-gathers in turns; CPU, GPUs and TPUs.

XLA's CPU backend lacks the operation. CPU programs run that of the package, which
test_ragged_all_to_all.py compares with XLA's definition; what NCCL does is not tested here.
"""

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner import pretend_tpus, warn_again
from jax import lax
from jax._src import distributed
from jax.sharding import PartitionSpec as P
from movement_oracle import combined, dispatched, random_plan
from on_mesh import AXIS, mesh_of, on_ranks, permuted_mesh

from jax_cp_dispatch import Metadata, combine, dispatch, experts, ragged_all_to_all
from jax_cp_dispatch._dispatch import xla  # inner: a CPU program uses the operation
from jax_cp_dispatch._dispatch.xla_transfers import XlaRanks  # inner: counts gathered bytes
from jax_cp_dispatch.experts import tokens  # inner: stands for processes without shared memory

W, S, T, C = 8, 5, 24, 2
CAPACITY = 100
MAY_BE_RAGGED = xla.may_be_ragged  # which tests replace
OPTIONS: Any = {"axis_name": AXIS, "implementation": "xla"}


@pytest.fixture
def calls(monkeypatch):
    """Lets CPU programs use the operation, by that of the package; counts calls while traced."""
    found = []

    def count(*args, **options):
        found.append(options)
        return ragged_all_to_all(*args, **options, implementation="in_process")

    monkeypatch.setattr(lax, "ragged_all_to_all", count)
    monkeypatch.setattr(xla, "may_be_ragged", lambda *_: True)
    return found


def fitting_plan(seed, num_replicas=C):
    for attempt in range(100):
        plan = random_plan(np.random.default_rng((seed, attempt)), W, S, T, num_replicas)
        if plan["num_total_recv_tokens"].max() <= CAPACITY:
            return plan
    raise AssertionError("no plan fits")


@pytest.mark.parametrize("has_src_offset", [False, True])
def test_any_plan_matches_the_definition_and_an_invalid_one_gives_nan(calls, has_src_offset):
    """On two axes of ranks, bits of narrow types too. An invalid plan fills every rank."""
    axes = ("pod", "data")
    options = {"axis_name": axes, "implementation": "xla"}
    mesh = permuted_mesh((2, 4), axes)

    def local(x, y, m):
        x, y = jax.tree.map(lambda x: x[0], (x, y))
        sent = dispatch(x, m, capacity=CAPACITY, **options)
        home = combine(y, m, num_tokens=T, **options)
        return jax.tree.map(lambda x: x[None], (sent, home))

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))

    def plan_of(seed):
        plan = fitting_plan(seed)
        if has_src_offset:
            free = T - plan["seq_len"] + 1
            starts = np.random.default_rng(seed).integers(0, free)
            plan["src_offset"] = (starts * (seed != 1)).astype(np.uint32)  # all slots on one row
        return plan

    def draw(seed):
        rng = np.random.default_rng(seed)
        x, y = (rng.normal(size=(W, n, 3)).astype(np.float32) for n in (T, CAPACITY))
        raw = rng.integers(0, 2**16, (W, T, 2)).astype(np.uint16)
        return {"x": x, "narrow": raw.view(jnp.bfloat16)}, y

    for seed in range(5):
        plan, (x, y) = plan_of(seed), draw(seed)
        sent, home = run(x, y, Metadata(**plan))
        x["narrow"], sent["narrow"] = (np.asarray(a["narrow"]).view(np.uint16) for a in (x, sent))
        for name, array in x.items():
            np.testing.assert_array_equal(sent[name], dispatched(plan, array, CAPACITY))
        np.testing.assert_array_equal(home, combined(plan, y, T, np.float32))
    plan, (x, y) = plan_of(0), draw(0)
    for field, index, value in [("dst_rank", np.s_[:], W), ("num_recv_tokens", np.s_[2, 1], 4)]:
        broken = plan | {field: plan[field].copy()}
        assert (broken[field][index] != value).any()
        broken[field][index] = value
        sent, home = run(x, y, Metadata(**broken))
        assert np.isnan(sent["x"]).all() and np.isnan(home).all(), field
    assert [options["axis_name"] for options in calls] == [axes] * 3


@pytest.mark.parametrize("num_turns", [2, 5])
def test_a_combine_of_many_bytes_gathers_in_turns(num_turns, monkeypatch):
    """Of 192 rows per rank, which the turns divide, and do not."""
    capacity = W * T
    limit = -(-W * capacity * 3 * 4 // num_turns)
    monkeypatch.setattr(xla, "MAX_GATHERED_BYTES", limit)
    gather, gathered = XlaRanks.gather, []
    note = lambda self, x: gathered.append(x.size * W * 4) or gather(self, x)
    monkeypatch.setattr(XlaRanks, "gather", note)
    run = on_ranks(lambda y, m: combine(y, m, num_tokens=T, **OPTIONS), mesh_of(W))
    for seed in range(2):
        rng = np.random.default_rng(seed)
        plan = random_plan(rng, W, S, T, C)
        plan["src_offset"] = rng.integers(0, T - plan["seq_len"] + 1).astype(np.uint32)
        y = rng.normal(size=(W, capacity, 3)).astype(np.float32)
        np.testing.assert_array_equal(run(y, Metadata(**plan)), combined(plan, y, T, np.float32))
    assert limit / 2 < max(gathered) <= limit


def test_processes_without_shared_memory_sum_weighted_rows_with_the_same_bits(monkeypatch):
    """They exchange rows of experts by choice as on CPU, but by XLA's collectives."""
    num_experts, choices, num_rows = 2 * W, 3, 40
    index = np.random.default_rng(5).integers(-1, num_experts, (W, 6, choices)).astype(np.int32)
    few = lambda seed, *shape: np.random.default_rng(seed).integers(-15, 16, (W, *shape)) / 8
    operands = few(5, num_rows, 5).astype(np.float32), few(6, 6, choices).astype(np.float32), index
    options = {"num_experts": num_experts, "axis_name": AXIS, "capacity": num_rows}

    def run(implementation):
        def combine(y, w, i):
            routing = experts.route(i, implementation=implementation, **options)
            return experts.combine_tokens(y, w, routing)

        return on_ranks(combine, mesh_of(W))(*operands)

    expected = run("in_process")
    monkeypatch.setattr(
        tokens, "_where_it_runs", lambda options, by_choice, by_rank, *x, summed: by_choice(*x)
    )
    np.testing.assert_array_equal(run("xla"), expected)


# ---- Lowered for GPUs and TPUs.

PLAN = Metadata(**fitting_plan(0))
X = np.zeros((W * T, 3), np.float32)


def moved(x, m):
    y = dispatch(x, m, axis_name=AXIS, capacity=CAPACITY, implementation="xla")
    return combine(y, m, axis_name=AXIS, num_tokens=T, implementation="xla")


def lowered(fn, *arguments, platforms):
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_move_only_what_the_plan_says(platform):
    run = jax.shard_map(moved, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    loss = lambda x, m: (run(x, m) ** 2).sum()
    for fn, num in ((run, 2), (jax.grad(loss), 4)):
        text = lowered(fn, X, PLAN, platforms=(platform,))
        assert text.count("custom_call @ragged_all_to_all(") == num
        gathered = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
        assert gathered and not any("xf32" in line for line in gathered), "only metadata"


def test_global_arrays_on_tpus_need_no_partitioner(monkeypatch):
    """Their XLA lacks `custom_partitioning`; a `shard_map` gives the same values."""
    mesh = permuted_mesh((2, 4), ("data", AXIS))
    plan = Metadata(**random_plan(np.random.default_rng(0), 4, S, T, 1))
    options = {"axis_name": AXIS, "mesh": mesh, "implementation": "xla"}

    def both(x, m):
        y = dispatch(x, m, capacity=4 * T, **options)
        return y, combine(y, m, num_tokens=T, **options)

    text = lowered(both, np.zeros((4 * T, 3), np.float32), plan, platforms=("tpu",))
    assert text.count("custom_call @ragged_all_to_all(") == 2
    assert "CustomSPMDPartitioning" not in text
    pretend_tpus(monkeypatch)
    x = np.random.default_rng(1).standard_normal((4, T, 3)).astype(np.float32)
    of_rows = jax.NamedSharding(mesh, P(AXIS, "data"))
    wide = np.concatenate([x, -x], -1).reshape(4 * T, 6)
    sent, summed = jax.jit(both)(jax.device_put(wide, of_rows), plan)
    fields = {name: np.asarray(value) for name, value in vars(plan).items() if value is not None}
    y = dispatched(fields, x, 4 * T)
    np.testing.assert_array_equal(np.asarray(sent).reshape(4, 4 * T, 6)[..., :3], y)
    z = combined(fields, y, T, np.float32)
    np.testing.assert_array_equal(np.asarray(summed).reshape(4, T, 6)[..., 3:], -z)


def test_global_arrays_on_tpus_need_a_known_mesh():
    put = jax.jit(
        lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=CAPACITY),
        in_shardings=jax.NamedSharding(mesh_of(W), P(AXIS)),
    )
    with pytest.raises(NotImplementedError, match=r"^dispatch: on TPUs.* Pass mesh="):
        put.trace(X, PLAN).lower(lowering_platforms=("tpu",))


def test_groups_and_examples():
    mesh = permuted_mesh((2, 4), ("data", AXIS))
    plan = Metadata(**random_plan(np.random.default_rng(0), 4, S, 4 * T, 1))
    move = lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=4 * T, implementation="xla")
    each = lambda x, m: jax.vmap(move, (0, None))(x, m)
    specs = {"in_specs": (P("data", AXIS), P(AXIS)), "out_specs": P("data", AXIS)}
    run = jax.shard_map(each, mesh=mesh, **specs)
    text = lowered(run, np.zeros((4, 16 * T, 2), np.float32), plan, platforms=("cuda",))
    (line,) = [line for line in text.splitlines() if "custom_call @ragged_all_to_all(" in line]
    assert "replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]>" in line
    assert f"tensor<{4 * T}x2x2xf32>" in line  # examples are columns of one call


def test_other_programs_gather():
    run = jax.shard_map(moved, mesh=mesh_of(W), in_specs=P(AXIS), out_specs=P(AXIS))
    assert "ragged" not in lowered(run, X, PLAN, platforms=("cpu", "cuda"))
    one_device = lambda x, m: moved(x, m)  # with all ranks
    assert "ragged" not in lowered(one_device, X, PLAN, platforms=("tpu",))


# ---- The self-test.


@pytest.fixture
def tested(monkeypatch):
    """Makes the CPU devices pass for GPUs, and forgets earlier results."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    xla._passes.cache_clear()
    warn_again()
    yield lambda: MAY_BE_RAGGED(["cuda"], None)
    xla._passes.cache_clear()


def test_wrong_results_choose_the_all_gather(calls, tested, monkeypatch):
    right = lax.ragged_all_to_all
    shift = lambda x, out, begin, *rest, **options: right(x, out, begin + 1, *rest, **options)
    monkeypatch.setattr(lax, "ragged_all_to_all", shift)
    with pytest.warns(UserWarning, match="by all-gather .* failed its self-test"):
        assert not tested()


def test_an_operation_that_cannot_run_chooses_the_all_gather(tested):
    with pytest.warns(UserWarning, match="by all-gather .* cannot run here: UNIMPLEMENTED"):
        assert not tested()
    assert not tested()  # decided once


class Coordinator:
    """JAX's service as process 0 of two sees it; None: the other process does not come."""

    def __init__(self, found_by_other):
        self.published, self.found_by_other = {}, found_by_other

    def wait_at_barrier(self, name, milliseconds):
        assert milliseconds == 60_000
        if self.found_by_other is None:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {name}")

    def key_value_set(self, key, value, may_repeat):
        self.published[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        return self.published[key] if key.endswith("/0") else json.dumps(self.found_by_other)


@pytest.mark.parametrize("other", ["", "it failed its self-test there", None])
@pytest.mark.parametrize("is_right", [True, False])
def test_all_processes_choose_alike(tested, monkeypatch, other, is_right):
    """By the first failure of any; without a self-test if not all come."""
    service, ran = Coordinator(other), []
    job = distributed.global_state
    for name, value in {"client": service, "process_id": 0, "num_processes": 2}.items():
        monkeypatch.setattr(job, name, value)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    own = "" if is_right else "ragged_all_to_all failed its self-test"
    monkeypatch.setattr(xla, "_failure", lambda: ran.append(1) or own)
    reason = "not all processes came within 60 s" if other is None else own or other
    if reason:
        with pytest.warns(UserWarning, match=f"by all-gather .*{reason}"):
            assert not tested()
    else:
        assert tested()
    assert len(ran) == (other is not None)
    assert list(service.published.values()) == [json.dumps(own)] * len(ran)


# ---- Devices that a program is compiled for, and that are not here.


def test_the_compiler_of_other_devices_decides(monkeypatch):
    """A refusal costs the ragged exchange, and is said once; other slices keep it."""
    refusing, taking = (object(),) * 4, (object(),) * 4
    refusal = lambda devices: "limited routing" if devices == refusing else ""
    monkeypatch.setattr(xla, "_refusal", refusal)
    client = lambda devices: types.SimpleNamespace(platform="tpu", devices=lambda: list(devices))
    with pytest.warns(UserWarning, match="by all-gather .* limited routing"):
        assert not xla.may_be_ragged(["tpu"], client(refusing))
    assert xla.may_be_ragged(["tpu"], client(taking))


def test_a_program_for_unknown_devices_uses_the_operation():
    for backend in (None, jax.devices()[0].client):
        assert xla.may_be_ragged(["tpu"], backend)
        assert not xla.may_be_ragged(["cpu"], backend)


def test_a_compiler_that_lacks_the_operation_refuses():
    assert "for 8 x cpu: UNIMPLEMENTED" in xla._refusal(tuple(jax.devices()))


def test_a_compiler_that_has_the_operation_takes_it(calls):
    for num_devices in (1, 3, 8):
        assert xla._refusal(tuple(jax.devices()[:num_devices])) == ""
    assert len(calls) == 3
