"""Expert parallelism: tokens go to the ranks that hold their experts, and come back summed.

`route`: from the experts of each token to a `Routing`, by an exchange of counts: `places` counts,
  `replicas` chooses among the places of an expert, `drop` what does not fit. `tokens`:
  `dispatch_tokens` and `combine_tokens`; `exchange` is what moves, also in 8 bits, and `rows` the
  local part. `on_ranks`: on this rank, or on global arrays. `fit`: capacities. `load`: a
  picture of it, and the time of each rank.
"""

from jax_cp_dispatch.experts.fit import fit_capacity
from jax_cp_dispatch.experts.load import load_profile, plot_load
from jax_cp_dispatch.experts.route import route
from jax_cp_dispatch.experts.routing import Routing
from jax_cp_dispatch.experts.tokens import combine_tokens, dispatch_tokens

__all__ = [
    "Routing",
    "combine_tokens",
    "dispatch_tokens",
    "fit_capacity",
    "load_profile",
    "plot_load",
    "route",
]
