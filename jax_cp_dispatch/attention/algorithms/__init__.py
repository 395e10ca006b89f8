"""The algorithms of attention over a mesh axis.

`algorithm`: what is asked of each. `planned`: `Balanced` and `Placed` move rows by a plan, `Halo`
as the mask says; `ulysses` exchanges tokens for heads, also around another algorithm. These
exchange once each way (`exchange_once`). In `ring` keys rotate, by the steps of `rotating`.

To add one, write its file and name it in `ALGORITHMS`; see CONTRIBUTING.md.
"""

from jax_cp_dispatch.attention.algorithms.algorithm import (
    Algorithm,
    refuse,
    run_unless_empty,
)
from jax_cp_dispatch.attention.algorithms.planned import Balanced, Halo, Placed
from jax_cp_dispatch.attention.algorithms.ring import Hamilton, Ring, Zigzag
from jax_cp_dispatch.attention.algorithms.ulysses import Ulysses

# Simplest first: `choose_algorithm` prefers it among those that are equally fast and balanced.
ALGORITHMS: tuple[type[Algorithm], ...] = (Ring, Zigzag, Halo, Hamilton, Ulysses, Balanced, Placed)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Balanced",
    "Halo",
    "Hamilton",
    "Placed",
    "Ring",
    "Ulysses",
    "Zigzag",
    "refuse",
    "run_unless_empty",
]
