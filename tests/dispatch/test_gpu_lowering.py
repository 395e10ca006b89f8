"""Which implementations there are, and programs lowered for platforms that are not here.

No GPU is needed: attributes of the custom calls, and errors. Nothing runs on GPUs.
"""

import functools
import itertools
import pathlib
import re
import types
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner import warn_again
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from movement_oracle import random_plan
from on_mesh import AXIS, mesh_of, permuted_mesh

import jax_cp_dispatch as cp
from jax_cp_dispatch._dispatch import lowering  # inner: its limit is that of the kernels
from jax_cp_dispatch._ranks import (
    communicator,  # inner: the default of several processes
    gpu,  # inner: caches what the driver said
    implementations,  # inner: other platforms are pretended
    implementations as implementations_gpu,
    runtime,  # inner: an extension is pretended
)
from jax_cp_dispatch._ranks.implementations import CUDA_PEER, IMPLEMENTATIONS, Operation
from jax_cp_dispatch.gpu import raise_gpu_errors
from jax_cp_dispatch.tools.doctor import Finding, try_implementations

ROOT = pathlib.Path(__file__).parents[2]
W, S, T, CAPACITY = 4, 5, 8, 64
ORDER = [3, 1, 0, 2]
PLAN = cp.Metadata(**random_plan(np.random.default_rng(0), W, S, T, 2))
X = np.zeros((W * T, 3), np.float32)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Pretends that the extension exists, built or not; nothing may be executed."""
    extension = types.SimpleNamespace(
        set_process=lambda process, ordinals: None,
        take_errors=lambda: [],
        registrations=dict,
        device_count=lambda: (0, "no driver"),
        why_no_kernels=lambda ordinal: "",
    )
    monkeypatch.setattr(runtime, "cuda", extension)
    return extension


def lowered(fn, *arguments):
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Returns (target, attributes) of this package's custom calls."""
    found = re.findall(r"custom_call @jax_cp_dispatch\.(\w+)\(.*?\{(.*)", text)
    return [(target, rest) for target, rest in found]


def device_table_in(attributes):
    (text,) = re.findall(r"device_table = dense<(.*?)> : tensor<\d+xi64>", attributes)
    return [int(n) for n in re.findall(r"-?\d+", text)]


def on_ranks(fn, mesh, **options):
    return jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), **options)


def send(x, m, **options):
    return cp.dispatch(x, m, axis_name=AXIS, capacity=CAPACITY, **options)


def lowered_on_ranks(fn=send, **options):
    """`fn` of each rank on shuffled devices."""
    return lowered(on_ranks(lambda x, m: fn(x, m, **options), mesh_of(W, ORDER)), X, PLAN)


# Where an exchange chooses its implementation: on a rank, or for all of them on one device.
PLACES = {
    "shard_map": lowered_on_ranks,
    "one device": lambda **options: lowered(lambda x, m: send(x, m, **options), X, PLAN),
}


def is_refused(why, *places, name="cuda_peer", **options):
    """By default XLA serves the call, and says why; a transport that is named raises an error."""
    for place in places:
        warn_again()
        with pytest.warns(UserWarning, match=f"XLA('s collectives| serves this call).*{why}"):
            assert not calls(PLACES[place](**options))
        with pytest.raises(NotImplementedError, match=f"'{name}' cannot .*{why}"):
            PLACES[place](implementation=name, **options)


# ---- The choice.


def test_available_implementations_have_names_and_reasons():
    found = cp.available_implementations()
    gpus = ["cuda_peer", "nvshmem", "cuda_ipc"]
    assert list(found) == ["in_process", "shared_memory", *gpus, "xla", "nccl_window"]
    assert [name for name, one in found.items() if one.available] == ["in_process", "xla"]
    assert found["nvshmem"].reason == "the platform is 'cpu', but it serves NVIDIA GPUs"
    assert found["shared_memory"].reason == "there is one process"
    assert found["in_process"].reason == "all devices are CPU devices of this process"
    assert "a plan that does not fit gives NaN, not an error" in found["xla"].reason


