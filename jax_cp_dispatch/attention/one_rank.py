"""Functions of one rank: they stand inside `jax.shard_map`, and say so elsewhere."""

from jax import lax

from jax_cp_dispatch._ranks.axis import AxisName, check_axis_name


def num_ranks_here(op: str, axis_name: AxisName, instead: str) -> int:
    """The size of the axis; outside of `shard_map` an error that names what to call instead."""
    check_axis_name(op, axis_name)
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name {axis_name!r} is not manual here, and {op} takes the arrays of one "
            f"rank. Call it inside jax.shard_map over {axis_name!r}; for the arrays of all ranks "
            f"use {instead}."
        ) from None
