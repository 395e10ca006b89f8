"""One process of test_gpu_world.py: joins the others with emulated GPUs."""

import os
import pathlib
import sys
import types

sys.path.append(str(pathlib.Path(__file__).parents[1] / "support"))

import jax
import scenes

from jax_cp_dispatch import gpu
from jax_cp_dispatch._ranks import runtime
from jax_cp_dispatch._ranks.gpu import world as gpu_world

ADDRESS, PROCESS = sys.argv[1], int(sys.argv[2])
SCENE = ""


def start(rank, num_ranks, id, device):
    assert (rank, num_ranks, id, device) == (PROCESS, 2, bytes(range(128)), 0)
    if SCENE == "nvshmem fails on one" and rank == 1:
        raise RuntimeError("initialize: NVSHMEM did not start")


def open_slab(device, handle):
    assert device == 0 and handle == bytes([1 - PROCESS] * 64)
    return 7000


def make_slab(num_bytes):
    can_map = "cannot map" not in SCENE
    return [100 if can_map or PROCESS == 0 else 0, 200 if can_map or PROCESS == 1 else 0]


def set_slab(slabs, num_bytes, memory_groups):
    print(f"slabs {slabs} of {num_bytes}, memory_groups {memory_groups}", flush=True)


def num_gpus():
    return (0, "no driver") if SCENE == "no gpu on one" and PROCESS == 1 else (1, "")


def connect(scene):
    global SCENE
    SCENE = scene
    for name, value in ENVIRONMENT.items():
        os.environ.pop(name, None)
        if scene.endswith("no network"):
            os.environ[name] = value
    gpu_world._world = None
    world = gpu.connect_gpus(timeout=600)
    assert gpu.connect_gpus() is world
    print(f"chose {world.implementation}: {world.reason}", flush=True)


SCENES = (
    *("nvshmem", "nvshmem cannot map", "nvshmem cannot map, no network"),
    *("nvshmem fails on one", "no gpu on one"),
)
ENVIRONMENT = {"NVSHMEM_REMOTE_TRANSPORT": "none", "JAX_CP_DISPATCH_GPU_TRANSPORT": "nvshmem"}
cuda = types.SimpleNamespace(
    device_count=num_gpus,
    make_slab=lambda device, num_bytes: (5000 + PROCESS, bytes([PROCESS] * 64)),
    open_slab=open_slab,
    set_slab=set_slab,
    set_network_launcher=lambda launcher: print(f"network by {launcher}", flush=True),
)
nvshmem = types.SimpleNamespace(
    version=lambda: "3.4.5",
    unique_id=lambda: bytes(range(128)),
    start=start,
    make_slab=make_slab,
    launcher=lambda device: f"launcher {device}",
)
runtime.cuda = cuda
runtime.load_nvshmem = lambda: (nvshmem, "")
jax.distributed.initialize(ADDRESS, 2, PROCESS)
assert jax.process_count() == 2  # starts JAX
scenes.play(SCENES, connect)
