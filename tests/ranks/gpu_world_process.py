"""One process of test_gpu_world.py: joins the others with emulated GPUs."""

import sys
import types

import jax

from jax_cp_dispatch import gpu
from jax_cp_dispatch._ranks import runtime

ADDRESS, PROCESS, SCENE = sys.argv[1], int(sys.argv[2]), sys.argv[3]


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


def set_slab(slabs, num_bytes, islands):
    print(f"slabs {slabs} of {num_bytes}, islands {islands}", flush=True)


num_gpus = 0 if SCENE == "no gpu on one" and PROCESS == 1 else 1
cuda = types.SimpleNamespace(
    device_count=lambda: (num_gpus, "" if num_gpus else "no driver"),
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
world = gpu.connect_gpus(timeout=600)
assert gpu.connect_gpus() is world
print(f"chose {world.implementation}: {world.reason}", flush=True)
