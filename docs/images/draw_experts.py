"""Draws the load of docs/experts.md: python docs/images/draw_experts.py."""

import pathlib

import jax
import numpy as np

from jax_cp_dispatch import experts
from jax_cp_dispatch.cpu_devices import start_cpu_devices

NUM_EXPERTS, RANKS, TOKENS, CHOICES = 32, 8, 2048, 4


def routing() -> experts.Routing:
    """Tokens whose experts are of unequal popularity; what does not fit is dropped."""
    random = np.random.default_rng(0)
    logits = random.gumbel(size=(TOKENS, NUM_EXPERTS)) + 0.4 * random.normal(size=NUM_EXPERTS)
    index = np.argsort(-logits, axis=1)[:, :CHOICES].astype(np.int32)
    weights = np.take_along_axis(logits, index, 1).astype(np.float32)
    options = {"capacity": 1200, "overflow": "drop", "weights": weights}
    mesh = jax.make_mesh((RANKS,), ("ep",))
    return experts.route(index, num_experts=NUM_EXPERTS, axis_name="ep", mesh=mesh, **options)


def draw(folder: pathlib.Path) -> None:
    experts.plot_load(routing(), folder / "experts.svg")


if __name__ == "__main__":
    start_cpu_devices(RANKS)
    draw(pathlib.Path(__file__).parent)