@pytest.mark.parametrize("name", cp.available_implementations())
def test_every_implementation_lowers_every_operation(name):
    row = IMPLEMENTATIONS[name]
    assert row.lowerings.keys() == set(Operation)
    assert row.name == name and (row.why_not(["rocm"], None) is None) == (name == "xla")


def test_a_platform_without_a_transport():
    """XLA's collectives serve it, even without such a device; by default, one warning says so."""
    split = NamedSharding(permuted_mesh((W,), (AXIS,), AxisType.Explicit), P(AXIS))
    shape = jax.ShapeDtypeStruct((W * T, 3), np.float32, sharding=split)

    def lower(implementation):
        def move(x):
            y = send(x, PLAN, implementation=implementation)
            return cp.combine(y, PLAN, axis_name=AXIS, num_tokens=T, implementation=implementation)

        text = jax.jit(move).trace(shape).lower(lowering_platforms=("rocm",)).as_text()
        assert "jax_cp_dispatch." not in text

    warn_again()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower("xla")
    with pytest.warns(UserWarning, match="moves rows with XLA's collectives.*is 'rocm'") as said:
        lower(None)
        lower(None)
    assert len(said) == 1, "one warning for dispatch, combine and all later calls"


@pytest.mark.parametrize(
    "name, platform, why",
    [
        *((name, "cpu", "platform is 'cpu'") for name in ("cuda_peer", "nccl_window", "nvshmem")),
        ("nccl_window", "cuda", "jaxlib 0.11.1 hands out no communicators, which needs 0.11.2 or"),
        ("in_process", "cuda", "the platform is 'cuda', but it serves CPU dev"),
        *((name, "cuda", "there is one process") for name in ("cuda_ipc", "nvshmem")),
    ],
)
def test_transports_that_cannot_serve(name, platform, why, monkeypatch):
    monkeypatch.setattr(runtime.jaxlib.version, "__version__", "0.11.1")
    call = jax.jit(on_ranks(lambda x, m: send(x, m, implementation=name), mesh_of(W)))
    with pytest.raises(NotImplementedError, match=f"'{name}' cannot .*{why}"):
        call.trace(X, PLAN).lower(lowering_platforms=(platform,))


# ---- Custom calls for GPUs.


GROUPS = permuted_mesh((2, W), ("data", AXIS))  # each index of the other axis is one
MAJOR = permuted_mesh((W, 2), (AXIS, "data"))


def over_explicit_axes():
    devices = np.array(jax.devices()[:W])[ORDER]
    with jax.set_mesh(Mesh(devices, (AXIS,), axis_types=(AxisType.Explicit,))):
        return lowered(send, X, PLAN)


DEVICES = {
    "shard_map": (lambda: lowered_on_ranks(), ORDER),
    "named": (lambda: lowered_on_ranks(implementation="cuda_peer"), ORDER),
    "one manual axis": (
        lambda: lowered(on_ranks(send, GROUPS, axis_names={AXIS}), X, PLAN),
        [device.id for device in GROUPS.devices.flat],
    ),
    "the major axis": (
        lambda: lowered(on_ranks(send, MAJOR), X, PLAN),
        [device.id for device in MAJOR.devices.T.flat],
    ),
    "explicit axes": (over_explicit_axes, ORDER),
    "one device": (PLACES["one device"], [-1]),
}


@pytest.mark.parametrize("place", DEVICES)
def test_a_call_names_the_gpu_of_every_rank(place):
    text, devices = DEVICES[place]
    ((target, attributes),) = calls(text())
    assert target == "dispatch" and 'memory = "devices"' in attributes
    assert device_table_in(attributes) == devices


@pytest.fixture
def with_communicators(monkeypatch):
    """Pretends that XLA hands them out."""
    monkeypatch.setattr(runtime.jaxlib.version, "__version__", "0.12.0.1")


