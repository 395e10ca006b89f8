"""What Ulysses attention moves: each rank holds 1 / W of the heads during attention."""

import math

from jax_cp_dispatch.cost.work import Workload


def kv_copies(workload: Workload) -> int:
    """Returns how often KV heads are repeated before they move."""
    return math.lcm(workload.num_kv_heads, workload.num_ranks) // workload.num_kv_heads


def bytes_exchanged(workload: Workload, *, backward: bool) -> tuple[float, float]:
    """Returns the bytes of a rank's rows in the exchanges before and after attention.

    Of these, 1 / W stay on the rank. Forward, q, k and v, then the output. Backward, dout, then dq,
    dk and dv: in float32 if KV heads are repeated, whose gradients are then summed.
    """
    rows, copies = workload.rows_per_rank, kv_copies(workload)
    q = float(workload.q_bytes(rows))
    if not backward:
        return q + copies * workload.kv_bytes(rows), q
    return q, q + copies * workload.kv_bytes(rows, itemsize=4 if copies > 1 else None)


def can_share_heads(workload: Workload) -> bool:
    """Whether the ranks divide the query heads, and move keys, not latent rows."""
    return workload.num_heads % workload.num_ranks == 0 and workload.latent_size is None
