"""Checks of invalid calls: each is rejected before anything moves.

A message starts with the operation, and says what it got and what it needs or what to do next.
"""

import re
from typing import Any

import numpy as np
import pytest
from comm_gemm_refusals import W

import jax_cp_dispatch as cp

T, S = 6, 2
LENGTHS = np.full((W, S), 3, np.int32)
WHERE = np.arange(W * S, dtype=np.int32).reshape(W, S) % W
X = np.ones((W, T, 2), np.float32)
IDS = np.ones((1, W * 4), np.int32)
Q = np.ones((1, W * 4, 2, 8), np.float32)
HEADS = np.ones((W, 1, 4, 2, 8), np.float32)
LHS, RHS = np.ones((W, 2, 3), np.float32), np.ones((W, 3, 5), np.float32)
NO_PLAN: Any = WHERE


def each(cases) -> Any:
    """Runs a test with the name, the call and the message of every case of `{name: [...]}`."""
    check_names(cases)
    rows = [(name, *case) for name, of_name in cases.items() for case in of_name]
    ids = [f"{row[0]}-{i}" for i, row in enumerate(rows)]
    return pytest.mark.parametrize("name, call, says", rows, ids=ids)


def check_names(cases) -> None:
    """Requires cases, all of public functions."""
    names = {name.split(".")[0] for name in cases}
    public = {name for room in (cp, *vars(cp).values()) for name in getattr(room, "__all__", ())}
    assert names and names <= public, names - public


def check_rejected(name, call, says) -> None:
    """Requires that `call` raises an error of operation `name`, and changes nothing."""
    create = lambda: cp.buffers.create_dispatch_buffer(capacity=5)
    buffer, before = create(), cp.buffers.list_comm_overlap_buffers()
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert re.match(rf"{re.escape(name)}: ", message), message
    assert re.search(says, message, flags=re.S), message
    # Nothing was created, counted, destroyed or overwritten.
    assert cp.buffers.list_comm_overlap_buffers() == before
    assert create() == buffer + 1
    for each in (buffer, buffer + 1):
        cp.buffers.destroy_dispatch_buffer(each)
    for array in (X, Q, HEADS, LHS, RHS):
        assert (array == 1).all()
