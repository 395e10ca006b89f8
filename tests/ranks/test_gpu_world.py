"""Three real processes agree on a GPU transport; only their GPUs are emulated.

NVSHMEM is too, in children of these processes as well, where it may end them.
"""

import pathlib

import pytest
from launching import outputs_of
from scenes import of_scene

from jax_cp_dispatch._ranks.gpu.nvshmem import what_hosts_lack  # inner: many hosts
from jax_cp_dispatch._ranks.gpu.slabs import describe_mapping, group_by_mapping
from jax_cp_dispatch._ranks.job import publish_and_read_all

ONE_HOST, TWO_HOSTS = "3 processes of 1 host, one GPU each", "3 processes of 2 hosts, one GPU each"
NO_IPC = "cuda_ipc: process 2: initialize: cudaIpcOpenMemHandle failed: invalid argument"
LOST = (
    "process 1: its GPU and that of process 0 reach each other's memory, but data is lost (an "
    "IOMMU or ACS of the machine may be the cause)"
)
ALL_IPC = [[5000, 7001, 7002], [7000, 5001, 7002], [7000, 7001, 5002]]
BY_HOST = [[5000, 7001, 5000], [7000, 5001, 5001], [5002] * 3]
# The network returns this process's own address for another process.
BY_NVSHMEM = [[100, 200, 100], [100, 200, 200], [300] * 3]


@pytest.fixture(scope="module")
def outputs():
    """What each of three processes printed, in all scenes."""
    process = pathlib.Path(__file__).with_name("gpu_world_process.py")
    environment = {"JAX_CP_DISPATCH_SYMMETRIC_BYTES": "2097152", "JAX_NUM_CPU_DEVICES": "2"}
    return outputs_of(3, process, **environment)


def in_all(outputs, scene):
    return [of_scene(scene, out) for out in outputs]


@pytest.mark.parametrize(
    "scene, chosen, reason, bases, groups",
    [
        ("one host", "cuda_ipc", ONE_HOST, ALL_IPC, [0, 0, 0]),
        (
            *("two hosts", "nvshmem"),
            f"{TWO_HOSTS}: 0-1, 2 through pointers, each other over the network",
            *(BY_NVSHMEM, [0, 0, 2]),
        ),
        (
            *("one host, nvshmem is named", "nvshmem"),
            f"{ONE_HOST}: 0-1, 2 through pointers, each other over the network",
            *(BY_NVSHMEM, [0, 0, 2]),
        ),
    ],
)
def test_processes_connect(outputs, scene, chosen, reason, bases, groups):
    """One host tries CUDA IPC first, which cannot end a process; several hosts need a network."""
    for number, out in enumerate(in_all(outputs, scene)):
        assert f"chose {chosen}: {reason}\n" in out
        assert f"slabs {bases[number]} of 2097152, groups {groups}" in out
        assert ("network by launcher 0" in out) == (chosen == "nvshmem")
        assert f"started {int(chosen == 'nvshmem')} times" in out
        both = ("cuda_ipc over (0, 1): None", "nvshmem over (0, 2): None")
        assert [text in out for text in both] == [chosen == "cuda_ipc", chosen == "nvshmem"]
        other = {"cuda_ipc": "nvshmem", "nvshmem": "cuda_ipc"}[chosen]
        assert f"{other} over (0, 2): {chosen} connects the processes: {reason}\n" in out


@pytest.mark.parametrize(
    "scene, reasons",
    [
        (
            "one host, no ipc, nvshmem ends it",
            [
                NO_IPC,
                "process 1: NVSHMEM ended the child process that tried it, with 255: ibv",
            ],
        ),
        ("one host, no ipc, nvshmem makes no id", [NO_IPC, "process 0: NVSHMEM ended", "with 7"]),
        (
            "one host, no ipc, nvshmem is late",
            [NO_IPC, "process 0: NVSHMEM did not start in a child process within 1 s"],
        ),
        ("one host, data is lost", [f"cuda_ipc: {LOST}", f"nvshmem: {LOST}"]),
        (
            "one host, mig on one",
            [
                "cuda_ipc: process 1: initialize: cudaIpcGetMemHandle failed: operation not supp",
                "nvshmem: process 1: NVSHMEM ended the child process",
            ],
        ),
        (
            "one host, nvshmem raises",
            ["nvshmem: process 1: initialize: NVSHMEM did not start"],
        ),
        (
            "one host, nvshmem is named, no remote transport",
            ["nvshmem: process 0: cannot map the memory of process 2", "TRANSPORT is none"],
        ),
        (
            "three hosts, no adapter",
            ["on a, has no InfiniBand adapter", "cuda_ipc: no two processes run on the same host"],
        ),
        ("one host, no gpu on one", ["process 1: this process has no GPU: no driver"]),
        (
            "one host, two gpus each",
            ["process 0 has 2 GPUs, but processes connect with one each; groups of ranks inside"],
        ),
    ],
)
def test_processes_that_cannot_connect_use_xla_and_know_why(outputs, scene, reasons):
    """The same in all of them; NVSHMEM ends none of them, and no memory stays."""
    for number, out in enumerate(in_all(outputs, scene)):
        (chosen,) = [line for line in out.splitlines() if line.startswith("chose ")]
        assert chosen.startswith("chose xla: ")
        assert all(reason in chosen for reason in reasons), chosen
        assert f"nvshmem over (0, 2): {chosen.removeprefix('chose xla: ')}\n" in out
        assert "slabs" not in out
        if "cuda_ipc: process" in chosen:
            has_memory, are_open = "mig" not in scene or number != 1, "mig" not in scene
            assert (f"freed {5000 + number}" in out) == has_memory
            closes = number == 1 or (number == 2 and "lost" in scene)
            assert ("closed 7000" in out) == (are_open and closes)


