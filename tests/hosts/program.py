"""What a process of a job over two hosts does; `two_hosts.py` starts it.

python program.py ADDRESS NUM_PROCESSES PROCESS KIND [--timeout S]
"""

import argparse
import importlib
import pathlib
import resource
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "processes"))

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from movement_oracle import dispatched
from places import AXIS, check, draw, mesh_of_all, on_ranks, place, plan_of

import jax_cp_dispatch as cp


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
    """What is wrong with this process, before it is joined to the others."""
    module = importlib.import_module("jax_cp_dispatch.processes.initialize")
    if options.kind == "one host":  # as clones of a snapshot may look
        setattr(module, "_host", lambda: "the same")  # noqa: B010
    if options.kind == "small files" and options.process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def dispatch_over_all(options) -> None:
    """Ten exchanges over all hosts, then what is left to do."""
    move_over(mesh_of_all(), times=10)
    time.sleep(options.work)


def dispatch_for_ever(options) -> None:
    """Says when it has begun."""
    move_over(mesh_of_all())
    print("begun", flush=True)
    while True:
        move_over(mesh_of_all(), deadline=10.0)
        time.sleep(0.05)


def dispatch_inside(options) -> None:
    """Groups inside each process, and inside each host: by the package's own transport."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as of a way that was not asked for
        by_process = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        for implementation in None, "in_process":
            move_over(mesh_of_groups(by_process, options.num_processes), own=implementation)
        if options.num_processes == 4:
            for implementation in None, "shared_memory":
                move_over(mesh_of_groups(by_process, 2), own=implementation)
    refused = ""
    try:
        move_over(mesh_of_all(), own="shared_memory")
    except NotImplementedError as error:
        refused = str(error)
    assert "implementation='shared_memory' cannot serve this program" in refused, refused
    dispatch_over_all(options)


def mesh_of_groups(devices, num_groups: int) -> Mesh:
    return Mesh(np.array(devices).reshape(num_groups, -1), ("group", AXIS))


def move_over(mesh: Mesh, times: int = 1, own: str | None = None, deadline: float = 60.0) -> None:
    """Exchanges of each group of ranks, checked; by a transport of this package unless XLA's."""
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
    spans = any(len({host_of(d) for d in g}) > 1 for g in mesh.devices.reshape(num_groups, -1))
    assert ("jax_cp_dispatch.dispatch" in text) != spans, "the other way was chosen"
    want = [
        dispatched(plan, x[g * num_ranks : (g + 1) * num_ranks], capacity)
        for g in range(num_groups)
    ]
    for _ in range(times):
        check(program(rows), np.concatenate(want))


def host_of(device) -> int:
    """Half of the processes are on each host."""
    return 2 * device.process_index // jax.process_count()


KINDS = {
    "ends": dispatch_over_all,
    "for ever": dispatch_for_ever,
    "inside": dispatch_inside,
    "one host": dispatch_over_all,
    "small files": dispatch_over_all,
}

if __name__ == "__main__":
    main()
