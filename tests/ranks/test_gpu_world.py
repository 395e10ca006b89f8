"""Two real processes agree on a GPU transport; only their GPUs are emulated."""

import pathlib

import pytest
from scenes import of_scene
from two_processes import outputs_of_two

from jax_cp_dispatch._ranks.gpu.shared_memory_groups import (
    describe_shared_memory_groups,
    find_shared_memory_groups,
)
from jax_cp_dispatch._ranks.gpu.world import what_hosts_lack
from jax_cp_dispatch._ranks.job import publish_and_read_all

SLABS = {
    "nvshmem": ["slabs [100, 200] of 2097152, memory_groups [0, 0]"] * 2,
    "ipc": [
        f"slabs {own} of 2097152, memory_groups [0, 0]" for own in ([5000, 7000], [7000, 5001])
    ],
    # The network returns this process's own address for another process.
    "far": [f"slabs {[own] * 2} of 2097152, memory_groups [0, 1]" for own in (100, 200)],
}


@pytest.fixture(scope="module")
def outputs():
    """What each of two processes printed, in all scenes."""
    process = pathlib.Path(__file__).with_name("gpu_world_process.py")
    return outputs_of_two(process, JAX_CP_DISPATCH_SYMMETRIC_BYTES="2097152")


@pytest.mark.parametrize(
    "scene, chosen, reason, slabs",
    [
        ("nvshmem", "nvshmem", "2 processes, one GPU each\n", SLABS["nvshmem"]),
        (
            *("nvshmem cannot map", "nvshmem"),
            "one GPU each: 0, 1 through pointers, each other over the network\n",
            SLABS["far"],
        ),
        (
            "nvshmem cannot map, no network",
            "xla",
            "nvshmem: process 0: cannot map the memory of",
            None,
        ),
        ("nvshmem fails on one", "cuda_ipc", "process 1: initialize: NVSHMEM did", SLABS["ipc"]),
        ("no gpu on one", "xla", "process 1: this process has no GPU: no driver", None),
    ],
)
def test_connect_gpus_chooses_alike_in_all_processes(outputs, scene, chosen, reason, slabs):
    for number, out in enumerate(of_scene(scene, out) for out in outputs):
        assert f"chose {chosen}: " in out and reason in out, out
        if slabs is None:
            assert "slabs" not in out
        else:
            assert slabs[number] in out
        assert ("network by launcher 0" in out) == (scene == "nvshmem cannot map")


def test_nvshmem_is_not_started_between_hosts_without_a_network():
    assert what_hosts_lack([("a", False), ("a", False)]) is None
    assert what_hosts_lack([("a", True), ("b", True)]) is None
    assert str(what_hosts_lack([("a", True), ("b", False)])).startswith(
        "process 1 of several hosts, on b, has no InfiniBand adapter"
    )


def test_memory_groups_map_the_same_ranks():
    hosts = [[a // 4 == b // 4 for b in range(8)] for a in range(8)]
    assert find_shared_memory_groups(hosts) == [0] * 4 + [4] * 4
    assert describe_shared_memory_groups(find_shared_memory_groups(hosts)) == (
        "0-3, 4-7 through pointers, each other over the network"
    )
    assert describe_shared_memory_groups([0] * 8) == "all through pointers"
    assert describe_shared_memory_groups([0, 1, 0, 0]).startswith("0+2-3, 1 through pointers")
    # 0 and 1, and 1 and 2, but not 0 and 2: they map different ranks.
    chain = [[True, True, False], [True, True, True], [False, True, True]]
    assert find_shared_memory_groups(chain) == [0, 1, 2]


def test_a_process_without_a_job_gets_an_error():
    with pytest.raises(RuntimeError, match=r"connect_gpus: .* no job. Call jax.distributed.init"):
        publish_and_read_all("connect_gpus", "ready", "", timeout=1.0)