def test_processes_agree_on_channels(outputs):
    """In the order of the ranks; a process that repeats itself is heard once."""
    for number, out in enumerate(in_all(outputs, "one host")):
        assert "agreed (['of 2', 'of 0', 'of 2', 'of 1'], '')\n" in out
        assert f"agreed (['of {number}'], '')\n" in out
        late = min({0, 1, 2} - {number})
        assert f"agreed ([], 'process {late} did not come to this call within 1.5 s" in out


def test_hosts_without_a_network_connect_inside(outputs):
    why = (
        "nvshmem: process 0 of several hosts, on a, has no InfiniBand adapter "
        "(/sys/class/infiniband); if another network or NVLink connects the hosts, set "
        "NVSHMEM_REMOTE_TRANSPORT or JAX_CP_DISPATCH_GPU_TRANSPORT=nvshmem"
    )
    inside = "groups of ranks inside one host use cuda_ipc"
    for number, out in enumerate(in_all(outputs, "two hosts, no adapter")):
        assert f"chose xla: {TWO_HOSTS}; {why}; {inside}\n" in out
        assert f"slabs {BY_HOST[number]} of 2097152, groups [0, 0, 2]" in out
        assert "cuda_ipc over (0, 1): None\n" in out
        assert f"cuda_ipc over (0, 2): {TWO_HOSTS}; {why}; {inside}\n" in out


def test_groups_inside_processes_of_several_gpus_use_these(outputs):
    """One process per host with all its GPUs, as trainers start them."""
    for out in in_all(outputs, "one host, two gpus each"):
        assert "lowered: %" in out and 'memory = "devices"' in out
        assert "dense<[0, 1, 65536, 65537, 131072, 131073]>" in out, out
        assert "over all: ranks of one group are in 3 processes (0, 1, 2), but it serves" in out
    for out in in_all(outputs, "one host, two gpus each, no peers on one"):
        assert "lowered: no custom call" in out
        assert "XLA's collectives (implementation='xla'): process 1: GPUs [0, 1] have no" in out


def test_nvshmem_is_not_started_between_hosts_without_a_network():
    assert what_hosts_lack([("a", False), ("a", False)]) is None
    assert what_hosts_lack([("a", True), ("b", True)]) is None
    assert str(what_hosts_lack([("a", True), ("b", False)])).startswith(
        "process 1 of several hosts, on b, has no InfiniBand adapter"
    )


def test_memory_groups_map_the_same_ranks():
    hosts = [[a // 4 == b // 4 for b in range(8)] for a in range(8)]
    assert group_by_mapping(hosts) == [0] * 4 + [4] * 4
    assert describe_mapping(group_by_mapping(hosts)) == (
        "0-3, 4-7 through pointers, each other over the network"
    )
    assert describe_mapping([0] * 8) == "all through pointers"
    assert describe_mapping([0, 1, 0, 0]).startswith("0+2-3, 1 through pointers")
    # 0 and 1, and 1 and 2, but not 0 and 2: they map different ranks.
    chain = [[True, True, False], [True, True, True], [False, True, True]]
    assert group_by_mapping(chain) == [0, 1, 2]


def test_a_process_without_a_job_gets_an_error():
    with pytest.raises(RuntimeError, match=r"connect_gpus: .* no job. Call jax.distributed.init"):
        publish_and_read_all("connect_gpus", "ready", "", timeout=1.0)
