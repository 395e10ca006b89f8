"""Placement: which rank keeps which tokens, decided once per batch, before the step.

`config`: the static choices; `documents`: where the documents of a batch stand; `build`: from the
pieces of each rank to the plan of its keys; `plan`: that plan; `place`: the public call. Which rank
takes which piece is decided in `csrc/planner`. NumPy only: nothing here starts JAX.
"""

from jax_cp_dispatch.planner.placement.config import PlacementConfig
from jax_cp_dispatch.planner.placement.place import Placement, place_tokens
from jax_cp_dispatch.planner.placement.plan import PlacedPlan

__all__ = ["PlacedPlan", "Placement", "PlacementConfig", "place_tokens"]
