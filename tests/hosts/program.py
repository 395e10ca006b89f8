"""One process of a job over two hosts; `two_hosts.py` starts it.

python program.py ADDRESS NUM_PROCESSES PROCESS KIND [--timeout S]
"""

import argparse
import contextlib
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
from inner import pretend
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp
from jax_cp_dispatch.attention import ring_exchange


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("num_processes", type=int)
    parser.add_argument("process", type=int)
    parser.add_argument("kind")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--work", type=float, default=0.0, help="seconds, after all else")
    options = parser.parse_args()
    if options.kind == "small files" and options.process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    # As clones of a snapshot may appear.
    is_clone = options.kind == "one host"
    with pretend("host", "the same") if is_clone else contextlib.nullcontext():
        choice = cp.initialize(
            options.address, options.num_processes, options.process, timeout=options.timeout
        )
    print(f"choice: {choice.implementation}: {choice.reason}", flush=True)
    KINDS[options.kind](options)
    print("done", flush=True)


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
    near, far = mesh_of_groups(options.num_processes), mesh_of_groups(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as for a fallback
        for implementation in None, "in_process":
            move_over(near, own=implementation)
        if options.num_processes == 4:
            for implementation in None, "shared_memory":
                move_over(mesh_of_groups(2), own=implementation)
        ring_inside(near)
    refused = (
        lambda: move_over(far, own="shared_memory"),
        lambda: move_over(far, own="in_process"),
        lambda: move_global_arrays("shared_memory"),
        lambda: multiply_global_arrays("shared_memory"),
    )
    for call in refused:
        try:
            call()
        except NotImplementedError as error:
            assert "implementation='" in str(error), error
            assert "cannot serve this program: " in str(error), error
        else:
            raise AssertionError("nothing was refused")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        move_over(mesh_of_all())
        move_global_arrays(None)
        multiply_global_arrays(None)
        ring_inside(far)
    assert [w.category for w in said if "jax_cp_dispatch" in str(w.message)] == [UserWarning], said


def mesh_of_groups(num_groups: int) -> Mesh:
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    return Mesh(np.array(devices).reshape(num_groups, -1), ("group", AXIS))


def run_and_check(mesh: Mesh, program, operands, want, times: int = 1) -> str:
    """Inside a host, by a transport of this package; returns the text of the program."""
    text = program.lower(*operands).as_text()
    is_own = "custom_call @jax_cp_dispatch" in text
    assert is_own != spans_hosts(mesh), "an unexpected transport"
    for _ in range(times):
        check(program(*operands), want)
    return text


def ring_inside(mesh: Mesh) -> None:
    """Rotates keys in each group; between hosts by collective-permutes."""
    spec, x = P(mesh.axis_names), draw(6, mesh.size, 2)
    groups = x.reshape(-1, mesh.shape[AXIS], *x.shape[1:])
    program = on_ranks(lambda x: ring_exchange(x, axis_name=AXIS), mesh, spec)
    want = np.roll(groups, 1, axis=1).reshape(x.shape)
    text = run_and_check(mesh, program, [place(x, mesh, spec)], want)
    assert ("collective_permute" in text) == spans_hosts(mesh)


def move_global_arrays(own: str | None) -> None:
    mesh = mesh_of_all()
    plan, capacity = plan_of(4, mesh.size)
    x = draw(5, mesh.size, 3)
    options: Any = {"axis_name": AXIS, "capacity": capacity, "mesh": mesh, "implementation": own}
    move = jax.jit(lambda x: cp.dispatch(x, cp.Metadata(**plan), **options))
    want = dispatched(plan, x, capacity).reshape(-1, 3)
    run_and_check(mesh, move, [place(x.reshape(-1, 3), mesh)], want)


def multiply_global_arrays(own: str | None) -> None:
    mesh = mesh_of_all()
    x = draw(1, mesh.size, 8).reshape(-1, 8)
    w = draw(2, mesh.size, 2).reshape(-1, 8)[: mesh.size].T.copy()
    options: Any = {"axis_name": AXIS, "mesh": mesh, "implementation": own}
    multiply = jax.jit(lambda x, w: cp.all_gather_matmul(x, w, **options))
    operands = place(x, mesh), place(w, mesh, P(None, AXIS))
    run_and_check(mesh, multiply, operands, x @ w)


def move_over(mesh: Mesh, times: int = 1, own: str | None = None, deadline: float = 60.0) -> None:
    """Exchanges of each group of ranks."""
    num_ranks, spec = mesh.shape[AXIS], P(mesh.axis_names)
    plan, capacity = plan_of(3, num_ranks)
    x = draw(5, mesh.size, 3)
    options: Any = {"capacity": capacity, "deadline": deadline, "implementation": own}
    local = lambda x: cp.dispatch(x, cp.Metadata(**plan), axis_name=AXIS, **options)
    groups = np.split(x, mesh.size // num_ranks)
    want = np.concatenate([dispatched(plan, group, capacity) for group in groups])
    run_and_check(mesh, on_ranks(local, mesh, spec), [place(x, mesh, spec)], want, times)


def costs(options) -> None:
    """Compares XLA's collectives with the package's transports: in a process, a host, over both."""
    devices = mesh_of_groups(1).devices
    near = Mesh(devices.reshape(-1, 2), ("group", AXIS))
    far = Mesh(devices.reshape(2, -1).T, ("group", AXIS))
    where = "a process" if options.num_processes < devices.size else "a host"
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
    spec = P(mesh.axis_names)
    plan, capacity = plan_of(3, mesh.shape[AXIS])
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
    """Half of the processes run on each host."""
    host_of = lambda device: 2 * device.process_index // jax.process_count()
    groups = mesh.devices.reshape(-1, mesh.shape[AXIS])
    return any(len(set(map(host_of, group))) > 1 for group in groups)


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
