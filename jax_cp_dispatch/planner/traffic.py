"""Counts the rows that a plan moves between ranks, and between nodes of consecutive ranks."""

import numpy as np

from jax_cp_dispatch.metadata import Metadata


def num_moved(metadata: Metadata, ranks_per_node: int = 1) -> int:
    """Returns the rows that move between nodes, by default between ranks; each copy counts.

    Of stacked plans, the sum. Read outside `jit`.
    """
    received = np.asarray(metadata.num_recv_tokens)[..., :-1]
    node = np.arange(received.shape[-1]) // ranks_per_node
    stays = node[:, None] == node
    return int(received.sum(dtype=np.int64) - received[..., stays].sum(dtype=np.int64))
