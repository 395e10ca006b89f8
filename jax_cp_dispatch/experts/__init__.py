"""Expert parallelism: tokens go to the ranks that hold their experts, and come back summed.

`route`: from the experts of each token to a `Routing`, by an exchange of counts; `fit_capacity`.
`tokens`: `dispatch_tokens` and `combine_tokens`, on this rank or on global arrays. `load`: a
  picture of it, and the time of each rank.
"""

from jax_cp_dispatch.experts.load import load_profile, plot_load
from jax_cp_dispatch.experts.route import fit_capacity, route
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