@pytest.mark.usefixtures("with_communicators")
@pytest.mark.parametrize(
    "mesh, partitions",
    [(mesh_of(W, ORDER), range(W)), (GROUPS, range(2 * W)), (MAJOR, [0, 2, 4, 6, 1, 3, 5, 7])],
)
def test_a_call_through_windows_names_ranks_by_their_numbers_in_the_program(mesh, partitions):
    """In one call, also for a start, and not unless it is asked for."""
    run = functools.partial(send, implementation="nccl_window")
    ((target, rest),) = calls(lowered(on_ranks(run, mesh), X, PLAN))
    assert target == "dispatch_window" and 'memory = "window"' in rest
    (found,) = re.findall(r"partitions = dense<(.*?)> : tensor<\d+xi64>", rest)
    assert [int(n) for n in re.findall(r"\d+", found)] == list(partitions)
    assert targets(on_ranks(send, mesh), X, PLAN) == ["dispatch"]
    squares = lambda x, m: (on_ranks(run, mesh)(x, m) ** 2).sum()
    assert targets(jax.grad(squares), X, PLAN) == ["dispatch_window", "combine_window"]
    options: Any = {"axis_name": AXIS, "capacity": CAPACITY, "implementation": "nccl_window"}
    whole = lambda x, m: cp.exchange_done(cp.dispatch_start(x, m, **options)[0])[0]
    assert targets(on_ranks(whole, mesh), X, PLAN) == ["dispatch_window"]
    assert targets(run, X, PLAN) == ["dispatch"]  # one device has all ranks


@pytest.mark.usefixtures("with_communicators")
def test_what_windows_do_not_serve(cuda, monkeypatch):
    product = lambda x: cp.all_gather_matmul(x, x.T, axis_name=AXIS, implementation="nccl_window")
    with pytest.raises(NotImplementedError, match=r"'nccl_window' cannot .*not the chunks of prod"):
        lowered(on_ranks(product, mesh_of(W)), X)
    cuda.device_count, cuda.why_no_nccl = lambda: (8, ""), lambda: "NCCL is too old"
    monkeypatch.setattr(runtime, "why_no_nccl", runtime.why_no_nccl.__wrapped__)
    with pytest.raises(NotImplementedError, match=r"'nccl_window' cannot .*NCCL is too old"):
        lowered_on_ranks(implementation="nccl_window")


def test_donated_storage_of_one_device():
    into = lambda x, m, out: send(x, m, out=out)
    ((_, attributes),) = calls(lowered(into, X, PLAN, np.zeros((W * CAPACITY, 3), np.float32)))
    assert "output_operand_alias" in attributes


@pytest.mark.usefixtures("with_communicators")
@pytest.mark.parametrize("name, more", [("cuda_peer", ()), ("nccl_window", ("partitions",))])
def test_the_handler_reads_every_attribute(name, more):
    names = ("common.cc", "dispatch_call.cc", "cuda/dispatch_call.cc")
    sources = [ROOT / "csrc/ffi" / path for path in names]
    read = {name for path in sources for name in re.findall(r'Read\("(\w+)"', path.read_text())}
    read -= {"partitions"} - {*more}
    ((_, rest),) = calls(lowered_on_ranks(implementation=name))
    attributes = re.findall(r"(\w+) = ", rest.split("mhlo.backend_config = {")[1].split("}")[0])
    assert sorted(attributes) == sorted(read)


def test_multiprocessors_of_an_exchange_are_those_of_its_derivative():
    def numbers(text):
        return re.findall(r"num_comm_sm = (\d+)", text)

    assert numbers(lowered_on_ranks()) == ["0"]  # all
    some = on_ranks(lambda x, m: send(x, m, num_comm_sm=48), mesh_of(W))
    text = lowered(jax.grad(lambda x, m: (some(x, m) ** 2).sum()), X, PLAN)
    assert numbers(text) == ["48", "48"] and [x for x, _ in calls(text)] == ["dispatch", "combine"]
    assert numbers(lowered_on_ranks(num_comm_sm=2**70)) == [str(2**31 - 1)]


