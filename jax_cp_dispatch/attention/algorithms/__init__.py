"""The algorithms of attention over a mesh axis.

`algorithm`: what is asked of each. One file for each: `balanced` and `placed` attend `by_plan`,
`halo` by a plan that the mask alone decides, `ulysses` by a `head_exchange`; these exchange once
each way (`exchange_once`, in `parts_of_heads`). In `two_levels`, another algorithm is inside it.
In `ring` and `hamilton` keys rotate, by the steps of `attention/rotating`. `rank_program`: the part
of one rank alone, for `balance_profile`.

To add one, write its file and name it in `ALGORITHMS`; see CONTRIBUTING.md.
"""

from jax_cp_dispatch.attention.algorithms.algorithm import (
    Algorithm,
    Call,
    attend_unless_empty,
    refuse,
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
    "Call",
    "Halo",
    "Hamilton",
    "Placed",
    "Ring",
    "Ulysses",
    "Zigzag",
    "attend_unless_empty",
    "refuse",
]
