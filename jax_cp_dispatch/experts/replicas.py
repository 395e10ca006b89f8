"""Which of the places of an expert a token uses, where a map gives experts to ranks."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jax_cp_dispatch._arguments import MOST_ROWS
from jax_cp_dispatch._scans import running_sum, sum_by_key


def choose_replicas(
    expert_index: Int32[Array, "T k"],
    physical_to_logical: Int32[Array, "W L"],
    num_experts: int,
    rank: Array,
) -> Int32[Array, "T k"]:
    """Returns the place of each choice, rank * L + i; token t of rank r takes replica r + t.

    If the map holds what is no expert, all choices are of that one.
    """
    num_places = physical_to_logical.size
    expert = physical_to_logical.reshape(-1)
    low, high = expert.min(), expert.max()
    is_wrong = (low < -1) | (high >= num_experts)
    wrong = jnp.where(high >= num_experts, high, low)
    expert_index = jnp.where(is_wrong & (expert_index >= 0), wrong, expert_index)
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
    return jnp.where(is_expert & (replicas > 0), place, no_place(expert_index, num_places))


def no_place(expert_index: Int32[Array, "T k"], num_places: int) -> Int32[Array, "T k"]:
    """Returns what stands for the place of experts without one: beyond all places; -1 stays."""
    beyond = num_places + jnp.minimum(expert_index, MOST_ROWS - num_places)
    return jnp.where(expert_index < 0, expert_index, beyond)
