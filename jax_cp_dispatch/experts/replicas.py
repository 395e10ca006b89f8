"""Which of the places of an expert a token uses, where a map gives experts to ranks."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._scans import running_sum, sum_by_key


def choose_replicas(
    expert_index: Int32[Array, "T k"],
    physical_to_logical: Int32[Array, "W L"],
    num_experts: int,
    rank: Array,
) -> Int32[Array, "T k"]:
    """Returns the place of each choice, rank * L + i; token t of rank r takes replica r + t.

    An index that is no expert stays, or becomes one that is no place.
    """
    num_places = physical_to_logical.size
    expert = physical_to_logical.reshape(-1)
    expert = jnp.where(expert < 0, num_experts, expert)  # a place without an expert
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    ones = jnp.ones(num_places, jnp.int32)
    (num_replicas,) = sum_by_key([ones], expert, num_experts)
    first = running_sum(num_replicas) - num_replicas
    is_expert = (expert_index >= 0) & (expert_index < num_experts)
    known = jnp.where(is_expert, expert_index, 0)
    token = rank + jnp.arange(len(expert_index), dtype=jnp.int32)[:, None]
    replicas = num_replicas[known]
    place = order[first[known] + token % jnp.maximum(replicas, 1)]
    other = jnp.where(expert_index < 0, expert_index, num_places)
    return jnp.where(is_expert & (replicas > 0), place, other)
