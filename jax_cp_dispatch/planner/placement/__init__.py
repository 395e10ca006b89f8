"""Placement: assigns tokens to ranks once per batch, before the step.

`config`: the static choices. `layers`: the masks that a placement serves. `fit`: capacities from a
  sample of batches. `fallback`: the placement of a batch that does not fit. `build`: the plan of
  the keys, from the pieces of each rank. `plan`: its representation. `placement`: the order of
  tokens. `place`: the public function, also
  of several `groups`. `csrc/planner` assigns pieces to ranks. Uses NumPy only, so
  nothing here starts JAX.
"""

from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.fit import fit_placement_config
from jax_cp_dispatch.planner.placement.place import place_tokens
from jax_cp_dispatch.planner.placement.placement import Placement
from jax_cp_dispatch.planner.placement.plan import PlacedPlan

__all__ = ["PlacedPlan", "Placement", "PlacementConfig", "fit_placement_config", "place_tokens"]
