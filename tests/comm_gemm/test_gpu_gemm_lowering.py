"""GEMMs lowered for GPUs without a GPU: attributes of the custom calls, and fallbacks to XLA."""

import importlib
import pathlib
import re
import sys
import types
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner import warn_again
from jax.sharding import PartitionSpec as P
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import all_gather_matmul, buffers, gemm, grouped_gemm, matmul_reduce_scatter
from jax_cp_dispatch._ranks import (  # inner: stand for a GPU that is not there
    gpu,  # inner: stands for GPUs of a network
    lowering,
    runtime,
)
from jax_cp_dispatch._ranks.communicator import Communicator  # inner: calls of one GPU
from jax_cp_dispatch._ranks.gpu import Slabs  # inner: the same

W, ORDER = 4, [3, 1, 0, 2]
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
gpu_gemm = importlib.import_module("gpu_gemm")
SCRATCH = 255 + (32 << 20)
X, Y, K = (np.zeros(shape, np.float32) for shape in ((8, 32), (32, 32), (32, 16)))
N = 16


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Pretends that the extension exists, built or not; these tests execute nothing."""
    released = []
    extension = types.SimpleNamespace(
        set_process=lambda process, ordinals: None,
        restore_buffer=lambda id: None,
        release_buffer=released.append,
        released=released,
        device_count=lambda: (0, "no driver"),
    )
    monkeypatch.setattr(runtime, "cuda", extension)
    return extension


def lowered(fn, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Returns the attributes of the GEMM calls by name, and their result types."""
    found = re.findall(
        r"custom_call @jax_cp_dispatch\.gemm\(.*?\{(.*)\} : .*?-> (?:tuple<)?(.*)", text
    )
    return [(dict(re.findall(r'(\w+) = (dense<.*?>|".*?"|\w+)', rest)), out) for rest, out in found]


def only_call(fn, *arguments):
    """Returns attributes and result types of the only GEMM of a program."""
    (found,) = calls(lowered(fn, *arguments))
    return found


def gather(**options):
    call = partial(all_gather_matmul, axis_name=AXIS, **options)
    specs: Any = {"in_specs": (P(AXIS), P(None, AXIS)), "out_specs": P(None, AXIS)}
    return jax.shard_map(call, mesh=mesh_of(W, ORDER), **specs)


def scatter(**options):
    call = partial(matmul_reduce_scatter, axis_name=AXIS, **options)
    specs: Any = {"in_specs": (P(None, AXIS), P(AXIS)), "out_specs": P(AXIS)}
    return jax.shard_map(call, mesh=mesh_of(W), **specs)


def test_a_plain_product():
    """The handler reads every attribute."""
    attributes, results = only_call(gemm, X, K)
    assert attributes["comm_type"] == "0" and attributes["device_table"] == "dense<-1>"
    assert f"tensor<{SCRATCH}xui8>" in results
    assert attributes["tf32"] == "false"
    names = ("common.cc", "gemm_call.cc", "cuda/dispatch_call.cc", "cuda/gemm_call.cc")
    sources = [(ROOT / "csrc/ffi" / name).read_text() for name in names]
    read = [name for source in sources for name in re.findall(r'Read\("(\w+)"', source)]
    read.remove("partitions")  # of exchanges through windows alone
    assert sorted(attributes.keys() - {"backend_config"}) == sorted(read)
    with jax.default_matmul_precision("tensorfloat32"):
        assert only_call(gemm, X, K)[0]["tf32"] == "true"


def test_gelu_that_the_library_cannot_fuse_needs_space_for_sums():
    for n, extra in ((16, 0), (12, 4 * 8 * 12)):
        x, w = (jnp.zeros(s, jnp.bfloat16) for s in ((8, 32), (32, n)))
        _, results = only_call(partial(gemm, fuse_gelu=True), x, w)
        assert f"tensor<{SCRATCH + -(-extra // 256) * 256}xui8>" in results


def test_8_bit_operands_may_need_another_layout():
    one = jnp.ones((1,), jnp.float32)
    x, w = (a.astype(jnp.float8_e4m3fn) for a in (X, K))
    options = {
        "scaling_mode": "CURRENT_TENSOR_SCALING",
        "lhs_scale_inv": one,
        "rhs_scale_inv": one,
        "preferred_element_type": jnp.bfloat16,
    }
    attributes, results = only_call(partial(gemm, **options), x, w)
    assert attributes["scaling_mode"] == "2"
    assert f"tensor<{SCRATCH + 32 * 16}xui8>" in results
    _, results = only_call(partial(gemm, contracting_dims=((1,), (1,)), **options), x, w.T)
    assert f"tensor<{SCRATCH}xui8>" in results


