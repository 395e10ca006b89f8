"""What tests of dispatch and combine read of a plan of NumPy arrays, and of results."""

import numpy as np


def capacity_of(plan):
    return int(plan["num_total_recv_tokens"].max())


def bits(x):
    """Compares bytes, so NaN and -0.0 count."""
    return np.ascontiguousarray(x).view(np.uint8)
