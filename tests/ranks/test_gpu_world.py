"""Three real processes agree on a GPU transport; only their GPUs are emulated.

NVSHMEM is too, in children of these processes as well, where it may end them. As a program, this
file is one of the processes.
"""

import importlib
import os
import sys
import types
import warnings

import fake_nvshmem
import jax
import numpy as np
import pytest
import scenes
from inner import warn_again
from jax.sharding import Mesh, PartitionSpec as P
from launching import outputs_of

from jax_cp_dispatch import compute_metadata, dispatch, gpu
from jax_cp_dispatch._ranks import gpu as gpu_world, nvshmem_trial, runtime  # inner: emulates GPUs
from jax_cp_dispatch._ranks.gpu import (
    describe_mapping,
    describe_network,
    group_by_mapping,
    what_hosts_lack,  # inner: many hosts
)
from jax_cp_dispatch._ranks.implementations import CUDA_IPC, CUDA_PEER, NVSHMEM
from jax_cp_dispatch._ranks.job import publish_and_read_all

ONE_HOST, TWO_HOSTS = "3 processes of 1 host, one GPU each", "3 processes of 2 hosts, one GPU each"
NO_IPC = "cuda_ipc: process 2: initialize: cudaIpcOpenMemHandle failed: invalid argument"
LOST = (
    "process 1: its GPU and that of process 0 reach each other's memory, but data is lost (an "
    "IOMMU or ACS of the machine may be the cause)"
)
NETWORKS = {"a": "adapters mlx5_0:1", "b": "no InfiniBand adapter", "c": "none"}
NETWORK = f"network: {NETWORKS['a']}"
BETWEEN_HOSTS = f"network of process 0: {NETWORKS['a']}; network of process 2: {NETWORKS['b']}"
ALL_IPC = [[5000, 7001, 7002], [7000, 5001, 7002], [7000, 7001, 5002]]
BY_HOST = [[5000, 7001, 5000], [7000, 5001, 5001], [5002] * 3]
# The network returns this process's own address for another process.
BY_NVSHMEM = [[100, 200, 100], [100, 200, 200], [300] * 3]

CONNECTED = [  # scene, transport, reason, slabs of each process, groups
    ("one host", "cuda_ipc", ONE_HOST, ALL_IPC, [0, 0, 0]),
    *(
        (scene, "nvshmem",
         f"{where}: 0-1, 2 through pointers, each other over the network; {network}",
         BY_NVSHMEM, [0, 0, 2])
        for scene, where, network in (("two hosts", TWO_HOSTS, BETWEEN_HOSTS),
                                      ("one host, nvshmem is named", ONE_HOST, NETWORK))
    ),
]  # fmt: skip
BY_XLA = {
    "one host, no ipc, nvshmem ends it": [
        NO_IPC, "process 1: NVSHMEM ended the child process that tried it, with 255: ibv"
    ],
    "three hosts, nvshmem ends it": [
        "ibv_open_device failed", "network of process 0: adapters mlx5_0:1; network of process 1: "
    ],
    "one host, no ipc, nvshmem ends it, exclusive": [
        NO_IPC, "process 1: a child process cannot try NVSHMEM (it ended with 255): a GPU is in "
        "compute mode EXCLUSIVE_PROCESS, which lets one process use it; run nvidia-smi "
    ],
    "one host, no ipc, nvshmem makes no id": [NO_IPC, "process 0: NVSHMEM ended", "with 7"],
    "one host, no ipc, nvshmem is late": [
        NO_IPC, "process 0: NVSHMEM did not start in a child process within 1 s"
    ],
    "one host, data is lost": [f"cuda_ipc: {LOST}", f"nvshmem: {LOST}"],
    "one host, mig on one": [
        "cuda_ipc: process 1: initialize: cudaIpcGetMemHandle failed: operation not supp",
        "nvshmem: process 1: NVSHMEM ended the child process",
    ],
    "one host, nvshmem raises": ["nvshmem: process 1: initialize: NVSHMEM did not start"],
    "one host, nvshmem is named, no remote transport": [
        "nvshmem: process 0: cannot map the memory of process 2", "TRANSPORT is none"
    ],
    "three hosts, no adapter": [
        "on a, has no InfiniBand adapter", "cuda_ipc: no two processes run on the same host"
    ],
    "one host, no gpu on one": ["process 1: this process has no GPU: no driver"],
    "one host, no image on one": [
        "process 1: no kernel image is available (its compute capability is 0.0; build the package"
    ],
    "one host, two gpus each": [
        "process 0 has 2 GPUs, but processes connect with one each; groups of ranks inside"
    ],
}  # fmt: skip
SCENES = [scene for scene, *_ in CONNECTED] + list(BY_XLA)
SCENES += ["two hosts, no adapter", "one host, two gpus each, no peers on one"]