def test_equal_calls_have_numbers_by_their_place_in_the_program():
    """Ranks compare them: processes whose schedules differ would take keys for values.

    A program has the same numbers whenever and wherever it is lowered.
    """
    text = lambda: lowered(on_ranks(lambda x, m: send(x, m) + send(2 * x, m), mesh_of(W)), X, PLAN)
    sites = lambda text: re.findall(r"site ?= ?(\d+)", text)
    first, second = sites(text())
    assert int(first) < int(second) and text() == text()
    inner = jax.jit(send)
    shared = lowered(on_ranks(lambda x, m: inner(x, m) + inner(2 * x, m), mesh_of(W)), X, PLAN)
    assert len(sites(shared)) == 1
    with jax.set_mesh(mesh_of(W)):  # the numbers are part of the names of the partitions
        split = lowered(lambda x, m: send(x, m) + send(2 * x, m), X, PLAN)
    assert len(set(sites(split))) == 2


def test_processes_wait_twelve_hours_or_as_long_as_asked(monkeypatch):
    """One that compiles, saves or is debugged costs no channel; GPUs of one process do neither."""
    lasting = lambda **options: re.findall(r"deadline_ms = (\d+)", lowered_on_ranks(**options))
    assert lasting() == ["600000"] and lasting(deadline=3.0) == ["3000"]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        assert communicator.deadline_ms(None, on_gpus=True) == 43_200_000
    monkeypatch.setenv("JAX_CP_DISPATCH_DEADLINE", "90")
    assert lasting() == ["90000"] and lasting(deadline=3.0) == ["3000"]


def test_without_the_extension_xla_serves_and_a_named_transport_is_rejected(monkeypatch):
    monkeypatch.setattr(runtime, "cuda", None)
    monkeypatch.setattr(runtime, "cuda_reason", "the package was built without CUDA")
    is_refused("built without CUDA", "shard_map")


class Device(NamedTuple):
    process_index: int
    id: int
    local_hardware_id: int | None


def test_a_place_is_a_process_and_a_device_of_it(monkeypatch):
    """Not the number that CUDA gives it: programs must be the same in all processes.

    Of three processes; this one, 0, uses the GPUs 4 and 6 of its machine, and knows no others.
    """
    places = [(0, 1, 4), (0, 0, 6), (1, 8, None), (1, 9, None), (2, 16, None), (2, 17, None)]
    devices = [Device(*place) for place in places]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    try:
        gpu._numbers.cache_clear()
        assert [gpu.device_entry(d) for d in devices] == [1, 0, 65536, 65537, 131072, 131073]
        assert gpu.local_ordinals() == [6, 4]
        assert gpu.device_entry(Device(0, 3, None)) == 3  # of a machine for which we compile
    finally:
        gpu._numbers.cache_clear()


# ---- An exchange in two calls.

FORWARD, BACKWARD = ["dispatch_start", "exchange_done"], ["combine_start", "exchange_done"]


def targets(fn, *arguments):
    return [target for target, _ in calls(lowered(fn, *arguments))]


def in_two_calls(x, metadata):
    options = {"axis_name": AXIS, "capacity": CAPACITY}
    exchange, x = cp.dispatch_start(x, metadata, beside=x, **options)
    return cp.exchange_done(exchange, beside=2 * x)[0]


def test_two_calls_and_two_for_the_derivative():
    """Also in a loop, for examples, and on one device with all ranks."""
    run = on_ranks(in_two_calls, mesh_of(W))
    assert targets(run, X, PLAN) == FORWARD
    squares = lambda x, m: (run(x, m) ** 2).sum()
    assert targets(jax.grad(squares), X, PLAN) == FORWARD + BACKWARD
    steps = lambda x, m: jax.lax.scan(
        lambda c, _: (c + run(c, m)[: W * T], None), x, None, length=3
    )
    assert targets(steps, X, PLAN) == FORWARD
    assert targets(in_two_calls, X, PLAN) == FORWARD
    assert targets(jax.vmap(run, (0, None)), np.stack([X, X]), PLAN) == FORWARD


