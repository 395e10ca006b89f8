"""One process of test_gpu_world.py: joins the others with emulated GPUs."""

import importlib
import os
import pathlib
import sys
import types
import warnings

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import fake_nvshmem
import jax
import numpy as np
import scenes
from jax.sharding import Mesh, PartitionSpec as P

from jax_cp_dispatch import compute_metadata, dispatch, gpu
from jax_cp_dispatch._ranks import runtime  # inner: emulates GPUs
from jax_cp_dispatch._ranks.gpu import nvshmem, nvshmem_trial, peers, world as gpu_world
from jax_cp_dispatch._ranks.implementations import CUDA_IPC, CUDA_PEER, NVSHMEM
from jax_cp_dispatch._text import say_once

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])
SCENE = ""
HOSTS = {"one host": "aaa", "two hosts": "aab", "three hosts": "abc"}
VARIABLES = ("NVSHMEM_REMOTE_TRANSPORT", "JAX_CP_DISPATCH_GPU_TRANSPORT", fake_nvshmem.HOW)
ENVIRONMENT = {
    "nvshmem ends it": {fake_nvshmem.HOW: "ends"},
    "mig on one": {fake_nvshmem.HOW: "ends"},
    "nvshmem makes no id": {fake_nvshmem.HOW: "silent"},
    "nvshmem is late": {fake_nvshmem.HOW: "late"},
    "nvshmem is named": {"JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem"},
    "nvshmem raises": {
        "JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem",
        fake_nvshmem.HOW: "raises",
    },
    "no remote transport": {
        "JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
    },
}
SCENES = (
    "one host",
    "one host, no ipc, nvshmem ends it",
    "one host, no ipc, nvshmem makes no id",
    "one host, no ipc, nvshmem is late",
    "one host, data is lost",
    "one host, mig on one",
    "one host, nvshmem is named",
    "one host, nvshmem raises",
    "one host, nvshmem is named, no remote transport",
    "two hosts",
    "two hosts, no adapter",
    "three hosts, no adapter",
    "one host, no gpu on one",
    "one host, two gpus each",
    "one host, two gpus each, no peers on one",
)


def make_slab(device, num_bytes):
    if "mig on one" in SCENE and PROCESS == 1:
        raise RuntimeError("initialize: cudaIpcGetMemHandle failed: operation not supported")
    return 5000 + PROCESS, bytes([PROCESS] * 64)


def open_slab(device, handle):
    if "no ipc" in SCENE and PROCESS == 2:
        raise RuntimeError("initialize: cudaIpcOpenMemHandle failed: invalid argument")
    assert device == 0 and handle == bytes([handle[0]] * 64) != bytes([PROCESS] * 64)
    return 7000 + handle[0]


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
    nvshmem._may_network = lambda: "no adapter" not in scene
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
        peers._reason.cache_clear()
        say_once.cache_clear()
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


runtime.cuda = types.SimpleNamespace(
    PATTERN_BYTES=1024,
    device_count=num_gpus,
    set_process=lambda process, ordinals: None,
    connect_peers=connect_peers,
    make_slab=make_slab,
    open_slab=open_slab,
    close_slab=lambda device, address: print(f"closed {address}", flush=True),
    free_slab=lambda device, address: print(f"freed {address}", flush=True),
    write_pattern=lambda device, address, seed: seed >> 16 == PROCESS,
    has_pattern=has_pattern,
    set_slab=set_slab,
    set_agree=lambda agree: say_of_agreement(agree) if SCENE == "one host" else None,
    set_network_launcher=lambda launcher: print(f"network by {launcher}", flush=True),
)
runtime.load_nvshmem = lambda: (importlib.import_module("fake_nvshmem"), "")
runtime.nvshmem_library = lambda: ""
jax.distributed.initialize(ADDRESS, 3, PROCESS)
assert jax.process_count() == 3  # starts JAX
scenes.play(SCENES, connect)