@pytest.fixture(scope="module")
def outputs():
    """What each of three processes printed, in all scenes."""
    environment = {"JAX_CP_DISPATCH_SYMMETRIC_BYTES": "2097152", "JAX_NUM_CPU_DEVICES": "2"}
    return outputs_of(3, __file__, PYTHONPATH=os.pathsep.join(sys.path), **environment)


def in_all(outputs, scene):
    return [scenes.of_scene(scene, out) for out in outputs]


@pytest.mark.parametrize("scene, chosen, reason, bases, groups", CONNECTED)
def test_processes_connect(outputs, scene, chosen, reason, bases, groups):
    """One host tries CUDA IPC first, which cannot end a process; several hosts need a network."""
    for number, out in enumerate(in_all(outputs, scene)):
        assert f"chose {chosen}: {reason}\n" in out
        assert f"slabs {bases[number]} of 2097152, groups {groups}" in out
        assert ("network by launcher 0" in out) == (chosen == "nvshmem")
        assert ("grows on 0" in out) == (chosen == "cuda_ipc")
        assert f"started {int(chosen == 'nvshmem')} times" in out
        both = ("cuda_ipc over (0, 1): None", "nvshmem over (0, 2): None")
        assert [text in out for text in both] == [chosen == "cuda_ipc", chosen == "nvshmem"]
        other = {"cuda_ipc": "nvshmem", "nvshmem": "cuda_ipc"}[chosen]
        assert f"{other} over (0, 2): {chosen} connects the processes: {reason}\n" in out


@pytest.mark.parametrize("scene, reasons", BY_XLA.items())
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


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The files of a host with two ports, of which one is down, and a function to write more."""
    for name in gpu_world._NETWORK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    ports = {"mlx5_0": ("4: ACTIVE", "InfiniBand"), "mlx5_1": ("1: DOWN", "Ethernet")}
    for name, (state, layer) in ports.items():
        for file, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec")):
            write(f"sys/class/infiniband/{name}/ports/1/{file}", text)
    return tmp_path, write


def test_a_reason_has_what_decides_how_fast_a_network_is(host, monkeypatch):
    root, write = host
    monkeypatch.delenv("NVSHMEM_IB_ENABLE_IBGDA", raising=False)
    adapters = "adapters mlx5_0:1 (InfiniBand, 400 Gb/sec), mlx5_1:1 (1: DOWN)"
    assert describe_network(root) == (
        f"{adapters}, IBGDA off: one thread of the host starts all transfers of a process, "
        "no nvidia_peermem, so dmabuf is needed"
    )
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "true")
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "mlx5_0:1")
    assert "IBGDA on, the driver has no PeerMappingOverride=1," in describe_network(root)
    write("proc/driver/nvidia/params", 'RegistryDwords: "PeerMappingOverride=1;"')
    write("sys/module/nvidia_peermem/version", "580")
    assert describe_network(root) == (
        f"{adapters}, IBGDA on, the driver has PeerMappingOverride=1, nvidia_peermem loaded, "
        "NVSHMEM_HCA_LIST=mlx5_0:1"
    )
    assert describe_network(root / "proc").startswith("no InfiniBand adapter, IBGDA on")


def test_the_compute_mode_is_that_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvshmem_trial.compute_modes() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Default; echo Exclusive_Process\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    assert nvshmem_trial.compute_modes() == ["Default", "Exclusive_Process"]


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


# ---- One of the processes.

SCENE, PROCESS = "", -1
HOSTS = {"one host": "aaa", "two hosts": "aab", "three hosts": "abc"}
VARIABLES = ("NVSHMEM_REMOTE_TRANSPORT", "JAX_CP_DISPATCH_GPU_TRANSPORT", fake_nvshmem.HOW)
ENVIRONMENT = {
    "nvshmem ends it": {fake_nvshmem.HOW: "ends"},
    "mig on one": {fake_nvshmem.HOW: "ends"},
    "nvshmem makes no id": {fake_nvshmem.HOW: "silent"},
    "nvshmem is late": {fake_nvshmem.HOW: "late"},
    "nvshmem is named": {"JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem"},
    "nvshmem raises": {"JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem", fake_nvshmem.HOW: "raises"},
    "no remote transport": {
        "JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    },
}


def make_slab(device, num_bytes):
    if "mig on one" in SCENE and PROCESS == 1:
        raise RuntimeError("initialize: cudaIpcGetMemHandle failed: operation not supported")
    return 5000 + PROCESS, f"{PROCESS:02x}" * 64


def open_slab(device, handle):
    if "no ipc" in SCENE and PROCESS == 2:
        raise RuntimeError("initialize: cudaIpcOpenMemHandle failed: invalid argument")
    assert device == 0 and handle == handle[:2] * 64 != f"{PROCESS:02x}" * 64
    return 7000 + int(handle[:2], 16)


def end_slab(device, address, *, is_own):
    print(f"{'freed' if is_own else 'closed'} {address}", flush=True)


def has_pattern(device, address, seed):
    """Finds the patterns that others have written into this process's memory; one is lost."""
    writer, owner = seed >> 16, seed & 0xFFFF
    assert owner == PROCESS
    return not ("data is lost" in SCENE and (writer, owner) == (0, 1))