def test_no_second_call_in_another_loop_or_branch():
    """The first one is then the whole exchange; see csrc/gpu_schedule/exchange_pairs.h."""

    def in_a_branch(x, metadata):
        exchange, _ = cp.dispatch_start(x, metadata, axis_name=AXIS, capacity=CAPACITY)
        end = lambda: cp.exchange_done(exchange)[0]
        return jax.lax.cond(x[0, 0] > 0, end, lambda: jnp.zeros((CAPACITY, x.shape[1])) + x[0])

    assert targets(on_ranks(in_a_branch, mesh_of(W)), X, PLAN) == ["dispatch_start"]
    plans = jax.tree.map(lambda x: jnp.stack([x, x]), PLAN)
    examples = jax.vmap(on_ranks(in_two_calls, mesh_of(W)))
    assert targets(examples, np.stack([X, X]), plans) == ["dispatch_start"]


@pytest.mark.parametrize("saved", ["exchange_start", "exchange_done", "all", "none"])
def test_policies_of_checkpoint_save_no_unfinished_rows(saved):
    """Where the second call runs again, so does the first: its results are nobody's to save."""
    policy = lambda primitive, *_, **__: saved in ("all", str(primitive))
    run = on_ranks(in_two_calls, mesh_of(W))
    loss = jax.checkpoint(lambda x, m: jnp.sin(run(x, m)).sum(), policy=policy)
    program = str(jax.make_jaxpr(jax.grad(loss))(X, PLAN))
    num_starts, num_dones = (program.count(f"= exchange_{x}[") for x in ("start", "done"))
    # One of the forward pass, one of the derivative, and one that runs again.
    assert num_starts == num_dones == (2 if saved in ("all", "exchange_done") else 3)


def test_arrays_of_several_devices_and_other_implementations_move_in_one_call():
    with jax.set_mesh(mesh_of(W)):
        assert targets(in_two_calls, X, PLAN) == []  # each device's, made when it is partitioned
    options: Any = {"axis_name": AXIS, "capacity": CAPACITY, "implementation": "xla"}
    by_xla = lambda x, m: cp.exchange_done(cp.dispatch_start(x, m, **options)[0])[0]
    assert targets(on_ranks(by_xla, mesh_of(W)), X, PLAN) == []


# ---- GPUs without an image of the kernels, or that do not reach each other's memory.


def pairs_in(size):
    return tuple(tuple(jax.devices()[i : i + size]) for i in range(0, W, size))


def test_gpus_without_an_image_of_the_kernels_use_xla(cuda, monkeypatch):
    """Known when the program is lowered, also where one device holds all ranks."""
    why = "loading the package's kernels on GPU 0 failed: no kernel image is available"
    cuda.device_count = lambda: (8, "")
    monkeypatch.setattr(gpu, "compute_capability", lambda: 120)
    cuda.why_no_kernels = lambda ordinal: why if ordinal == 0 else ""
    cuda.connect_peers = lambda ordinals: pytest.fail("they cannot run kernels")
    gpu._reason.cache_clear()
    said = re.escape(f"{why} (its compute capability is 12.0; build the package with CMAKE_ARGS=")
    is_refused(said, *PLACES)
    gpu._reason.cache_clear()


@pytest.mark.usefixtures("cuda")
def test_programs_whose_channels_do_not_fit_the_slabs_use_xla(monkeypatch):
    """Over NVSHMEM, whose memory cannot grow. Calls that are alike share a channel."""
    monkeypatch.setattr(
        implementations.Implementation, "why_not",
        lambda row, *_: None if row.name in ("nvshmem", "xla") else "pretended",
    )  # fmt: skip
    asked = []

    def channel_bytes(*sizes):
        asked.append(sizes)
        return 1000 * sizes[3][0][1]

    monkeypatch.setattr(runtime.native, "channel_bytes", channel_bytes)
    slabs = gpu.Slabs("nvshmem", [0] * W, [0] * W, 1000 * (2 * CAPACITY + 1))
    monkeypatch.setattr(gpu, "_slabs", slabs)
    assert targets(on_ranks(in_two_calls, mesh_of(W)), X, PLAN) == FORWARD
    assert asked == 2 * [(True, False, W, [(T, CAPACITY, PLAN.dst_rank.shape[-1], False, [12])])]
    twice = lambda x, m: send(send(x, m)[:T], m)
    squares = lambda x, m: (on_ranks(twice, mesh_of(W))(x, m) ** 2).sum()
    assert targets(jax.grad(squares), X, PLAN) == ["dispatch"] * 2 + ["combine"] * 2

    def more(x, metadata, **options):
        options |= {"axis_name": AXIS}
        ys = [cp.dispatch(x, metadata, capacity=CAPACITY + i, **options) for i in range(2)]
        return cp.combine(ys[0], metadata, num_tokens=T, **options), ys

    why = f"need {1000 * (3 * CAPACITY + 1)} bytes of each process or more, but it has"
    warn_again()
    with pytest.warns(UserWarning, match=f"XLA serves this call.*{why}"):
        assert [x for x, _ in calls(lowered_on_ranks(more))] == ["dispatch"] * 2
    with pytest.raises(NotImplementedError, match=f"combine: .*'nvshmem' cannot .*{why}"):
        lowered_on_ranks(more, implementation="nvshmem")