@pytest.mark.parametrize("method", ["none", "ring"])
def test_an_overlapped_product_names_the_gpu_of_every_rank(method):
    attributes, _ = only_call(gather(method=method), Y, K)
    assert re.findall(r"\d+", attributes["device_table"])[:W] == [str(n) for n in ORDER]
    assert attributes["memory"] == '"devices"'
    assert attributes["comm_type"] == "2"


def test_options_of_a_buffer_reach_the_gpu(cuda):
    options: Any = {"gemm_priority": 1, "comm_priority": 3, "num_comm_sm": 12}
    buffer = buffers.create_comm_overlap_buffer(
        "RS", "PIPELINE", (32, 16), "float32", W, num_splits=2, **options
    )
    attributes, _ = only_call(scatter(buffer=buffer), Y, K)
    assert {name: int(attributes[name]) for name in options} == options
    assert attributes["set_sm_margin"] == "true" and attributes["copies"] == "false"
    assert attributes["comm_overlap_id"] == str(buffer)
    buffers.destroy_comm_overlap_buffer(buffer)
    assert cuda.released == [buffer]


def fallen(fn, *arguments):
    """Returns why a program falls back to XLA."""
    warn_again()
    with pytest.warns(UserWarning) as said:
        text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert not calls(text)
    return str(said[0].message)


def test_unsupported_gemms_fall_back_to_xla_with_a_reason():
    half = X.astype(jnp.bfloat16)
    assert "does not multiply bfloat16 by float32" in fallen(gemm, half, K)
    to_half = partial(gemm, preferred_element_type=jnp.bfloat16)
    assert "does not multiply float32 by float32 with a result in bfloat16" in fallen(to_half, X, K)
    sizes = np.array([3, 5], np.int32)
    assert "ragged_dot" in fallen(grouped_gemm, X, np.zeros((2, 32, 16), np.float32), sizes)
    with pytest.raises(NotImplementedError, match=r"'cuda_peer' cannot serve .* bfloat16 by fl"):
        lowered(partial(gemm, implementation="cuda_peer"), half, K)


def test_ranks_over_the_network_use_xla_and_neighbours_do_not(monkeypatch):
    slabs = Slabs("nvshmem", [1, 2, 3, 3], [0, 0, 2, 2])
    monkeypatch.setattr(gpu, "connected_slabs", lambda: slabs)
    devices = tuple(type("Device", (), {"process_index": p, "id": 0})() for p in range(4))
    comm = Communicator(axis_names=(AXIS,), num_ranks=W)
    said = "processes 0 and 2 reach each other over the network only"
    assert gpu.what_pointers_lack(None, comm, (devices,)) == said
    assert gpu.what_pointers_lack(None, comm, (devices[:2], devices[2:])) is None
    monkeypatch.setattr(lowering, "mesh_groups", lambda *_: (devices,))
    assert said in fallen(gather(), Y, K)
    assert calls(lowered(gemm, X, K))  # a single rank


@pytest.mark.parametrize("kind, method", gpu_gemm.OVERLAPS)
def test_one_gpu_that_holds_all_ranks(kind, method):
    """The benchmark's call is that of one rank, but for the dimension of ranks."""
    program, x, w = gpu_gemm.all_ranks(64, W, method, kind)
    whole = jnp.zeros((64, 64), x.dtype)
    of_rank = (gather if kind.name == "AG" else scatter)(method=method, deadline=60.0)
    found, wanted = lowered(program, x, w), lowered(of_rank, whole, whole)
    of_ranks = {"op", "axis", "device_table", "site", "backend_config"}
    (attributes, _), (of_one, _) = *calls(found), *calls(wanted)
    assert attributes["device_table"] == "dense<-1>"
    assert {k: v for k, v in attributes.items() if k not in of_ranks} == {
        k: v for k, v in of_one.items() if k not in of_ranks
    }
    arrays = lambda text: re.findall(
        "tensor<(.*?)>", re.findall(r"@jax_cp_dispatch\.gemm\(.*\} : (.*)", text)[0]
    )
    unused = ("i32", "1xf32")  # numbers of the rank and group, and what a call does not have
    assert arrays(found) == [x if x in unused else f"{W}x{x}" for x in arrays(wanted)]
