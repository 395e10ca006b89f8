"""A tensor-parallel MLP with sequence parallelism; its GEMMs overlap with communication.

Uses four virtual CPU devices, or four GPUs with JAX_PLATFORMS=cuda (not tried yet). Compares one
device with `shard_map` and with global arrays. Pass a folder for a trace and a picture.
"""

import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.comm_gemm import choose_comm_gemm
from jax_cp_dispatch.cost import HARDWARE, CommGemmShape
from jax_cp_dispatch.cpu_devices import start_cpu_devices
from jax_cp_dispatch.plots import plot_overlap

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    start_cpu_devices(4)  # virtual ones, before JAX starts
jax.config.update("jax_default_matmul_precision", "highest")  # no TF32

B, T, D, F, AXIS = 2, 256, 128, 512, "tp"  # batch, tokens, width, hidden width
SPLIT = {"up": P(None, AXIS), "down": P(AXIS), "up_bias": P(AXIS), "down_bias": P()}
close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # other order of sums
COLLECTIVE = re.compile(r" = .*? (all-[a-z-]+?|reduce-scatter|collective-\w+)(?:-start)?\(")


def operands() -> tuple[dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype("f")
    weights = {"up": draw(D, F) / np.float32(D**0.5), "down": draw(F, D) / np.float32(F**0.5)}
    return weights | {"up_bias": draw(F), "down_bias": draw(D)}, draw(B, T, D)


def dense(weights, x):
    """The MLP on one device."""
    hidden = jax.nn.gelu(x @ weights["up"] + weights["up_bias"])
    return hidden @ weights["down"] + weights["down_bias"]


def tensor_parallel(weights, x, up: Any = None, down: Any = None):
    """The same MLP. `up` and `down` are options of the two GEMMs; the method defaults to "auto"."""
    up = {"axis_name": AXIS, "bias": weights["up_bias"], **(up or {})}
    down = {"axis_name": AXIS, "bias": weights["down_bias"], **(down or {})}  # added once
    hidden = cpd.all_gather_matmul(x, weights["up"], **up)
    return cpd.matmul_reduce_scatter(jax.nn.gelu(hidden), weights["down"], **down)


def inside_shard_map(mesh, **options):
    local = lambda weights, x: tensor_parallel(weights, x, **options)
    tokens = P(None, AXIS)
    return jax.shard_map(local, mesh=mesh, in_specs=(SPLIT, tokens), out_specs=tokens)


def verify(title: str, mlp, weights, x) -> None:
    """Checks values and gradients against one device; XLA's own collectives must be gone."""

    def step(mlp):
        loss = lambda weights, x: (mlp(weights, x) ** 2).sum() / x.size
        return jax.value_and_grad(loss, argnums=(0, 1))

    forward, backward = (jax.jit(f).lower(weights, x).compile() for f in (mlp, step(mlp)))
    close(forward(weights, x), dense(*operands()))
    jax.tree.map(close, backward(weights, x), jax.jit(step(dense))(*operands()))
    # In the backward pass, XLA still sums the loss, and gradients over groups or tokens of a bias.
    left = [set(COLLECTIVE.findall(str(program.as_text()))) for program in (forward, backward)]
    assert not left[0] and left[1] <= {"all-reduce"}, left
    print(f"{title}: forward and backward, XLA gathers and scatters nothing: verified")


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def main(folder: pathlib.Path) -> None:
    weights, x = operands()
    four, groups = mesh_of(tp=4), mesh_of(dp=2, tp=2)

    # 1. Inside shard_map: automatic method, a ring with a registered buffer, and without copies.
    verify("four ranks, auto", inside_shard_map(four), weights, x)
    buffer = cpd.buffers.create_comm_overlap_buffer("RS", "RING_EXCHANGE", (B * T, D), "float32", 4)
    ring = inside_shard_map(four, up={"method": "ring"}, down={"buffer": buffer})
    verify("four ranks, a ring and a registered buffer", ring, weights, x)
    direct = {"method": "ring", "use_ce": False}
    verify("four ranks, direct", inside_shard_map(four, up=direct, down=direct), weights, x)

    # 2. Global arrays: batch over dp, tokens over tp; two groups communicate.
    place = lambda array, spec: jax.device_put(array, NamedSharding(groups, spec))
    with jax.set_mesh(groups):
        placed = jax.tree.map(place, weights, SPLIT), place(x, P("dp", AXIS))
        verify("global arrays, two groups", tensor_parallel, *placed)

    # 3. The timeline of each rank: a trace for ui.perfetto.dev, and a picture.
    one_by_one = inside_shard_map(four, up={"method": "none"}, down={"method": "none"})
    profile = lambda f: cpd.profiling.overlap_profile(jax.jit(f), weights, x)
    profiles = {"no overlap": profile(one_by_one), "ring": profile(ring)}
    for title, run in profiles.items():
        times = run.total, run.computation, run.communication, run.exposed_communication
        ms = np.round(np.multiply(times, 1e3), 2)
        print(f"{title}: ms total, computing, communicating, exposed communication:", *ms)
    assert len(profiles["ring"].spans) == 4 * (4 + 3 + 4 + 3 + 1)  # GEMMs, sends; a sum
    profiles["ring"].write_trace(folder / "trace.json")
    if importlib.util.find_spec("matplotlib"):
        plot_overlap(profiles, folder / "overlap.svg")
    cpd.buffers.destroy_comm_overlap_buffer(buffer)

    shape = CommGemmShape("all_gather_matmul", m=8192, k=8192, n=2560, num_ranks=4, itemsize=2)
    print("Predicted, H100:", choose_comm_gemm(shape, hardware=HARDWARE["h100"]).reason)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else folder))