def test_gpus_without_peer_access_use_xla(cuda, monkeypatch):
    """Asked once for the devices of each group; not for ranks that one device holds."""
    why, asked = "GPU 0 cannot access the memory of GPU 3", []

    def connect_peers(ordinals):
        asked.append(ordinals)
        return why if 3 in ordinals else ""

    cuda.device_count, cuda.connect_peers = lambda: (8, ""), connect_peers
    gpu._reason.cache_clear()
    is_refused(why, "shard_map")
    assert asked == [[0, 1, 2, 3]]
    assert CUDA_PEER.why_not(["cuda"], pairs_in(2)) == why
    assert asked[1:] == [[0, 1], [2, 3]]
    monkeypatch.setattr(implementations, "program_platform", lambda *_: "cuda")
    assert cp.available_implementations()["cuda_peer"] == (False, why)
    *_, found = itertools.islice(try_implementations(), 2)  # of the doctor
    assert found == Finding("transport cuda_peer", why, "missing")
    assert calls(PLACES["one device"]())
    cuda.device_count = lambda: (2, "")  # a program for another machine
    gpu._reason.cache_clear()
    assert CUDA_PEER.why_not(["cuda"], pairs_in(4)) is None
    gpu._reason.cache_clear()


def test_a_process_that_lowers_nothing_is_an_error_and_not_a_reason_for_xla(cuda, monkeypatch):
    """It may choose otherwise when it comes. The wait is as long as that of ranks, and readable."""

    def read_from(op, name, process, seconds):
        assert [call.processes for call in cp.gpu.waiting_calls()] == [(1,)]
        raise RuntimeError(f"nothing within {seconds:g} s")

    cuda.waiting_ranks = list
    monkeypatch.setattr(gpu, "read_from", read_from)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="process 1 has not lowered this program within 43200 s"):
        gpu._reason(1, (0, 1))
    assert cp.gpu.waiting_calls() == []


@pytest.mark.parametrize(
    "module, limit, num, what",
    [(implementations_gpu, "MAX_RANKS", W, "ranks"), (lowering, "_MAX_ARRAYS", 1, "arrays")],
)
def test_more_than_a_call_takes_is_served_by_xla(module, limit, num, what, monkeypatch):
    monkeypatch.setattr(module, limit, num)
    assert all(calls(lower()) for lower in PLACES.values())
    monkeypatch.setattr(module, limit, num - 1)
    is_refused(f"{num} {what}, but a call on GPUs takes at most {num - 1}", *PLACES)


def test_limits_are_those_of_the_kernels():
    header = (ROOT / "csrc/kernels/call.h").read_text()
    limits = dict(re.findall(r"constexpr int kMax(\w+) = (\d+);", header))
    assert int(limits["Ranks"]) == implementations_gpu.MAX_RANKS
    assert int(limits["Arrays"]) == lowering._MAX_ARRAYS


def test_raise_gpu_errors_raises_each_once(cuda):
    found = ["dispatch: rank 1 waited", "combine: rank 0 expects"]
    cuda.take_errors = lambda: [found.pop(0) for _ in list(found)]
    with pytest.raises(RuntimeError, match="rank 1 waited\ncombine: rank 0 expects"):
        raise_gpu_errors()
    raise_gpu_errors()
