"""Counts the rows that a plan moves between ranks, and between nodes of consecutive ranks."""

import numpy as np

from jax_cp_dispatch.metadata import Metadata
from jax_cp_dispatch.planner.slices import check_all_ranks


def num_moved(op: str, metadata: Metadata, ranks_per_node: int = 1) -> int:
    """Returns the rows that move between nodes, by default between ranks; each copy counts.

    Of stacked plans, the sum. Read outside `jit`.

    Raises:
      ValueError: this is one rank's part of a plan.
    """
    received = np.asarray(metadata.num_recv_tokens)[..., :-1]
    held, world_size = received.shape[-2:]
    check_all_ranks(op, held, world_size)
    node = np.arange(world_size) // ranks_per_node
    stays = node[:, None] == node
    return int(received.sum(dtype=np.int64) - received[..., stays].sum(dtype=np.int64))
