"""One process of a job over two hosts; `two_hosts.py` starts it.

python program.py ADDRESS NUM_PROCESSES PROCESS KIND [--timeout S]
"""

import argparse
import importlib
import pathlib
import resource
import sys
import time
import warnings
from typing import Any

sys.path.extend(
    str(pathlib.Path(__file__).parents[1] / name) for name in ("oracles", "support", "processes")
)

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp
from jax_cp_dispatch.attention import ring_exchange


def main() -> None:
    options = _parse()
    _before(options)
    choice = cp.initialize(
        options.address, options.num_processes, options.process, timeout=options.timeout
    )
    print(f"choice: {choice.implementation}: {choice.reason}", flush=True)
    KINDS[options.kind](options)
    print("done", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("num_processes", type=int)
    parser.add_argument("process", type=int)
    parser.add_argument("kind")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--work", type=float, default=0.0, help="seconds, after all else")
    return parser.parse_args()


def _before(options) -> None:
    """Applies the fault of this process before it joins the others."""
    module = importlib.import_module("jax_cp_dispatch._ranks.processes.initialize")
    if options.kind == "one host":  # as clones of a snapshot may appear
        setattr(module, "_host", lambda: "the same")  # noqa: B010
    if options.kind == "small files" and options.process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def dispatch_over_all(options) -> None:
    """Makes ten exchanges over all hosts, then does the remaining work."""
    move_over(mesh_of_all(), times=10)
    time.sleep(options.work)


def dispatch_for_ever(options) -> None:
    """Reports when it has started."""
    move_over(mesh_of_all())
    print("begun", flush=True)
    while True:
        move_over(mesh_of_all(), deadline=10.0)
        time.sleep(0.05)


def dispatch_inside(options) -> None:
    """Groups inside each process and inside each host use the package's own transport."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as for a fallback
        by_process = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        for implementation in None, "in_process":
            move_over(mesh_of_groups(by_process, options.num_processes), own=implementation)
        if options.num_processes == 4:
            for implementation in None, "shared_memory":
                move_over(mesh_of_groups(by_process, 2), own=implementation)
        ring_inside(mesh_of_groups(by_process, options.num_processes))
    for refused in (
        lambda: move_over(mesh_of_all(), own="shared_memory"),
        lambda: move_over(mesh_of_all(), own="in_process"),
        lambda: move_global_arrays("shared_memory"),
        lambda: multiply_global_arrays("shared_memory"),
    ):
        expect_refusal(refused)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        move_over(mesh_of_all())
        move_global_arrays(None)
        multiply_global_arrays(None)
        ring_inside(mesh_of_groups(by_process, 1))
    assert [w.category for w in said if "jax_cp_dispatch" in str(w.message)] == [UserWarning], said


def expect_refusal(call) -> None:
    try:
        call()
    except NotImplementedError as error:
        assert "implementation='" in str(error), error
        assert "cannot serve this program: " in str(error), error
    else:
        raise AssertionError("nothing was refused")


def ring_inside(mesh: Mesh) -> None:
    """Rotates keys in each group; between hosts by collective-permutes."""
    spec = P(mesh.axis_names)
    x = draw(6, mesh.size, 2)
    shift = lambda x: ring_exchange(x, axis_name=AXIS)
    program = on_ranks(shift, mesh, spec)
    rows = place(x, mesh, spec)
    text = program.lower(rows).as_text()
    assert ("jax_cp_dispatch.dispatch" in text) != spans_hosts(mesh)
    assert ("collective_permute" in text) == spans_hosts(mesh)
    groups = x.reshape(-1, mesh.shape[AXIS], *x.shape[1:])
    check(program(rows), np.roll(groups, 1, axis=1).reshape(x.shape))


def move_global_arrays(own: str | None) -> None:
    mesh = Mesh(mesh_of_all().devices, (AXIS,), axis_types=(AxisType.Auto,))
    plan, capacity = plan_of(4, mesh.size)
    x = draw(5, mesh.size, 3)
    options: Any = {"axis_name": AXIS, "capacity": capacity, "mesh": mesh, "implementation": own}
    move = jax.jit(lambda x: cp.dispatch(x, cp.Metadata(**plan), **options))
    got = move(place(x.reshape(-1, 3), mesh))
    check(got, dispatched(plan, x, capacity).reshape(-1, 3))


def multiply_global_arrays(own: str | None) -> None:
    mesh = Mesh(mesh_of_all().devices, (AXIS,), axis_types=(AxisType.Auto,))
    x = draw(1, mesh.size, 8).reshape(-1, 8)
    w = draw(2, mesh.size, 2).reshape(-1, 8)[: mesh.size].T.copy()
    options: Any = {"axis_name": AXIS, "mesh": mesh, "implementation": own}
    multiply = jax.jit(lambda x, w: cp.all_gather_matmul(x, w, **options))
    check(multiply(place(x, mesh), place(w, mesh, P(None, AXIS))), x @ w)


def mesh_of_groups(devices, num_groups: int) -> Mesh:
    return Mesh(np.array(devices).reshape(num_groups, -1), ("group", AXIS))


def move_over(mesh: Mesh, times: int = 1, own: str | None = None, deadline: float = 60.0) -> None:
    """Checks exchanges of each group of ranks; inside a host, by a transport of this package."""
    num_groups = mesh.shape.get("group", 1)
    num_ranks = mesh.shape[AXIS]
    spec = P(mesh.axis_names)
    plan, capacity = plan_of(3, num_ranks)
    x = draw(5, num_groups * num_ranks, 3)
    m = cp.Metadata(**plan)

    def local(x):
        return cp.dispatch(
            x, m, axis_name=AXIS, capacity=capacity, deadline=deadline, implementation=own
        )

    program = on_ranks(local, mesh, spec)
    rows = place(x, mesh, spec)
    text = program.lower(rows).as_text()
    assert ("jax_cp_dispatch.dispatch" in text) != spans_hosts(mesh), "an unexpected transport"
    want = [
        dispatched(plan, x[g * num_ranks : (g + 1) * num_ranks], capacity)
        for g in range(num_groups)
    ]
    for _ in range(times):
        check(program(rows), np.concatenate(want))


def costs(options) -> None:
    """Compares XLA's collectives with the package's transports: in a process, a host, over both."""
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    near = Mesh(devices.reshape(-1, 2), ("group", AXIS))
    far = Mesh(devices.reshape(2, -1).T, ("group", AXIS))
    where = "a process" if options.num_processes < len(devices) else "a host"
    for megabytes in 1, 32:
        own = seconds(near, None, megabytes)
        inside, between = (seconds(mesh, "xla", megabytes) for mesh in (near, far))
        print(
            f"{megabytes} MB per rank: {1e3 * own:.1f} ms inside {where}; by XLA "
            f"{inside / own:.1f} times that, and between hosts {between / own:.1f} times",
            flush=True,
        )


def seconds(mesh: Mesh, own: str | None, megabytes: int) -> float:
    """Returns the median time of a dispatch of random segments."""
    spec, num_ranks = P(mesh.axis_names), mesh.shape[AXIS]
    plan, capacity = plan_of(3, num_ranks)
    x = draw(5, mesh.size, megabytes << 14)  # of 16 rows in float32
    options: Any = {"axis_name": AXIS, "capacity": capacity, "implementation": own}
    program = on_ranks(lambda x: cp.dispatch(x, cp.Metadata(**plan), **options), mesh, spec)
    rows = place(x, mesh, spec)
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        jax.block_until_ready(program(rows))
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


def spans_hosts(mesh: Mesh) -> bool:
    groups = mesh.devices.reshape(-1, mesh.shape[AXIS])
    return any(len({host_of(device) for device in group}) > 1 for group in groups)


def host_of(device) -> int:
    """Half of the processes run on each host."""
    return 2 * device.process_index // jax.process_count()


KINDS = {
    "ends": dispatch_over_all,
    "for ever": dispatch_for_ever,
    "inside": dispatch_inside,
    "costs": costs,
    "one host": dispatch_over_all,
    "small files": dispatch_over_all,
}

if __name__ == "__main__":
    main()