def set_slab(bases, num_bytes, memory_groups, process):
    assert process == PROCESS
    print(f"slabs {bases} of {num_bytes}, groups {memory_groups}", flush=True)


def say_of_agreement(agree):
    """Prints what the processes tell each other where they make a channel, one of them alone."""
    print("agreed", agree("a/0/free", f"of {PROCESS}", [2, 0, 2, 1], 600_000), flush=True)
    print("agreed", agree("a/0/free", f"of {PROCESS}", [PROCESS], 600_000), flush=True)
    print("agreed", agree(f"b/{PROCESS}", "alone", [0, 1, 2], 1500), flush=True)


def num_gpus():
    return (0, "no driver") if "no gpu on one" in SCENE and PROCESS == 1 else (2, "")


def why_no_kernels(device):
    return "no kernel image is available" if "no image" in SCENE and PROCESS == 1 else ""


def connect_peers(devices):
    is_cut = "no peers on one" in SCENE and PROCESS == 1
    return f"GPUs {devices} have no peer access" if is_cut else ""


def connect(scene):
    global SCENE
    SCENE = scene
    for name in VARIABLES:
        os.environ.pop(name, None)
    for part, values in ENVIRONMENT.items():
        if part in scene:
            os.environ.update(values)
    nvshmem_trial._SECONDS = 1.0 if "late" in scene else 600.0
    fake_nvshmem.started.clear()
    gpu_world._world = gpu_world._slabs = None
    gpu_world._host = lambda: HOSTS[scene.partition(",")[0]][PROCESS]
    gpu_world.may_network = lambda: "no adapter" not in scene
    gpu_world.describe_network = lambda: NETWORKS[gpu_world._host()]
    modes = ["Default", "Exclusive_Process"] if "exclusive" in scene else []
    nvshmem_trial.compute_modes = lambda: modes
    num_local = 2 if "two gpus each" in scene else 1
    gpu_world._local_gpus = lambda: jax.local_devices()[:num_local]
    world = gpu.connect_gpus(timeout=600)
    assert gpu.connect_gpus() is world
    print(f"chose {world.implementation}: {world.reason}", flush=True)
    print(f"started {len(fake_nvshmem.started)} times", flush=True)
    say_of_groups()


def say_of_groups():
    """Prints whether groups over some processes are served, and what a program becomes."""
    by_process = [[d for d in jax.devices() if d.process_index == p] for p in range(3)]
    for row, processes in ((CUDA_IPC, (0, 1)), (CUDA_IPC, (0, 2)), (NVSHMEM, (0, 2))):
        groups = (tuple(by_process[p][0] for p in processes),)
        print(f"{row.name} over {processes}: {row.why_not(['cuda'], groups)}", flush=True)
    if "two gpus each" in SCENE:
        gpu_world._reason.cache_clear()
        warn_again()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print("lowered:", " ".join(lowered(by_process).split()), flush=True)
        print(*(w.message for w in said), flush=True)
        print(f"over all: {CUDA_PEER.why_not(['cuda'], None)}", flush=True)


def lowered(by_process):
    """Returns the custom call of an exchange in groups, one in each process."""
    mesh = Mesh(np.array(by_process), ("data", "cp"))
    plan, _ = compute_metadata(np.full((2, 2), 3), np.array([[0, 1], [1, 0]]))
    move = lambda x: dispatch(x, plan, axis_name="cp", capacity=6)
    run = jax.shard_map(move, mesh=mesh, in_specs=P(("data", "cp")), out_specs=P(("data", "cp")))
    x = jax.ShapeDtypeStruct((6 * 6, 2), np.float32)
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @jax_cp_dispatch" in line]
    return calls[0] if calls else "no custom call"


if __name__ == "__main__":
    PROCESS = int(sys.argv[2])
    runtime.cuda = types.SimpleNamespace(
        PATTERN_BYTES=1024,
        device_count=num_gpus,
        why_no_kernels=why_no_kernels,
        set_process=lambda process, ordinals: None,
        connect_peers=connect_peers,
        make_slab=make_slab,
        open_slab=open_slab,
        end_slab=end_slab,
        write_pattern=lambda device, address, seed: seed >> 16 == PROCESS,
        has_pattern=has_pattern,
        set_slab=set_slab,
        set_agree=lambda agree: say_of_agreement(agree) if SCENE == "one host" else None,
        let_slab_grow=lambda device: print(f"grows on {device}", flush=True),
        set_network_launcher=lambda launcher: print(f"network by {launcher}", flush=True),
    )
    runtime.load_nvshmem = lambda: (importlib.import_module("fake_nvshmem"), "")
    runtime.nvshmem_library = lambda: ""
    jax.distributed.initialize(sys.argv[1], 3, PROCESS)
    assert jax.process_count() == 3  # starts JAX
    scenes.play(SCENES, connect)
