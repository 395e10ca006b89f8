"""A run of training whose steps exchange rows between all processes. Run by the launcher.

    python -m jax_cp_dispatch.launch --processes 3 PROGRAM FOLDER STEPS [LOST]

Saves parameters after every second step, and resumes from what it finds. Process LOST kills itself
before the last step. The first process prints each loss exactly.
"""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from places import AXIS, mesh_of_all, place

import jax_cp_dispatch as cp

T, D, SAVE_EVERY = 66, 8, 2
LENGTHS = (30, 5, 31)
DEADLINE = 30.0


def main():
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    lost = int(sys.argv[3]) if len(sys.argv) > 3 else None
    cp.initialize()
    mesh = mesh_of_all()
    rng = np.random.default_rng(0)
    placement = cp.place_tokens(LENGTHS, world_size=jax.device_count(), columns=T)
    put = lambda spec, part: jax.tree.map(lambda x: place(x, mesh, spec), part)
    documents = placement.documents
    documents = jax.tree.map(put, documents.specs(AXIS), documents)

    def batch_of(step):
        x = np.random.default_rng(step).standard_normal((1, T, D)).astype(np.float32)
        return place(placement.apply(x), mesh, P(None, AXIS))

    def loss(w, x, documents):
        q, k, v = (jnp.einsum("btd,dh->bth", x, part)[:, :, None] for part in w)
        options = {"mesh": mesh, "axis_name": AXIS, "algorithm": "placed", "deadline": DEADLINE}
        out = cp.context_parallel_attention(q, k, v, documents=documents, **options)
        return jnp.mean((out[:, :, 0] - x) ** 2)

    @jax.jit
    def train_step(w, x, documents):
        value, gradient = jax.value_and_grad(loss)(w, x, documents)
        return w - 0.1 * gradient, value

    saved = sorted(folder.glob("*.npy"))
    w = np.load(saved[-1]) if saved else rng.standard_normal((3, D, D)).astype(np.float32) / 4
    first = int(saved[-1].stem) if saved else 0
    w = place(w, mesh, P())
    for step in range(first + 1, steps + 1):
        if step == steps and jax.process_index() == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        w, value = jax.block_until_ready(train_step(w, batch_of(step), documents))
        if jax.process_index() == 0:
            print(f"step {step}: {float(value).hex()}", flush=True)
            if step % SAVE_EVERY == 0:
                np.save(folder / f"{step:04}.npy", np.asarray(w))


if __name__ == "__main__":
    main()
