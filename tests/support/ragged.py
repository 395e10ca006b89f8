"""`jax.lax.ragged_all_to_all` from an all-gather: XLA's CPU backend cannot run the operation."""

import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """Row by row from XLA's definition; all bits are set where two ranks disagree about a size."""
    me, num_ranks = lax.axis_index(axis_name), lax.axis_size(axis_name)
    to = jnp.stack([input_offsets, send_sizes, output_offsets])
    to = to.reshape(3, num_ranks, -1)  # to each rank equally many updates
    from_each = lax.all_gather(to, axis_name)[:, :, me]  # [W, 3, updates]
    rows = lax.all_gather(operand, axis_name)
    place = jnp.arange(output.shape[0])

    def write(update, output):
        source, u = update // from_each.shape[2], update % from_each.shape[2]
        begin, size, begin_here = from_each[source, :, u]
        i = place - begin_here
        sent = rows[source].at[begin + i].get(mode="fill", fill_value=0)
        is_here = ((i >= 0) & (i < size)).reshape(-1, *[1] * (output.ndim - 1))
        return jnp.where(is_here, sent, output)

    output = lax.fori_loop(0, recv_sizes.size, write, output)
    agree = jnp.all(from_each[:, 1].ravel() == recv_sizes)
    is_inside = jnp.all((input_offsets >= 0) & (input_offsets + send_sizes <= operand.shape[0]))
    wrong = jnp.full(output.shape, True if output.dtype == bool else 77, output.dtype)
    return jnp.where(agree & is_inside, output, wrong)
