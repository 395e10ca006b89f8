"""In place of the extension `_nvshmem`, in three processes and in their children.

The environment variable TEST_NVSHMEM says what happens: "ends" ends the process that starts it, as
NVSHMEM does; "silent" ends the one that creates the id; "late" does not start.
"""

import os
import time

HOW = "TEST_NVSHMEM"
ID = bytes(range(128))
started: list[tuple[int, int, bytes, int]] = []


def version():
    return "3.4.5"


def unique_id():
    if os.environ.get(HOW) == "silent":
        print("nvshmem: no bootstrap", flush=True)
        os._exit(7)
    return ID


def start(rank, num_ranks, id, device):
    assert (num_ranks, id, device) == (3, ID, 0)
    if os.environ.get(HOW) == "ends" and rank == 1:
        print("ibv_open_device failed", flush=True)
        os._exit(255)
    if os.environ.get(HOW) == "late":
        time.sleep(600)
    if os.environ.get(HOW) == "raises" and rank == 1:
        raise RuntimeError("initialize: NVSHMEM did not start")
    started.append((rank, num_ranks, id, device))


def make_slab(num_bytes):
    """Two processes map each other's memory, the third one does not."""
    if not started:
        raise RuntimeError("initialize: NVSHMEM does not run")
    near = started[-1][0] < 2
    return [100, 200, 0] if near else [0, 0, 300]


def launcher(device):
    return f"launcher {device}"
